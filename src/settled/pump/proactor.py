"""Runs the pump's effects with awaits."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from settled.message import Message, in_hand
from settled.pump.driver import Pump
from settled.pump.loop import Effect, Handle, Pause, Receive, Settle, Stopped
from settled.pump.settlers import AwaitableSettler
from settled.settlement import Cancelled, Outcome, Raised, Returned, Undecodable
from settled.transports.base import AsyncChannel

_RETURNED = Returned()

# What the loop is told when the pump's task is cancelled in the middle of an effect.
_INTERRUPTED: dict[type[Effect], Callable[[BaseException], Any]] = {
    Handle: lambda _: Cancelled(),
    Settle: lambda error: error,
    Receive: lambda _: (),
    Pause: lambda _: None,
}


class Proactor(Pump[AsyncChannel]):
    """The driver of async handlers; `run()` is awaited until the pump ends."""

    settler = AwaitableSettler

    async def run(self) -> Stopped:
        """Pump until told to stop or cancelled, or until the limit is reached."""
        effects = self._effects()
        carry_out: dict[type[Effect], Callable[[Any], Awaitable[Any]]] = {
            Handle: self._handle,
            Settle: self._settle,
            Receive: self._receive,
            Pause: self._pause,
        }
        cancelled: asyncio.CancelledError | None = None
        try:
            effect = next(effects)
            while True:
                try:
                    answer = await carry_out[type(effect)](effect)
                except asyncio.CancelledError as error:
                    # What is in hand and buffered is still to be released, in this very task.
                    cancelled = error
                    _uncancel()
                    self._stop.ring()
                    answer = _INTERRUPTED[type(effect)](error)
                effect = effects.send(answer)
        except StopIteration as end:
            stopped = self._ended(end.value)
        except BaseException as error:
            self._crashed(error)
            raise
        if cancelled is not None:
            raise cancelled
        return stopped

    async def _receive(self, effect: Receive) -> Any:
        try:
            self.received = received = await self.channel.receive(effect.limit, effect.timeout)
        except Exception as error:
            return error
        return received

    async def _settle(self, effect: Settle) -> Exception | None:
        try:
            await self._settler.settle(effect.delivery, effect.action)
        except Exception as error:
            return error
        return None

    async def _pause(self, effect: Pause) -> None:
        await self._clock.wait_async(self._stop, 0, effect.seconds)

    async def _handle(self, effect: Handle) -> Outcome:
        delivery = effect.delivery
        try:
            message: Message[Any] = Message(delivery, self.subscription.decode, self._settler)
        except Exception as error:
            return Undecodable(error)
        self.in_hand = delivery
        token = in_hand.set(message)
        try:
            await self.subscription.invoke(message)
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            # Somebody else's cancellation, which the handler let through: an error like any other.
            return Raised(error, delivery.settled)
        except BaseException as error:
            return Raised(error, delivery.settled)
        finally:
            in_hand.reset(token)
            self.in_hand = None
            delivery.handled = True
        return _RETURNED


def _uncancel() -> None:
    task = asyncio.current_task()
    while task is not None and task.cancelling():
        task.uncancel()
