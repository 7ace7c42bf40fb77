"""Tidying up in small steps: retention, small segments, messages that waited too long, old news, memory."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING

from settled.queue import dedup
from settled.queue.activity import wait_for
from settled.queue.burials import bury_overdue
from settled.queue.compact import Compactor
from settled.queue.db import sql
from settled.queue.errors import Unavailable
from settled.queue.options import setting
from settled.queue.types import QUEUE_MODE

if TYPE_CHECKING:
    from settled.queue.core import Core
    from settled.queue.lanes import Lane

log = logging.getLogger("settled.queue")
EVERY = 5.0
COMPACT_EVERY = 6
STEP_LANES, STEP_SEGMENTS = 200, 200
LANES_A_ROUND = 2_000
"""Of many idle lanes a round looks at so many; the next one goes on from there."""
OVERDUE = 100
OVERDUE_BUDGET = 2.0
"""Seconds a round may take for it."""
JOURNAL = "SETTLED_JOURNAL_SECONDS"
JOURNAL_SECONDS = 7 * 86_400
JOURNAL_STEP = 2000
JOURNAL_BUDGET = 1.0
"""Seconds a round may take for it."""
LEASE_MEMORY = 3600.0
RESTING_IDS = 4_000_000
"""With more ids in memory, those of partitions that nobody pushes to are read again when somebody does."""
REMEMBERED_IDS = 12_000_000
LONG_UNUSED = 12
"""Rounds."""


def journal_seconds() -> int:
    """How long the journal is kept."""
    return setting(JOURNAL, 60, JOURNAL_SECONDS)


class Janitor:
    """One round every few seconds; of several workers' janitors one works at a time."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._compactor = Compactor(core)
        self._trimmed = 0
        self._swept = 0
        self._warned = False
        self._keep = journal_seconds()

    async def run(self) -> None:
        """Tidy up for ever."""
        rounds = 0
        while True:
            await wait_for(self._core.stopping, EVERY)
            if self._core.stopping.is_set():
                return
            rounds += 1
            try:
                await self.round(compact=rounds % COMPACT_EVERY == 0)
            except Unavailable:
                continue
            except Exception:
                log.exception("the janitor failed; it tries again in %s s", EVERY)

    async def round(self, *, compact: bool = True) -> dict[str, int]:
        """One round; answers what it did."""
        core = self._core
        await core.clock.sync(core.pool)
        await self._forget()
        async with core.pool.link() as link:
            if not (await link.fetch("select pg_try_advisory_lock(hashtext('settled janitor'))"))[0][0]:
                return {}
            try:
                return {
                    "retained": await self._trim(),
                    "compacted": await self._compactor.round() if compact else 0,
                    "expired": await self._expire(),
                    "journal": await self._old_journal(),
                    "activity": await core.pool.fetchval(sql("tidy_activity")),
                    "leases": await core.pool.fetchval(sql("tidy_wide_leases"))
                    + await core.pool.fetchval(sql("tidy_lost_leases")),
                    "consumers": await self._sweep(),
                }
            finally:
                await link.fetch("select pg_advisory_unlock(hashtext('settled janitor'))")

    async def _trim(self) -> int:
        """Retention, a few lanes a transaction, with a pause so that nobody notices."""
        removed = looked = 0
        while looked < LANES_A_ROUND and not self._core.stopping.is_set():
            row = await self._core.pool.fetchrow(
                "select * from trim_lanes($1, $2, $3)", self._trimmed, STEP_LANES, STEP_SEGMENTS
            )
            removed += row["removed"]
            if row["last_lane"] is None:
                self._trimmed = 0
                break
            if not row["removed"]:
                self._trimmed = row["last_lane"]
                looked += STEP_LANES
            await asyncio.sleep(0.001)
        return int(removed)

    async def _sweep(self) -> int:
        """Remove the cursors that a pop left on a lane which was deleted at the same moment."""
        row = await self._core.pool.fetchrow(sql("tidy_consumers"), self._swept, LANES_A_ROUND)
        self._swept = row["last"] or 0
        return int(row["removed"])

    async def _expire(self) -> int:
        """Move what waited longer than maxWaitTimeSeconds or ttl to its group's dead letters."""
        moved, end = 0, time.monotonic() + OVERDUE_BUDGET
        while not self._core.stopping.is_set():
            lanes, count = await self._expire_some()
            moved += count
            if lanes < OVERDUE or not count or time.monotonic() > end:
                break
        return moved

    async def _expire_some(self) -> tuple[int, int]:
        """How many lanes had something to move, and how much was moved."""
        core = self._core
        moved = 0
        rows = await core.pool.fetch(sql("overdue"), OVERDUE)
        for row in rows:
            await core.registry.lanes_of([row["lane_id"]])
            lane = core.registry.lanes_by_id.get(row["lane_id"])
            if lane is None:
                continue
            group_id = row["group_id"] or await core.registry.group(QUEUE_MODE)
            moved += await bury_overdue(core, lane, group_id, row["seconds"], row["option"])
        return len(rows), moved

    async def _old_journal(self) -> int:
        """As fast as it grows, but a little at a time."""
        removed, end = 0, time.monotonic() + JOURNAL_BUDGET
        while not self._core.stopping.is_set():
            count = await self._core.pool.fetchval(sql("tidy_journal"), float(self._keep), JOURNAL_STEP)
            removed += count
            if count < JOURNAL_STEP or time.monotonic() > end:
                break
            await asyncio.sleep(0.001)
        return removed

    async def _forget(self) -> None:
        """Keep this worker's memory bounded."""
        core, memory = self._core, self._core.registry.memory
        core.leases.drop_older(core.clock.now() - LEASE_MEMORY)
        for remembered in [each for each in memory.loose if each.used < memory.rounds]:
            remembered.pack()
            await asyncio.sleep(0)
        memory.rounds += 1
        if memory.total <= min(RESTING_IDS, memory.limit):
            return
        lanes = [lane for lane in core.registry.lanes_by_id.values() if lane.remembered.size]
        lanes.sort(key=lambda lane: lane.remembered.used)
        for lane in lanes:
            if memory.total <= min(RESTING_IDS, memory.limit):
                return
            if not lane.busy and memory.rounds - lane.remembered.used > LONG_UNUSED:
                lane.remembered.forget()
        if memory.total <= min(REMEMBERED_IDS, memory.limit):
            return
        await self._trim_memory(sorted(lanes, key=lambda lane: lane.remembered.size, reverse=True))
        if memory.total > memory.limit:
            await self._shorten([lane for lane in lanes if lane.remembered.size > dedup.LEAST])

    async def _shorten(self, lanes: list[Lane]) -> None:
        """Forget the oldest ids of the partitions that have most, until the rest fits."""
        memory, before = self._core.registry.memory, self._core.registry.memory.forgotten
        most = sum(lane.remembered.size for lane in lanes)
        kept = max(0.0, 1 - (memory.total - 0.9 * memory.limit) / most) if most else 1.0
        for lane in lanes:
            if not lane.busy:
                lane.remembered.shorten(max(dedup.LEAST, int(lane.remembered.size * kept)))
                await asyncio.sleep(0)
        if memory.forgotten > before and not self._warned:
            self._warned = True
            log.warning(
                "the oldest transaction ids do not fit into %d MiB and are forgotten before their "
                "dedupWindowSeconds are over: set a shorter one, or a larger %s",
                memory.limit * dedup.ID_BYTES >> 20,
                dedup.MEMORY,
            )

    async def _trim_memory(self, lanes: list[Lane]) -> None:
        """Drop the ids of messages that are gone, or older than is looked for."""
        lanes = lanes[:LANES_A_ROUND]
        windows = [float(lane.queue.options.dedup_window_seconds) for lane in lanes]
        rows = await self._core.pool.fetch(sql("lane_starts"), [lane.id for lane in lanes], windows)
        starts = {row["id"]: row["seq"] for row in rows}
        for lane in lanes:
            if lane.id in starts and not lane.busy:
                lane.remembered.trim(starts[lane.id])
                await asyncio.sleep(0)
