"""Keeping queues within their maxSize, however many workers push: those queues are pushed to by turns."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from settled.queue.db import Link, sql
from settled.queue.errors import QueueFull

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from settled.queue.core import Core
    from settled.queue.lanes import Queue
    from settled.queue.types import PushItem

TIGHT = 1000
"""Up to this limit the pending messages are counted each time; above, four times a second."""
TRUSTED = 0.25


class _Entry:
    """One push that wants room."""

    def __init__(self, counts: dict[Queue, int]) -> None:
        self.counts = counts
        self.admitted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.left = asyncio.Event()

    def refuse(self, error: Exception) -> None:
        if not self.admitted.done():
            self.admitted.set_exception(error)


class Room:
    """Admits pushes to queues with a limit, a crowd at a time, while no other worker does."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._link = Link(core.dsn)
        self._waiting: list[_Entry] = []
        self._task: asyncio.Task[None] | None = None

    async def close(self) -> None:
        """Disconnect, when nobody is inside."""
        if self._task is not None:
            await asyncio.wait([self._task])
        await self._link.close()

    def limited(self, items: Sequence[PushItem]) -> dict[Queue, int]:
        """How many messages go to each queue that has a limit."""
        queues = self._core.registry.queues
        if not any(queue.options.max_size for queue in queues.values()):
            return {}
        counts: dict[Queue, int] = {}
        for item in items:
            queue = queues.get(item.queue)
            if queue is not None and queue.options.max_size:
                counts[queue] = counts.get(queue, 0) + 1
        return counts

    @asynccontextmanager
    async def hold(self, counts: dict[Queue, int]) -> AsyncIterator[None]:
        """Push inside of this; QueueFull if there is no room."""
        if not counts:
            yield
            return
        entry = _Entry(counts)
        self._waiting.append(entry)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._admit())
        try:
            await entry.admitted
            yield
        finally:
            entry.left.set()

    async def _admit(self) -> None:
        while self._waiting:
            entries, self._waiting = self._waiting, []
            ids = sorted({queue.id for entry in entries for queue in entry.counts})
            try:
                # Locked in one order; the lock is this connection's and goes with it.
                await self._link.fetch(sql("room_lock"), ids)
                try:
                    await self._let_in(entries, ids)
                finally:
                    await self._link.fetch(sql("room_unlock"), ids)
            except Exception as error:  # the callers must hear of it, whatever it is
                for entry in entries:
                    entry.refuse(error)

    async def _let_in(self, entries: list[_Entry], ids: list[int]) -> None:
        rows = await self._link.fetch(sql("room_sizes"), ids)
        sizes: dict[int, Any] = {row["queue_id"]: row for row in rows}
        taken: dict[int, int] = {}
        counted: set[int] = set()
        inside: list[_Entry] = []
        for entry in entries:
            if entry.admitted.done():
                continue
            limits = {queue: queue.options.max_size for queue in entry.counts}
            for queue, count in entry.counts.items():
                known, limit = sizes.get(queue.id), limits[queue]
                if not limit:  # it was lifted meanwhile
                    continue
                stale = known is None or limit <= TIGHT or known["age"] > TRUSTED
                fits = known is not None and known["size"] + taken.get(queue.id, 0) + count <= limit
                if queue.id not in counted and (stale or not fits):
                    counted.add(queue.id)
                    size = (await self._link.fetch(sql("backlog"), queue.id))[0][0]
                    sizes[queue.id] = {"size": size, "age": 0.0}
            full = _full(entry, limits, sizes, taken)
            if full is not None:
                entry.refuse(full)
                continue
            for queue, count in entry.counts.items():
                taken[queue.id] = taken.get(queue.id, 0) + count
            inside.append(entry)
        noted = [queue for queue in ids if queue in sizes]
        totals = [sizes[queue]["size"] + taken.get(queue, 0) for queue in noted]
        await self._link.fetch(sql("room_note"), noted, totals, [queue in counted for queue in noted])
        for entry in inside:
            if not entry.admitted.done():
                entry.admitted.set_result(None)
            else:
                entry.left.set()
        await asyncio.gather(*(entry.left.wait() for entry in inside))


def _full(
    entry: _Entry, limits: dict[Queue, int], sizes: dict[int, Any], taken: dict[int, int]
) -> QueueFull | None:
    for queue, limit in limits.items():
        size = sizes[queue.id]["size"] + taken.get(queue.id, 0) if limit else 0
        if limit and size + entry.counts[queue] > limit:
            return QueueFull(queue.name, size, limit, entry.counts[queue])
    return None
