"""What each group did with each of many messages, read in a few statements."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

from settled.queue.db import sql
from settled.queue.leases import LostLease
from settled.queue.types import GroupState

if TYPE_CHECKING:
    from collections.abc import Mapping

    from settled.queue.core import Core


class _Progress:
    """A group on a lane: where it is, and what it holds."""

    def __init__(self, row: Any) -> None:
        self.group: str = row["name"]
        self.cursor: int = row["cursor"]
        self.base: int = row["base"]
        self.until: Any = row["lease_until"]
        self.leased: bool = bool(row["leased"])
        self.parked_out: set[int] = set(row["parked_out"])
        self.batch_end: int = row["batch_end"]
        self._done, self._answered = row["done"], row["answered"]
        self._bits = (self._done.to_int(), self._answered.to_int())

    def done(self, seq: int) -> bool:
        return seq < self.cursor or _bit(self._bits[0], len(self._done), seq - self.base)

    def holds(self, seq: int) -> bool:
        """Whether the message is out under a lease and not answered yet."""
        if not self.leased:
            return False
        if seq in self.parked_out:
            return True
        inside = self.base <= seq < self.batch_end
        return inside and not _bit(self._bits[1], len(self._answered), seq - self.base)


def _bit(bits: int, size: int, at: int) -> bool:
    return 0 <= at < size and bool(bits >> (size - 1 - at) & 1)


class States:
    """How far every group is with the messages of some lanes."""

    def __init__(self) -> None:
        self.holes: set[tuple[int, int]] = set()
        self._groups: dict[int, list[_Progress]] = {}
        self._failed: dict[tuple[int, str, int], Any] = {}
        self._dead: dict[tuple[int, str, int], Any] = {}
        self._lost: dict[tuple[int, str], list[LostLease]] = {}

    @classmethod
    async def read(cls, core: Core, ranges: Mapping[int, tuple[int, int]]) -> Self:
        """The states of messages of lanes, by lane the first and the last sequence number."""
        states = cls()
        lanes = list(ranges)
        bounds = (lanes, [r[0] for r in ranges.values()], [r[1] for r in ranges.values()])
        if lanes:
            for row in await core.pool.fetch(sql("lane_consumers"), lanes):
                states._groups.setdefault(row["lane_id"], []).append(_Progress(row))
            for row in await core.pool.fetch(sql("lane_failures"), *bounds):
                kind = states._dead if row["dead"] else states._failed
                kind[(row["lane_id"], row["name"], row["seq"])] = row
            for row in await core.pool.fetch(sql("lane_lost"), lanes):
                lost = LostLease(row["base"], row["held"], row["parked"], row["times"])
                states._lost.setdefault((row["lane_id"], row["name"]), []).append(lost)
            holes = await core.pool.fetch(sql("lane_holes"), *bounds)
            states.holes = {(row["lane_id"], row["seq"]) for row in holes}
        return states

    def of(self, lane_id: int, seq: int) -> list[GroupState]:
        """What each group did with one message."""
        found = []
        for progress in self._groups.get(lane_id, ()):
            key = (lane_id, progress.group, seq)
            failed, dead = self._failed.get(key), self._dead.get(key)
            attempts, error = (failed["attempts"], failed["error"]) if failed is not None else (0, None)
            if progress.holds(seq):
                state = GroupState(progress.group, "processing", attempts, progress.until, error)
            elif failed is not None:
                state = GroupState(progress.group, "retrying", attempts, None, error)
            elif dead is not None:
                state = GroupState(progress.group, "dead_letter", dead["attempts"], None, dead["error"])
            else:
                state = GroupState(progress.group, "completed" if progress.done(seq) else "pending")
            state.unsettled = sum(
                lost.times for lost in self._lost.get((lane_id, progress.group), ()) if lost.had(seq)
            )
            if not state.unsettled and dead is not None:
                state.unsettled = dead["unsettled"]
            found.append(state)
        return found
