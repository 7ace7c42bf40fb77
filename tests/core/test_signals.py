from __future__ import annotations

import pickle
from typing import Any

import pytest

from settled import ConfigurationError, Defer, DontAck, Invalid, Reject

SIGNALS = [DontAck, Defer, Reject, Invalid]


@pytest.mark.parametrize("signal", SIGNALS)
def test_fr_1_a_signal_is_an_exception_with_an_optional_cause(signal: type[DontAck]) -> None:
    error = ValueError("why")
    assert signal().cause is None
    assert signal(cause=error).cause is error
    with pytest.raises(signal) as raised:
        raise signal() from error
    assert raised.value.cause is error


def test_the_error_being_handled_when_a_signal_is_raised_is_its_cause() -> None:
    error = KeyError("k")
    with pytest.raises(DontAck) as raised:
        try:
            raise error
        except KeyError:
            raise DontAck("blocked")  # noqa: B904
    assert raised.value.cause is error


def test_from_none_hides_the_error_being_handled() -> None:
    with pytest.raises(Reject) as raised:
        try:
            raise KeyError("k")
        except KeyError:
            raise Reject("no") from None
    assert raised.value.cause is None


@pytest.mark.parametrize(
    "signal", [DontAck("a"), Defer(2.5, "b"), Defer(), Reject("c", cause=ValueError("x")), Invalid("d")]
)
def test_a_signal_survives_pickling(signal: DontAck) -> None:
    again = pickle.loads(pickle.dumps(signal))
    assert type(again) is type(signal)
    assert again.__dict__ == signal.__dict__
    assert repr(again.cause) == repr(signal.cause)
    assert str(again) == str(signal)


@pytest.mark.parametrize("delay", [-1, float("inf"), float("nan"), "x"])
def test_a_delay_that_is_none_is_refused_by_name_and_value(delay: Any) -> None:
    with pytest.raises(ValueError, match=rf"delay must be 0 or more seconds, got {delay!r}"):
        Defer(delay)


def test_a_configuration_error_is_no_signal() -> None:
    assert not issubclass(ConfigurationError, DontAck.__mro__[1])
