"""Checks what this worker remembers against the tables, before anybody is told "empty" for long."""

from __future__ import annotations

import asyncio
import logging
from contextlib import ExitStack
from itertools import islice
from typing import TYPE_CHECKING, Any

from settled.queue.db import Link, listed, sql
from settled.queue.errors import Unavailable
from settled.queue.turns import Rounds

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from settled.queue.lanes import Registry
    from settled.queue.ready import ReadySet, ReadySets

log = logging.getLogger("settled.queue")
EVERY = 0.2
TRUSTED = 0.25
"""Seconds for which memory is believed after it was checked."""
IDLE = 2.0
"""Seconds between looks at what was appended while nobody waits."""
LEASES = 20_000
LANES = 2_000
"""Leases and unleased lanes that one round checks; of more, the next round checks others."""
SHARE = 10
PAUSE = 0.4
"""After a queue was read as a whole it rests so many times as long, but no longer than this, in seconds."""


class Auditor:
    """One round for all sets of a worker that somebody waits for.

    It reads which lanes got messages since the round before, and which queues changed, by transaction id; and
    it looks at the lanes that memory believes closed. It only ever opens lanes, so a round that is older than
    what memory has learned since costs a claim and starves nobody.
    """

    def __init__(
        self, dsn: str, registry: Registry, ready: ReadySets, on_change: Callable[[int], None]
    ) -> None:
        self._link = Link(dsn)
        self._one = asyncio.Lock()
        self._registry = registry
        self._ready = ready
        self._on_change = on_change
        self._rounds = Rounds(self._round)
        self._since: str | None = None
        self._began = float("-inf")
        self._wanted: dict[ReadySet, None] = {}
        self._used = False
        self._offset = 0
        self._task: asyncio.Task[None] | None = None
        self.rounds = 0
        self.opened = 0

    async def start(self) -> None:
        """Begin; sets that are read from now on are covered."""
        await self._rounds.run()
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        """Stop, with no statement cut off half-way."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self._rounds.end()
        await self._link.close()

    def recent(self) -> bool:
        """Whether changes of queues were looked at just now; if so, they will be for a while."""
        self._used = True
        return asyncio.get_running_loop().time() - self._began <= TRUSTED

    async def check(self, sets: Sequence[ReadySet]) -> None:
        """Compare sets with the tables, unless that was done just now."""
        now = asyncio.get_running_loop().time()
        if all(now - ready.checked <= TRUSTED for ready in sets) and now - self._began <= TRUSTED:
            return
        self._wanted.update(dict.fromkeys(sets))
        await self._rounds.run()

    async def sift(self, sets: Iterable[ReadySet]) -> None:
        """Take lanes that have nothing out of what is ready: memory heard of them, but others took it."""
        for ready in sets:
            lanes = list(islice(ready.ready, LANES))
            with ready.overhear() as heard:
                found = await self._openings([(lane, ready.group_id) for lane in lanes])
            for lane, row in zip(lanes, found, strict=True):
                if lane in heard or lane not in ready.ready or (row is not None and row["open"]):
                    continue
                del ready.ready[lane]
                if row is not None and row["leased"]:
                    ready.hold(lane, row["until"])
                elif row is not None and row["until"] is not None:
                    ready.wake_at(lane, row["until"])

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(EVERY)
            waited = (
                self._ready.lane_waiters
                or self._registry.waiting
                or any(ready.waiters for ready in self._ready.sets.values())
            )
            used, self._used = self._used, False
            if waited or used or (self._ready.sets and loop.time() - self._began >= IDLE):
                try:
                    await self._rounds.run()
                except Unavailable:
                    continue  # whoever pops is told
                except Exception:
                    log.exception("memory could not be checked against the tables; trying again")

    async def _round(self) -> None:
        began = asyncio.get_running_loop().time()
        wanted, self._wanted = self._wanted, {}
        wanted.update((ready, None) for ready in self._ready.sets.values() if ready.waiters)
        targets = [ready for ready in wanted if not ready.dropped]
        since, self._since = self._since, None  # until it is done, nothing is known
        row = (await self._fetch("appended_since", since))[0]
        if since is None:  # at the start, or nobody knows what happened meanwhile
            self._ready.reset()
            self._registry.announce()
        else:
            self._doubt(row["queues"] or (), row["lanes"] or ())
            changes = await self._fetch("changed_since", since, row["snapshot"])
            if changes:
                await self._changed(changes, targets)
            await self._look(targets)
            await self._read_again(targets, began)
        for ready in targets:
            ready.checked = began
            if ready.ready:
                ready.wake()
        self.rounds += 1
        self._began, self._since = began, row["snapshot"]

    def _doubt(self, queues: Sequence[int], lanes: Sequence[int]) -> None:
        """Lanes got messages: some may be left."""
        if any(lane not in self._registry.lanes_by_id for lane in lanes):
            self._registry.announce()
        for queue_id, lane_id in zip(queues, lanes, strict=True):
            self._ready.wake_lane(lane_id)
            for ready in self._ready.by_queue.get(queue_id, ()):
                ready.doubt(lane_id)

    async def _changed(self, rows: list[Any], targets: Sequence[ReadySet]) -> None:
        """Queues were made, configured, or moved in."""
        for row in rows:
            known = self._registry.queues.get(row["name"])
            if known is not None and known.id != row["id"]:  # deleted, and made again
                self._registry.forget(known)
                self._ready.drop_queue(known.id)
            self._on_change(row["id"])
            for ready in list(self._ready.by_queue.get(row["id"], ())):
                if ready.changed == row["changed"]:
                    continue  # it was read after the change
                if ready in targets or ready.waiters:
                    ready.stale = True
                else:
                    self._ready.drop((ready.queue_id, ready.group_id))
        changed = {row["id"] for row in rows}
        for lane_id in list(self._ready.lane_waiters):
            lane = self._registry.lanes_by_id.get(lane_id)
            if lane is None or lane.queue.id in changed:
                self._ready.wake_lane(lane_id)
        await self._registry.refresh(changed & self._registry.queues_by_id.keys())
        self._registry.announce()

    async def _look(self, targets: Sequence[ReadySet]) -> None:
        """Look at the lanes that memory believes closed, and at those that got messages."""
        closed: list[tuple[ReadySet | None, int, int]] = [
            (ready, lane, ready.group_id) for ready in targets for lane in ready.held
        ]
        for lane, waiters in self._ready.lane_waiters.items():
            closed += [(None, lane, group) for group in {*waiters.values()} if group is not None]
        closed = self._some(closed, LEASES)
        if closed:
            lanes, groups = listed([at[1] for at in closed]), listed([at[2] for at in closed])
            places = (await self._fetch("unleased", lanes, groups))[0]["places"] or ()
            closed = self._some([closed[place - 1] for place in places], LANES)
        for ready in targets:
            doubted, ready.doubted = ready.doubted, set()
            closed += [(ready, lane, ready.group_id) for lane in doubted if lane not in ready.ready]
        self._offset += 1
        for start in range(0, len(closed), LANES):
            part = closed[start : start + LANES]
            with ExitStack() as stack:
                heard = {ready: stack.enter_context(ready.overhear()) for ready in targets}
                found = await self._openings([at[1:] for at in part])
            for (whose, lane, _), row in zip(part, found, strict=True):
                if whose is not None:
                    self._correct(whose, lane, row, lane in heard[whose])
                elif row is None or row["open"]:
                    self._ready.wake_lane(lane)

    def _correct(self, ready: ReadySet, lane: int, row: Any, heard: bool) -> None:
        """Make memory say of a lane what the tables say, if they say that it is open."""
        until: float | None = row["until"] if row is not None else None
        if row is not None and row["open"]:
            if lane not in ready.ready:
                self.opened += 1
                ready.release(lane, None, 0)
        elif row is not None and row["leased"]:
            if lane not in ready.held and lane not in ready.ready and not heard:
                ready.hold(lane, row["until"])
        elif until is None:
            ready.free(lane)
        else:
            if ready.held.get(lane, 0) > until:
                ready.held[lane] = until
            ready.wake_at(lane, until)

    def _some(self, lanes: list[Any], limit: int) -> list[Any]:
        """As many as one round checks, others in each round."""
        if len(lanes) <= limit:
            return lanes
        start = self._offset * limit % len(lanes)
        return (lanes[start:] + lanes[:start])[:limit]

    async def _openings(self, pairs: Sequence[tuple[int, int]]) -> list[Any]:
        """What each (lane, group) has for a pop; None where the lane is gone."""
        lanes, groups = listed([pair[0] for pair in pairs]), listed([pair[1] for pair in pairs])
        found: list[Any] = [None] * len(pairs)
        for row in await self._fetch("openings", lanes, groups):
            found[row["place"] - 1] = row
        return found

    async def _read_again(self, targets: Sequence[ReadySet], now: float) -> None:
        """Read sets whose queue changed, but a large queue not all the time."""
        loop = asyncio.get_running_loop()
        for ready in targets:
            if ready.stale and not ready.dropped and now >= ready.read_again:
                ready.stale = False
                began = loop.time()
                await self._ready.read(ready)
                ready.read_again = loop.time() + min(PAUSE, SHARE * (loop.time() - began))

    async def _fetch(self, name: str, *args: Any) -> list[Any]:
        async with self._one:
            return await self._link.fetch(sql(name), *args)
