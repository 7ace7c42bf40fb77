"""What one caller wants settled, message by message."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from settled.queue.types import AckItem, AckResult
from settled.settlement import storable

if TYPE_CHECKING:
    from settled.queue.lanes import Lane
    from settled.queue.leases import Lease

LEASE_LOST = "Lease validation failed"
UNPROVEN = (
    f"{LEASE_LOST}: this message was delivered before, and that delivery had no verdict yet; send the "
    "leaseId of yours"
)
SETTLED_BEFORE = "Message already settled: its outcome is committed"
UNKNOWN = "Message not found: transactionId is unresolvable under this lease"


class Mark:
    """One message to settle, found under its lease."""

    __slots__ = ("delay", "error", "item", "kind", "lane", "lease", "result", "seq")

    def __init__(self, item: AckItem, lane: Lane, lease: Lease, seq: int, kind: str) -> None:
        self.item = item
        self.lane = lane
        self.lease = lease
        self.seq = seq
        self.kind = kind
        self.error = None if item.error is None else storable(item.error)
        self.delay = item.delay
        self.result: AckResult | None = None

    @property
    def single(self) -> bool:
        """Whether it needs more than a bit."""
        return (
            self.kind != "ack"
            or self.seq < self.lease.base
            or self.seq >= self.lease.base + self.lease.length
            or (bool(self.lease.parked) and self.seq in self.lease.parked)
        )

    def refuse(self, message: Any, error: str) -> None:
        """Answer that it was not settled."""
        self.result = AckResult(
            self.item.transaction_id, False, message, error, self.lane.queue.name, self.lane.name
        )
        self.result.noop = self.kind == "ack" and error is SETTLED_BEFORE


class Settlement:
    """One caller's marks; with `atomic` they are settled together or not at all."""

    __slots__ = ("atomic", "future", "marks")

    def __init__(self, marks: list[Mark], atomic: bool) -> None:
        self.marks = marks
        self.atomic = atomic
        self.future: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def live(self) -> list[Mark]:
        """What is still to be settled."""
        if self.atomic and any(mark.result is not None for mark in self.marks):
            return []
        return [mark for mark in self.marks if mark.result is None]

    def fail(self, error: Exception) -> None:
        """Tell the caller that nobody knows what became of it."""
        if not self.future.done():
            self.future.set_exception(error)

    def finish(self) -> None:
        """Answer the caller; what an atomic call gave up because of another item says so."""
        for mark in self.marks:
            if mark.result is None:
                mark.refuse("not_applied", "not settled because another item of the same call could not be")
        if not self.future.done():
            self.future.set_result(None)


def overlaps(
    settlement: Settlement, touched: dict[tuple[str, int], set[int]], out: set[tuple[int, int]]
) -> bool:
    """Whether it touches a message that this flush settles already, or a lane another call works on."""
    own: dict[tuple[str, int], set[int]] = {}
    last: Lease | None = None
    seqs: set[int] = set()
    for mark in settlement.marks:
        lease = mark.lease
        if lease is not last:
            if (lease.lane_id, lease.group_id) in out:
                return True
            last = lease
            seqs = own.setdefault((lease.id, lease.lane_id), set())
        seqs.add(mark.seq)
    if any(not seqs.isdisjoint(touched.get(key, ())) for key, seqs in own.items()):
        return True
    for key, seqs in own.items():
        touched.setdefault(key, set()).update(seqs)
    return False


def refusal(item: AckItem, lane: Lane | None, lease: Lease | None, lost: str = LEASE_LOST) -> AckResult:
    """Why an item cannot be settled; without a lease, `lost` says why there is none."""
    if lane is None:
        return AckResult(item.transaction_id, False, "not_found", "Partition not found")
    queue, partition = lane.queue.name, lane.name
    if lease is None:
        return AckResult(item.transaction_id, False, "invalid_lease", lost, queue, partition)
    return AckResult(item.transaction_id, False, "not_found", UNKNOWN, queue, partition)
