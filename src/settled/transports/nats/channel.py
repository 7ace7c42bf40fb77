"""A subscription's end of a consumer: receiving and settling."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from settled.message import Delivery
from settled.settlement import Reason, Reject, one_line
from settled.transports.base import Capabilities, LeaseLost, NackMeans, Source
from settled.transports.nats.advisories import OURS
from settled.transports.nats.connection import Connection, logger
from settled.transports.nats.delivery import NatsDelivery
from settled.transports.nats.feeds import NAK, ConsumerGone, Feed
from settled.transports.nats.letters import Letter, Office
from settled.transports.nats.sources import Consumer

_BUFFER = 100
# How long what nobody has tried yet is kept for this channel's next receive, before anyone may have it.
_KEEP_FOR = 5.0
# How long the next receive waits for the message it has to begin with.
_BLOCK_FOR = 0.3


class Reader(Protocol):
    """What a channel needs of its transport."""

    connection: Connection
    office: Office
    random: Callable[[], float]

    async def consumer(self, source: Source) -> Consumer: ...

    def feed(self, consumer: Consumer) -> Feed: ...

    async def remake(self, source: Source, old: Consumer) -> Consumer: ...


def capabilities(consumer: Consumer | None) -> Capabilities:
    """What can be said of a consumer before the first message."""
    if consumer is None:
        return Capabilities(wakes=True, buffer=_BUFFER)
    acks = consumer.ack_policy != "none"
    return Capabilities(
        nack=NackMeans.RELEASE if acks else NackMeans.NONE,
        extends=acks and consumer.settings.in_progress,
        wakes=True,
        # Without acks what is buffered when the process ends is gone.
        buffer=_BUFFER if acks else 1,
        lease=min(consumer.backoff, default=consumer.ack_wait),
        max_attempts=consumer.max_deliver,
    )


class NatsChannel:
    """The awaitable channel; every call runs on the transport's loop."""

    def __init__(self, reader: Reader, source: Source, consumer: Consumer | None) -> None:
        self.capabilities = capabilities(consumer)
        self._reader = reader
        self._source = source
        self._connection = reader.connection
        self._consumer = consumer
        self._feed: Feed | None = None
        self._kept: list[NatsDelivery] = []
        self._giving_back: asyncio.TimerHandle | None = None
        self._blocked = False
        self._loop = asyncio.get_running_loop() if consumer is not None else None

    @property
    def is_open(self) -> bool:
        """Whether what is told the server can reach it, now or after a reconnect."""
        return not self._connection.sending.is_closed

    @property
    def confirms(self) -> bool:
        """Whether an ack waits for the server, or may fail for lack of a consumer."""
        return self._consumer is None or self._consumer.settings.confirm

    async def receive(self, limit: int, timeout: float) -> Sequence[Delivery]:
        if self._consumer is None or self._feed is None:
            await self._start()
        consumer, feed = self._consumer, self._feed
        assert consumer is not None and feed is not None  # noqa: S101, PT018
        try:
            if self._connection.sending.is_closed:
                await self._connection.open()
            if self._kept:
                held = await self._take_kept(feed, limit, timeout)
            else:
                held = await feed.take(limit, timeout)
            self._blocked = False
        except ConsumerGone:
            if not consumer.is_ephemeral:
                raise
            await feed.close()
            self._consumer, self._feed = await self._reader.remake(self._source, consumer), None
            return ()
        if held and consumer.is_ephemeral:
            sequences = [delivery.sequence for delivery in held]
            consumer.unsettled.update(sequences)
            consumer.last = max(consumer.last, *sequences)
        return held

    async def _start(self) -> None:
        self._loop = asyncio.get_running_loop()
        if self._consumer is None:
            self._consumer = await self._reader.consumer(self._source)
            self.capabilities = capabilities(self._consumer)
        self._feed = self._reader.feed(self._consumer)

    async def ack(self, delivery: Delivery) -> None:
        mine, consumer = self._mine(delivery)
        if consumer.ack_policy == "none":
            return
        if consumer.settings.confirm:
            await self._connection.client.request(mine.reply, b"+ACK", timeout=self._connection.timeout)
        else:
            await self._connection.sending.publish(mine.reply)
        if consumer.is_ephemeral:
            consumer.unsettled.discard(mine.sequence)

    async def nack(self, delivery: Delivery) -> None:
        mine, consumer = self._mine(delivery)
        if not mine.handled:
            # Nobody has tried it, and every delivery counts here: giving it back could be the death of it.
            self._keep_back([mine])
            return
        self._check(mine, consumer)
        if consumer.exhausted(mine.attempt):
            await self._exhaust(mine, consumer, "released")
            return
        if consumer.deliver_subject and self._feed is not None:
            # What was pushed behind it must not come before it.
            self._keep_back(self._feed.give_back())
        self._blocked = True
        await self._tell(mine, NAK)

    async def requeue(self, delivery: Delivery, delay: float | None) -> None:
        mine, consumer = self._mine(delivery)
        self._check(mine, consumer)
        if consumer.exhausted(mine.attempt):
            await self._exhaust(mine, consumer, "failed")
            return
        if delay is None:
            delay = consumer.retry_delay(mine.attempt, self._reader.random())
        asked = consumer.asked_delay(mine.attempt, delay)
        await self._tell(mine, b'%b {"delay": %d}' % (NAK, asked) if delay > 0 else NAK)

    async def reject(self, delivery: Delivery, rejection: Reject) -> None:
        mine, consumer = self._mine(delivery)
        # Stored and confirmed first: if that fails, the message is still the server's.
        await self._reader.office.write(Letter.of(mine, rejection), self._source)
        reason = one_line(f"{OURS}{rejection.reason.value}: {rejection.error}", 500)
        await self._tell(mine, f"+TERM {reason}".encode())
        consumer.unsettled.discard(mine.sequence)

    async def extend(self, delivery: Delivery) -> None:
        mine, _ = self._mine(delivery)
        await self._tell(mine, b"+WPI")

    def buffered(self) -> Sequence[Delivery]:
        return [*self._kept, *(self._feed.waiting() if self._feed is not None else ())]

    def wake(self) -> None:
        feed, loop = self._feed, self._loop
        if feed is not None and loop is not None and not loop.is_closed():
            loop.call_soon_threadsafe(feed.wake)

    async def close(self) -> None:
        feed, self._feed = self._feed, None
        if feed is None:
            return
        await feed.close()
        # A message that came too late to be handed out must not wait for its timeout.
        self._kept += feed.give_back()
        await self._give_back()

    def _keep_back(self, deliveries: list[NatsDelivery]) -> None:
        self._kept += deliveries
        if self._kept and self._giving_back is None:
            loop = asyncio.get_running_loop()
            self._giving_back = loop.call_later(_KEEP_FOR, lambda: loop.create_task(self._give_back()))

    async def _take_kept(self, feed: Feed, limit: int, timeout: float) -> list[NatsDelivery]:
        """What was kept, behind the message that was given back: the next thing handled is that one."""
        fresh: list[NatsDelivery] = []
        if self._blocked:
            fresh = await feed.take(limit, min(timeout, _BLOCK_FOR))
        self._stop_timer()
        ready = sorted([*fresh, *self._kept], key=_sequence)
        self._kept = ready[limit:]
        self._keep_back([])
        for delivery in ready[:limit]:
            delivery.renew()
        return ready[:limit]

    async def _give_back(self) -> None:
        """Let anyone have what was kept, oldest first: the server hands out in the order of the naks."""
        self._stop_timer()
        kept, self._kept = self._kept, []
        for delivery in sorted(kept, key=_sequence):
            await self._quietly(self._tell(delivery, NAK))

    def _stop_timer(self) -> None:
        if self._giving_back is not None:
            self._giving_back.cancel()
            self._giving_back = None

    async def _exhaust(self, mine: NatsDelivery, consumer: Consumer, what: str) -> None:
        error = f"{what} on delivery {mine.attempt}; the consumer's max_deliver is {consumer.max_deliver}"
        await self.reject(mine, Reject(Reason.DELIVERY_ERROR, error))

    async def _tell(self, mine: NatsDelivery, what: bytes) -> None:
        await self._connection.sending.publish(mine.reply, what)

    @staticmethod
    def _check(mine: NatsDelivery, consumer: Consumer) -> None:
        """The server takes a nak under AckPolicy none, and ignores it."""
        if consumer.ack_policy == "none":
            raise LeaseLost(
                f"message {mine.id!r}: consumer {consumer.stream}/{consumer.name} has AckPolicy none: it was "
                "acknowledged on delivery and does not come again"
            )

    def _mine(self, delivery: Delivery) -> tuple[NatsDelivery, Consumer]:
        if not isinstance(delivery, NatsDelivery) or self._consumer is None:
            raise TypeError(f"message {delivery.id!r} was not received from this transport")
        return delivery, self._consumer

    async def _quietly(self, call: Awaitable[None]) -> None:
        try:
            await call
        except Exception as error:
            logger.warning("nats: %s: %s: %s", self._source.channel, type(error).__name__, error)


def _sequence(delivery: NatsDelivery) -> int:
    return delivery.sequence
