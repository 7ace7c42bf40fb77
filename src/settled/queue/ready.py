"""Which lanes have something for a group, in order, so that a pop looks at no other."""

from __future__ import annotations

import asyncio
import heapq
from collections import OrderedDict
from contextlib import contextmanager
from typing import TYPE_CHECKING

from settled.queue.db import sql

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from settled.queue.db import Clock, Pool

IDLE_AFTER = 300.0


class ReadySet:
    """Lanes of one queue that may have messages for one group, the longest waiting first: a hint.

    `ready` guesses how many messages a lane has. `held` are lanes that cannot give any before a time (leased,
    or waiting for a retry); until then their `news` are kept back. `asked` are lanes with claims under way:
    how many, and the turn in which something was last heard of the lane. A claim that was taken in an earlier
    turn knows less, so its "leased" holds nothing. `doubted` are lanes that got messages, by the tables, and
    may have some left; the auditor checks them before anybody is told that the set is empty.
    """

    def __init__(self, queue_id: int, group_id: int) -> None:
        self.queue_id = queue_id
        self.group_id = group_id
        # Taken from the front again and again: a dict would walk over every lane that was ever taken out.
        self.ready: OrderedDict[int, int] = OrderedDict()
        self.held: dict[int, float] = {}
        self.news: set[int] = set()
        self.asked: dict[int, list[int]] = {}
        self.turn = 0
        self.overheard: list[set[int]] = []
        """Lanes heard of, for whoever is reading from the tables."""
        self.doubted: set[int] = set()
        self.timers: list[tuple[float, int]] = []
        self.timed: dict[int, float] = {}
        self.waiters: OrderedDict[asyncio.Future[None], None] = OrderedDict()
        self.loaded: asyncio.Future[None] | None = None
        self.dropped = False
        self.changed: str | None = None
        """The change of the queue that was the last when the set was read."""
        self.stale = False
        """Whether the queue changed since."""
        self.checked = 0.0
        """The loop's time when the set was last compared with the tables."""
        self.read_again = 0.0
        """The loop's time before which it is not read again: a large queue must not be read all the time."""
        self.used = 0.0

    def heard(self, lane_id: int) -> None:
        """Something happened to the lane: who asked before knows less."""
        asked = self.asked.get(lane_id)
        if asked is not None:
            self.turn += 1
            asked[1] = self.turn
        for overheard in self.overheard:
            overheard.add(lane_id)

    @contextmanager
    def overhear(self) -> Iterator[set[int]]:
        """The lanes of which something is heard meanwhile."""
        overheard: set[int] = set()
        self.overheard.append(overheard)
        try:
            yield overheard
        finally:
            self.overheard = [each for each in self.overheard if each is not overheard]

    def add(self, lane_id: int, count: int = 1) -> None:
        """The lane has `count` more messages."""
        self.heard(lane_id)
        if lane_id in self.held:
            self.news.add(lane_id)
        else:
            self.ready[lane_id] = self.ready.get(lane_id, 0) + count
            self.wake()

    def add_all(self, lanes: Mapping[int, int]) -> None:
        """Lanes have more messages: how many by lane. A push tells every group, so this must be quick."""
        known = self.ready.keys() >= lanes.keys()  # what is known to be ready needs no better guess
        if known and not self.overheard and self.asked.keys().isdisjoint(lanes):
            for _ in lanes if self.waiters else ():
                self.wake()
            return
        for lane_id, count in lanes.items():
            self.add(lane_id, count)

    def doubt(self, lane_id: int) -> None:
        """The lane got messages, by the tables; whether any is left nobody has looked."""
        self.heard(lane_id)
        if lane_id in self.held:
            self.news.add(lane_id)
        elif lane_id not in self.ready:
            self.doubted.add(lane_id)

    def release(self, lane_id: int, until: float | None, now: float) -> None:
        """The lane was given back, with more to read, or something that comes due at `until`."""
        self.held.pop(lane_id, None)
        self.news.discard(lane_id)
        self.add(lane_id)
        if until is not None and until > now:
            self.wake_at(lane_id, until)

    def free(self, lane_id: int) -> None:
        """The lane was given back with nothing left to read, as far as the giver saw."""
        self.heard(lane_id)
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
        """Take out the lane that has waited longest, to claim from it; `turn` is the claim's turn then."""
        if not self.ready:
            return None
        lane_id = next(iter(self.ready))
        del self.ready[lane_id]
        self.turn += 1
        self.asked.setdefault(lane_id, [0, 0])[0] += 1
        return lane_id

    def answered(self, lane_id: int, status: str, until: float | None, left: int, turn: int) -> None:
        """A claim of that turn came back: with messages (`left` remain), or with a reason to wait."""
        asked = self.asked[lane_id]
        news = asked[1] > turn
        asked[0] -= 1
        if not asked[0]:
            del self.asked[lane_id]
        if status == "gone":
            return
        if left > 0:
            self.ready[lane_id] = max(self.ready.pop(lane_id, 0), left)
            self.wake()
        elif until is not None and status == "ok":
            self.hold(lane_id, until)
            if news:
                self.news.add(lane_id)
        elif news:
            if lane_id not in self.ready:
                self.add(lane_id)
        elif until is not None and status == "empty":  # what comes next need not wait for what comes due
            self.wake_at(lane_id, until)
        elif until is not None:
            self.hold(lane_id, until)

    def wake(self) -> None:
        """Let one waiting pop try."""
        while self.waiters:
            waiter, _ = self.waiters.popitem(last=False)
            if not waiter.done():
                waiter.set_result(None)
                return

    def wake_all(self) -> None:
        """Let every waiting pop try."""
        _wake(self.waiters)
        self.waiters.clear()


class ReadySets:
    """All ready sets of this worker, fed by its own work and by the activity of others."""

    def __init__(self, pool: Pool, clock: Clock) -> None:
        self._pool = pool
        self._clock = clock
        self.sets: dict[tuple[int, int], ReadySet] = {}
        self.by_queue: dict[int, list[ReadySet]] = {}
        self.lane_waiters: dict[int, dict[asyncio.Future[None], int | None]] = {}
        """Pops that wait for a lane they named, with the group that the lane is closed to, if it is."""

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
                await self.read(found)
            except BaseException:
                found.loaded.set_result(None)
                found.loaded = None
                raise
            found.loaded.set_result(None)
        elif not found.loaded.done():
            await asyncio.shield(found.loaded)
        return found

    async def read(self, ready: ReadySet) -> None:
        """Find what is ready now. What is heard meanwhile is newer than what is read."""
        began = asyncio.get_running_loop().time()
        with ready.overhear() as heard:
            rows = await self._pool.fetch(sql("ready_lanes"), ready.queue_id, ready.group_id)
        ready.checked = began
        for row in rows:
            lane_id, until = row["lane_id"], row["until"]
            ready.changed = row["changed"]
            if lane_id is None:
                continue
            if lane_id in ready.asked:  # its answer comes, and may be older than what is read here
                ready.heard(lane_id)
                continue
            if row["blocks"]:
                if lane_id in heard:
                    ready.release(lane_id, None, 0)
                else:
                    ready.hold(lane_id, until)
                continue
            ready.held.pop(lane_id, None)
            if until is not None:
                ready.wake_at(lane_id, until)
            if row["count"] > 0 and lane_id not in ready.ready:
                ready.add(lane_id, row["count"])

    def pushed(self, lanes: Iterable[tuple[int, int, int]]) -> None:
        """Messages were appended: (queue, lane, how many)."""
        told: dict[int, dict[int, int]] = {}
        for queue_id, lane_id, count in lanes:
            told.setdefault(queue_id, {})[lane_id] = count
            if self.lane_waiters:
                self.wake_lane(lane_id)
        for queue_id, own in told.items():
            for ready in self.by_queue.get(queue_id, ()):
                ready.add_all(own)

    def released(self, queue_id: int, lane_id: int, group_id: int, until: float | None) -> None:
        """A lease was given back, or a cursor moved."""
        ready = self.sets.get((queue_id, group_id))
        if ready is not None:
            ready.release(lane_id, until, self._clock.now())
        self.wake_lane(lane_id)

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

    def wake_lane(self, lane_id: int) -> None:
        """Let the pops that named the lane try."""
        _wake(self.lane_waiters.pop(lane_id, ()))

    def wake_everybody(self) -> None:
        """Let every waiting pop look at where it stands."""
        for ready in self.sets.values():
            ready.wake_all()
        waiting, self.lane_waiters = self.lane_waiters, {}
        for waiters in waiting.values():
            _wake(waiters)

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
        """Forget a set; it is read again when it is needed, and who waits for it looks again."""
        ready = self.sets.pop(key, None)
        if ready is not None:
            own = self.by_queue[ready.queue_id]
            own.remove(ready)
            if not own:
                del self.by_queue[ready.queue_id]
            ready.dropped = True
            ready.wake_all()

    def reset(self) -> None:
        """Forget everything, as after an outage."""
        self.wake_everybody()
        for key in list(self.sets):
            self.drop(key)

    async def wait(
        self,
        sets: Sequence[ReadySet],
        seconds: float,
        *,
        names: dict[asyncio.Future[None], None] | None = None,
    ) -> None:
        """Sleep until one of the sets may have something, or until the time is over.

        `names` are the pops that want to hear of new queues and partitions.
        """
        if any(ready.ready or ready.dropped for ready in sets):
            return
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        for ready in sets:
            ready.waiters[waiter] = None
        if names is not None:
            names[waiter] = None
        try:
            await asyncio.wait([waiter], timeout=seconds)
        except asyncio.CancelledError:
            if waiter.done():  # it was woken for something that another may take
                for ready in sets:
                    if ready.ready:
                        ready.wake()
            raise
        finally:
            waiter.cancel()
            for ready in sets:
                ready.waiters.pop(waiter, None)
            if names is not None:
                names.pop(waiter, None)

    @contextmanager
    def watch(self, lane_id: int) -> Iterator[asyncio.Future[None]]:
        """Something that is done when the lane may have messages that it did not have when this began."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.lane_waiters.setdefault(lane_id, {})[waiter] = None
        try:
            yield waiter
        finally:
            waiter.cancel()
            left = self.lane_waiters.get(lane_id)
            if left is not None and waiter in left:
                del left[waiter]
                if not left:
                    del self.lane_waiters[lane_id]

    async def wait_lane(
        self, lane_id: int, waiter: asyncio.Future[None], group_id: int | None, seconds: float
    ) -> None:
        """Sleep until a watched lane may have something; `group_id` if it is closed to that group now."""
        if not waiter.done():
            self.lane_waiters[lane_id][waiter] = group_id
            await asyncio.wait([waiter], timeout=seconds)


def _wake(waiters: Iterable[asyncio.Future[None]]) -> None:
    for waiter in waiters:
        if not waiter.done():
            waiter.set_result(None)
