"""Backoff and circuit breaker, with a clock that is told what time it is."""

from __future__ import annotations

import pytest

from settled.client import CircuitOpen, Resilience
from settled.client.resilience import Breaker


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_waits_double_up_to_a_limit_and_are_spread() -> None:
    rules = Resilience(first_delay=0.1, longest_delay=1.0)
    assert [rules.delay(n, 1.0) for n in range(5)] == [0.1, 0.2, 0.4, 0.8, 1.0]
    assert rules.delay(0, 0.0) == pytest.approx(0.05)
    assert rules.delay(0, 0.5, retry_after=0.7) == 0.7
    assert rules.delay(0, 0.5, retry_after=60) == 1.0


def test_the_breaker_opens_after_failures_in_a_row_and_lets_one_probe_through() -> None:
    clock = Clock()
    breaker = Breaker(Resilience(threshold=3, open_for=10), clock)
    for _ in range(2):
        breaker.failed()
    breaker.succeeded()
    for _ in range(3):
        breaker.check()
        breaker.failed()
    with pytest.raises(CircuitOpen) as refused:
        breaker.check()
    assert refused.value.retry_after == 10
    clock.now = 10.5
    breaker.check()
    with pytest.raises(CircuitOpen):
        breaker.check()
    breaker.succeeded()
    breaker.check()
    assert not breaker.is_open
