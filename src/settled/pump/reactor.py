"""Runs the pump's effects with blocking calls."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from settled.message import Delivery, Message, in_hand
from settled.pump.driver import Pump
from settled.pump.loop import RETURNED, Effect, Handle, Pause, Receive, Settle, Status, Stopped
from settled.pump.settlers import BlockingSettler
from settled.settlement import ACKED, Leave, Nack, Outcome, Raised, Undecodable, describe
from settled.transports.base import AcksSoon, Channel

_NACK, _LEAVE = Nack(), Leave()


class Reactor(Pump[Channel]):
    """The driver of sync handlers; `run()` blocks until the pump ends."""

    settler = BlockingSettler
    _soon: AcksSoon | None = None

    def run(self) -> Stopped:
        """Pump until told to stop, or until the limit is reached."""
        effects = self._effects()
        channel: object = self.channel
        self._soon = channel if isinstance(channel, AcksSoon) else None
        carry_out: dict[type[Effect], Callable[[Any], Any]] = {
            Handle: self._handle,
            Settle: self._settle,
            Receive: self._receive,
            Pause: self._pause,
        }
        try:
            effect = next(effects)
            while True:
                effect = effects.send(carry_out[type(effect)](effect))
        except StopIteration as end:
            return self._ended(end.value)
        except BaseException as error:
            self._crashed(error)
            raise
        finally:
            if self._soon is not None:
                with contextlib.suppress(RuntimeError):  # the loop is closed, and the connection with it
                    self._soon.send_acks()

    def release(self) -> None:
        """Give back the message of a handler that did not end in time; what it does later is too late."""
        delivery = self.in_hand
        if delivery is None:
            return
        self.status, self.why = Status.STOPPED, "its handler goes on; its message was released"
        failed = self._settle(Settle(delivery, _NACK))
        if failed is not None:
            self._log.settle_failed(delivery, _NACK, failed)
            self.why = f"its handler goes on; its message could not be released: {describe(failed)}"
        action = delivery.account(_LEAVE)
        with self._later_lock:
            self._later.settle_failed += failed is not None
            if action is not None:
                self._later.count(action)

    def _receive(self, effect: Receive) -> Any:
        try:
            self.received = received = self.channel.receive(effect.limit, effect.timeout)
        except Exception as error:
            return error
        return received

    def _settle(self, effect: Settle) -> Exception | None:
        try:
            self._settler.settle(effect.delivery, effect.action)
        except Exception as error:
            return error
        return None

    def _not_acked(self, delivery: Delivery, error: Exception) -> None:
        """It was counted as acked when the next message was begun."""
        delivery.reopen()
        with self._later_lock:
            self._later.acked -= 1
            self._later.settle_failed += 1
        self._log.settle_failed(delivery, ACKED.action, error)

    def _pause(self, effect: Pause) -> None:
        self._clock.wait(self._stop, 0, effect.seconds)

    def _handle(self, effect: Handle) -> tuple[Delivery, Outcome | BaseException] | None:
        buffered, counts, stop, settler = effect.buffered, self._counts, self._stop, self._settler
        decode, handler = self.subscription.decode, self.subscription.handler
        explicit, channel, soon = self.subscription.policy.explicit, self.channel, self._soon
        while True:
            delivery = buffered.popleft()
            try:
                message: Message[Any] = Message(delivery, decode, settler)
            except Exception as error:
                return delivery, Undecodable(error)
            self.in_hand = delivery
            token = in_hand.set(message)
            try:
                handler(message if explicit else message.payload)
            except BaseException as error:
                return delivery, Raised(error, delivery.settled)
            finally:
                in_hand.reset(token)
                self.in_hand = None
                delivery.handled = True
            # What the handler of an implicit subscription settled itself is not just acked either.
            if not effect.acks or not delivery.claim():
                return delivery, RETURNED
            try:
                if soon is not None:
                    soon.ack_soon(delivery, self._not_acked, last=not buffered)
                else:
                    channel.ack(delivery)
            except BaseException as error:
                delivery.reopen()
                if not isinstance(error, Exception):
                    raise
                return delivery, error
            counts.acked += 1
            if not buffered or stop.rung:
                return None
