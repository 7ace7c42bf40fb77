"""A subscription's end of a topic: a member of a classic group that commits what is settled."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, TopicPartition

from settled.message import Delivery
from settled.settlement import Reject
from settled.transports.base import (
    Attempts,
    Capabilities,
    DelayMeans,
    LeaseLost,
    NackMeans,
    Source,
    retry_delay,
)
from settled.transports.kafka.commits import COMMIT_WITHIN, Commits, Wanted, uncommitted
from settled.transports.kafka.lane import KafkaDelivery, Lane
from settled.transports.kafka.records import headers_of
from settled.transports.kafka.settings import DEFAULT_GROUP, Settled
from settled.transports.kafka.thread import Thread

if TYPE_CHECKING:
    from settled.transports.kafka.transport import KafkaTransport

logger = logging.getLogger("settled.kafka")

_SLICE = 0.1
# Records that are there already come along with the first: handed out one by one, each is not asked for anew.
_AHEAD = 100
_BROKER_TIMEOUT = 10.0


class KafkaChannel:
    """One member of a consumer group.

    A nack puts this consumer back to the message. Where others do nothing, because it is not committed, the
    next commit would bury it: what is behind a message that was given back waits for it. Nothing is fetched
    again for that; the record is still in memory.

    The offset committed for a partition is that of its first message which is not settled. How often that one
    failed, and until when it waits, is kept in the metadata of the commit: order, count and delay outlive a
    restart and a rebalance. A commit is begun when the last of a batch is acked, after 50 ms at the latest; a
    handler that acks the last one itself waits for it, and the pump goes on meanwhile.
    """

    capabilities = Capabilities(
        nack=NackMeans.REWIND, attempts=Attempts.HEADER, delay=DelayMeans.HELD, wakes=True, lanes=True
    )

    def __init__(self, transport: KafkaTransport, source: Source, settings: Settled) -> None:
        self._transport = transport
        self._source = source
        self._settings = settings
        self.capabilities = replace(self.capabilities, lease=settings.lease)
        self._group = source.group or DEFAULT_GROUP
        self._lanes: dict[tuple[str, int], Lane] = {}
        self._paused: set[tuple[str, int]] = set()
        # Lanes change in the client's thread, at a rebalance, and in the loop, when a message is settled.
        self._lock = threading.Lock()
        self._consumer: Consumer | None = None
        self._thread: Thread | None = None
        self._polled = 0.0
        self._wakes = 0
        self._trouble: KafkaException | None = None
        self.commits = Commits(source.channel, self._lanes, self._lock, transport.heard, self._commit)
        self._keeper: asyncio.Task[None] | None = None

    async def receive(self, limit: int, timeout: float) -> Sequence[Delivery]:
        wakes = self._wakes
        loop = asyncio.get_running_loop()
        if self._keeper is None:
            self._keeper = asyncio.create_task(self._keep_alive(), name="kafka-keep-alive")
        if at_hand := self.at_hand(limit):
            return at_hand
        # The client does one thing at a time: a commit would wait until this poll is over.
        await self.commits.flush()
        until = loop.time() + timeout
        while True:
            wait = max(0.0, min(_SLICE, until - loop.time()))
            taken = await self._poll(self._take, limit, wait)
            if taken or self._wakes != wakes or loop.time() >= until:
                return taken

    def at_hand(self, limit: int) -> Sequence[Delivery]:
        """What can be handed out without asking the client; nothing if that would keep the group waiting.

        From any thread, as `settled`.
        """
        if time.monotonic() - self._polled >= _SLICE:
            return ()
        with self._lock:
            return self._ready(limit, time.time())

    async def _poll(
        self, call: Callable[[int, float], list[KafkaDelivery]], limit: int, wait: float
    ) -> list[KafkaDelivery]:
        if self._thread is None:
            self._thread = Thread("settled-kafka")
        polling = self._thread.run(call, limit, wait)
        try:
            return await asyncio.shield(polling)
        except asyncio.CancelledError:
            # Nobody is there to take what it brings.
            polling.add_done_callback(self._put_back)
            raise

    def _put_back(self, polling: asyncio.Future[list[KafkaDelivery]]) -> None:
        if polling.cancelled() or polling.exception() is not None:
            return
        with self._lock:
            for delivery in polling.result():
                if not delivery.home.lost:
                    delivery.home.give_back(delivery)

    def _take(self, limit: int, wait: float) -> list[KafkaDelivery]:
        """In the client's thread: what waits, else what the broker has."""
        consumer = self._consumer or self._join()
        if time.monotonic() - self._polled >= _SLICE and any(lane.waiting for lane in self._lanes.values()):
            # The group hears of us, and we of it, also while there is enough to hand out.
            self._received(self._look(consumer, 0), set(), 0)
        now = time.time()
        with self._lock:
            for lane in self._lanes.values():
                lane.expire(time.monotonic(), now)
            busy = {lane for lane in self._lanes.values() if lane.ordered and lane.out}
            ready = self._ready(limit, now)
            blocked = {place for place, lane in self._lanes.items() if lane.blocked()}
            dues = [due for lane in self._lanes.values() if (due := lane.due()) is not None]
        if len(ready) == limit:
            return ready
        if ready:
            self._pause(consumer, blocked)
            room = limit - len(ready)
            return ready + self._received(consumer.consume(room, 0), busy, room)
        if self._trouble is not None:
            trouble, self._trouble = self._trouble, None
            raise trouble
        self._pause(consumer, blocked)
        records = self._look(consumer, max(0.0, min([wait, *(due - now for due in dues)])))
        if records:
            records += consumer.consume(max(limit, _AHEAD) - 1, 0)
        return self._received(records, busy, limit)

    def _look(self, consumer: Consumer, wait: float) -> list[Message]:
        self._polled = time.monotonic()
        record = consumer.poll(wait)
        return [] if record is None else [record]

    def _ready(self, limit: int, now: float) -> list[KafkaDelivery]:
        found: list[KafkaDelivery] = []
        deadline = time.monotonic() + self._settings.lease
        for lane in self._lanes.values():
            for delivery in lane.ready(limit - len(found), now):
                del lane.waiting[delivery.offset]
                found.append(lane.hand_out(delivery, deadline))
        return found

    def _received(self, records: Sequence[Message], busy: set[Lane], room: int) -> list[KafkaDelivery]:
        """Hand out as many as there is room for; the others wait."""
        taken: list[KafkaDelivery] = []
        now, deadline = time.time(), time.monotonic() + self._settings.lease
        with self._lock:
            for record in records:
                error = record.error()
                if error is not None:
                    if error.code() != KafkaError._PARTITION_EOF:
                        self._trouble = KafkaException(error)
                    continue
                delivery = self._delivery(record)
                lane = delivery.home
                if (
                    len(taken) == room
                    or lane in busy
                    or ((lane.waiting or lane.failures) and lane.waits(delivery, now))
                ):
                    lane.waiting[delivery.offset] = delivery
                else:
                    delivery.deadline = deadline
                    lane.out[delivery.offset] = delivery
                    taken.append(delivery)
        if taken:
            self._transport.heard()
        return taken

    def _delivery(self, record: Message) -> KafkaDelivery:
        place = record.topic(), record.partition()
        lane = self._lanes.get(place)  # type: ignore[arg-type]
        if lane is None or lane.goes_back(record.offset() or 0):
            lane = self._anew(record, lane)
        return lane.came(record, headers_of(record))

    def _anew(self, record: Message, before: Lane | None) -> Lane:
        topic, number = str(record.topic()), record.partition() or 0
        if before is not None:
            logger.warning("%s/%d: begins anew at offset %s", topic, number, record.offset())
            before.lost = True
        lane = self._lanes[topic, number] = self._lane(topic, number)
        return lane

    def _lane(self, topic: str, number: int) -> Lane:
        return Lane(topic, number, self._group, ordered=self._settings.ordered)

    def _pause(self, consumer: Consumer, blocked: set[tuple[str, int]]) -> None:
        """Fetch nothing that would have to wait; the group still hears of us with every poll."""
        if blocked == self._paused:
            return
        here = self._lanes.keys()
        pause, resume = (blocked - self._paused) & here, (self._paused - blocked) & here
        if pause:
            consumer.pause([TopicPartition(*place) for place in pause])
        if resume:
            consumer.resume([TopicPartition(*place) for place in resume])
        self._paused = blocked & here

    def _join(self) -> Consumer:
        consumer = self._transport.consumer(self._group)
        consumer.subscribe(
            [self._source.channel], on_assign=self._assigned, on_revoke=self._revoked, on_lost=self._lost
        )
        self._consumer = consumer
        return consumer

    def _assigned(self, consumer: Consumer, places: list[TopicPartition]) -> None:
        if self._consumer is None:
            # On the way out: closing waits for nothing more than it must.
            return
        try:
            known = consumer.committed(places, timeout=_BROKER_TIMEOUT)
        except KafkaException as error:
            logger.warning("%s: attempts so far are not known: %s", self._source.channel, error)
            known = places
        with self._lock:
            for place in known:
                lane = self._lanes[place.topic, place.partition] = self._lane(place.topic, place.partition)
                if place.offset >= 0:
                    lane.committed = (place.offset, place.metadata or "")
                    lane.restore(place.metadata)

    def _revoked(self, consumer: Consumer, places: list[TopicPartition]) -> None:
        with self._lock:
            lanes = [lane for place in places if (lane := self._lanes.get((place.topic, place.partition)))]
            wanted = uncommitted(lanes)
        try:
            self.commits.make(consumer, wanted)
        except (KafkaException, LeaseLost) as error:
            logger.warning("%s: not committed before giving up partitions: %s", self._source.channel, error)
        self._lost(consumer, places)

    def _lost(self, _: Consumer, places: list[TopicPartition]) -> None:
        with self._lock:
            for place in places:
                self._paused.discard((place.topic, place.partition))
                lane = self._lanes.pop((place.topic, place.partition), None)
                if lane is not None:
                    lane.lost = True

    async def ack(self, delivery: Delivery) -> None:
        within = self.settled(delivery)
        if not within and not delivery.handled:  # the handler itself waits for it
            await self.commits.now()
        else:
            self.commits.within(within)

    def settled(self, delivery: Delivery) -> float:
        """It is settled for good; within how many seconds that is to be committed."""
        mine = _mine(delivery)
        with self._lock:
            mine.home.settle(mine)
            more = mine.home.out or any(lane.out for lane in self._lanes.values())
        return COMMIT_WITHIN if more else 0.0

    async def nack(self, delivery: Delivery) -> None:
        mine = _mine(delivery)
        with self._lock:
            mine.home.give_back(mine)

    async def requeue(self, delivery: Delivery, delay: float | None) -> None:
        mine = _mine(delivery)
        due = time.time() + retry_delay(delay, self._settings.backoff, mine.attempt)
        with self._lock:
            mine.home.fail(mine, due)
        await self.commits.now()

    async def reject(self, delivery: Delivery, rejection: Reject) -> None:
        mine = _mine(delivery)
        with self._lock:
            mine.home.check(mine)
        # Stored and confirmed first: if that fails, the message is still ours.
        await self._transport.write_letter(self._source, mine, rejection, self._group, mine.key)
        with self._lock:
            mine.home.settle(mine)
        await self.commits.now()

    async def extend(self, delivery: Delivery) -> None:
        mine = _mine(delivery)
        with self._lock:
            mine.home.check(mine)
            mine.deadline = time.monotonic() + self._settings.lease

    def wake(self) -> None:
        self._wakes += 1

    async def close(self) -> None:
        self.commits.close()
        if self._keeper is not None:
            self._keeper.cancel()
        self._keeper = None
        thread, self._thread = self._thread, None
        if thread is None:
            return
        # Giving up the partitions commits what is settled of them.
        await thread.run(self._leave)
        thread.end()

    async def _commit(self, wanted: list[Wanted]) -> None:
        consumer, thread = self._consumer, self._thread
        if consumer is not None and thread is not None:
            await thread.run(self.commits.make, consumer, wanted)

    def _leave(self) -> None:
        consumer, self._consumer = self._consumer, None
        if consumer is not None:
            with self._lock:
                places = [TopicPartition(*place) for place in self._lanes]
            self._revoked(consumer, places)
            consumer.close()

    async def _keep_alive(self) -> None:
        """Poll while handlers are at it, so that the group does not take them for dead."""
        interval = self._transport.address.patience() / 4
        while True:
            await asyncio.sleep(interval)
            if self._consumer is not None and time.monotonic() - self._polled >= interval:
                try:
                    await self._poll(self._poll_nothing, 0, 0)
                except Exception as error:
                    logger.warning("%s: %s", self._source.channel, error)

    def _poll_nothing(self, _limit: int, _wait: float) -> list[KafkaDelivery]:
        consumer = self._consumer
        if consumer is None:
            return []
        with self._lock:
            everything = set(self._lanes)
        self._pause(consumer, everything)
        # What was fetched before the pause is first in its lane when somebody asks.
        return self._received(self._look(consumer, 0), set(), 0)


def _mine(delivery: Delivery) -> KafkaDelivery:
    if not isinstance(delivery, KafkaDelivery):
        raise TypeError(f"message {delivery.id!r} was not received from this transport")
    return delivery
