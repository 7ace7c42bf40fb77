"""Leases: ids that name their lane and group, and what this worker remembers of those that are out."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Any, NamedTuple

from settled.queue.db import sql
from settled.queue.pieces import cut
from settled.queue.places import Places

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asyncpg import BitString

    from settled.queue.cache import SegmentCache
    from settled.queue.db import Pool
    from settled.queue.popped import Piece

REMEMBERED = 20_000
REMEMBERED_MESSAGES = 1_000_000


class LostLease(NamedTuple):
    """A lease that ended before its holder had given a verdict on all of it."""

    base: int
    held: BitString
    parked: Sequence[int]
    times: int

    def had(self, seq: int) -> bool:
        """Whether this message was under it without a verdict."""
        at = seq - self.base
        return seq in self.parked or (0 <= at < len(self.held) and bool(self.held[at]))


class Lease:
    """One lane's part of a lease: where its range begins, its length, and which message is where."""

    __slots__ = (
        "_pieces",
        "_places",
        "base",
        "group_id",
        "id",
        "key",
        "lane_id",
        "length",
        "lost",
        "parked",
        "popped_at",
    )

    def __init__(
        self,
        lease_id: str,
        lane_id: int,
        group_id: int,
        base: int,
        length: int,
        parked: list[int],
        pieces: list[Piece],
        popped_at: float,
    ) -> None:
        self.id = lease_id
        self.lane_id = lane_id
        self.group_id = group_id
        self.key = (lane_id, group_id)
        self.base = base
        self.length = length
        self.parked = parked
        self.popped_at = popped_at
        self.lost: list[LostLease] | None = None
        self._pieces = pieces
        self._places: Places | None = None

    def disputed(self, seq: int) -> bool:
        """Whether an earlier holder of this message gave no verdict, and may yet come with one."""
        return any(lost.had(seq) for lost in self.lost or ())

    def place(self, transaction_id: str) -> int | None:
        """The sequence number of a message under this lease, or None."""
        found = self._known().find(transaction_id)
        return found if found >= 0 else None

    def mask(self, transaction_ids: Sequence[str]) -> int:
        """These messages as bits from `base` on; 0 if one is unknown, parked or named twice."""
        if self.parked:
            return 0
        if len(transaction_ids) == 1:  # as most are that are acked one by one
            at = (self._places or self._known()).find(transaction_ids[0]) - self.base
            return 1 << at if 0 <= at < self.length else 0
        if len(transaction_ids) == self.length and transaction_ids == self.transaction_ids():
            return (1 << self.length) - 1
        places = self._known().find_all(transaction_ids)
        first, last, count = min(places), max(places), len(places)
        if first < self.base or last >= self.base + self.length:
            return 0
        if len(set(places)) != count:
            return 0
        if last - first == count - 1:
            return ((1 << count) - 1) << (first - self.base)
        mask = 0
        for place in places:
            mask |= 1 << (place - first)
        return mask << (first - self.base)

    def transaction_ids(self) -> list[str]:
        """The messages under this lease, in the order in which they were handed out."""
        if self._places is not None:
            return self._places.ids()
        ids: list[str] = []
        for piece in self._pieces:
            ids += piece.segment.txs_of(piece.offsets)
        return ids

    def let_go(self) -> None:
        """Keep the ids of the messages, and no longer the messages."""
        self._known()

    def _known(self) -> Places:
        if self._places is None:
            seqs = [piece.segment.first_seq + offset for piece in self._pieces for offset in piece.offsets]
            self._places, self._pieces = Places(self.transaction_ids(), seqs), []
        return self._places


class Leases:
    """The leases this worker handed out or had to look up, the most recent ones."""

    def __init__(self, pool: Pool, cache: SegmentCache) -> None:
        self._pool = pool
        self._cache = cache
        self._known: OrderedDict[tuple[str, int], Lease] = OrderedDict()
        self._messages = 0
        self.current: dict[tuple[int, int], str] = {}

    def __len__(self) -> int:
        return len(self._known)

    def put(self, lease: Lease) -> None:
        """Remember a lease; the oldest of many are forgotten, and looked up if they are needed."""
        self._known[(lease.id, lease.lane_id)] = lease
        self.current[(lease.lane_id, lease.group_id)] = lease.id
        self._messages += lease.length
        while len(self._known) > REMEMBERED or (
            self._messages > REMEMBERED_MESSAGES and len(self._known) > 1
        ):
            self.drop(next(iter(self._known.values())))

    def drop(self, lease: Lease) -> None:
        """Forget a lease that is over."""
        if self._known.pop((lease.id, lease.lane_id), None) is not None:
            self._messages -= lease.length
        if self.current.get((lease.lane_id, lease.group_id)) == lease.id:
            del self.current[(lease.lane_id, lease.group_id)]

    def drop_older(self, popped_before: float) -> None:
        """Forget leases nobody settled for long."""
        for lease in [held for held in self._known.values() if held.popped_at < popped_before]:
            self.drop(lease)

    def known(self, lease_id: str | None, lane_id: int, group_id: int) -> Lease | None:
        """A lease as this worker remembers it; without an id, the last it saw on that lane for that group."""
        lease = self._known.get((lease_id or self.current.get((lane_id, group_id), ""), lane_id))
        return lease if lease is not None and lease.group_id == group_id else None

    async def look(self, lease: Lease) -> None:
        """Read which leases of its lane were lost before; that changes only when this one is over."""
        if lease.lost is None:
            rows = await self._pool.fetch(sql("lost_leases"), *lease.key)
            lease.lost = [LostLease(row["base"], row["held"], row["parked"], row["times"]) for row in rows]

    async def find(self, lease_id: str | None, lane_id: int, group_id: int, now: float) -> Lease | None:
        """A valid lease as the database has it, or None; without an id, whichever holds the lane."""
        row: Any = await self._pool.fetchrow(sql("lease_row"), lane_id, group_id)
        if row is None or row["lease"] is None or not row["valid"]:
            return None
        if lease_id is not None and str(row["lease"]) != lease_id:
            return None
        ranges = [(lane_id, row["base"], row["batch_end"])]
        parked = sorted(row["parked_out"])
        ranges += [(lane_id, seq, seq + 1) for seq in parked]
        segments = (await self._cache.load(self._pool, ranges))[lane_id]
        segments.sort(key=lambda segment: segment.first_seq)
        pieces = cut(segments, row["base"], row["batch_end"], None, parked)
        length = row["batch_end"] - row["base"]
        lease = Lease(str(row["lease"]), lane_id, group_id, row["base"], length, parked, pieces, now)
        self.put(lease)
        return lease
