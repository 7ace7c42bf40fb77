"""Segments by (lane, sequence number): an LRU of bounded size in front of the table."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

from settled.queue.db import sql
from settled.queue.segment import Segment, count

if TYPE_CHECKING:
    from collections.abc import Sequence

    from settled.queue.db import Link, Pool

EPOCH_US = 1_000_000
UNLIMITED = 2**62


class SegmentCache:
    """Recently written and recently read segments; messages never change, so they are never stale.

    Segments may be merged into longer ones: a longer one that is read takes the place of those it covers.
    """

    def __init__(self, capacity: int = 24 * 2**20) -> None:
        self._capacity = capacity
        self._size = 0
        self._segments: OrderedDict[tuple[int, int], Segment | tuple[int, bytes]] = OrderedDict()
        self._starts: dict[int, list[int]] = {}

    @property
    def size(self) -> int:
        """How many bytes it holds, about."""
        return self._size

    def put(self, lane_id: int, first_seq: int, created_us: int, raw: bytes) -> None:
        """Keep a segment as stored; it is decoded when somebody reads it."""
        key = (lane_id, first_seq)
        if key not in self._segments:
            self._segments[key] = (created_us, raw)
            starts = self._starts.get(lane_id)
            if not starts:
                self._starts[lane_id] = [first_seq]
            elif first_seq > starts[-1]:
                starts.append(first_seq)
            else:
                insort(starts, first_seq)
            self._grow(len(raw) + 200)

    def _cover(self, lane_id: int, first_seq: int, end_seq: int) -> None:
        """Drop segments that one from `first_seq` to `end_seq` covers, but for that one itself."""
        starts = self._starts.get(lane_id, [])
        low, high = bisect_left(starts, first_seq), bisect_left(starts, end_seq)
        for start in starts[low:high]:
            if start > first_seq or _count(self._segments[(lane_id, start)]) < end_seq - first_seq:
                self._size -= _weight(self._segments.pop((lane_id, start)))
                starts.remove(start)

    def _grow(self, size: int) -> None:
        self._size += size
        while self._size > self._capacity and self._segments:
            (lane_id, first_seq), entry = self._segments.popitem(last=False)
            self._size -= _weight(entry)
            starts = self._starts[lane_id]
            starts.pop(bisect_right(starts, first_seq) - 1)
            if not starts:
                del self._starts[lane_id]

    def forget_lane(self, lane_id: int) -> None:
        """Drop a lane's segments."""
        for first_seq in self._starts.pop(lane_id, ()):
            self._size -= _weight(self._segments.pop((lane_id, first_seq)))

    def find(self, lane_id: int, seq: int) -> Segment | None:
        """The cached segment that holds this message, or None."""
        starts = self._starts.get(lane_id)
        if not starts:
            return None
        at = bisect_right(starts, seq) - 1
        if at < 0:
            return None
        key = (lane_id, starts[at])
        entry = self._segments[key]
        if isinstance(entry, tuple):
            segment = Segment(key[1], *entry)
            self._segments[key] = segment
            self._grow(_weight(segment) - _weight(entry))
        else:
            segment = entry
        if key in self._segments:
            self._segments.move_to_end(key)
        return segment if seq < segment.end_seq else None

    def run(self, lane_id: int, first: int, end: int) -> tuple[list[Segment], int]:
        """Cached segments from `first` on without a gap, and where they end."""
        found = []
        while first < end and (segment := self.find(lane_id, first)) is not None:
            found.append(segment)
            first = segment.end_seq
        return found, first

    async def load(
        self,
        source: Link | Pool,
        ranges: Sequence[tuple[int, int, int]],
        ahead: int = 0,
        limit: int = UNLIMITED,
        short: dict[tuple[int, int], int] | None = None,
    ) -> dict[int, list[Segment]]:
        """The segments of each (lane, first, end), in order, whatever of them still exists.

        Of a range with more than `limit` stored bytes the rest is left out; `short` is told where it begins.
        """
        result: dict[int, list[Segment]] = {}
        missing: list[tuple[int, int, int]] = []
        begun: list[int] = []
        for lane_id, first, end in ranges:
            found, reached = self.run(lane_id, first, end)
            result.setdefault(lane_id, []).extend(found)
            if reached < end:
                missing.append((lane_id, reached, end))
                begun.append(first)
        if missing:
            rows = await source.fetch(
                sql("segments"),
                [m[0] for m in missing],
                [m[1] for m in missing],
                [m[2] for m in missing],
                ahead,
                limit,
            )
            fetched: dict[int, list[Any]] = {}
            for row in rows:
                fetched.setdefault(row["lane_id"], []).append(row)
            for (lane_id, first, end), start in zip(missing, begun, strict=True):
                read, stop = 0, end
                for row in fetched.get(lane_id, ()):
                    self._cover(lane_id, row["first_seq"], row["first_seq"] + row["n"])
                    self.put(lane_id, row["first_seq"], micros(row["created_at"]), row["body"])
                    if row["first_seq"] < end and row["first_seq"] + row["n"] > first:
                        read, stop = read + len(row["body"]), row["first_seq"] + row["n"]
                        found_now = self.find(lane_id, row["first_seq"])
                        if found_now is None:  # too big for the cache
                            found_now = Segment(row["first_seq"], micros(row["created_at"]), row["body"])
                        result[lane_id].append(found_now)
                if short is not None and read >= limit and stop < end:
                    short[(lane_id, start)] = stop
        return result

    async def message(self, source: Link | Pool, lane_id: int, seq: int) -> Segment | None:
        """The segment with this message, or None if it is gone."""
        segments = (await self.load(source, [(lane_id, seq, seq + 1)]))[lane_id]
        return segments[0] if segments and segments[0].first_seq <= seq < segments[0].end_seq else None


def _count(entry: Segment | tuple[int, bytes]) -> int:
    return count(entry[1]) if isinstance(entry, tuple) else entry.n


def _weight(entry: Segment | tuple[int, bytes]) -> int:
    return 200 + (len(entry[1]) if isinstance(entry, tuple) else entry.size + 120 * entry.n)


def micros(at: Any) -> int:
    """A timestamp as µs since 1970."""
    return int(at.timestamp()) * EPOCH_US + int(at.microsecond)
