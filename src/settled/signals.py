"""Raise one of these, anywhere below a handler, to settle the message in hand."""

from __future__ import annotations

import math
from typing import Any


class Signal(Exception):
    """What every signal has: a reason to log, and the error that led to it, if any.

    >>> Reject("no such customer").reason
    'no such customer'
    """

    def __init__(self, reason: str = "", *, cause: BaseException | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        if cause is not None:
            self.__cause__ = cause

    @property
    def cause(self) -> BaseException | None:
        """The error behind the signal: given, raised `from`, or being handled when it was raised."""
        if self.__cause__ is not None or self.__suppress_context__:
            return self.__cause__
        return self.__context__

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.__dict__, self.cause)


class DontAck(Signal):
    """Block on this message: it is released, not acknowledged, and comes again."""


class Defer(Signal):
    """Try again after `delay` seconds, at most a year; without one, after the policy's `requeue_delay`."""

    def __init__(
        self, delay: float | None = None, reason: str = "", *, cause: BaseException | None = None
    ) -> None:
        try:
            fine = delay is None or 0 <= delay < math.inf
        except TypeError:
            fine = False
        if not fine:
            raise ValueError(f"Defer: delay must be 0 or more seconds, got {delay!r}")
        super().__init__(reason, cause=cause)
        self.delay = delay


class Reject(Signal):
    """Never again: the message goes to the dead letters with this reason."""


class Invalid(Signal):
    """The message itself is wrong: it goes to the invalid-message channel, else to the dead letters."""


class ConfigurationError(Exception):
    """The application is set up wrongly: the message is released, and the pump stops."""


def _rebuild(kind: type[Signal], state: dict[str, Any], cause: BaseException | None) -> Signal:
    # Signals cross process borders (Spark workers), and Defer's arguments are not Exception.args.
    signal = kind.__new__(kind, state.get("reason", ""))
    signal.__dict__.update(state)
    signal.__cause__ = cause
    return signal
