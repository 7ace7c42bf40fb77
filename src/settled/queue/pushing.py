"""The life of one push: what may not go in, what waits, and what is appended now."""

from __future__ import annotations

from typing import TYPE_CHECKING

from settled.queue.errors import BadRequest, Unavailable
from settled.queue.push import ATTEMPTS, LANE_LIMIT, Chunk, Gone, Pusher
from settled.queue.schedule import MAX_DELAY, schedule
from settled.queue.types import PushItem, PushResult

if TYPE_CHECKING:
    from collections.abc import Sequence

    from settled.queue.core import Core
    from settled.queue.lanes import Registry


async def push(core: Core, items: Sequence[PushItem]) -> list[PushResult]:
    """Append or schedule items and answer in their order."""
    if core.switches.get("push"):
        raise Unavailable("pushes are switched off for maintenance", 5)
    if not items:
        return []
    later = [item for item in items if item.delay_seconds]
    unknown = {(i.queue, i.partition) for i in items if (i.queue, i.partition) not in core.registry.lanes}
    if unknown:
        await core.registry.make(unknown)
    counts = core.room.limited(items)
    if counts:
        await core.room.take(counts)
    try:
        if not later:
            return await push_items(core.pusher, core.registry, items)
        return await _push_mixed(core, items, later)
    finally:
        if counts:
            core.room.done(counts)


async def _push_mixed(core: Core, items: Sequence[PushItem], later: list[PushItem]) -> list[PushResult]:
    for item in later:
        if not 0 < item.delay_seconds <= MAX_DELAY:
            raise BadRequest("delaySeconds", item.delay_seconds, "must be 0 s to a year")
    now = await push_items(core.pusher, core.registry, [item for item in items if not item.delay_seconds])
    async with core.pool.transaction() as connection:
        waiting = await schedule(core, connection, later)
    core.scheduler.look()
    done, noted = iter(now), iter(waiting)
    return [next(noted) if item.delay_seconds else next(done) for item in items]


async def _push_chunks(pusher: Pusher, registry: Registry, chunks: list[Chunk]) -> None:
    """Push chunks; those whose lane was deleted meanwhile go to a new lane of that name."""
    for _ in range(ATTEMPTS):
        await pusher.push(chunks)
        chunks = [chunk for chunk in chunks if isinstance(chunk.error, Gone)]
        if not chunks:
            return
        await registry.make({(c.lane.queue.name, c.lane.name) for c in chunks})
        for chunk in chunks:
            chunk.error = None
            chunk.lane = registry.lanes[(chunk.lane.queue.name, chunk.lane.name)]
    raise Unavailable("the queue is deleted again and again", 0.1)


async def push_items(pusher: Pusher, registry: Registry, items: Sequence[PushItem]) -> list[PushResult]:
    """Push items that are due now, to lanes found or made, and answer in item order."""
    lanes = registry.lanes
    unknown = {(i.queue, i.partition) for i in items if (i.queue, i.partition) not in lanes}
    if unknown:
        await registry.make(unknown)
    chunks: list[Chunk] = []
    latest: dict[tuple[str, str], Chunk] = {}
    places: list[Chunk] = []
    for item in items:
        key = (item.queue, item.partition)
        chunk = latest.get(key)
        if chunk is None or len(chunk.tx) >= LANE_LIMIT:
            chunk = latest[key] = Chunk(lanes[key])
            chunks.append(chunk)
        chunk.add(item)
        places.append(chunk)
    await _push_chunks(pusher, registry, chunks)
    taken = dict.fromkeys(chunks, 0)
    results = []
    for item, chunk in zip(items, places, strict=True):
        at = taken[chunk]
        taken[chunk] = at + 1
        message_id, duplicate = chunk.results[at]
        results.append(
            PushResult(
                item.transaction_id or message_id,
                message_id,
                "duplicate" if duplicate else "queued",
                item.queue,
                item.partition,
                chunk.lane.uid,
            )
        )
    return results
