"""One structured line for every settlement that is not a plain acknowledgement."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from settled.message import Delivery
from settled.settlement import Ack, Action, Leave, Nack, Reject, Requeue, Settlement, describe
from settled.signals import Signal

logger = logging.getLogger("settled")

_WORDS = {Ack: "acknowledged", Nack: "released", Requeue: "requeued", Reject: "rejected", Leave: "left"}


# The same failure, time and again, shows its traceback so often; every line is logged all the same.
TRACEBACK_EVERY = 10.0
_FAILURES = 100


class Tracebacks:
    """Which failures have shown their traceback lately; the same is one of the same class and place."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._shown: dict[tuple[type[BaseException], str, int], float] = {}

    def due(self, error: BaseException) -> BaseException | None:
        """The error, if its traceback is to be shown."""
        place = error.__traceback__
        while place is not None and place.tb_next is not None:
            place = place.tb_next
        where = ("", 0) if place is None else (place.tb_frame.f_code.co_filename, place.tb_lineno)
        key, now = (type(error), *where), self._now()
        if now - self._shown.get(key, float("-inf")) < TRACEBACK_EVERY:
            return None
        if len(self._shown) >= _FAILURES:
            self._shown.clear()
        self._shown[key] = now
        return error


class SettlementLog:
    """What operators read. The fields are in the record's `settled` attribute too, for a JSON formatter."""

    def __init__(self, channel: str, now: Callable[[], float] = time.monotonic) -> None:
        self._channel = channel
        self._tracebacks = Tracebacks(now)

    def settled(self, delivery: Delivery, settlement: Settlement) -> None:
        if not settlement.errors and isinstance(settlement.action, (Ack, Leave)):
            return
        if not logger.isEnabledFor(settlement.level):
            return
        word = _WORDS[type(settlement.action)]
        for error in settlement.errors or (None,):
            self._line(settlement.level, word, delivery, settlement, error)

    def _line(
        self,
        level: int,
        word: str,
        delivery: Delivery,
        settlement: Settlement,
        error: BaseException | None,
    ) -> None:
        # In a group every leaf has a line, under its own name.
        signal = type(error).__name__ if len(settlement.errors) > 1 else settlement.signal
        cause = error.cause if isinstance(error, Signal) else error
        text = describe(error) if error is not None else getattr(settlement.action, "error", "")
        fields = {
            "event": word,
            "message_id": delivery.id,
            "channel": self._channel,
            "attempt": delivery.attempt,
            "signal": signal,
            "cause": text,
        }
        # A plain error carries its traceback; so does the cause of a signal, on a line of its own.
        plain = error is not None and not isinstance(error, Signal)
        logger.log(
            level,
            "%s message_id=%s channel=%s attempt=%d signal=%s cause=%r",
            *fields.values(),
            exc_info=self._tracebacks.due(error) if plain and error and level >= logging.ERROR else None,
            extra={"settled": fields},
        )
        if not plain and cause is not None and level >= logging.WARNING:
            logger.error(
                "cause message_id=%s channel=%s signal=%s cause=%r",
                delivery.id,
                self._channel,
                signal,
                describe(cause),
                exc_info=self._tracebacks.due(cause),
                extra={"settled": {**fields, "event": "cause", "cause": describe(cause)}},
            )

    def settle_failed(self, delivery: Delivery, action: Action, error: BaseException) -> None:
        fields = {
            "event": "settle failed",
            "message_id": delivery.id,
            "channel": self._channel,
            "attempt": delivery.attempt,
            "signal": _WORDS[type(action)],
            "cause": describe(error),
        }
        logger.error(
            "%s, left to the broker message_id=%s channel=%s attempt=%d signal=%s cause=%r",
            *fields.values(),
            exc_info=self._tracebacks.due(error),
            extra={"settled": fields},
        )

    def receive_failed(self, error: BaseException, pause: float) -> None:
        fields = {"event": "receive failed", "channel": self._channel, "cause": describe(error)}
        logger.warning(
            "%s channel=%s cause=%r, again in %g s", *fields.values(), pause, extra={"settled": fields}
        )
