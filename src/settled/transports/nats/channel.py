"""A subscription's end of a consumer: receiving, settling, and telling the server that work goes on."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from settled.message import Delivery
from settled.settlement import Reason, Reject
from settled.transports.base import Capabilities, NackMeans, Source
from settled.transports.nats.advisories import OURS
from settled.transports.nats.connection import Connection, logger
from settled.transports.nats.delivery import NatsDelivery
from settled.transports.nats.feeds import NAK, ConsumerGone, Feed
from settled.transports.nats.letters import Letter, Office
from settled.transports.nats.sources import Consumer

# A pump releases what it has buffered one by one, last first: this long after the last one they are sent.
_RELEASE_AFTER = 0.02


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
    nack = NackMeans.NONE if consumer is not None and consumer.ack_policy == "none" else NackMeans.RELEASE
    limit = None if consumer is None else consumer.max_deliver
    return Capabilities(nack=nack, wakes=True, max_attempts=limit)


class NatsChannel:
    """The awaitable channel; every call runs on the transport's loop."""

    def __init__(self, reader: Reader, source: Source, consumer: Consumer | None) -> None:
        self.capabilities = capabilities(consumer)
        self._reader = reader
        self._source = source
        self._connection = reader.connection
        self._consumer = consumer
        self._feed: Feed | None = None
        self._held: Sequence[NatsDelivery] = ()
        self._released: list[NatsDelivery] = []
        self._releasing: asyncio.TimerHandle | None = None
        self._keeper: asyncio.Task[None] | None = None
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
        # Whoever asks for more is done with all that he had, or has left it to the server.
        self._held = ()
        if self._released:
            await self._release()
        if self._consumer is None or self._feed is None:
            await self._start()
        consumer, feed = self._consumer, self._feed
        assert consumer is not None and feed is not None  # noqa: S101, PT018
        try:
            if self._connection.sending.is_closed:
                await self._connection.open()
            self._held = held = await feed.take(limit, timeout)
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
        if self._consumer.settings.in_progress and self._consumer.ack_policy != "none" and not self._keeper:
            self._keeper = asyncio.create_task(self._keep(self._consumer), name="in-progress")

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
        if consumer.exhausted(mine.attempt):
            await self._exhaust(mine, consumer, "released")
            return
        if consumer.deliver_subject and self._feed is not None:
            # What was pushed behind it must not come before it.
            self._released += self._feed.give_back()
        self._released.append(mine)
        if self._releasing is not None:
            self._releasing.cancel()
        loop = asyncio.get_running_loop()
        self._releasing = loop.call_later(_RELEASE_AFTER, lambda: loop.create_task(self._release()))

    async def requeue(self, delivery: Delivery, delay: float | None) -> None:
        mine, consumer = self._mine(delivery)
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
        reason = " ".join(f"{OURS}{rejection.reason.value}: {rejection.error}".split())[:500]
        await self._tell(mine, f"+TERM {reason}".encode())
        consumer.unsettled.discard(mine.sequence)

    async def extend(self, delivery: Delivery) -> None:
        mine, _ = self._mine(delivery)
        await self._tell(mine, b"+WPI")
        mine.extended = asyncio.get_running_loop().time()

    def wake(self) -> None:
        feed, loop = self._feed, self._loop
        if feed is not None and loop is not None and not loop.is_closed():
            loop.call_soon_threadsafe(feed.wake)

    async def close(self) -> None:
        if self._keeper is not None:
            self._keeper.cancel()
            self._keeper = None
        feed, self._feed = self._feed, None
        if feed is None:
            return
        await feed.close()
        # A message that came too late to be handed out must not wait for its timeout.
        self._released += feed.give_back()
        await self._release()

    async def _release(self) -> None:
        """Give back what was released, oldest first: the server hands out in the order of the naks."""
        if self._releasing is not None:
            self._releasing.cancel()
            self._releasing = None
        released, self._released = self._released, []
        for delivery in sorted(released, key=_sequence):
            await self._quietly(self._tell(delivery, NAK))

    async def _exhaust(self, mine: NatsDelivery, consumer: Consumer, what: str) -> None:
        error = f"{what} on delivery {mine.attempt}; the consumer's max_deliver is {consumer.max_deliver}"
        await self.reject(mine, Reject(Reason.DELIVERY_ERROR, error))

    async def _tell(self, mine: NatsDelivery, what: bytes) -> None:
        await self._connection.sending.publish(mine.reply, what)

    def _mine(self, delivery: Delivery) -> tuple[NatsDelivery, Consumer]:
        if not isinstance(delivery, NatsDelivery) or self._consumer is None:
            raise TypeError(f"message {delivery.id!r} was not received from this transport")
        return delivery, self._consumer

    async def _keep(self, consumer: Consumer) -> None:
        """Say in-progress for what is in hand or buffered and has been for a third of its time."""
        shortest = min((consumer.ack_wait, *consumer.backoff) if not consumer.backoff else consumer.backoff)
        while True:
            await asyncio.sleep(shortest / 6)
            now = asyncio.get_running_loop().time()
            feed = self._feed
            for delivery in (*self._held, *(feed.waiting() if feed is not None else ())):
                if delivery.settled or delivery.handled:
                    continue
                if now - delivery.extended >= consumer.patience(delivery.attempt) / 3:
                    await self._quietly(self.extend(delivery))

    async def _quietly(self, call: Awaitable[None]) -> None:
        try:
            await call
        except Exception as error:
            logger.warning("nats: %s: %s: %s", self._source.channel, type(error).__name__, error)


def _sequence(delivery: NatsDelivery) -> int:
    return delivery.sequence
