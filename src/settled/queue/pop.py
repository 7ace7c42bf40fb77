"""Handing out: concurrent pops share one claim, and bodies come from the cache."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import asyncpg

from settled.queue.db import Link, sql
from settled.queue.leases import Lease
from settled.queue.names import new_lease
from settled.queue.popped import Empty, Piece, Popped, PoppedLane

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from datetime import datetime

    from settled.queue.activity import Activity
    from settled.queue.cache import SegmentCache
    from settled.queue.db import Clock, Pool
    from settled.queue.lanes import Lane, Registry
    from settled.queue.leases import Leases
    from settled.queue.ready import ReadySet, ReadySets
    from settled.queue.segment import Segment
    from settled.queue.types import PopRequest

CLAIMERS = 2
CLAIM = "select * from claim($1, $2, $3, $4, $5, $6, $7, $8)"
READ_AHEAD = 400


class Ask:
    """One pop as it goes through a flush: where it may take from, and what it got."""

    __slots__ = (
        "future",
        "group_id",
        "lane",
        "lease_seconds",
        "older_than",
        "popped",
        "request",
        "sets",
        "until",
        "why",
    )

    def __init__(
        self, request: PopRequest, group_id: int, sets: Sequence[ReadySet], lane: Lane | None
    ) -> None:
        self.request = request
        self.group_id = group_id
        self.sets = sets
        self.lane = lane
        self.popped: Popped | None = None
        self.why: Empty = "no_available_partition"
        self.until: float | None = None
        self.older_than: float | None = None
        self.future: asyncio.Future[None] = asyncio.get_running_loop().create_future()


class Share:
    """One claim's entry: a lane, who shares it, and from which set it was taken."""

    __slots__ = ("asks", "group_id", "lane_id", "lease", "ready", "room", "want")

    def __init__(
        self, lane_id: int, group_id: int, ready: ReadySet | None, ask: Ask, lease: str | None
    ) -> None:
        self.lane_id = lane_id
        self.group_id = group_id
        self.ready = ready
        self.asks = [ask]
        self.want = ask.request.batch
        self.lease = lease
        self.room = 0


def cut(
    segments: Sequence[Segment],
    first: int,
    end: int,
    skip: Any,
    parked: Sequence[int] = (),
    limit: int | None = None,
) -> list[Piece]:
    """Parked messages, then those of [first, end) that are not in `skip`, as runs of their segments."""
    pieces = []
    if parked:
        left = set(parked)
        for segment in dict.fromkeys(segments):
            found = [seq for seq in parked if segment.first_seq <= seq < segment.end_seq and seq in left]
            if found:
                left.difference_update(found)
                pieces.append(Piece(segment, [seq - segment.first_seq for seq in found]))
    bits = skip.to_int() if skip is not None and len(skip) else 0
    size = len(skip) if skip is not None else 0
    seen, reached = None, first
    for segment in segments:
        if segment is seen or segment.end_seq <= first or segment.first_seq >= end:
            continue
        seen = segment
        # A small segment that was cached before it was merged may come beside the merged one.
        low, high = max(first, reached, segment.first_seq), min(end, segment.end_seq)
        if low >= high:
            continue
        reached = high
        if not bits:
            pieces.append(Piece(segment, range(low - segment.first_seq, high - segment.first_seq)))
            continue
        offsets = [
            s - segment.first_seq
            for s in range(low, high)
            if s - first >= size or not bits >> (size - 1 - (s - first)) & 1
        ]
        if offsets:
            pieces.append(Piece(segment, offsets))
    return pieces


class Popper:
    """Gathers pops into claims."""

    def __init__(
        self,
        dsn: str,
        worker: str,
        registry: Registry,
        cache: SegmentCache,
        ready: ReadySets,
        leases: Leases,
        activity: Activity,
        clock: Clock,
        pool: Pool,
        abandoned: Callable[[Popped], None],
    ) -> None:
        self._abandoned = abandoned
        self._pool = pool
        self._worker = worker
        self._registry = registry
        self._cache = cache
        self._ready = ready
        self._leases = leases
        self._activity = activity
        self._clock = clock
        self._links = [Link(dsn) for _ in range(CLAIMERS)]
        self._pending: list[Ask] = []
        self._wake = asyncio.Event()
        self._closing = False
        self._tasks: list[asyncio.Task[None]] = []
        self.claims = 0
        self.messages = 0

    async def start(self) -> None:
        """Begin claiming."""
        await asyncio.gather(*(link.get() for link in self._links))
        self._tasks = [asyncio.create_task(self._run(link)) for link in self._links]

    async def close(self) -> None:
        """Answer what is in flight and stop."""
        self._closing = True
        self._wake.set()
        self._ready.reset()
        self._registry.announce()
        await asyncio.gather(*self._tasks)
        for link in self._links:
            await link.close()

    @property
    def closing(self) -> bool:
        """Whether waiting makes no sense any more."""
        return self._closing

    async def ask(self, ask: Ask) -> None:
        """Try once: `ask.popped` or `ask.why` and `ask.until` are set afterwards."""
        if self._closing:
            return
        if ask.lane is None and not any(ready.ready for ready in ask.sets):
            return
        self.submit(ask)
        try:
            await ask.future
        except asyncio.CancelledError:
            if not ask.future.cancelled() and ask.popped is not None:
                # Answered, but the caller went away before it could hear of it.
                self._abandoned(ask.popped)
            raise

    def submit(self, ask: Ask) -> None:
        """Put an ask into the next claim; its `future` is done when it was answered."""
        self._pending.append(ask)
        self._wake.set()

    async def claim_alone(self, ask: Ask) -> None:
        """Try once, sharing nothing with anybody."""
        async with self._pool.link() as link:
            await self._flush(link, [ask])

    async def _run(self, link: Link) -> None:
        while True:
            while not self._pending:
                if self._closing:
                    return
                self._wake.clear()
                await self._wake.wait()
            asks, self._pending = [ask for ask in self._pending if not ask.future.done()], []
            try:
                await self._flush(link, asks)
            except asyncpg.PostgresError:
                for ask in asks:
                    await self._try_alone(link, ask)
            except Exception as error:  # the callers must hear of it, whatever it is
                _fail(asks, error)
            for ask in asks:
                if ask.future.cancelled() and ask.popped is not None:
                    self._abandoned(ask.popped)

    async def _try_alone(self, link: Link, ask: Ask) -> None:
        """What failed together may be one caller's fault only."""
        try:
            if not ask.future.done():
                await self._flush(link, [ask])
        except Exception as error:  # the caller must hear of it, whatever it is
            _fail([ask], error)

    def _assign(self, asks: list[Ask]) -> list[Share]:
        """Give each ask the lanes that have waited longest; asks that settle at once may share one."""
        shares: list[Share] = []
        open_shares: dict[ReadySet, Share] = {}
        for ask in asks:
            request = ask.request
            if ask.lane is not None:
                lease = None if request.auto_ack else new_lease(ask.lane.id, ask.group_id, wide=False)
                shares.append(Share(ask.lane.id, ask.group_id, None, ask, lease))
                continue
            taken: list[Share] = []
            for ready in ask.sets:
                shared = open_shares.get(ready)
                if request.auto_ack and request.partitions == 1 and shared is not None and shared.room > 0:
                    shared.asks.append(ask)
                    shared.want += request.batch
                    shared.room -= request.batch
                    taken.append(shared)
                    break
                while len(taken) < request.partitions and ready.ready:
                    guess = next(iter(ready.ready.values()))
                    lane_id = ready.take()
                    assert lane_id is not None  # noqa: S101
                    share = Share(lane_id, ask.group_id, ready, ask, None)
                    taken.append(share)
                    shares.append(share)
                    if request.auto_ack and request.partitions == 1:
                        share.room = guess - request.batch
                        open_shares[ready] = share
                if len(taken) >= request.partitions:
                    break
            if taken and not request.auto_ack:
                lease = new_lease(taken[0].lane_id, ask.group_id, wide=len(taken) > 1)
                for share in taken:
                    share.lease = lease
        return shares

    async def _flush(self, link: Link, asks: list[Ask]) -> None:
        shares = sorted(self._assign(asks), key=lambda share: (share.lane_id, share.group_id))
        numbers: dict[int, int] = {}
        for share in shares:
            numbers.setdefault(id(share.asks[0]), len(numbers))
        try:
            rows = (
                await link.fetch(
                    CLAIM,
                    self._worker,
                    [numbers[id(s.asks[0])] for s in shares],
                    [s.lane_id for s in shares],
                    [s.group_id for s in shares],
                    [s.want for s in shares],
                    [s.lease for s in shares],
                    [s.asks[0].request.lease_seconds for s in shares],
                    asks[0].older_than,
                )
                if shares
                else []
            )
        except BaseException:
            for share in shares:
                if share.ready is not None:
                    share.ready.answered(share.lane_id, "failed", None, 1)
            raise
        self.claims += 1
        await self._answer(link, shares, rows)
        for ask in asks:
            if not ask.future.done():
                ask.future.set_result(None)

    async def _answer(self, link: Link, shares: list[Share], rows: list[Any]) -> None:
        """Sort out what each lane gave, fetch the bodies and deal them out."""
        queued: dict[tuple[int, int], list[Share]] = {}
        for share in shares:
            queued.setdefault((share.lane_id, id(share.asks[0])), []).append(share)
        by_number = {n: share.asks[0] for n, share in enumerate(_first_of_each(shares))}
        got: list[tuple[Share, Any]] = []
        for row in rows:
            share = queued[(row["lane_id"], id(by_number[row["request"]]))].pop()
            until = row["until"].timestamp() if row["until"] is not None else None
            status = row["status"]
            ask = share.asks[0]
            if status == "ok":
                got.append((share, row))
                left = 0 if share.lease else row["head"] - row["end_seq"]
            else:
                left = 0
                ask.until = until if ask.until is None or until is None else min(until, ask.until)
                ask.why = (
                    _WHY.get(status, "no_available_partition")
                    if ask.lane is not None or status == "window"
                    else ask.why
                )
            if until is not None and until < self._clock.now() + 1:
                self._activity.look()
            if share.ready is not None:
                share.ready.answered(share.lane_id, status, until, left)
            elif status == "ok" and share.lease and ask.lane is not None:
                self._ready.hold(ask.lane.queue.id, ask.lane.id, ask.group_id, until or 0)
        for rest in queued.values():  # not asked for any more: their request was full
            for share in rest:
                if share.ready is not None:
                    share.ready.answered(share.lane_id, "full", None, 1)
        if not got:
            return
        await self._registry.lanes_of(row["lane_id"] for _, row in got)
        ranges = [
            (r["lane_id"], r["first_seq"], r["end_seq"]) for _, r in got if r["end_seq"] > r["first_seq"]
        ]
        ranges += [(r["lane_id"], seq, seq + 1) for _, r in got for seq in r["parked"] or ()]
        segments = await self._cache.load(link, ranges, READ_AHEAD)
        wide: dict[str, list[int]] = {}
        for share, row in got:
            self._deal(share, row, segments.get(row["lane_id"], []), wide)
        for lease, lanes in wide.items():
            if len(lanes) > 1:
                await link.fetch(sql("wide_lease"), lease, lanes)

    def _deal(self, share: Share, row: Any, segments: list[Segment], wide: dict[str, list[int]]) -> None:
        lane = self._registry.lanes_by_id.get(row["lane_id"])
        if lane is None:
            return
        parked = row["parked"] or []
        pieces = cut(
            sorted(segments, key=lambda s: s.first_seq), row["first_seq"], row["end_seq"], row["skip"], parked
        )
        failed = dict(zip(row["failed_seqs"] or (), row["failed_counts"] or (), strict=True))
        if share.lease is not None:
            length = row["end_seq"] - row["first_seq"]
            now = self._clock.now()
            self._leases.put(
                Lease(share.lease, lane.id, share.group_id, row["first_seq"], length, parked, pieces, now)
            )
            wide.setdefault(share.lease, []).append(lane.id)
        for ask in share.asks:
            mine, pieces = _split(pieces, ask.request.batch) if len(share.asks) > 1 else (pieces, [])
            if mine:
                part = PoppedLane(lane.queue.name, lane.name, lane.uid, mine, failed)
                self.messages += len(part)
                self._hand(ask, part, share.lease, row["until"])

    def _hand(self, ask: Ask, part: PoppedLane, lease: str | None, until: datetime | None) -> None:
        if ask.popped is None:
            ask.popped = Popped(ask.request.group, lease, until if lease else None, [])
        ask.popped.lanes.append(part)


def _fail(asks: list[Ask], error: Exception) -> None:
    for ask in asks:
        if not ask.future.done():
            ask.future.set_exception(error)


_WHY: dict[str, Empty] = {"leased": "lease_held", "window": "window_buffer", "gone": "partition_not_found"}


def _first_of_each(shares: list[Share]) -> list[Share]:
    """One share of each ask, in the order in which asks were numbered."""
    found: dict[int, Share] = {}
    for share in shares:
        found.setdefault(id(share.asks[0]), share)
    return list(found.values())


def _split(pieces: list[Piece], count: int) -> tuple[list[Piece], list[Piece]]:
    """The first `count` messages, and the rest."""
    mine: list[Piece] = []
    for at, piece in enumerate(pieces):
        if len(piece.offsets) > count:
            if count:
                mine.append(Piece(piece.segment, piece.offsets[:count]))
            return mine, [Piece(piece.segment, piece.offsets[count:]), *pieces[at + 1 :]]
        mine.append(piece)
        count -= len(piece.offsets)
    return mine, []
