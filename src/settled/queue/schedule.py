"""Messages pushed with a delay: they wait in a table of their own and are appended when due."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any
from uuid import UUID

from settled.queue import dedup, sealing, segment
from settled.queue.activity import wait_for
from settled.queue.batch import Batch, Chunk, Gone
from settled.queue.db import sql
from settled.queue.errors import BadRequest, Conflict, Unavailable
from settled.queue.types import PushResult

if TYPE_CHECKING:
    from collections.abc import Sequence

    from settled.queue.core import Core
    from settled.queue.types import PushItem

MAX_DELAY = 366 * 86_400
MOVE = 500
LOOK_EVERY = 0.25
"""Seconds: another worker may have scheduled something that comes sooner than all there was."""


def check_delay(item: PushItem) -> None:
    """Refuse a delay that is none."""
    if not 0 < item.delay_seconds <= MAX_DELAY:
        raise BadRequest("delaySeconds", item.delay_seconds, "must be 0 s to a year")


async def schedule(core: Core, connection: Any, items: Sequence[PushItem]) -> list[PushResult]:
    """Note delayed items and answer in their order; an id that waits or is in the lane is a duplicate."""
    results: list[PushResult] = []
    await core.registry.ensure({(item.queue, item.partition) for item in items})
    lanes = [core.registry.lanes[(item.queue, item.partition)] for item in items]
    for item, lane in zip(items, lanes, strict=True):
        check_delay(item)
        chunk = Chunk(lane).extend([item])
        message_id = segment.uuid_text(segment.new_base())
        tx, status = item.transaction_id, "queued"
        known = await core.pusher.known(connection, chunk) if tx else {}
        if known:
            message_id, status = next(iter(known.values())), "duplicate"
        else:
            rows = await connection.fetch(
                sql("schedule"),
                [float(item.delay_seconds)],
                [lane.id],
                [message_id],
                [tx],
                *_stored(chunk),
            )
            if not rows:
                first = await connection.fetch(sql("scheduled_first"), lane.id, tx)
                message_id, status = str(first[0][0]) if first else message_id, "duplicate"
        results.append(PushResult(tx or message_id, message_id, status, item.queue, item.partition, lane.uid))  # type: ignore[arg-type]
    return results


class Scheduler:
    """Appends scheduled messages when they are due; workers share the work."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._soon = asyncio.Event()

    def look(self) -> None:
        """The next due time may have changed."""
        self._soon.set()

    async def run(self) -> None:
        """Move what is due, for ever."""
        while not self._core.stopping.is_set():
            self._soon.clear()
            pause = LOOK_EVERY
            try:
                due = await self._core.pool.fetchval(sql("scheduled_next"))
                if due is not None and due <= self._core.clock.now():
                    while await self.move() == MOVE and not self._core.stopping.is_set():
                        pass
                    due = await self._core.pool.fetchval(sql("scheduled_next"))
                if due is not None:
                    pause = min(pause, max(0.001, due - self._core.clock.now()))
            except Unavailable:
                pause = LOOK_EVERY
            if not self._core.stopping.is_set():
                await wait_for(self._soon, pause)

    async def move(self) -> int:
        """Append what is due now, in one transaction with its removal here; answers how many."""
        core = self._core
        batches: list[Batch] = []
        busy: list[Any] = []
        try:
            async with core.pool.transaction() as connection:
                rows = await connection.fetch(sql("scheduled_due"), MOVE)
                if not rows:
                    return 0
                await core.registry.lanes_of({row["lane_id"] for row in rows})
                chunks: dict[int, Chunk] = {}
                moved = []
                for row in rows:
                    lane = core.registry.lanes_by_id.get(row["lane_id"])
                    try:
                        if lane is not None:
                            _add(chunks.setdefault(lane.id, Chunk(lane)), row)
                    except Conflict:
                        continue  # for a worker that has the key
                    moved.append(row["id"])
                chunks = {lane_id: chunk for lane_id, chunk in chunks.items() if chunk.tx}
                busy = await core.pusher.exclusive([chunk.lane for chunk in chunks.values()])
                fresh = [Batch(chunk.lane, [chunk]) for chunk in chunks.values()]
                batches = await core.pusher.append(connection, fresh, scheduled=True)
                await connection.fetch(sql("scheduled_done"), moved)
        except Gone:
            return 0
        except BaseException:
            for lane in busy:
                lane.remembered.rewind()
            raise
        finally:
            core.pusher.free(busy)
        core.pusher.commit(batches)
        return len(moved)


def _add(chunk: Chunk, row: Any) -> None:
    read = sealing.open_value if chunk.lane.queue.options.encryption_enabled else sealing.unseal_value
    headers, payload = read(row["headers"]), read(row["payload"])
    tx = (row["transaction_id"] or "").encode()
    if chunk.ids is None:
        chunk.ids = []
    chunk.ids.append(UUID(str(row["message_id"])).bytes)
    chunk.tx.append(tx)
    chunk.hashes.append(dedup.fingerprint(tx) if tx else 0)
    chunk.headers.append(headers)
    chunk.payloads.append(payload)


def _stored(chunk: Chunk) -> tuple[list[bytes], list[bytes]]:
    headers, payload = chunk.headers[0], chunk.payloads[0]
    if chunk.lane.queue.options.encryption_enabled:
        headers, payload = sealing.seal_value(headers), sealing.seal_value(payload)
    return [headers], [payload]
