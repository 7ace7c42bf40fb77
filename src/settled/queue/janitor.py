"""Tidying up in small steps: retention, small segments, messages that waited too long, old news, memory."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from settled.queue.activity import wait_for
from settled.queue.asks import Ask
from settled.queue.compact import Compactor
from settled.queue.db import sql
from settled.queue.deadletters import bury
from settled.queue.errors import Unavailable
from settled.queue.types import QUEUE_MODE, AckItem, PopRequest

if TYPE_CHECKING:
    from settled.queue.core import Core

log = logging.getLogger("settled.queue")
EVERY = 5.0
COMPACT_EVERY = 6
STEP_LANES, STEP_SEGMENTS = 200, 200
OVERDUE = 100
OVERDUE_BATCH = 500
JOURNAL_DAYS = 7
JOURNAL_STEP = 2000
LEASE_MEMORY = 3600.0
REMEMBERED_IDS = 12_000_000


class Janitor:
    """One round every few seconds; of several workers' janitors one works at a time."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._compactor = Compactor(core)

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
        self._forget()
        async with core.pool.link() as link:
            if not (await link.fetch("select pg_try_advisory_lock(hashtext('settled janitor'))"))[0][0]:
                return {}
            try:
                return {
                    "retained": await self._trim(),
                    "compacted": await self._compactor.round() if compact else 0,
                    "expired": await self._expire(),
                    "journal": len(await self._old_journal()),
                    "activity": len(await core.pool.fetch(sql("tidy_activity") + " returning 1")),
                    "leases": len(await core.pool.fetch(sql("tidy_wide_leases") + " returning 1")),
                    "consumers": len(await core.pool.fetch(sql("tidy_consumers") + " returning 1")),
                }
            finally:
                await link.fetch("select pg_advisory_unlock(hashtext('settled janitor'))")

    async def _trim(self) -> int:
        """Retention, a few lanes a transaction, with a pause so that nobody notices."""
        removed, after = 0, 0
        while True:
            row = await self._core.pool.fetchrow(
                "select * from trim_lanes($1, $2, $3)", after, STEP_LANES, STEP_SEGMENTS
            )
            removed += row["removed"]
            if row["last_lane"] is None or self._core.stopping.is_set():
                return int(removed)
            after = row["last_lane"] if not row["removed"] else after
            await asyncio.sleep(0.001)

    async def _expire(self) -> int:
        """Move what waited longer than maxWaitTimeSeconds or ttl to its group's dead letters."""
        core = self._core
        moved = 0
        for row in await core.pool.fetch(sql("overdue"), OVERDUE):
            await core.registry.lanes_of([row["lane_id"]])
            lane = core.registry.lanes_by_id.get(row["lane_id"])
            if lane is None:
                continue
            group = await core.registry.group_name(row["group_id"]) if row["group_id"] else QUEUE_MODE
            group_id = await core.registry.group(group)
            request = PopRequest(
                lane.queue.name, lane.name, group=group, batch=OVERDUE_BATCH, lease_seconds=60
            )
            ask = Ask(request, group_id, [], lane)
            ask.older_than = row["seconds"]
            await core.popper.claim_alone(ask)
            if ask.popped is None:
                continue
            error = f"waited longer than {row['option']} ({row['seconds']:.0f} s)"
            items = [
                AckItem(m.transaction_id, m.partition_id, "dlq", m.lease_id, error)
                for m in ask.popped.messages()
            ]
            moved += await bury(core, items, group)
        return moved

    async def _old_journal(self) -> list[object]:
        return await self._core.pool.fetch(
            sql("tidy_journal") + " returning 1", float(JOURNAL_DAYS * 86_400), JOURNAL_STEP
        )

    def _forget(self) -> None:
        """Keep this worker's memory bounded."""
        core = self._core
        core.leases.drop_older(core.clock.now() - LEASE_MEMORY)
        lanes = [
            lane for lane in core.registry.lanes_by_id.values() if lane.remembered.size and not lane.busy
        ]
        total = sum(lane.remembered.size for lane in lanes)
        for lane in sorted(lanes, key=lambda lane: lane.remembered.size, reverse=True):
            if total <= REMEMBERED_IDS:
                break
            total -= lane.remembered.size
            lane.remembered.forget()
