"""Runs the pump's effects with awaits."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from time import monotonic
from typing import Any

from settled.message import Delivery, Message, in_hand
from settled.pump.driver import Pump
from settled.pump.loop import RETURNED, Effect, Handle, Pause, Receive, Settle, Stopped
from settled.pump.settlers import AwaitableSettler, perform
from settled.settlement import Cancelled, Outcome, Raised, Undecodable
from settled.transports.base import AsyncChannel

# For how long the pump may keep the loop to itself, in seconds.
_TURN = 0.005


class Proactor(Pump[AsyncChannel]):
    """The driver of async handlers; `run()` is awaited until the pump ends."""

    settler = AwaitableSettler
    _cancelled: asyncio.CancelledError | None = None
    _turn_ends = 0.0

    async def run(self) -> Stopped:
        """Pump until told to stop or cancelled, or until the limit is reached."""
        effects = self._effects()
        carry_out: dict[type[Effect], Callable[[Any], Awaitable[Any]]] = {
            Handle: self._handle,
            Settle: self._settle,
            Receive: self._receive,
            Pause: self._pause,
        }
        try:
            self._turn_ends = monotonic() + _TURN
            effect = next(effects)
            while True:
                effect = effects.send(await carry_out[type(effect)](effect))
        except StopIteration as end:
            stopped = self._ended(end.value)
        except BaseException as error:
            self._crashed(error)
            raise
        if self._cancelled is not None:
            raise self._cancelled
        return stopped

    def _interrupt(self, error: asyncio.CancelledError) -> None:
        """Stop: what is in hand and buffered is still to be released, in this very task."""
        self._cancelled = error
        task = asyncio.current_task()
        while task is not None and task.cancelling():
            task.uncancel()
        self._stop.ring()

    async def _yield(self) -> None:
        """Let the rest of the loop have its turn: a handler and a channel may never wait for anything."""
        try:
            await asyncio.sleep(0)
        except asyncio.CancelledError as error:
            self._interrupt(error)
        self._turn_ends = monotonic() + _TURN

    async def _receive(self, effect: Receive) -> Any:
        if monotonic() >= self._turn_ends:
            await self._yield()
            if self._cancelled is not None:
                return ()
        try:
            self.received = received = await self.channel.receive(effect.limit, effect.timeout)
        except Exception as error:
            return error
        except asyncio.CancelledError as error:
            self._interrupt(error)
            return ()
        return received

    async def _settle(self, effect: Settle) -> BaseException | None:
        """What a settler does, with fewer steps: this is the loop's own thread."""
        delivery = effect.delivery
        if delivery.claim():
            try:
                done = perform(self.channel, delivery, effect.action, self.subscription.policy.backoff)
                if done is not None:
                    await done
                delivery.settled_as = effect.action
            except BaseException as error:
                return self._unsettled(delivery, error)
        return None

    def _unsettled(self, delivery: Delivery, error: BaseException) -> BaseException:
        """It is open again; what is neither an error nor a cancellation ends the pump."""
        delivery.reopen()
        if isinstance(error, asyncio.CancelledError):
            self._interrupt(error)
        elif not isinstance(error, Exception):
            raise error
        return error

    async def _pause(self, effect: Pause) -> None:
        try:
            await self._clock.wait_async(self._stop, 0, effect.seconds)
        except asyncio.CancelledError as error:
            self._interrupt(error)

    async def _handle(self, effect: Handle) -> tuple[Delivery, Outcome | BaseException] | None:
        buffered, counts, stop, settler = effect.buffered, self._counts, self._stop, self._settler
        decode, handler, channel = self.subscription.decode, self.subscription.handler, self.channel
        explicit = self.subscription.policy.explicit
        while True:
            delivery = buffered.popleft()
            try:
                message: Message[Any] = Message(delivery, decode, settler)
            except Exception as error:
                return delivery, Undecodable(error)
            self.in_hand = delivery
            token = in_hand.set(message)
            try:
                await handler(message if explicit else message.payload)
            except asyncio.CancelledError as error:
                task = asyncio.current_task()
                if task is not None and task.cancelling():
                    self._interrupt(error)
                    return delivery, Cancelled()
                # Somebody else's cancellation, which the handler let through: an error like any other.
                return delivery, Raised(error, delivery.settled)
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
                done = channel.ack(delivery)
                if done is not None:
                    await done
            except BaseException as error:
                return delivery, self._unsettled(delivery, error)
            counts.acked += 1
            if not buffered or stop.rung:
                return None
            if monotonic() >= self._turn_ends:
                await self._yield()
