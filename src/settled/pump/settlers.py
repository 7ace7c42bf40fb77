"""From what a message or the pump asks for to a call on the channel, once a delivery."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Generic, TypeVar, assert_never

from settled.backoff import Backoff
from settled.message import DONE, Delivery
from settled.pump.log import logger
from settled.settlement import Ack, Action, Leave, Nack, Reason, Reject, Requeue
from settled.transports.base import AsyncChannel, Capabilities, Channel

C = TypeVar("C", bound=Channel | AsyncChannel)


def perform(
    channel: Channel | AsyncChannel, delivery: Delivery, action: Action, backoff: Backoff | None = None
) -> Awaitable[None] | None:
    """The channel's call for an action; awaitable if the channel is.

    The subscriber's `backoff` is how long a failed message waits that has no delay of its own.
    """
    if not isinstance(action, Ack):
        action = _or_reject(channel.capabilities, delivery, action)
    match action:
        case Ack():
            return channel.ack(delivery)
        case Nack():
            return channel.nack(delivery)
        case Requeue(delay, error):
            delivery.failure = error
            if delay is None and backoff is not None:
                delay = backoff.wait(delivery.attempt)
            return channel.requeue(delivery, delay)
        case Reject():
            return channel.reject(delivery, action)
        case Leave():
            raise ValueError(f"message {delivery.id!r}: a message that is left alone is not settled")
        case _:
            assert_never(action)


def _or_reject(can: Capabilities, delivery: Delivery, action: Action) -> Action:
    """Also what is given back by hand, or at the stop, is not left to a broker that would give it up."""
    if not can.counts_untried or can.saves or not can.gives_up(delivery, action):
        return action
    what = "released" if isinstance(action, Nack) else "failed"
    limit = f"the broker gives a message up after {can.max_attempts}"
    error = f"{what} on delivery {delivery.deliveries}; {limit}"
    logger.error("dead letter message_id=%s channel=%s cause=%r", delivery.id, delivery.subject, error)
    return Reject(Reason.DELIVERY_ERROR, error)


class _Settler(Generic[C]):
    """Settles on a channel until that is closed."""

    __slots__ = ("_backoff", "_channel", "_closed", "_late")

    def __init__(
        self,
        channel: C,
        backoff: Backoff | None = None,
        late: Callable[[Action], None] | None = None,
    ) -> None:
        """`late` is called for what is settled after its delivery was counted as left alone."""
        self._channel = channel
        self._backoff = backoff
        self._late = late
        self._closed = False

    def close(self) -> None:
        """The channel is closed: what is not settled is the broker's."""
        self._closed = True

    def _refuse(self, delivery: Delivery) -> None:
        raise ConnectionError(
            f"message {delivery.id!r}: the app that received it has ended; the broker brings it again"
        )


class BlockingSettler(_Settler[Channel]):
    """Settles on a blocking channel, at once."""

    __slots__ = ()

    def settle(self, delivery: Delivery, action: Action) -> Awaitable[None]:
        if delivery.claim():
            try:
                if self._closed:
                    self._refuse(delivery)
                perform(self._channel, delivery, action, self._backoff)
                if delivery.note(action) and self._late is not None:
                    self._late(action)
            except BaseException:
                delivery.reopen()
                raise
        return DONE

    def extend(self, delivery: Delivery) -> Awaitable[None]:
        if self._closed:
            self._refuse(delivery)
        self._channel.extend(delivery)
        return DONE


class AwaitableSettler(_Settler[AsyncChannel]):
    """Settles on an awaitable channel: in the loop's own thread when awaited, in another thread at once."""

    __slots__ = ("_loop", "_thread")

    def __init__(
        self,
        channel: AsyncChannel,
        backoff: Backoff | None = None,
        late: Callable[[Action], None] | None = None,
    ) -> None:
        super().__init__(channel, backoff, late)
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()

    def settle(self, delivery: Delivery, action: Action) -> Awaitable[None]:
        return self._here(delivery, self._settle(delivery, action))

    def extend(self, delivery: Delivery) -> Awaitable[None]:
        return self._here(delivery, self._channel.extend(delivery))

    def _here(self, delivery: Delivery, call: Coroutine[Any, Any, None]) -> Awaitable[None]:
        if self._closed and not delivery.settled:
            call.close()
            self._refuse(delivery)
        if threading.get_ident() == self._thread:
            return call
        asyncio.run_coroutine_threadsafe(call, self._loop).result()
        return DONE

    async def _settle(self, delivery: Delivery, action: Action) -> None:
        # Claimed only when awaited: an `ack()` that nobody awaits must not count as one.
        if delivery.claim():
            try:
                if self._closed:
                    self._refuse(delivery)
                done = perform(self._channel, delivery, action, self._backoff)
                if done is not None:
                    await done
                if delivery.note(action) and self._late is not None:
                    self._late(action)
            except BaseException:
                delivery.reopen()
                raise
