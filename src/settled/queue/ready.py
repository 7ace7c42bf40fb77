"""Which lanes have something for a group, in order, so that a pop looks at no other."""

from __future__ import annotations

import asyncio
import heapq
from collections import OrderedDict, deque
from typing import TYPE_CHECKING

from settled.queue.db import sql

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from settled.queue.db import Clock, Pool
    from settled.queue.lanes import Lane

IDLE_AFTER = 300.0


class ReadySet:
    """Lanes of one queue that may have messages for one group, the longest waiting first.

    `ready` guesses how many messages a lane has. `held` are lanes that cannot give any before a time (leased,
    or waiting for a retry); until then their `news` are kept back. `asked` are lanes with a claim under way:
    news that come meanwhile must not be lost when its answer is "nothing".
    """

    def __init__(self, queue_id: int, group_id: int) -> None:
        self.queue_id = queue_id
        self.group_id = group_id
        # Taken from the front again and again: a dict would walk over every lane that was ever taken out.
        self.ready: OrderedDict[int, int] = OrderedDict()
        self.held: dict[int, float] = {}
        self.news: set[int] = set()
        self.asked: dict[int, bool] = {}
        self.timers: list[tuple[float, int]] = []
        self.timed: dict[int, float] = {}
        self.waiters: deque[asyncio.Future[None]] = deque()
        self.loaded: asyncio.Future[None] | None = None
        self.used = 0.0

    def add(self, lane_id: int, count: int = 1) -> None:
        """The lane has `count` more messages."""
        if lane_id in self.asked:
            self.asked[lane_id] = True
        if lane_id in self.held:
            self.news.add(lane_id)
        else:
            self.ready[lane_id] = self.ready.get(lane_id, 0) + count
            self.wake()

    def add_all(self, lanes: Mapping[int, int]) -> None:
        """Lanes have more messages: how many by lane. A push tells every group, so this must be quick."""
        if self.ready.keys() >= lanes.keys():  # what is known to be ready needs no better guess
            for _ in lanes if self.waiters else ():
                self.wake()
            return
        for lane_id, count in lanes.items():
            self.add(lane_id, count)

    def release(self, lane_id: int, until: float | None, now: float) -> None:
        """The lane was given back, with more to read, or something that comes due at `until`."""
        self.held.pop(lane_id, None)
        self.news.discard(lane_id)
        self.add(lane_id)
        if until is not None and until > now:
            self.wake_at(lane_id, until)

    def free(self, lane_id: int) -> None:
        """The lane was given back with nothing left to read, as far as the giver saw."""
        self.held.pop(lane_id, None)
        if lane_id in self.news:
            self.news.discard(lane_id)
            self.add(lane_id)

    def hold(self, lane_id: int, until: float) -> None:
        """Nothing can be had of the lane before `until`."""
        self.ready.pop(lane_id, None)
        self.held[lane_id] = until
        self.wake_at(lane_id, until)

    def wake_at(self, lane_id: int, when: float) -> None:
        """Look at the lane again then, or before; a lane has one timer, however often it is leased."""
        if self.timed.get(lane_id, when + 1) > when:
            self.timed[lane_id] = when
            heapq.heappush(self.timers, (when, lane_id))

    def due(self, now: float) -> float | None:
        """Bring back lanes whose time has come; answers when the next one is due."""
        while self.timers and self.timers[0][0] <= now:
            when, lane_id = heapq.heappop(self.timers)
            if self.timed.get(lane_id) != when:
                continue
            del self.timed[lane_id]
            if self.held.get(lane_id, 0) > now:
                self.wake_at(lane_id, self.held[lane_id])
            else:
                self.held.pop(lane_id, None)
                self.news.discard(lane_id)
                self.add(lane_id)
        return self.timers[0][0] if self.timers else None

    def take(self) -> int | None:
        """Take out the lane that has waited longest, to claim from it."""
        if not self.ready:
            return None
        lane_id = next(iter(self.ready))
        del self.ready[lane_id]
        self.asked[lane_id] = False
        return lane_id

    def answered(self, lane_id: int, status: str, until: float | None, left: int) -> None:
        """A claim came back: with messages (`left` remain), or with a reason to wait."""
        news = self.asked.pop(lane_id, False)
        if status == "gone":
            return
        if left > 0:
            self.ready[lane_id] = max(self.ready.pop(lane_id, 0), left)
            self.wake()
        elif until is not None and not (news and status != "ok"):
            self.hold(lane_id, until)
            if news:
                self.news.add(lane_id)
        elif news and lane_id not in self.ready:
            self.add(lane_id)

    def wake(self) -> None:
        """Let one waiting pop try."""
        while self.waiters:
            waiter = self.waiters.popleft()
            if not waiter.done():
                waiter.set_result(None)
                return

    def wake_all(self) -> None:
        """Let every waiting pop try."""
        while self.waiters:
            waiter = self.waiters.popleft()
            if not waiter.done():
                waiter.set_result(None)


class ReadySets:
    """All ready sets of this worker, fed by its own work and by the activity of others."""

    def __init__(self, pool: Pool, clock: Clock) -> None:
        self._pool = pool
        self._clock = clock
        self.sets: dict[tuple[int, int], ReadySet] = {}
        self.by_queue: dict[int, list[ReadySet]] = {}
        self.lane_waiters: dict[int, list[asyncio.Future[None]]] = {}

    async def get(self, queue_id: int, group_id: int) -> ReadySet:
        """The set of a queue and group; read from the tables once, by whoever asks first."""
        found = self.sets.get((queue_id, group_id))
        if found is None:
            found = self.sets[(queue_id, group_id)] = ReadySet(queue_id, group_id)
            self.by_queue.setdefault(queue_id, []).append(found)
        found.used = self._clock.now()
        if found.loaded is None:
            found.loaded = asyncio.get_running_loop().create_future()
            try:
                await self._scan(found)
            except BaseException:
                found.loaded.set_result(None)
                found.loaded = None
                raise
            found.loaded.set_result(None)
        elif not found.loaded.done():
            await asyncio.shield(found.loaded)
        return found

    async def _scan(self, ready: ReadySet) -> None:
        """Find what is ready now. News that come meanwhile are already being added."""
        for row in await self._pool.fetch(sql("ready_lanes"), ready.queue_id, ready.group_id):
            lane_id, until = row["lane_id"], row["until"]
            if row["blocks"]:
                ready.hold(lane_id, until)
                continue
            if until is not None:
                ready.wake_at(lane_id, until)
            if row["count"] > 0:
                ready.add(lane_id, row["count"])

    def pushed(self, lanes: Iterable[tuple[int, int, int]]) -> None:
        """Messages were appended: (queue, lane, how many)."""
        told: dict[int, dict[int, int]] = {}
        for queue_id, lane_id, count in lanes:
            told.setdefault(queue_id, {})[lane_id] = count
            if self.lane_waiters:
                self._wake_lane(lane_id)
        for queue_id, own in told.items():
            for ready in self.by_queue.get(queue_id, ()):
                ready.add_all(own)

    def released(self, queue_id: int, lane_id: int, group_id: int, until: float | None) -> None:
        """A lease was given back, or a cursor moved."""
        ready = self.sets.get((queue_id, group_id))
        if ready is not None:
            ready.release(lane_id, until, self._clock.now())
        self._wake_lane(lane_id)

    def freed(self, queue_id: int, lane_id: int, group_id: int) -> None:
        """A lease was given back and nothing is left to read."""
        ready = self.sets.get((queue_id, group_id))
        if ready is not None:
            ready.free(lane_id)

    def hold(self, queue_id: int, lane_id: int, group_id: int, until: float) -> None:
        """A lane was leased by name."""
        ready = self.sets.get((queue_id, group_id))
        if ready is not None:
            ready.hold(lane_id, until)

    def _wake_lane(self, lane_id: int) -> None:
        for waiter in self.lane_waiters.pop(lane_id, ()):
            if not waiter.done():
                waiter.set_result(None)

    def tick(self) -> float | None:
        """Bring back what is due everywhere, drop sets nobody reads; answers when the next one is due."""
        now = self._clock.now()
        soonest: float | None = None
        for key, ready in list(self.sets.items()):
            if now - ready.used > IDLE_AFTER and not ready.waiters:
                self.drop(key)
                continue
            due = ready.due(now)
            if due is not None and (soonest is None or due < soonest):
                soonest = due
        return soonest

    def drop_queue(self, queue_id: int) -> None:
        """Forget what was known of a queue, as when it is configured anew."""
        for ready in list(self.by_queue.get(queue_id, ())):
            self.drop((queue_id, ready.group_id))

    def drop(self, key: tuple[int, int]) -> None:
        """Forget a set; it is read again when it is needed."""
        ready = self.sets.pop(key, None)
        if ready is not None:
            self.by_queue[ready.queue_id].remove(ready)
            ready.wake_all()

    def reset(self) -> None:
        """Forget everything, as after an outage."""
        for key in list(self.sets):
            self.drop(key)
        waiting, self.lane_waiters = self.lane_waiters, {}
        for waiters in waiting.values():
            for waiter in waiters:
                if not waiter.done():
                    waiter.set_result(None)

    async def wait(self, sets: Sequence[ReadySet], lane: Lane | None, seconds: float) -> None:
        """Sleep until one of the sets may have something, or until the time is over."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if lane is not None:
            self.lane_waiters.setdefault(lane.id, []).append(waiter)
        elif any(ready.ready for ready in sets):
            return
        else:
            for ready in sets:
                ready.waiters.append(waiter)
        try:
            await asyncio.wait([waiter], timeout=seconds)
        finally:
            waiter.cancel()
            for ready in sets:
                if waiter in ready.waiters:
                    ready.waiters.remove(waiter)
            if lane is not None and waiter in (left := self.lane_waiters.get(lane.id, [])):
                left.remove(waiter)
