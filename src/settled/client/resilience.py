"""When to try again and when to stop trying: backoff and a circuit breaker, without I/O."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from .errors import CircuitOpen

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True, slots=True)
class Resilience:
    """How a client deals with a server that fails.

    A call is tried `1 + retries` times; waits double from `first_delay` to `longest_delay` seconds. After
    `threshold` failed attempts in a row nothing is sent for `open_for` seconds.
    """

    retries: int = 4
    first_delay: float = 0.1
    longest_delay: float = 5.0
    threshold: int = 10
    open_for: float = 10.0

    def delay(self, attempt: int, chance: float, retry_after: float | None = None) -> float:
        """Seconds before attempt number `attempt + 1`; `chance` in 0..1 spreads the crowd.

        >>> Resilience(first_delay=1, longest_delay=8).delay(attempt=2, chance=1.0)
        4.0
        >>> Resilience().delay(attempt=0, chance=0.5, retry_after=2.0)
        2.0
        """
        if retry_after is not None:
            return min(retry_after, self.longest_delay)
        return float(min(self.longest_delay, self.first_delay * 2**attempt)) * (0.5 + chance / 2)


class Breaker:
    """Refuses calls after too many failures in a row; one probe goes through when its time is up.

    >>> breaker = Breaker(Resilience(threshold=1, open_for=5), clock=lambda: 0.0)
    >>> breaker.failed()
    >>> breaker.check()
    Traceback (most recent call last):
    settled.client.errors.CircuitOpen: circuit breaker is open; next attempt in 5.0 s
    """

    def __init__(self, rules: Resilience, clock: Callable[[], float]) -> None:
        self._rules = rules
        self._clock = clock
        self._failures = 0
        self._open_until = 0.0

    @property
    def is_open(self) -> bool:
        """Whether calls are refused now."""
        return self._failures >= self._rules.threshold and self._clock() < self._open_until

    def check(self) -> None:
        """Raise CircuitOpen, or let this call through."""
        if self._failures < self._rules.threshold:
            return
        left = self._open_until - self._clock()
        if left > 0:
            raise CircuitOpen(left)
        # This caller is the probe; others wait for what becomes of it.
        self._open_until = self._clock() + self._rules.open_for

    def succeeded(self) -> None:
        """The server answered."""
        self._failures = 0

    def failed(self) -> None:
        """The server did not answer, or answered 5xx."""
        self._failures += 1
        if self._failures >= self._rules.threshold:
            self._open_until = self._clock() + self._rules.open_for
