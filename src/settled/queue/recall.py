"""Reading the transaction ids that a lane had before this worker knew it, while other lanes go on."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from settled.queue import dedup
from settled.queue.batch import Batch
from settled.queue.db import Link, sql

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from settled.queue.lanes import Lane

MANY = 5_000
"""Lanes with more messages are read one at a time, each as soon as its turn comes."""
PAGE = 4_000
RUN = 500_000


class Recall:
    """Reads lanes' ids in the background; a lane that is being read is kept out of flushes."""

    def __init__(self, dsn: str, free: Callable[[Sequence[Lane]], None]) -> None:
        self._free = free
        # Long lanes must not hold up short ones.
        self._short, self._long = Link(dsn), Link(dsn)
        self._one_short, self._one_long = asyncio.Lock(), asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, lanes: list[Lane]) -> None:
        """Read the ids of lanes that were taken out of flushes, and give each back when it is done."""
        task = asyncio.create_task(self._read_all(lanes))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    @property
    def busy(self) -> bool:
        """Whether lanes are being read."""
        return bool(self._tasks)

    async def idle(self) -> None:
        """Wait until everything was read."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def close(self) -> None:
        """Disconnect."""
        await self.idle()
        for link in (self._short, self._long):
            await link.close()

    async def _read_all(self, lanes: list[Lane]) -> None:
        try:
            async with self._one_short:
                heads = await _heads(self._short, lanes)
                short = [lane for lane in lanes if _count(heads, lane) <= MANY]
                await _read_short(self._short, short, heads)
            self._free(short)
            lanes = [lane for lane in lanes if lane not in set(short)]
            while lanes:
                async with self._one_long:
                    await _read_long(self._long, lanes[0])
                self._free([lanes.pop(0)])
        except Exception as error:  # whoever pushes there must hear of it, whatever it is
            for lane in lanes:
                batch = Batch(lane, lane.pending)
                lane.pending = []
                batch.fail(error)
            self._free(lanes)


async def read(link: Any, lanes: Sequence[Lane]) -> None:
    """Read the ids of lanes now."""
    heads = await _heads(link, lanes)
    await _read_short(link, [lane for lane in lanes if _count(heads, lane) <= MANY], heads)
    for lane in lanes:
        if _count(heads, lane) > MANY:
            await _read_long(link, lane)


async def _heads(link: Any, lanes: Sequence[Lane]) -> dict[int, Any]:
    rows = await link.fetch(sql("lane_heads"), [lane.id for lane in lanes])
    return {row["id"]: row for row in rows}


def _count(heads: dict[int, Any], lane: Lane) -> int:
    row = heads.get(lane.id)
    return int(row["next_seq"] - row["first_seq"]) if row is not None else 0


async def _read_short(link: Any, lanes: Sequence[Lane], heads: dict[int, Any]) -> None:
    if not lanes:
        return
    stored: dict[int, list[tuple[int, bytes]]] = {}
    windows = [float(lane.queue.options.dedup_window_seconds) for lane in lanes]
    for row in await link.fetch(sql("lane_hashes"), [lane.id for lane in lanes], windows):
        stored.setdefault(row["lane_id"], []).append((row["first_seq"], row["hashes"]))
    for lane in lanes:
        head = heads[lane.id]["next_seq"] if lane.id in heads else 0
        lane.remembered.load([s for s in stored.get(lane.id, ()) if s[0] < head], head)


async def _read_long(link: Any, lane: Lane) -> None:
    """A part at a time, sorted in a thread: a million ids must not stop everything else."""
    runs: list[dedup.Run] = []
    part: list[tuple[int, bytes]] = []
    window, size = float(lane.queue.options.dedup_window_seconds), 0
    heads = await _heads(link, [lane])
    head = heads[lane.id]["next_seq"] if heads else 0
    since = max(0, head - lane.remembered.room())
    while True:
        rows = await link.fetch(sql("lane_hashes_page"), lane.id, window, since, head, PAGE)
        part += [(row["first_seq"], row["hashes"]) for row in rows]
        size += sum(len(row["hashes"]) // 8 for row in rows)
        if part and (size >= RUN or len(rows) < PAGE):
            run = await asyncio.to_thread(dedup.run_of, part)
            runs += [run] if run is not None else []
            part, size = [], 0
        if len(rows) < PAGE:
            break
        since = rows[-1]["first_seq"] + 1
    lane.remembered.take(runs, head, await asyncio.to_thread(dedup.sieve_of, runs))
