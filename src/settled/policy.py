"""Every default of a subscription, once."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Literal, TypedDict

from settled.backoff import Backoff


class OnError(StrEnum):
    """What an exception that is no signal does to a message in implicit mode."""

    NAK = "nak"
    """Failed: counts an attempt and comes again after the backoff. Nothing is lost."""
    ACK = "ack"
    """Acknowledged all the same; the log has the error."""
    DONT_ACK = "dont_ack"
    """Released, and the pump pauses: block on this message."""
    REJECT = "reject"
    """To the dead letters at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """How a subscription receives and settles. All times are in seconds.

    >>> Policy(requeue_count=5).requeue_count
    5
    """

    auto_ack: bool = True
    """Implicit mode: acknowledge when the handler returns. False leaves the message alone, also when the
    handler raises anything but a signal."""
    explicit: bool = False
    """The handler takes `Message[T]` and settles itself. Read off its signature, not set by hand."""
    ack_on_delivery: bool = False
    """Acknowledge before the handler runs: at most once, nothing is retried."""
    on_error: OnError = OnError.NAK
    """What a plain exception does in implicit mode."""
    requeue_count: int = -1
    """Attempts a message has in all before it is rejected; -1 is unlimited."""
    backoff: Backoff | None = None
    """How long a message waits that failed without a delay of its own, along its attempts. None is what the
    broker has configured for it, else `AFTER_NAK`: 1 s, doubled with every attempt, at most 60 s."""
    delivery_limit: int = 0
    """Reject a message that the broker delivers more often than this, without calling the handler: what ends
    a crash loop. It counts what the broker counts, so releases and naks too on most; 0 is off."""
    requeue_delay: float = 0.0
    """How long a `Defer` without a delay waits."""
    dont_ack_delay: float = 1.0
    """Pause after a message was released, so that blocking on it does not burn a core."""
    unacceptable_limit: int = 0
    """Stop the pump after so many strikes; 0 or less never stops it."""
    unacceptable_window: float | None = None
    """Count only the strikes of this many last seconds; None counts all."""
    empty_delay: float = 0.5
    """Pause after an empty receive; a channel that can tell ends it when a message arrives."""
    channel_failure_delay: float = 1.0
    """Pause after a failed receive; tried again for ever."""
    receive_timeout: float = 0.3
    """How long one receive waits for a message."""
    buffer: int | None = None
    """How many messages one receive may take. None is one at first, and more while the handler is quick, up
    to what the broker's transport has for it (`Capabilities.buffer`)."""
    buffer_bytes: int = 16 * 1024 * 1024
    """How many bytes of messages one receive may take, judged by the largest of the one before; one message
    is taken whatever its size."""
    performers: int = 1
    """How many pumps run in parallel."""
    shutdown_grace: float = 10.0
    """How long a handler may go on after a stop, before its message is released."""
    extend_for: float = 3600.0
    """How long, in all, the lease of a message in hand is extended; 0 never extends it."""

    def __post_init__(self) -> None:
        try:
            object.__setattr__(self, "on_error", OnError(self.on_error))
        except ValueError:
            choices = ", ".join(OnError)
            raise ValueError(f"policy: on_error must be one of {choices}, got {self.on_error!r}") from None
        for name in ("auto_ack", "explicit", "ack_on_delivery"):
            _check(name, getattr(self, name), bool, "True or False", lambda _: True)
        for name in _SECONDS:
            _check(name, getattr(self, name), (int, float), "0 or more seconds", lambda v: 0 <= v < math.inf)
        for name in ("buffer", "buffer_bytes", "performers"):
            if name != "buffer" or self.buffer is not None:
                _check(name, getattr(self, name), int, "a whole number of at least 1", lambda v: v >= 1)
        _check("unacceptable_limit", self.unacceptable_limit, int, "a whole number", lambda _: True)
        _check("delivery_limit", self.delivery_limit, int, "0 (off) or at least 1 delivery", lambda v: v >= 0)
        _check(
            "requeue_count",
            self.requeue_count,
            int,
            "-1 (unlimited) or at least 1 attempt",
            lambda v: v == -1 or v >= 1,
        )
        if self.backoff is not None and not isinstance(self.backoff, Backoff):
            raise ValueError(f"policy: backoff must be None or a Backoff(initial=...), got {self.backoff!r}")
        if self.unacceptable_window is not None:
            _check(
                "unacceptable_window",
                self.unacceptable_window,
                (int, float),
                "None or more than 0 seconds",
                lambda v: 0 < v < math.inf,
            )


_SECONDS = (
    "requeue_delay",
    "dont_ack_delay",
    "empty_delay",
    "channel_failure_delay",
    "receive_timeout",
    "shutdown_grace",
    "extend_for",
)


def _check(name: str, value: Any, kind: type | tuple[type, ...], wanted: str, fits: Any) -> None:
    is_bool = isinstance(value, bool)
    if not isinstance(value, kind) or (is_bool and kind is not bool) or not fits(value):
        raise ValueError(f"policy: {name} must be {wanted}, got {value!r}")


class PolicyOptions(TypedDict, total=False):
    """The fields of a `Policy` that a subscriber may set by keyword."""

    auto_ack: bool
    ack_on_delivery: bool
    on_error: OnError | Literal["nak", "ack", "dont_ack", "reject"]
    requeue_count: int
    backoff: Backoff | None
    delivery_limit: int
    requeue_delay: float
    dont_ack_delay: float
    unacceptable_limit: int
    unacceptable_window: float | None
    empty_delay: float
    channel_failure_delay: float
    receive_timeout: float
    buffer: int | None
    buffer_bytes: int
    performers: int
    shutdown_grace: float
    extend_for: float
