"""The life of one push: what may not go in, what waits, and what is appended now."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import asyncpg

from settled.queue.batch import Chunk, Gone, plain_ids
from settled.queue.errors import PartlyStored, Paused, Unavailable
from settled.queue.push import ATTEMPTS, LANE_LIMIT
from settled.queue.schedule import check_delay, schedule
from settled.queue.types import Appended, PushItem, PushResult

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from settled.queue.core import Core
    from settled.queue.lanes import Lane, Registry
    from settled.queue.push import Pusher
    from settled.queue.soon import Done


async def push(core: Core, items: Sequence[PushItem]) -> list[PushResult]:
    """Append or schedule items and answer in their order."""
    if core.switches.get("push"):
        raise Paused
    if not items:
        return []
    lanes = core.registry.lanes
    later = limited = False
    unknown: set[tuple[str, str]] = set()
    for item in items:
        lane = lanes.get((item.queue, item.partition))
        if lane is None:
            unknown.add((item.queue, item.partition))
        elif lane.queue.options.max_size:
            limited = True
        if item.delay_seconds:
            later = True
    if unknown:
        await core.registry.ensure(unknown)
        limited = True  # look closer: one of them may have a limit
    if not later and not limited:
        return await push_items(core.pusher, core.registry, items)
    async with core.room.hold(core.room.limited(items)):
        if not later:
            return await push_items(core.pusher, core.registry, items)
        return await _push_mixed(core, items, [item for item in items if item.delay_seconds])


def push_soon(
    core: Core,
    queue: str,
    partition: str,
    transaction_ids: Sequence[str | None],
    payloads: list[bytes],
    done: Done[Appended],
) -> bool:
    """Append JSON payloads to a known lane and tell `done`, or None where it takes `push` after all.

    False, and nothing is done, for anything that `push` must look at.
    """
    lane = core.registry.lanes.get((queue, partition))
    if lane is None or lane.queue.options.max_size or core.switches.get("push") or core.pusher.closing:
        return False
    tx = plain_ids(transaction_ids)
    if tx is None or len(tx) > LANE_LIMIT:
        return False
    chunk = Chunk(lane, tx, payloads)

    def answered(chunk: Chunk) -> None:
        error = chunk.error
        if error is None:
            done(Appended(lane.queue.name, lane.uid, chunk.results))
        else:
            done(None if isinstance(error, Gone) else error)

    chunk.done = answered
    core.pusher.submit(chunk)
    return True


def _results(lane: Lane, items: Iterable[PushItem], results: Iterable[tuple[str, bool]]) -> list[PushResult]:
    queue, partition, uid = lane.queue.name, lane.name, lane.uid
    return [
        PushResult(item.transaction_id or own, own, "duplicate" if twice else "queued", queue, partition, uid)
        for item, (own, twice) in zip(items, results, strict=False)
    ]


async def _push_mixed(core: Core, items: Sequence[PushItem], later: list[PushItem]) -> list[PushResult]:
    for item in later:
        check_delay(item)
    now = await push_items(core.pusher, core.registry, [item for item in items if not item.delay_seconds])
    try:
        async with core.pool.transaction() as connection:
            waiting = await schedule(core, connection, later)
    except Exception as error:
        if not now:
            raise
        raise PartlyStored(_merge(items, now, [_unstored(item, error) for item in later]), error) from error
    core.scheduler.look()
    return _merge(items, now, waiting)


def _merge(
    items: Sequence[PushItem], now: list[PushResult], waiting: Iterable[PushResult]
) -> list[PushResult]:
    done, noted = iter(now), iter(waiting)
    return [next(noted) if item.delay_seconds else next(done) for item in items]


def _unstored(item: PushItem, error: Exception | None) -> PushResult:
    """What is said of an item whose part of a push failed; what the database refused is not stored."""
    status: Literal["failed", "unknown"] = (
        "failed" if isinstance(error, asyncpg.PostgresError | Gone) else "unknown"
    )
    return PushResult(item.transaction_id or "", "", status, item.queue, item.partition, "")


async def _push_chunks(pusher: Pusher, registry: Registry, chunks: list[Chunk]) -> None:
    """Push chunks; those whose lane was deleted meanwhile go to a new lane of that name."""
    for _ in range(ATTEMPTS):
        await pusher.push(chunks)
        chunks = [chunk for chunk in chunks if isinstance(chunk.error, Gone)]
        if not chunks:
            return
        await registry.ensure({(c.lane.queue.name, c.lane.name) for c in chunks})
        for chunk in chunks:
            chunk.error = None
            chunk.lane = registry.lanes[(chunk.lane.queue.name, chunk.lane.name)]
    raise Unavailable("the queue is deleted again and again", 0.1)


async def push_items(pusher: Pusher, registry: Registry, items: Sequence[PushItem]) -> list[PushResult]:
    """Push items that are due now, and answer in item order."""
    if len(items) == 1:
        if (items[0].queue, items[0].partition) not in registry.lanes:
            await registry.ensure({(items[0].queue, items[0].partition)})
        chunk = Chunk(registry.lanes[(items[0].queue, items[0].partition)]).extend(items)
        await _push_chunks(pusher, registry, [chunk])
        return _results(chunk.lane, items, chunk.results)
    await registry.ensure({(item.queue, item.partition) for item in items})
    lanes = registry.lanes
    chunks: list[Chunk] = []
    runs: list[tuple[Chunk, int]] = []  # neighbours of one lane stay together
    start, total = 0, len(items)
    latest: dict[Lane, Chunk] = {}
    while start < total:
        queue, partition = items[start].queue, items[start].partition
        stop = start + 1
        while stop < total and items[stop].partition == partition and items[stop].queue == queue:
            stop += 1
        lane = lanes[(queue, partition)]
        while start < stop:
            open_chunk = latest.get(lane)
            if open_chunk is None or len(open_chunk.tx) >= LANE_LIMIT:
                open_chunk = latest[lane] = Chunk(lane)
                chunks.append(open_chunk)
            count = min(stop - start, LANE_LIMIT - len(open_chunk.tx))
            open_chunk.extend(items[start : start + count] if count < total else items)
            runs.append((open_chunk, count))
            start += count
    failed: Exception | None = None
    try:
        await _push_chunks(pusher, registry, chunks)
    except Exception as error:
        if all(chunk.error is not None for chunk in chunks):
            raise
        failed = error
    answers = {chunk: iter(chunk.results) for chunk in chunks}
    results: list[PushResult] = []
    for chunk, count in runs:
        own = items[len(results) : len(results) + count]
        if chunk.error is None:
            results += _results(chunk.lane, own, answers[chunk])
        else:
            results += [_unstored(item, chunk.error) for item in own]
    if failed is not None:
        raise PartlyStored(results, failed) from failed
    return results
