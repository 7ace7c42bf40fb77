from __future__ import annotations

from dataclasses import FrozenInstanceError, fields
from typing import Any

import pytest

from settled import OnError, Policy
from settled.policy import PolicyOptions


def test_the_defaults_are_those_of_the_design() -> None:
    policy = Policy()
    assert (policy.dont_ack_delay, policy.requeue_count, policy.requeue_delay) == (1.0, -1, 0.0)
    assert (policy.unacceptable_limit, policy.unacceptable_window) == (0, None)
    assert (policy.empty_delay, policy.channel_failure_delay, policy.receive_timeout) == (0.5, 1.0, 0.3)
    assert (policy.buffer, policy.buffer_bytes) == (None, 16 * 1024 * 1024)
    assert (policy.performers, policy.shutdown_grace) == (1, 10.0)
    assert (policy.backoff, policy.delivery_limit) == (None, 0)
    assert policy.on_error is OnError.NAK
    assert policy.auto_ack
    assert not policy.ack_on_delivery


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("requeue_count", 0),
        ("requeue_count", -2),
        ("requeue_delay", -0.1),
        ("dont_ack_delay", float("nan")),
        ("receive_timeout", float("inf")),
        ("unacceptable_limit", 1.5),
        ("unacceptable_window", 0),
        ("buffer", 0),
        ("buffer_bytes", 0),
        ("delivery_limit", -1),
        ("performers", True),
        ("shutdown_grace", "10"),
        ("on_error", "explode"),
        ("auto_ack", 1),
        ("backoff", 5),
    ],
)
def test_a_wrong_value_is_refused_with_field_and_value(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"policy: {field} must be .*got {value!r}"):
        Policy(**{field: value})


def test_on_error_may_be_a_word() -> None:
    assert Policy(on_error="reject").on_error is OnError.REJECT  # type: ignore[arg-type]


def test_a_policy_does_not_change() -> None:
    with pytest.raises(FrozenInstanceError):
        Policy().buffer = 2  # type: ignore[misc]


def test_a_subscriber_can_set_every_field_but_the_mode() -> None:
    assert set(PolicyOptions.__annotations__) == {f.name for f in fields(Policy)} - {"explicit"}
