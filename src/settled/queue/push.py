"""Appending: requests are coalesced into one call a flush; duplicates are found in memory."""

from __future__ import annotations

import asyncio
from array import array
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import asyncpg

from settled.queue import dedup
from settled.queue.batch import Batch, Chunk, Duplicate, Gone
from settled.queue.cache import micros
from settled.queue.db import Link, listed, sql
from settled.queue.errors import Unavailable
from settled.queue.recall import Recall, read
from settled.queue.turns import Landed, Turns

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from settled.queue.cache import SegmentCache
    from settled.queue.lanes import Lane, Registry

FLUSHERS = 2
LANE_LIMIT = 2000
SEGMENT_BYTES = 2 * 2**20  # of payloads; a request with more has a segment of its own
FLUSH_LIMIT = 20_000
ATTEMPTS = 20
_lane_id = attrgetter("lane.id")
APPEND = (
    "select * from append_many($1, $2::text::bigint[], $3::text::bigint[], $4::text::bigint[], "
    "$5::text::int[], $6, $7, $8::text::bigint[])"
)


class Pusher:
    """Takes chunks, flushes whatever has come together; a lane is in one flush at a time."""

    def __init__(
        self,
        dsn: str,
        worker: str,
        registry: Registry,
        cache: SegmentCache,
        on_append: Callable[[list[tuple[Lane, int]]], None],
    ) -> None:
        self._worker = worker
        self._registry = registry
        self._cache = cache
        self._on_append = on_append
        self._links = [Link(dsn) for _ in range(FLUSHERS)]
        self._recall = Recall(dsn, self.free)
        self._dirty: dict[Lane, None] = {}
        self._turns = Turns()
        self._freed = asyncio.Event()
        self._closing = False
        self._tasks: list[asyncio.Task[None]] = []
        self.flushes = 0
        self.messages = 0
        self.duplicates = 0

    async def start(self) -> None:
        """Begin flushing."""
        await asyncio.gather(*(link.get() for link in self._links))
        self._tasks = [asyncio.create_task(self._run(link)) for link in self._links]

    async def close(self) -> None:
        """Flush what is waiting and stop."""
        self._closing = True
        self._turns.ring()
        await asyncio.gather(*self._tasks)
        await self._recall.close()
        for link in self._links:
            await link.close()

    @property
    def closing(self) -> bool:
        """Whether nothing more is taken."""
        return self._closing

    async def push(self, chunks: Sequence[Chunk]) -> None:
        """Queue chunks and wait until all were answered; raises the first error, but for `Gone`."""
        if self._closing:
            raise Unavailable("the engine is closing")
        if not chunks:
            return
        waiting: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        left = len(chunks)

        def done(_: Chunk) -> None:
            nonlocal left
            left -= 1
            if left == 0 and not waiting.done():
                waiting.set_result(None)

        for chunk in chunks:
            chunk.done = done
            self.submit(chunk)
        await waiting
        for chunk in chunks:
            if chunk.error is not None and not isinstance(chunk.error, Gone):
                raise chunk.error

    def submit(self, chunk: Chunk) -> None:
        """Put a chunk into the next flush of its lane; its `done` is called when it was answered."""
        lane = chunk.lane
        lane.pending.append(chunk)
        if not lane.busy:
            self._dirty[lane] = None
            self._turns.ring(len(self._dirty))

    async def exclusive(self, lanes: Iterable[Lane]) -> list[Lane]:
        """Keep lanes out of flushes until `free`; taken in one order, so callers cannot block each other."""
        taken = []
        for lane in sorted(set(lanes), key=lambda lane: lane.id):
            while lane.busy:
                await self._freed.wait()
            lane.busy = True
            self._dirty.pop(lane, None)
            taken.append(lane)
        return taken

    def free(self, lanes: Iterable[Lane]) -> None:
        """Give lanes back to the flushes."""
        for lane in lanes:
            lane.busy = False
            if lane.pending:
                self._dirty[lane] = None
        self._freed.set()
        self._freed = asyncio.Event()
        if self._dirty:
            self._turns.ring(len(self._dirty))

    async def _run(self, link: Link) -> None:
        while True:
            while not self._dirty or not self._turns.may_start(len(self._dirty)):
                if self._closing and not self._dirty and not self._recall.busy:
                    return
                reading = self._closing and not self._dirty
                await (self._recall.idle() if reading else self._turns.wait())
            batches = self._take()
            if not batches:
                continue
            with self._turns.out(len(batches)) as landed:
                try:
                    await self._flush(link, batches, landed)
                except Exception as error:  # the callers must hear of it, whatever it is
                    for batch in batches:
                        batch.lane.remembered.rewind()
                        if not batch.answered:
                            batch.fail(error)
                finally:
                    self.free(batch.lane for batch in batches)

    def _take(self) -> list[Batch]:
        """What waits, as far as it fits into a flush; lanes whose ids were not read yet are read first."""
        batches, total, unread = [], 0, []
        dirty = self._dirty
        while dirty and total < FLUSH_LIMIT:
            lane = next(iter(dirty))
            del dirty[lane]
            pending = lane.pending
            if lane.busy or not pending:
                continue
            lane.busy = True
            if lane.remembered.known < 0 and any(any(chunk.hashes) for chunk in pending):
                unread.append(lane)
                continue
            size, count = len(pending[0].tx), 1
            left = SEGMENT_BYTES - sum(map(len, pending[0].payloads))
            while count < len(pending) and size + len(pending[count].tx) <= LANE_LIMIT:
                left -= sum(map(len, pending[count].payloads))
                if left < 0:
                    break
                size += len(pending[count].tx)
                count += 1
            batches.append(Batch(lane, pending[:count]))
            del pending[:count]
            total += size
        if unread:
            self._recall.start(unread)
        if not self._dirty:
            self._dirty = {}  # or the next look would walk over all that was ever taken out
        return batches

    async def _flush(self, link: Link, batches: list[Batch], landed: Landed) -> None:
        """Append; if the database refuses a flush, each request is tried alone: only the bad one fails."""
        try:
            await self.append(link, batches, landed=landed)
        except asyncpg.PostgresError:
            left = [batch for batch in batches if not batch.answered]
            singles = [Batch(batch.lane, [chunk]) for batch in left for chunk in batch.chunks]
            for batch in left:
                batch.answered = True
            for single in singles:
                single.lane.remembered.rewind()
                try:
                    await self.append(link, [single], landed=landed)
                except asyncpg.PostgresError as error:
                    single.fail(error)

    async def append(
        self,
        link: Any,
        batches: list[Batch],
        *,
        landed: Landed | None = None,
        refuse: bool = False,
        scheduled: bool = False,
    ) -> list[Batch]:
        """Append batches through `link`, trying again where another worker was quicker.

        With `landed` the callers are told when that was awaited; without, the caller commits first and then
        calls `commit`.
        With `refuse` a duplicate raises `Duplicate`. With `scheduled` these are the ids that waited.
        """
        everything: list[Batch] = []
        waiting = batches
        for _ in range(ATTEMPTS):
            done: list[Batch] = []
            waiting = await self._attempt(link, waiting, done, landed is not None, refuse, scheduled)
            everything += done
            if landed is not None:
                await landed()
                self.commit(done)
            if not waiting:
                return everything
        raise Unavailable("too many workers push to the same partition", 0.1)

    def commit(self, batches: list[Batch]) -> None:
        """Tell everybody what was appended."""
        self.flushes += 1
        self._on_append([(batch.lane, len(batch.tx)) for batch in batches if batch.tx])
        for batch in batches:
            self.messages += len(batch.tx)
            self.duplicates += batch.left_out
            batch.finish()

    async def _attempt(
        self, link: Any, batches: list[Batch], done: list[Batch], settle: bool, refuse: bool, scheduled: bool
    ) -> list[Batch]:
        await self._catch_up(link, batches)
        for batch in batches:
            batch.lane.remembered.mark()
            duplicates = await self._duplicates(link, batch) if batch.meets() else {}
            if batch.lane.later and not scheduled:
                duplicates |= await self._waiting(link, batch)
            if duplicates and refuse:
                self.duplicates += len(duplicates)
                tx, first = next(iter(duplicates.items()))
                raise Duplicate(batch.lane, tx.decode(), first)
            batch.fill(duplicates)
        done += [batch for batch in batches if not batch.tx]
        batches = [batch for batch in batches if batch.tx]
        batches.sort(key=_lane_id)
        if not batches:
            return []
        hashes = [dedup.pack(batch.hashes) for batch in batches]
        rows = await link.fetch(
            APPEND,
            self._worker,
            listed([b.lane.queue.id for b in batches]),
            listed([b.lane.id for b in batches]),
            listed([b.lane.remembered.known if h else "null" for b, h in zip(batches, hashes, strict=True)]),
            listed([len(b.tx) for b in batches]),
            hashes,
            [b.body for b in batches],
            None if scheduled or not any(hashes) else listed([b.lane.id for b in batches if b.lane.later]),
        )
        return self._take_over(batches, rows, done, settle)

    def _take_over(
        self, batches: list[Batch], rows: list[Any], done: list[Batch], settle: bool
    ) -> list[Batch]:
        """Note what was appended, here and by others; answer the batches that must be tried again."""
        if rows[0]["status"] == "all":
            created = micros(rows[0]["created_at"])
            for batch, first in zip(batches, rows[0]["firsts"], strict=True):
                self._keep(batch, first, created, settle)
            done += batches
            return []
        by_lane = {batch.lane.id: batch for batch in batches}
        if rows[0]["status"] == "later":
            for row in rows:
                by_lane[row["lane_id"]].lane.later = True
            return batches
        again = []
        for row in rows:
            batch = by_lane[row["lane_id"]]
            lane, remembered = batch.lane, batch.lane.remembered
            first, n = row["first_seq"], row["n"]
            match row["status"]:
                case "ok":
                    self._keep(batch, first, micros(row["created_at"]), settle)
                    done.append(batch)
                case "missed":
                    if row["hashes"]:
                        remembered.add(first, array("Q", row["hashes"]))
                    remembered.known = first + n
                case "clash":
                    remembered.known = first
                    again.append(batch)
                case "gone":
                    self._registry.forget_lane(lane)
                    if not settle:
                        raise Gone(lane.queue.name, lane.name)
                    batch.fail(Gone(lane.queue.name, lane.name))
        return again

    def _keep(self, batch: Batch, first: int, created: int, settle: bool) -> None:
        """Remember what was appended."""
        lane, remembered = batch.lane, batch.lane.remembered
        if remembered.known >= 0 and (remembered.known == first or any(batch.hashes)):
            remembered.add(first, batch.hashes)
            remembered.known = first + len(batch.tx)
        if settle:
            self._cache.put(lane.id, first, created, batch.body)

    async def _waiting(self, link: Any, batch: Batch) -> dict[bytes, str]:
        """Transaction ids of the batch that wait for their time in its lane, with the first message's id."""
        ids = [tx.decode() for chunk in batch.chunks for tx in chunk.tx if tx]
        rows = await link.fetch(sql("scheduled_among"), batch.lane.id, ids)
        batch.lane.later = rows[0]["others"]
        return {row["transaction_id"].encode(): str(row["message_id"]) for row in rows if row["message_id"]}

    async def known(self, link: Any, chunk: Chunk) -> dict[bytes, str]:
        """Transaction ids of the chunk that its lane has already, with the first message's id."""
        batch = Batch(chunk.lane, [chunk])
        await self._catch_up(link, [batch])
        return await self._duplicates(link, batch) if batch.meets() else {}

    async def _catch_up(self, link: Any, batches: list[Batch]) -> None:
        """Read the ids of lanes this worker has not pushed to yet."""
        cold = [
            b.lane for b in batches if b.lane.remembered.known < 0 and any(any(c.hashes) for c in b.chunks)
        ]
        if cold:
            await read(link, cold)

    async def _duplicates(self, link: Any, batch: Batch) -> dict[bytes, str]:
        """Transaction ids of the batch that the lane has already, with the first message's id."""
        suspects = batch.lane.remembered.suspects([key for chunk in batch.chunks for key in chunk.hashes])
        # Retention may have removed what the cache and the hashes still know.
        heads = await link.fetch(sql("lane_heads"), [batch.lane.id])
        if not heads:
            return {}  # the lane was deleted, with all its ids: appending will say so
        first, holes = heads[0]["first_seq"], heads[0]["has_holes"]
        found: dict[bytes, str] = {}
        for chunk in batch.chunks:
            for tx, key in zip(chunk.tx, chunk.hashes, strict=True):
                for seq in suspects.get(key, ()) if key else ():
                    stored = await self._cache.message(link, batch.lane.id, seq) if seq >= first else None
                    if stored is not None and (own := stored.own_tx()) and own[seq - stored.first_seq] == tx:
                        if holes and await link.fetch(sql("is_hole"), batch.lane.id, seq):
                            continue  # deleted by hand
                        found[tx] = stored.id(seq - stored.first_seq)
                        break
        return found
