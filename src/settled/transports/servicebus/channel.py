"""A subscription's end of a queue or topic: receiving, and settling by lock."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any, Protocol

from azure.servicebus import ServiceBusMessage
from azure.servicebus.exceptions import (
    MessageAlreadySettled,
    MessageLockLostError,
    MessageNotFoundError,
    OperationTimeoutError,
    SessionLockLostError,
)

from settled.clock import Bell
from settled.message import Delivery
from settled.settlement import Reject
from settled.transports.base import (
    Capabilities,
    DelayMeans,
    LeaseLost,
    Outgoing,
    Published,
    RejectMeans,
    Source,
    retry_delay,
)
from settled.transports.letters import destination, letter
from settled.transports.polling import Poll
from settled.transports.servicebus.delivery import ServiceBusDelivery, copy
from settled.transports.servicebus.settings import Entity, Place

logger = logging.getLogger("settled")

_SLICE = 0.5
"""How long one request may wait: a wake, or a settlement by another task, has to wait for its end."""
_LOOK_AGAIN = 0.05
_ACCEPT_FOR = 5.0
# What a lock may be; a clock that goes wrong here must not make it longer.
_SHORTEST_LOCK, _LONGEST_LOCK = 1.0, 300.0
_GONE = (MessageLockLostError, SessionLockLostError, MessageAlreadySettled, MessageNotFoundError)


class Bus(Protocol):
    """What a channel needs of its transport."""

    async def receiver(self, place: Place, session: bool, wait: float) -> Any: ...

    async def push(self, message: Outgoing) -> Published: ...

    async def send(self, to: str, message: ServiceBusMessage) -> None: ...

    def watch(self, error: BaseException | None) -> None: ...


CAPABILITIES = Capabilities(
    reject=RejectMeans.NATIVE, delay=DelayMeans.PARKED, wakes=True, lanes=True, counts_untried=True
)


class ServiceBusChannel:
    """One subscription's end of a queue, or of a topic's subscription.

    Nack abandons, as FR-13 asks: the lock is gone, and the message anyone's. Service Bus counts that as a
    delivery, and dead-letters a message by itself after `max_delivery_count` of them.

    A delay is a scheduled copy, stored before the original is completed. A topic would hand a copy to all its
    subscriptions, and a session would go on without it; there the message is held under its lock instead.
    """

    def __init__(self, transport: Bus, source: Source, settings: Entity) -> None:
        self._transport = transport
        self._source = source
        self._settings = settings
        self._place = Place.of(source)
        self._holds = bool(settings.sessions) or self._place.subscription is not None
        self._receiver: Any = None
        # The client's receivers take one call at a time.
        self._turn = asyncio.Lock()
        self._sessions: Poll[Any] = Poll(self._accept)
        self._open: set[ServiceBusDelivery] = set()
        self._held: dict[asyncio.Task[None], ServiceBusDelivery] = {}
        self._bell = Bell()
        self._quiet_since = 0.0
        self.capabilities = replace(
            CAPABILITIES,
            reject=RejectMeans.NATIVE if source.dead_letter is None else RejectMeans.PUBLISH,
            delay=DelayMeans.HELD if self._holds else DelayMeans.PARKED,
            max_attempts=settings.max_delivery_count,
        )

    async def receive(self, limit: int, timeout: float) -> Sequence[Delivery]:
        until, woken = time.monotonic() + timeout, self._bell.rung
        while True:
            left = until - time.monotonic()
            found = await self._take(limit, max(0.0, left), woken)
            if found or self._bell.rung != woken or time.monotonic() >= until:
                return found

    async def _take(self, limit: int, left: float, woken: int) -> list[ServiceBusDelivery]:
        if self._settings.sessions and self._open and self._receiver is not None:
            if _until(self._receiver.session.locked_until_utc) > 0:
                # Nothing of a session may overtake what is not settled.
                await self._bell.wait_async(woken, min(left, _LOOK_AGAIN))
                return []
            await self._stop(None)
        if self._receiver is None and not await self._start(left):
            return []
        receiver = self._receiver
        try:
            async with self._turn:
                # A wait of nothing would be no request at all.
                raw = await receiver.receive_messages(
                    max_message_count=limit, max_wait_time=max(0.05, min(left, _SLICE))
                )
        except Exception as error:
            await self._stop(error)
            if isinstance(error, SessionLockLostError):
                return []
            raise
        self._transport.watch(None)
        if raw:
            self._quiet_since = time.monotonic()
        elif self._settings.sessions:
            await self._leave_session()
        found = [ServiceBusDelivery(message, receiver, self._source.channel) for message in raw]
        if found and self.capabilities.lease is None:
            # What is left of it when it arrives; the broker does not say how long it is.
            lock = min(max(_remaining(found[0]), _SHORTEST_LOCK), _LONGEST_LOCK)
            self.capabilities = replace(self.capabilities, lease=lock)
        self._open.update(found)
        return found

    async def _start(self, left: float) -> bool:
        if self._settings.sessions:
            for receiver in await self._sessions.take(1, left):
                self._receiver, self._quiet_since = receiver, time.monotonic()
        else:
            try:
                self._receiver = await self._transport.receiver(self._place, False, 0)
            except Exception as error:
                self._transport.watch(error)
                raise
        return self._receiver is not None

    async def _accept(self, limit: int, wait: bool) -> Sequence[Any]:
        """The next session that has messages; nothing if there is none for a while."""
        try:
            return [await self._transport.receiver(self._place, True, _ACCEPT_FOR)]
        except OperationTimeoutError:
            self._transport.watch(None)
            return []
        except Exception as error:
            self._transport.watch(error)
            raise

    async def _leave_session(self) -> None:
        if not self._open and time.monotonic() - self._quiet_since >= (self._settings.idle or 0):
            await self._stop(None)

    async def _stop(self, error: BaseException | None) -> None:
        receiver, self._receiver = self._receiver, None
        self._open.clear()
        self._transport.watch(error)
        if receiver is not None:
            with contextlib.suppress(Exception):
                async with self._turn:
                    await receiver.close()

    async def ack(self, delivery: Delivery) -> None:
        mine = _mine(delivery)
        await self._settle(mine, mine.receiver.complete_message)

    async def nack(self, delivery: Delivery) -> None:
        mine = _mine(delivery)
        await self._settle(mine, mine.receiver.abandon_message)

    async def requeue(self, delivery: Delivery, delay: float | None) -> None:
        mine = _mine(delivery)
        wait = retry_delay(delay, self._settings.backoff, mine.attempt)
        if wait <= 0:
            await self._settle(mine, mine.receiver.abandon_message)
        elif self._holds:
            await self.extend(mine)
            task = asyncio.create_task(self._hold(mine, time.monotonic() + wait))
            self._held[task] = mine
            task.add_done_callback(self._given_back)
        else:
            self._check(mine)
            # Stored and confirmed first: if that fails, the message is still the queue's.
            await self._transport.send(self._place.name, copy(mine, wait))
            await self._settle(mine, mine.receiver.complete_message)

    def _given_back(self, task: asyncio.Task[None]) -> None:
        self._held.pop(task, None)

    async def _hold(self, mine: ServiceBusDelivery, until: float) -> None:
        try:
            while (left := until - time.monotonic()) > 0:
                await asyncio.sleep(min(left, max(0.1, _remaining(mine) / 2)))
                if until - time.monotonic() > 0:
                    await self.extend(mine)
            await self._settle(mine, mine.receiver.abandon_message)
        except asyncio.CancelledError:
            raise
        except Exception as error:
            logger.warning("servicebus: %s: message %s comes sooner: %s", mine.subject, mine.id, error)

    async def reject(self, delivery: Delivery, rejection: Reject) -> None:
        mine = _mine(delivery)
        to = destination(self._source, rejection)
        if to is not None:
            self._check(mine)
            await self._transport.push(letter(mine, rejection, self._place.subscription or "", to))
            await self._settle(mine, mine.receiver.complete_message)
            return

        async def bury(message: Any) -> None:
            await mine.receiver.dead_letter_message(
                message,
                reason=rejection.reason.value,
                error_description=rejection.error or rejection.reason.value,
            )

        await self._settle(mine, bury)

    async def extend(self, delivery: Delivery) -> None:
        mine = _mine(delivery)
        session = mine.receiver.session
        async with self._turn:
            try:
                if session is not None:
                    await session.renew_lock()
                else:
                    await mine.receiver.renew_message_lock(mine.message)
            except _GONE as error:
                raise _lost(mine, error) from error

    def wake(self) -> None:
        self._sessions.wake()
        self._bell.ring()

    async def close(self) -> None:
        for task, mine in list(self._held.items()):
            task.cancel()
            with contextlib.suppress(Exception):
                await self._settle(mine, mine.receiver.abandon_message)
        for receiver in await self._sessions.close():
            with contextlib.suppress(Exception):
                await receiver.close()
        await self._stop(None)

    async def _settle(self, mine: ServiceBusDelivery, call: Callable[[Any], Awaitable[None]]) -> None:
        async with self._turn:
            try:
                await call(mine.message)
            except _GONE as error:
                self._open.discard(mine)
                raise _lost(mine, error) from error
            except ValueError as error:
                # The client's word for a receiver that is closed, as after a lost connection.
                raise _lost(mine, error) from error
        self._open.discard(mine)

    def _check(self, mine: ServiceBusDelivery) -> None:
        """Do not write a second copy of what is somebody else's already."""
        if _remaining(mine) <= 0:
            raise _lost(mine, "its lock is over")


def _remaining(mine: ServiceBusDelivery) -> float:
    session = mine.receiver.session
    return _until(mine.message.locked_until_utc if session is None else session.locked_until_utc)


def _until(then: datetime | None) -> float:
    return then.timestamp() - time.time() if then is not None else 0.0


def _mine(delivery: Delivery) -> ServiceBusDelivery:
    if not isinstance(delivery, ServiceBusDelivery):
        raise TypeError(f"message {delivery.id!r} was not received from this transport")
    return delivery


def _lost(delivery: ServiceBusDelivery, why: object) -> LeaseLost:
    return LeaseLost(f"{delivery.subject!r}: message {delivery.id!r}: {why}")
