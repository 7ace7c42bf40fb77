"""A subscription's end of a share group: records are locked one by one, and the broker counts deliveries."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, TypeVar

from confluent_kafka import (
    AcknowledgeType,
    IllegalStateException,
    KafkaError,
    KafkaException,
    Message,
    ShareConsumer,
    TopicPartition,
)

from settled.message import Delivery, Metadata
from settled.settlement import Reject
from settled.transports.base import Capabilities, DelayMeans, LeaseLost, NackMeans, Source, retry_delay
from settled.transports.kafka.records import KEY, headers_of, identity, stored_at
from settled.transports.kafka.settings import DEFAULT_GROUP, Settled
from settled.transports.kafka.thread import Thread

if TYPE_CHECKING:
    from settled.transports.kafka.transport import KafkaTransport

logger = logging.getLogger("settled.kafka")
T = TypeVar("T")

_SLICE = 0.1
_FLUSH_AFTER = 0.05
_COMMIT_WITHIN = 10.0
_LEAVE_WITHIN = 5.0
# The record's state is invalid; the session was not found, or has another epoch: its locks are gone.
_GONE = {121, 122, 123}


class ShareDelivery(Delivery):
    """A record under the broker's lock."""

    __slots__ = ("deadline", "group", "place", "record")

    def __init__(self, record: Message, group: str, deadline: float) -> None:
        # Not through the base, which takes longer: this runs for every record.
        self.headers = headers_of(record)
        self.id = identity(record, self.headers)
        self.subject = str(record.topic())
        self.data = record.value() or b""
        self.attempt = max(1, record.delivery_count() or 1)
        self.place = record.partition(), record.offset()
        self.lane = str(self.place[0])
        self.ordered = False
        self.settled = False
        self.handled = False
        self.record = record
        self.group = group
        self.deadline = deadline

    def metadata(self) -> Metadata:
        stored = stored_at(self.record)
        return Metadata(
            stream_sequence=self.record.offset(),
            timestamp=None if stored is None else datetime.fromtimestamp(stored / 1000, UTC),
            redelivery_count=self.attempt - 1,
            consumer=self.group,
            lane=self.lane,
        )


SHARED = Capabilities(
    nack=NackMeans.RELEASE,
    delay=DelayMeans.HELD,
    extends=False,
    wakes=True,
    lanes=True,
    counts_untried=True,
)


class ShareChannel:
    """One member of a share group.

    A nack releases the record to any member at once; the broker counts every delivery, so this one too, and
    gives a record up after its limit. The client polls again only when all it has is settled: a delay holds
    the record here, and the channel with it, at most for half the broker's lock.
    """

    def __init__(self, transport: KafkaTransport, source: Source, settings: Settled) -> None:
        self.capabilities = replace(SHARED, lease=settings.lease, max_attempts=settings.max_attempts)
        self._transport = transport
        self._source = source
        self._settings = settings
        self._group = source.group or DEFAULT_GROUP
        self._consumer: ShareConsumer | None = None
        # The client is for one thread.
        self._thread: Thread | None = None
        self._fresh: deque[ShareDelivery] = deque()
        self._out: dict[tuple[int | None, int | None], ShareDelivery] = {}
        # Acked, and the client not told yet: it is told of many at once, in its thread.
        self._accepted: deque[ShareDelivery] = deque()
        self._held: dict[asyncio.Task[None], ShareDelivery] = {}
        self._flushing: asyncio.Task[None] | None = None
        self._taken = 0
        self._wakes = 0

    async def receive(self, limit: int, timeout: float) -> Sequence[Delivery]:
        wakes = self._wakes
        loop = asyncio.get_running_loop()
        until = loop.time() + timeout
        while True:
            await self._expire()
            if not self._fresh:
                wait = max(0.0, min(_SLICE, until - loop.time()))
                if self._out or self._held:
                    await asyncio.sleep(wait)
                else:
                    await self._run(self._poll, wait)
            if self._fresh:
                taken = [self._fresh.popleft() for _ in range(min(limit, len(self._fresh)))]
                self._out.update({delivery.place: delivery for delivery in taken})
                self._taken = len(taken)
                return taken
            if self._wakes != wakes or loop.time() >= until:
                return ()

    async def _run(self, call: Callable[..., T], *arguments: object) -> T:
        if self._thread is None:
            self._thread = Thread("settled-kafka-share")
        # Made also if its caller is cancelled: what it brings is the channel's, and is handed out next.
        return await self._thread.run(call, *arguments)

    def _poll(self, wait: float) -> None:
        if self._consumer is None:
            self._consumer = self._transport.share_consumer(self._group)
            self._consumer.set_acknowledgement_commit_callback(self._told)
            self._consumer.subscribe([self._source.channel])
        self._tell()
        deadline = time.monotonic() + self._settings.lease
        trouble: KafkaError | None = None
        for record in self._consumer.poll(wait):
            error = record.error()
            if error is not None:
                trouble = error
            else:
                self._fresh.append(ShareDelivery(record, self._group, deadline))
        if self._fresh:
            self._transport.heard()
        elif trouble is not None and trouble.code() != KafkaError._PARTITION_EOF:
            raise KafkaException(trouble)

    async def ack(self, delivery: Delivery) -> None:
        mine = self._claimed(delivery)
        self._accepted.append(mine)
        if self._out or self._fresh or (mine.handled and self._taken > 1):
            # The next poll, which the pump comes to at once, takes them along.
            self._flush_later()
        else:
            await self._run(self._commit)

    async def nack(self, delivery: Delivery) -> None:
        await self._settle(self._claimed(delivery), AcknowledgeType.RELEASE)

    async def requeue(self, delivery: Delivery, delay: float | None) -> None:
        mine = self._claimed(delivery)
        wait = min(retry_delay(delay, self._settings.backoff, mine.attempt), self._settings.lease / 2)
        if wait <= 0:
            await self._settle(mine, AcknowledgeType.RELEASE)
            return
        task = asyncio.create_task(self._hold(mine, wait), name="kafka-share-delay")
        self._held[task] = mine
        task.add_done_callback(lambda done: self._held.pop(done, None))

    async def _hold(self, mine: ShareDelivery, wait: float) -> None:
        try:
            await asyncio.sleep(wait)
        finally:
            await self._quietly(self._release, [mine])

    async def reject(self, delivery: Delivery, rejection: Reject) -> None:
        mine = self._mine(delivery)
        # Stored and confirmed first: if that fails, the broker's lock runs out and the record comes again.
        await self._transport.write_letter(self._source, mine, rejection, self._group, mine.headers.get(KEY))
        await self._settle(self._claimed(mine), AcknowledgeType.REJECT)

    async def extend(self, delivery: Delivery) -> None:
        """The broker's lock cannot be renewed by this client; LeaseLost if it ran out."""
        self._mine(delivery)

    def wake(self) -> None:
        self._wakes += 1

    async def close(self) -> None:
        for task in [*self._held, *([self._flushing] if self._flushing else [])]:
            task.cancel()
            await asyncio.wait([task])
        thread = self._thread
        if thread is None:
            return
        left = [*self._fresh, *self._out.values()]
        self._fresh.clear()
        self._out.clear()
        await self._quietly(self._release, left)
        self._thread = None
        thread.end()
        await self._leave()

    async def _leave(self) -> None:
        consumer, self._consumer = self._consumer, None
        if consumer is None:
            return
        # The client's close may never return, and must not keep the process from ending then.
        leaving = threading.Thread(target=consumer.close, name="settled-kafka-leave", daemon=True)
        leaving.start()
        await asyncio.to_thread(leaving.join, _LEAVE_WITHIN)
        if leaving.is_alive():
            logger.warning("%s: group %s not left in time", self._source.channel, self._group)

    def _mine(self, delivery: Delivery) -> ShareDelivery:
        if not isinstance(delivery, ShareDelivery):
            raise TypeError(f"message {delivery.id!r} was not received from this transport")
        if self._out.get(delivery.place) is not delivery:
            raise _lost(delivery, "it is settled already, or its lock ran out")
        return delivery

    def _claimed(self, delivery: Delivery) -> ShareDelivery:
        mine = self._mine(delivery)
        del self._out[mine.place]
        return mine

    async def _settle(self, mine: ShareDelivery, how: AcknowledgeType) -> None:
        await self._run(self._acknowledge, mine, how)
        await self._run(self._commit)

    def _acknowledge(self, mine: ShareDelivery, how: AcknowledgeType) -> None:
        if self._consumer is None:
            raise _lost(mine, "the channel is closed")
        try:
            self._consumer.acknowledge(mine.record, how)
        except IllegalStateException as error:
            raise _lost(mine, str(error)) from error

    def _commit(self) -> None:
        """Tell the broker; LeaseLost if it has taken a record away meanwhile."""
        if self._consumer is None:
            return
        late = self._tell()
        for place, error in self._consumer.commit_sync(_COMMIT_WITHIN).items():
            if error is not None:
                why = f"topic {place.topic!r}, partition {place.partition}: {error.args[0].str()}"
                if error.args[0].code() in _GONE:
                    raise LeaseLost(f"{why}: a lock was gone before its record was settled")
                raise error
        if late is not None:
            raise late

    def _tell(self) -> LeaseLost | None:
        """Let the client know what is acked; it is sent with the next poll or commit."""
        late: LeaseLost | None = None
        while self._accepted:
            try:
                self._acknowledge(self._accepted.popleft(), AcknowledgeType.ACCEPT)
            except LeaseLost as lost:
                late = lost
                logger.error("settle failed, left to the broker: %s", lost)  # noqa: TRY400
        return late

    def _told(self, offsets: dict[TopicPartition, set[int]], error: KafkaException | None) -> None:
        if error is not None:
            for place, those in offsets.items():
                logger.error(
                    "settle failed, left to the broker: topic %r, partition %d, offsets %s: %s",
                    place.topic,
                    place.partition,
                    sorted(those),
                    error.args[0].str(),
                )

    def _release(self, deliveries: Sequence[ShareDelivery]) -> None:
        try:
            for delivery in deliveries:
                self._acknowledge(delivery, AcknowledgeType.RELEASE)
        finally:
            self._commit()

    async def _expire(self) -> None:
        """Forget what the broker has taken back: the client would wait for it for ever."""
        now = time.monotonic()
        gone = [one for one in (*self._out.values(), *self._fresh) if one.deadline <= now]
        if gone:
            self._out = {place: one for place, one in self._out.items() if one.deadline > now}
            self._fresh = deque(one for one in self._fresh if one.deadline > now)
            await self._quietly(self._release, gone)

    def _flush_later(self) -> None:
        if self._flushing is None or self._flushing.done():
            self._flushing = asyncio.create_task(self._flush(), name="kafka-share-commit")

    async def _flush(self) -> None:
        await asyncio.sleep(_FLUSH_AFTER)
        await self._quietly(self._commit)

    async def _quietly(self, call: Callable[..., None], *arguments: object) -> None:
        try:
            await self._run(call, *arguments)
        except Exception as error:
            logger.warning("%s: left to the broker: %s", self._source.channel, error)


def _lost(delivery: Delivery, why: str) -> LeaseLost:
    return LeaseLost(f"topic {delivery.subject!r}: message {delivery.id!r}: {why}")
