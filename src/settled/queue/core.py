"""The parts of an engine, put together once and shared by all its operations."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
from functools import partial
from typing import TYPE_CHECKING, Any, Self

from settled.queue.ack import Settler
from settled.queue.activity import Activity, wait_for
from settled.queue.auditor import Auditor
from settled.queue.burials import clear_the_way
from settled.queue.cache import SegmentCache
from settled.queue.db import Clock, Pool, migrate, sql
from settled.queue.errors import Unavailable
from settled.queue.janitor import Janitor
from settled.queue.lanes import Registry
from settled.queue.leases import Leases
from settled.queue.poll import Poller
from settled.queue.pop import POP_BYTES, Popper
from settled.queue.probe import Probe
from settled.queue.push import Pusher
from settled.queue.ready import ReadySets
from settled.queue.room import Room
from settled.queue.schedule import Scheduler
from settled.queue.types import AckItem

if TYPE_CHECKING:
    from settled.queue.lanes import Lane
    from settled.queue.popped import Popped

log = logging.getLogger("settled.queue")
POOL = 4


class Core:
    """Connections, caches, batchers and background tasks of one engine."""

    def __init__(self, dsn: str, worker: str | None, pop_bytes: int = POP_BYTES) -> None:
        self.dsn = dsn
        self.worker = worker or f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(3)}"
        self.pool = Pool(dsn, POOL)
        self.probe = Probe(self.pool)
        self.clock = Clock()
        self.cache = SegmentCache()
        self.registry = Registry(self.pool)
        self.ready = ReadySets(self.pool, self.clock)
        self.leases = Leases(self.pool, self.cache)
        self.activity = Activity(dsn, self.worker, self.registry, self.ready, self.clock, self.reset_queue)
        self.auditor = Auditor(
            dsn, self.registry, self.ready, lambda queue_id: self.poller.forget_subscriptions(queue_id)
        )
        self.pusher = Pusher(dsn, self.worker, self.registry, self.cache, self.appended)
        self.popper = Popper(
            dsn,
            self.worker,
            self.registry,
            self.cache,
            self.ready,
            self.leases,
            self.activity,
            self.clock,
            self.pool,
            self.give_back,
            partial(clear_the_way, self),
            pop_bytes,
        )
        self.switches: dict[str, bool] = {}
        self.poller = Poller(
            self.pool,
            self.registry,
            self.ready,
            self.popper,
            self.activity,
            self.auditor,
            self.clock,
            lambda: self.switches.get("pop", False),
        )
        self.settler = Settler(
            dsn, self.worker, self.registry, self.cache, self.ready, self.leases, self.clock, self.activity
        )
        self.scheduler = Scheduler(self)
        self.janitor = Janitor(self)
        self.room = Room(self)
        self.stopping = asyncio.Event()
        self._given_back: set[asyncio.Task[Any]] = set()
        self._tasks: list[asyncio.Task[Any]] = []

    @classmethod
    async def open(cls, dsn: str, worker: str | None, maintain: bool, pop_bytes: int = POP_BYTES) -> Self:
        """Connect, migrate and start."""
        await migrate(dsn)
        core = cls(dsn, worker, pop_bytes)
        await core.clock.sync(core.pool)
        await core.activity.start()
        await core.auditor.start()
        await core.pusher.start()
        await core.popper.start()
        await core.settler.start()
        await core.read_switches()
        core.spawn(core.watch_switches())
        if maintain:
            core.spawn(core.scheduler.run())
            core.spawn(core.janitor.run())
        return core

    async def read_switches(self) -> None:
        """Which maintenance switches are on."""
        before = self.switches.get("pop", False)
        self.switches = {row["name"]: row["enabled"] for row in await self.pool.fetch(sql("switches"))}
        if self.switches.get("pop", False) and not before:
            self.ready.wake_everybody()
            self.registry.announce()

    async def watch_switches(self) -> None:
        """Follow switches that another worker set."""
        while not self.stopping.is_set():
            await wait_for(self.stopping, 1)
            try:
                await self.read_switches()
            except Unavailable:
                continue

    def spawn(self, work: Any) -> None:
        """Run background work until the engine closes."""
        self._tasks.append(asyncio.create_task(work))

    async def close(self) -> None:
        """Answer what is in flight, then stop everything."""
        self.stopping.set()
        self.scheduler.look()
        if self._tasks:
            _, late = await asyncio.wait(self._tasks, timeout=10)
            for task in late:
                task.cancel()
        await self.pusher.close()
        await self.room.close()
        await self.popper.close()
        await asyncio.gather(*self._given_back, return_exceptions=True)
        await self.settler.close()
        await self.auditor.close()
        await self.activity.close()
        await self.pool.close()

    def give_back(self, popped: Popped) -> None:
        """Nobody waits any more for what was just leased: let somebody else have it."""
        if popped.lease_id is not None:
            items = [
                AckItem(m.transaction_id, m.partition_id, "retry", m.lease_id, group=m.group)
                for m in popped.messages()
            ]
            task = asyncio.create_task(self.settler.settle(items, popped.group, atomic=False))
            self._given_back.add(task)
            task.add_done_callback(self._given_back.discard)

    def reset_queue(self, queue_id: int) -> None:
        """Forget what is remembered of a queue and its groups, as when it is configured anew."""
        self.poller.forget_subscriptions(queue_id)
        self.ready.drop_queue(queue_id)

    def appended(self, lanes: list[tuple[Lane, int]]) -> None:
        """Messages are on disk: tell who waits, here and elsewhere."""
        if lanes:
            self.probe.stored()
            self.ready.pushed((lane.queue.id, lane.id, count) for lane, count in lanes)
            self.activity.ring()

    def metrics(self) -> dict[str, float]:
        """Counters since the engine was opened, and gauges."""
        ready = self.ready.sets.values()
        return {
            "pushed_messages_total": self.pusher.messages,
            "push_flushes_total": self.pusher.flushes,
            "duplicate_messages_total": self.pusher.duplicates,
            "popped_messages_total": self.popper.messages,
            "claims_total": self.popper.claims,
            "settled_messages_total": self.settler.settled + self.settler.plain.settled,
            "settle_calls_total": self.settler.calls + self.settler.plain.calls,
            "known_lanes": len(self.registry.lanes_by_id),
            "known_leases": len(self.leases),
            "ready_lanes": sum(len(r.ready) for r in ready),
            "waiting_pops": sum(len(r.waiters) for r in ready),
            "audits_total": self.auditor.rounds,
            "audited_openings_total": self.auditor.opened,
            "remembered_ids": self.registry.memory.total,
            "forgotten_ids_total": self.registry.memory.forgotten,
            "cached_segment_bytes": self.cache.size,
            **{f"{name}_messages_total": count for name, count in self.settler.outcomes.items()},
            "refused_acks_total": self.settler.refused,
        }
