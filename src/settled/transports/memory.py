"""The in-memory transport: the default of an app, what tests run on, and the model of the queue."""

from __future__ import annotations

import heapq
import itertools
import threading
import uuid
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Literal

from settled.clock import Bell, Clock, SystemClock
from settled.message import Delivery
from settled.settlement import Ack, Action, Nack, Reason, Reject, Requeue
from settled.transports.base import (
    AsyncChannel,
    Capabilities,
    Channel,
    LeaseLost,
    NackMeans,
    Outgoing,
    Publication,
    Published,
    RejectMeans,
    Source,
)
from settled.transports.faces import AsyncImmediateChannel, ImmediateChannel
from settled.transports.lanes import (
    Cursor,
    DeadLetter,
    Lane,
    Lease,
    MemoryDelivery,
    QueueOptions,
    Record,
    Settled,
)
from settled.transports.letters import destination, letter

DEFAULT_GROUP = "__QUEUE_MODE__"
CAPABILITIES = Capabilities(nack=NackMeans.RELEASE, reject=RejectMeans.TOGETHER, wakes=True, lanes=True)


class Group:
    """One consumer group on one queue: its cursors, and which lanes may have something for it."""

    def __init__(self, name: str, start: Literal["all", "new"] | datetime, lanes: Sequence[Lane]) -> None:
        self.name = name
        self.cursors: dict[str | None, Cursor] = {}
        self.ready: dict[str | None, None] = {}
        self.timers: list[tuple[float, int, str | None]] = []
        self.dead: list[DeadLetter] = []
        for lane in lanes:
            self.add(lane, _start_of(lane, start))

    def add(self, lane: Lane, at: int) -> Cursor:
        cursor = self.cursors[lane.name] = Cursor(lane, next=at, floor=at)
        self.ready[lane.name] = None
        return cursor


def _start_of(lane: Lane, start: Literal["all", "new"] | datetime) -> int:
    match start:
        case "all":
            return lane.base
        case "new":
            return lane.end
        case datetime():
            after = start.timestamp()
            return lane.base + sum(1 for record in lane.log.values() if record.time < after)
        case _:
            raise ValueError(f"group: start must be 'all', 'new' or a datetime, got {start!r}")


class Queue:
    """A named queue: its lanes, its groups, and what is scheduled for later."""

    def __init__(self, name: str, options: QueueOptions) -> None:
        self.name = name
        self.options = options
        self.lanes: dict[str | None, Lane] = {}
        self.groups: dict[str, Group] = {}
        self.scheduled: list[tuple[float, int, str | None, Record]] = []
        self.bell = Bell()

    def lane(self, name: str | None) -> Lane:
        lane = self.lanes.get(name)
        if lane is None:
            lane = self.lanes[name] = Lane(name)
            for group in self.groups.values():
                group.add(lane, 0)
        return lane

    def append_due(self, now: float) -> None:
        while self.scheduled and self.scheduled[0][0] <= now:
            _, _, lane, record = heapq.heappop(self.scheduled)
            self.append(lane, record)

    def append(self, lane_name: str | None, record: Record) -> None:
        self.lane(lane_name).append(record)
        for group in self.groups.values():
            group.ready[lane_name] = None


class MemoryTransport:
    """Queues in this process, with everything a broker does to a message.

    Messages published with the same `lane` are handed out in order, one lease on the lane at a time.
    Messages without one are independent of each other.
    """

    capabilities = CAPABILITIES

    def __init__(
        self, *, clock: Clock | None = None, on_settled: Callable[[Settled], None] | None = None
    ) -> None:
        self.clock: Clock = clock or SystemClock()
        self._on_settled = on_settled
        self._queues: dict[str, Queue] = {}
        self._lock = threading.RLock()
        self._ticket = itertools.count()

    async def open(self) -> None:
        """Nothing to connect to."""

    async def close(self) -> None:
        """What is unsettled stays, for the next run in this process."""

    def configure(self, queue: str, options: QueueOptions) -> None:
        """Set how a queue leases and retries."""
        with self._lock:
            self._queue(queue).options = options

    def subscribe(
        self, queue: str, group: str | None = None, start: Literal["all", "new"] | datetime = "all"
    ) -> None:
        """Make a group, if it is new, that starts with all that is kept, what is new, or from a time on."""
        with self._lock:
            self._group(self._queue(queue), group or DEFAULT_GROUP, start)

    def channel(self, source: Source) -> Channel:
        return ImmediateChannel(self.immediate(source))

    def async_channel(self, source: Source) -> AsyncChannel:
        return AsyncImmediateChannel(self.immediate(source))

    def immediate(self, source: Source) -> MemoryChannel:
        """The channel itself, for a caller that does its own waiting."""
        with self._lock:
            queue = self._queue(source.channel)
            group = self._group(queue, source.group or DEFAULT_GROUP, "all")
            return MemoryChannel(self, source, queue, group)

    def publish(self, message: Outgoing) -> Publication:
        return Publication.of(self.put(message))

    def put(self, message: Outgoing) -> Published:
        """Store a message; one with the id of a message its lane still keeps is a duplicate."""
        with self._lock:
            queue = self._queue(message.subject)
            now = self.clock.now()
            lane = queue.lane(message.lane)
            if message.id is not None:
                if message.id in lane.ids:
                    return Published(id=message.id, duplicate=True, lane=message.lane)
                lane.ids.add(message.id)
            identity = message.id or uuid.uuid4().hex
            record = Record(-1, identity, message.data, message.headers, now)
            if message.delay > 0:
                entry = (now + message.delay, next(self._ticket), message.lane, record)
                heapq.heappush(queue.scheduled, entry)
                published = Published(id=identity, lane=message.lane)
            else:
                queue.append(message.lane, record)
                published = Published(id=identity, sequence=record.sequence + 1, lane=message.lane)
        queue.bell.ring()
        return published

    def dead_letters(self, queue: str, group: str | None = None) -> list[DeadLetter]:
        """What a group gave up on, oldest first; without a group, what any did."""
        with self._lock:
            groups = self._queue(queue).groups.values()
            return [dead for g in groups if group in (None, g.name) for dead in g.dead]

    def depth(self, queue: str, group: str | None = None) -> int:
        """How many messages the group has not settled: waiting, scheduled, parked or leased."""
        with self._lock:
            q = self._queue(queue)
            g = self._group(q, group or DEFAULT_GROUP, "all")
            handed_out = sum(len(lease.open) for c in g.cursors.values() for lease in c.leases.values())
            return len(q.scheduled) + handed_out + sum(c.pending() for c in g.cursors.values())

    def next_due(self) -> float | None:
        """When, in all queues, the next delayed message or retry comes up; leases do not count."""
        with self._lock:
            dues = [queue.scheduled[0][0] for queue in self._queues.values() if queue.scheduled]
            for queue in self._queues.values():
                for group in queue.groups.values():
                    dues += [cursor.parked[0][0] for cursor in group.cursors.values() if cursor.parked]
            return min(dues) if dues else None

    def _queue(self, name: str) -> Queue:
        if not name:
            raise ValueError(f"queue: a name must not be empty, got {name!r}")
        queue = self._queues.get(name)
        if queue is None:
            queue = self._queues[name] = Queue(name, QueueOptions())
        return queue

    @staticmethod
    def _group(queue: Queue, name: str, start: Literal["all", "new"] | datetime) -> Group:
        group = queue.groups.get(name)
        if group is None:
            group = queue.groups[name] = Group(name, start, list(queue.lanes.values()))
        return group

    def _record(self, delivery: MemoryDelivery, action: Action, now: float) -> None:
        if self._on_settled is not None:
            d = delivery
            self._on_settled(Settled(d.id, d.subject, d.group, d.lane, d.attempt, action, now))


def _due(queue: Queue, group: Group) -> float | None:
    """When to look again; a timer whose lease is settled by then only means a look for nothing."""
    times = [heap[0][0] for heap in (group.timers, queue.scheduled) if heap]
    return min(times) if times else None


class MemoryChannel:
    """One subscriber's end of a queue; no call here blocks."""

    def __init__(self, transport: MemoryTransport, source: Source, queue: Queue, group: Group) -> None:
        self.clock = transport.clock
        self.bell = queue.bell
        self.capabilities = replace(CAPABILITIES, lease=queue.options.lease)
        self._transport = transport
        self._lock = transport._lock
        self._source = source
        self._queue = queue
        self._group = group

    def take(self, limit: int, lanes: int | None = None) -> list[Delivery]:
        """Up to `limit` messages, from the lanes in turn; `lanes` bounds how many of them."""
        with self._lock:
            now = self.clock.now()
            queue, group = self._queue, self._group
            if queue.scheduled:
                queue.append_due(now)
            while group.timers and group.timers[0][0] <= now:
                lane = heapq.heappop(group.timers)[2]
                group.cursors[lane].timer = None
                group.ready[lane] = None
            taken: list[Delivery] = []
            claimed = 0
            while group.ready and len(taken) < limit and (lanes is None or claimed < lanes):
                name = next(iter(group.ready))
                del group.ready[name]
                cursor = group.cursors[name]
                batch = cursor.take(limit - len(taken), now, queue.options)
                if batch is not None:
                    lease, records = batch
                    claimed += 1
                    taken += self._deliveries(cursor, lease, records)
                    if name is None:
                        # Without order there is no lease on the lane, so there may be more of it.
                        group.ready[name] = None
                self._set_timer(cursor)
            return taken

    def _deliveries(self, cursor: Cursor, lease: Lease, records: Sequence[Record]) -> list[Delivery]:
        queue, group, ordered = self._queue.name, self._group.name, cursor.keeps_order(self._queue.options)
        return [MemoryDelivery(record, queue, group, cursor, lease.id, ordered) for record in records]

    def due(self) -> float | None:
        with self._lock:
            return _due(self._queue, self._group)

    def ack(self, delivery: Delivery) -> None:
        with self._lock:
            mine, now = self._settle(delivery)
            self._finish(mine)
            self._transport._record(mine, _ACK, now)
            # Without order nobody waits for this one; with it, the lane may be free now.
            freed = mine.lane is not None and not mine.cursor.leases
        if freed:
            self.bell.ring()

    def nack(self, delivery: Delivery) -> None:
        with self._lock:
            mine, now = self._settle(delivery)
            heapq.heappush(mine.cursor.back, mine.record.sequence)
            self._transport._record(mine, _NACK, now)
        self.bell.ring()

    def requeue(self, delivery: Delivery, delay: float | None) -> None:
        with self._lock:
            mine, now = self._settle(delivery)
            cursor, sequence, options = mine.cursor, mine.record.sequence, self._queue.options
            failures = cursor.failures[sequence] = cursor.failures.get(sequence, 0) + 1
            if options.retry_limit is not None and failures >= options.retry_limit:
                error = f"failed {failures} times; the queue's retry_limit is {options.retry_limit}"
                self._bury(mine, Reject(Reason.DELIVERY_ERROR, error), now)
                return
            wait = options.backoff(failures) if delay is None else delay
            if wait > 0:
                heapq.heappush(cursor.parked, (now + wait, sequence))
                self._set_timer(cursor)
            else:
                heapq.heappush(cursor.back, sequence)
            self._transport._record(mine, Requeue(delay), now)
        self.bell.ring()

    def reject(self, delivery: Delivery, rejection: Reject) -> None:
        with self._lock:
            mine, now = self._settle(delivery)
            self._bury(mine, rejection, now)

    def extend(self, delivery: Delivery) -> None:
        with self._lock:
            mine, now = self._mine(delivery)
            lease = mine.cursor.leases.get(mine.lease_id)
            if lease is None or lease.expires <= now:
                raise self._lost(mine)
            lease.expires = max(lease.expires, now + self._queue.options.lease)

    def _bury(self, mine: MemoryDelivery, rejection: Reject, now: float) -> None:
        dead = DeadLetter(
            id=mine.id,
            subject=mine.subject,
            group=mine.group,
            lane=mine.lane,
            data=mine.data,
            headers=mine.headers,
            reason=rejection.reason,
            error=rejection.error,
            attempts=mine.attempt,
            published_at=mine.record.time,
            died_at=now,
        )
        to = destination(self._source, rejection)
        if to is None:
            self._group.dead.append(dead)
        else:
            self._transport.put(letter(mine, rejection, mine.group, to))
        self._finish(mine)
        self._transport._record(mine, rejection, now)
        self.bell.ring()

    def _finish(self, mine: MemoryDelivery) -> None:
        cursor, groups = mine.cursor, self._queue.groups
        cursor.done(mine.record.sequence)
        floor = cursor.floor
        if len(groups) > 1:
            floor = min(group.cursors[mine.lane].floor for group in groups.values())
        cursor.lane.forget_before(floor)

    def _settle(self, delivery: Delivery) -> tuple[MemoryDelivery, float]:
        mine, now = self._mine(delivery)
        if not mine.cursor.settle(mine.record.sequence, mine.lease_id, now):
            raise self._lost(mine)
        self._group.ready[mine.lane] = None
        return mine, now

    def _mine(self, delivery: Delivery) -> tuple[MemoryDelivery, float]:
        if not isinstance(delivery, MemoryDelivery):
            raise TypeError(f"message {delivery.id!r} was not received from this transport")
        return delivery, self.clock.now()

    def _lost(self, mine: MemoryDelivery) -> LeaseLost:
        return LeaseLost(
            f"queue {self._queue.name!r}: message {mine.id!r} is not leased to this consumer any more"
        )

    def _set_timer(self, cursor: Cursor) -> None:
        due = cursor.look_again()
        if due is not None and (cursor.timer is None or due < cursor.timer):
            cursor.timer = due
            heapq.heappush(self._group.timers, (due, next(self._transport._ticket), cursor.lane.name))


_ACK, _NACK = Ack(), Nack()
