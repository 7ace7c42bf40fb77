"""Handing out: concurrent pops share one claim, and bodies come from the cache."""

from __future__ import annotations

import asyncio
from operator import attrgetter
from typing import TYPE_CHECKING

import asyncpg

from settled.queue.asks import Ask, Share, assign
from settled.queue.claims import Claimed, claim, handed_out
from settled.queue.db import Link, sql
from settled.queue.errors import Conflict
from settled.queue.leases import Lease
from settled.queue.names import lane_of
from settled.queue.pieces import cut, deal, fit
from settled.queue.popped import Empty, Popped, PoppedLane
from settled.queue.turns import Landed, Turns

if TYPE_CHECKING:
    from collections.abc import Callable

    from settled.queue.activity import Activity
    from settled.queue.cache import SegmentCache
    from settled.queue.claims import Clear
    from settled.queue.db import Clock, Pool
    from settled.queue.lanes import Registry
    from settled.queue.leases import Leases
    from settled.queue.popped import Piece
    from settled.queue.ready import ReadySets
    from settled.queue.segment import Segment

CLAIMERS = 2
READ_AHEAD = 1500  # messages of a lane that may be read with those asked for, if they are small
POP_BYTES = 16 * 2**20  # of one answer
TOGETHER = 4  # answers of that size that are made at once; more share what these may have
LEAST = 256 * 1024  # of that for each
PARKED_AT_ONCE = 16
HELD = 1 * 2**20  # bytes of messages that a lease may keep in memory
_first_seq = attrgetter("first_seq")


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
        clear: Clear,
        limit: int = POP_BYTES,
    ) -> None:
        self._abandoned = abandoned
        self._clear = clear
        self._limit = limit
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
        self._turns = Turns()
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
        self._turns.ring()
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
        waiting: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        ask.done = lambda _: None if waiting.done() else waiting.set_result(None)
        self.submit(ask)
        try:
            await waiting
        except asyncio.CancelledError:
            if not ask.answered:
                ask.gone = True
            elif ask.popped is not None:  # the caller went away before it could hear of it
                self._abandoned(ask.popped)
            raise
        if ask.error is not None:
            raise ask.error

    def submit(self, ask: Ask) -> None:
        """Put an ask into the next claim; its `done` is called when it was answered."""
        self._pending.append(ask)
        self._turns.ring(len(self._pending))

    async def claim_alone(self, ask: Ask) -> None:
        """Try once, sharing nothing with anybody."""
        async with self._pool.link() as link:
            await self._flush(link, [ask])

    async def _run(self, link: Link) -> None:
        while True:
            while not self._pending or not self._turns.may_start(len(self._pending)):
                if self._closing and not self._pending:
                    return
                await self._turns.wait()
            asks, self._pending = [ask for ask in self._pending if not ask.gone], []
            with self._turns.out(len(asks)) as landed:
                try:
                    await self._flush(link, asks, landed)
                except asyncpg.PostgresError:
                    for ask in asks:
                        await self._try_alone(link, ask)
                except Exception as error:  # the callers must hear of it, whatever it is
                    for ask in asks:
                        ask.finish(error)
            for ask in asks:
                if ask.gone and ask.popped is not None:
                    self._abandoned(ask.popped)

    async def _try_alone(self, link: Link, ask: Ask) -> None:
        """What failed together may be one caller's fault only."""
        try:
            if not ask.answered:
                await self._flush(link, [ask])
        except Exception as error:  # the caller must hear of it, whatever it is
            ask.finish(error)

    async def _flush(self, link: Link, asks: list[Ask], landed: Landed | None = None) -> None:
        shares = assign(asks)
        try:
            claimed = await claim(
                link, self._worker, shares, asks[0].older_than if asks else None, self._clear
            )
        except BaseException:
            for share in shares:
                if share.ready is not None:
                    share.ready.answered(share.lane_id, "failed", None, 1, share.turn)
            raise
        self.claims += 1
        got = self._sort_out(shares, claimed)
        unread: dict[Ask, Exception] = {}
        if got:
            await self._registry.lanes_of(share.lane_id for share, _ in got)
            wide: dict[str, list[int]] = {}
            await self._hand_out(link, got, unread, wide)
            for lease, lanes in wide.items():
                if lanes != [lane_of(lease)]:
                    await link.fetch(sql("wide_lease"), lease, lanes)
        if landed is not None:
            await landed()
        for ask in asks:
            ask.finish(unread.get(ask) if ask.popped is None else None)

    def _sort_out(
        self, shares: list[Share], claimed: list[tuple[Share, Claimed]]
    ) -> list[tuple[Share, Claimed]]:
        """Note what each lane gave, for the next pops; answers those that gave messages."""
        got: list[tuple[Share, Claimed]] = []
        for share, found in claimed:
            until = found.until.timestamp() if found.until is not None else None
            status, ask, left = found.status, share.asks[0], 0
            if status == "ok":
                got.append((share, found))
                left = 0 if share.lease else found.head - found.end_seq
            else:
                ask.until = until if ask.until is None or until is None else min(until, ask.until)
                if ask.lane is not None or status == "window":
                    ask.why = _WHY.get(status, "no_available_partition")
            if until is not None and until < self._clock.now() + 1:
                self._activity.look()
            if share.ready is not None:
                share.ready.answered(share.lane_id, status, until, left, share.turn)
            elif status == "ok" and share.lease and ask.lane is not None:
                self._ready.hold(ask.lane.queue.id, ask.lane.id, ask.group_id, until or 0)
        if len(claimed) < len(shares):  # the others were not asked any more: their request was full
            asked = {share for share, _ in claimed}
            for share in shares:
                if share not in asked and share.ready is not None:
                    share.ready.answered(share.lane_id, "full", None, 1, share.turn)
        return got

    async def _hand_out(
        self,
        link: Link,
        got: list[tuple[Share, Claimed]],
        unread: dict[Ask, Exception],
        wide: dict[str, list[int]],
    ) -> None:
        """Fetch the bodies and deal them out; what cannot be read is given back, and fails nobody else."""
        try:
            await self._give(link, got, wide)
        except Conflict as error:
            if len(got) > 1:
                for one in got:
                    await self._hand_out(link, [one], unread, wide)
                return
            share, found = got[0]
            seqs = handed_out(found)
            counts = dict(zip(found.failed_seqs, found.failed_counts, strict=True))
            await link.fetch(
                sql("take_back"),
                share.lane_id,
                share.group_id,
                share.lease,
                seqs,
                [counts.get(seq, 0) for seq in seqs],
            )
            if share.ready is not None:
                share.ready.release(share.lane_id, None, 0)
            unread.update(dict.fromkeys(share.asks, error))

    async def _give(self, link: Link, got: list[tuple[Share, Claimed]], wide: dict[str, list[int]]) -> None:
        """Hand out what fits into the answers; the rest is taken back before anybody hears of it."""
        limit = min(self._limit, max(LEAST, TOGETHER * self._limit // len(got)))
        ranges = [(s.lane_id, c.first_seq, c.end_seq) for s, c in got if c.end_seq > c.first_seq]
        ranges += [(s.lane_id, seq, seq + 1) for s, c in got for seq in c.parked[:PARKED_AT_ONCE]]
        short: dict[tuple[int, int], int] = {}
        segments = await self._cache.load(link, ranges, READ_AHEAD, limit, short)
        spent: dict[Ask, int] = {}
        for share, claimed in got:
            found, ask, own = claimed, share.asks[0], segments.get(share.lane_id, [])
            first, parked = found.first_seq, list(found.parked)
            end = short.get((share.lane_id, first), found.end_seq)
            if len(parked) > PARKED_AT_ONCE:
                parked = await self._read_parked(link, share.lane_id, parked, own, limit)
                end = end if len(parked) == len(found.parked) else first
            every = cut(sorted(own, key=_first_seq), first, end, found.skip, parked)
            pieces = fit(every, limit - spent.get(ask, 0), least=0 if ask in spent else 1)
            if pieces is not every or end < found.end_seq:
                found = await self._shrink(link, share, found, pieces, None if pieces is not every else end)
            if pieces:
                size = sum([piece.segment.size for piece in pieces])
                spent[ask] = spent.get(ask, 0) + size
                self._deal(share, found, pieces, size, wide)

    async def _read_parked(
        self, link: Link, lane_id: int, parked: list[int], own: list[Segment], limit: int
    ) -> list[int]:
        """Read parked messages, more at a time as long as they are small; returns those that were read."""
        at = PARKED_AT_ONCE
        while at < len(parked) and sum([segment.size for segment in own]) < limit:
            more = [(lane_id, seq, seq + 1) for seq in parked[at : 2 * at]]
            own += (await self._cache.load(link, more))[lane_id]
            at *= 2
        return parked[:at]

    async def _shrink(
        self, link: Link, share: Share, found: Claimed, pieces: list[Piece], reached: int | None
    ) -> Claimed:
        """Take back what comes after `pieces`, which end at `reached`, or with their last message."""
        kept = [piece.segment.first_seq + offset for piece in pieces for offset in piece.offsets]
        waited = set(found.parked)
        parked = [seq for seq in kept if seq in waited]
        fresh = [seq for seq in kept if seq not in waited]
        end = reached if reached is not None else fresh[-1] + 1 if fresh else found.first_seq
        lane_id, group_id, was = share.lane_id, share.group_id, found.end_seq
        done = await link.fetch(sql("shrink"), lane_id, group_id, share.lease, was, end, parked)
        if not done[0][0] and share.lease is None:
            seqs = [seq for seq in handed_out(found) if seq not in set(kept)]
            counts = dict(zip(found.failed_seqs, found.failed_counts, strict=True))
            await link.fetch(
                sql("take_back"), lane_id, group_id, None, seqs, [counts.get(seq, 0) for seq in seqs]
            )
        if share.ready is not None and (share.lease is None or not kept):
            share.ready.release(lane_id, None, 0)
        return found._replace(end_seq=end, parked=parked)

    def _deal(
        self, share: Share, found: Claimed, pieces: list[Piece], size: int, wide: dict[str, list[int]]
    ) -> None:
        lane = self._registry.lanes_by_id.get(share.lane_id)
        if lane is None:
            return
        first, end, parked = found.first_seq, found.end_seq, list(found.parked)
        failed = dict(zip(found.failed_seqs, found.failed_counts, strict=True))
        if share.lease is not None:
            now = self._clock.now()
            lease = Lease(share.lease, lane.id, share.group_id, first, end - first, parked, pieces, now)
            if size > HELD:
                lease.let_go()
            self._leases.put(lease)
            if share.asks[0].request.partitions > 1:
                wide.setdefault(share.lease, []).append(lane.id)
        self.messages += sum([len(piece.offsets) for piece in pieces])
        asks = share.asks
        dealt = [pieces] if len(asks) == 1 else deal(pieces, [ask.request.batch for ask in asks])
        for ask, mine in zip(asks, dealt, strict=True):
            if mine:
                part = PoppedLane(lane.queue.name, lane.name, lane.uid, mine, failed)
                if ask.popped is None:
                    until = found.until if share.lease else None
                    ask.popped = Popped(ask.request.group, share.lease, until, [part])
                else:
                    ask.popped.lanes.append(part)


_WHY: dict[str, Empty] = {"leased": "lease_held", "window": "window_buffer", "gone": "partition_not_found"}
