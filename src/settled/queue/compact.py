"""Merging old small segments: a lane of single pushes becomes a lane of full segments, and nobody notices."""

from __future__ import annotations

import asyncio
import time
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

from settled.queue import segment
from settled.queue.cache import micros
from settled.queue.db import sql
from settled.queue.sealing import SEALED, seal
from settled.queue.segment import Segment

if TYPE_CHECKING:
    from collections.abc import Sequence

    from settled.queue.core import Core

AGE = 60.0
"""Younger segments are left alone, in seconds: they are still being read, and may yet be removed."""
IDLE = 600.0
"""A run that is not full is merged when nothing came for so long."""
SPAN = 3600.0
"""Messages of a segment are retained together, so they must be about as old."""
SMALL, FULL, FULL_BYTES = 64, 256, 128 * 1024
FEWEST = 4
LANES, SEGMENTS = 100, 2000
BUDGET = 2.0
"""Seconds a round may take."""
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class Size(NamedTuple):
    """A segment without its body."""

    first_seq: int
    n: int
    first_at: float
    last_at: float
    size: int
    age: float


class Merged(NamedTuple):
    """One segment in the place of several."""

    firsts: list[int]
    n: int
    created_at: datetime
    times: list[datetime]
    hashes: bytes | None
    body: bytes


def plan(sizes: Sequence[Size], since: int, span: float, *, more: bool) -> tuple[list[list[Size]], int]:
    """Which runs of neighbours to merge, and up to where the lane is done with; `more`: others follow."""
    runs: list[list[Size]] = []
    run: list[Size] = []
    n = size = 0
    for each in sizes:
        fits = (
            bool(run)
            and each.n <= SMALL
            and each.first_seq == run[-1].first_seq + run[-1].n
            and n + each.n <= FULL
            and size + each.size <= FULL_BYTES
            and each.last_at - run[0].first_at <= span
        )
        if not fits:
            runs.append(run)
            run, n, size = [], 0, 0
        if each.n <= SMALL:
            run.append(each)
            n, size = n + each.n, size + each.size
        since = each.first_seq + each.n
    if run and (not more or n >= FULL) and (run[-1].age > IDLE or n >= FULL):
        runs.append(run)
    elif run:  # it may still grow
        since = run[0].first_seq
    return [run for run in runs if len(run) >= FEWEST], since


def merge(rows: Sequence[Any]) -> Merged:
    """Neighbouring segments as one; ids, hashes, headers and the time of each message stay what they were."""
    tx: list[bytes] = []
    payloads: list[bytes] = []
    headers: list[bytes] = []
    ids: list[bytes] = []
    times: list[int] = []
    for row in rows:
        part = Segment(row["first_seq"], micros(row["created_at"]), row["body"])
        tx += part.own_tx() or [b""] * part.n
        for at in range(part.n):
            payloads.append(part.payload(at))
            headers.append(part.header(at))
            times.append(part.created(at))
        ids += [bytes.fromhex(text.replace("-", "")) for text in part.ids()]
    known = any(row["hashes"] for row in rows)
    body = segment.encode(b"", tx, payloads, headers, b"".join(ids), times)
    return Merged(
        [row["first_seq"] for row in rows],
        len(payloads),
        rows[-1]["created_at"],
        [_EPOCH + timedelta(microseconds=at) for at in times],
        b"".join(row["hashes"] or bytes(8 * row["n"]) for row in rows) if known else None,
        seal(body, len(payloads)) if any(row["body"][0] == SEALED for row in rows) else body,
    )


class Compactor:
    """Goes round the lanes, a little at a time; the janitor calls it."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._after = 0

    async def round(self) -> int:
        """Merge for a while; answers how many segments there are less."""
        end = time.monotonic() + BUDGET
        saved = 0
        while time.monotonic() < end and not self._core.stopping.is_set():
            lanes = await self._core.pool.fetch(sql("compactable"), self._after, FEWEST, LANES)
            for lane in lanes:
                if time.monotonic() > end or self._core.stopping.is_set():
                    return saved
                self._after = lane["id"]
                span = min(SPAN, lane["keep"] / 10) if lane["keep"] else SPAN
                saved += await self._lane(lane["id"], lane["since"], span, end)
            if len(lanes) < LANES:
                self._after = 0
                break
        return saved

    async def _lane(self, lane_id: int, since: int, span: float, end: float) -> int:
        saved = 0
        while time.monotonic() < end:
            rows = await self._core.pool.fetch(sql("segment_sizes"), lane_id, since, AGE, SEGMENTS)
            sizes = [Size(*row) for row in rows]
            runs, upto = plan(sizes, since, span, more=len(rows) == SEGMENTS)
            for run in runs:
                if not await self._replace(lane_id, run):
                    return saved
                saved += len(run) - 1
                await asyncio.sleep(0.001)
            if upto > since:
                await self._note(lane_id, upto)
            if len(rows) < SEGMENTS or upto <= since:
                return saved
            since = upto
        return saved

    async def _replace(self, lane_id: int, run: list[Size]) -> bool:
        stop = run[-1].first_seq + run[-1].n
        rows = await self._core.pool.fetch(sql("whole_segments"), lane_id, run[0].first_seq, stop)
        if len(rows) < len(run):  # retention was here meanwhile
            return False
        return await self._call(lane_id, merge(rows), 0)

    async def _note(self, lane_id: int, upto: int) -> None:
        await self._call(lane_id, Merged([], 0, _EPOCH, [], None, b""), upto)

    async def _call(self, lane_id: int, merged: Merged, upto: int) -> bool:
        async with self._core.pool.transaction() as connection:
            # If this is lost in a crash, what there was before is still there.
            await connection.execute("set local synchronous_commit = off")
            return bool(
                await connection.fetchval("select compact($1, $2, $3, $4, $5, $6, $7, $8)", lane_id,
                                          merged.firsts, merged.n, merged.created_at, merged.times,
                                          merged.hashes, merged.body, upto)
            )  # fmt: skip
