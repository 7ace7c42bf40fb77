"""The in-memory queue: lanes in order, and for each group a cursor, leases, retries and dead letters."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Literal

from settled.backoff import AFTER_NAK
from settled.message import Delivery, Metadata
from settled.settlement import Action, Reason


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueOptions:
    """How a queue leases and retries. Times are in seconds."""

    lease: float = 300.0
    """How long a consumer has to settle what it took."""
    retry: Literal["in_order", "parked"] = "in_order"
    """Whether an ordered lane waits for a failed message, or goes on without it."""
    retry_limit: int | None = None
    """Failures after which a message is dead; None is never."""
    retry_delay: float = AFTER_NAK.initial
    """The wait after the first failure; it doubles with each further one."""
    retry_delay_max: float = AFTER_NAK.maximum

    def __post_init__(self) -> None:
        for name in ("retry_delay", "retry_delay_max"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"queue: {name} must be 0 or more seconds, got {getattr(self, name)!r}")
        if not self.lease > 0:
            raise ValueError(f"queue: lease must be more than 0 seconds, got {self.lease!r}")
        if self.retry not in ("in_order", "parked"):
            raise ValueError(f"queue: retry must be 'in_order' or 'parked', got {self.retry!r}")
        if self.retry_limit is not None and self.retry_limit < 1:
            raise ValueError(f"queue: retry_limit must be None or at least 1, got {self.retry_limit!r}")

    def backoff(self, failures: int) -> float:
        """The wait after the given number of failures."""
        return float(min(self.retry_delay * 2 ** min(failures - 1, 63), self.retry_delay_max))


@dataclass(slots=True)
class Record:
    """A stored message."""

    sequence: int
    id: str
    data: bytes
    headers: Mapping[str, str]
    time: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetter:
    """A message that will not be tried again, with its own copy of everything."""

    id: str
    subject: str
    group: str
    lane: str | None
    data: bytes
    headers: Mapping[str, str]
    reason: Reason
    error: str
    attempts: int
    published_at: float
    died_at: float


@dataclass(frozen=True, slots=True)
class Settled:
    """How one delivery ended."""

    id: str
    subject: str
    group: str
    lane: str | None
    attempt: int
    action: Action
    at: float


@dataclass(slots=True)
class Lease:
    """A consumer's right to settle what it took, until it expires."""

    id: int
    expires: float
    open: set[int]


_lease_numbers = itertools.count(1)


class Lane:
    """An append-only log; what every group is done with is forgotten."""

    __slots__ = ("base", "end", "ids", "log", "name")

    def __init__(self, name: str | None) -> None:
        self.name = name
        self.base = 0
        self.end = 0
        self.log: dict[int, Record] = {}
        self.ids: set[str] = set()

    def append(self, record: Record) -> None:
        record.sequence = self.end
        self.log[self.end] = record
        self.end += 1

    def forget_before(self, sequence: int) -> None:
        while self.base < sequence:
            self.ids.discard(self.log.pop(self.base).id)
            self.base += 1


@dataclass(slots=True)
class Cursor:
    """Where one group stands in one lane. Each message is in exactly one place:

    ahead of `next`, in a lease, in `back` (available again), in `parked` (until its time), or done.
    """

    lane: Lane
    next: int
    floor: int
    back: list[int] = field(default_factory=list)
    parked: list[tuple[float, int]] = field(default_factory=list)
    leases: dict[int, Lease] = field(default_factory=dict)
    expiries: list[tuple[float, int]] = field(default_factory=list)
    failures: dict[int, int] = field(default_factory=dict)
    handed_out: set[int] = field(default_factory=set)
    timer: float | None = None

    def refresh(self, now: float) -> None:
        """Bring back what is due: retries whose time has come, and what expired leases still held."""
        while self.parked and self.parked[0][0] <= now:
            heapq.heappush(self.back, heapq.heappop(self.parked)[1])
        while self.expiries and self.expiries[0][0] <= now:
            _, lease_id = heapq.heappop(self.expiries)
            lease = self.leases.get(lease_id)
            if lease is None:
                continue
            if lease.expires > now:
                heapq.heappush(self.expiries, (lease.expires, lease_id))
                continue
            del self.leases[lease_id]
            for sequence in lease.open:
                heapq.heappush(self.back, sequence)

    def take(self, limit: int, now: float, options: QueueOptions) -> tuple[Lease, list[Record]] | None:
        """Lease up to `limit` messages in order of sequence; an ordered lane has one lease at a time."""
        self.refresh(now)
        if self.lane.name is not None and self.leases:
            return None
        waits_for = None
        if self.parked and self.keeps_order(options):
            waits_for = min(sequence for _, sequence in self.parked)
        if not self.back and waits_for is None:
            taken = list(range(self.next, min(self.next + limit, self.lane.end)))
            self.next += len(taken)
        else:
            taken = list(self._next_sequences(limit, waits_for))
        if not taken:
            return None
        lease = Lease(next(_lease_numbers), now + options.lease, set(taken))
        self.leases[lease.id] = lease
        heapq.heappush(self.expiries, (lease.expires, lease.id))
        self.handed_out.update(taken)
        return lease, [self.lane.log[sequence] for sequence in taken]

    def keeps_order(self, options: QueueOptions) -> bool:
        """Whether the lane waits for a message that failed."""
        return self.lane.name is not None and options.retry == "in_order"

    def _next_sequences(self, limit: int, waits_for: int | None) -> Iterator[int]:
        for _ in range(limit):
            fresh = self.next if self.next < self.lane.end else None
            if self.back and (fresh is None or self.back[0] < fresh):
                if waits_for is not None and self.back[0] > waits_for:
                    return
                yield heapq.heappop(self.back)
            elif fresh is not None and (waits_for is None or fresh < waits_for):
                self.next += 1
                yield fresh
            else:
                return

    def settle(self, sequence: int, lease_id: int, now: float) -> bool:
        """Take a message out of its lease; False if the lease does not hold it any more."""
        lease = self.leases.get(lease_id)
        if lease is None or lease.expires <= now or sequence not in lease.open:
            return False
        lease.open.remove(sequence)
        if not lease.open:
            del self.leases[lease_id]
            if len(self.expiries) > 2 * len(self.leases) + 16:
                self.expiries = [(live.expires, live.id) for live in self.leases.values()]
                heapq.heapify(self.expiries)
        return True

    def done(self, sequence: int) -> None:
        """The message is finished for this group."""
        self.handed_out.discard(sequence)
        self.failures.pop(sequence, None)
        while self.floor < self.next and self.floor not in self.handed_out:
            self.floor += 1

    def look_again(self) -> float | None:
        """When to look for what is due; cheap, and early rather than late."""
        times = [heap[0][0] for heap in (self.parked, self.expiries) if heap]
        return min(times) if times else None

    def pending(self) -> int:
        """What is still to be handed out, retries included."""
        return self.lane.end - self.next + len(self.back) + len(self.parked)


class MemoryDelivery(Delivery):
    """A delivery that remembers where it was taken from."""

    __slots__ = ("cursor", "group", "lease_id", "record")

    def __init__(
        self, record: Record, subject: str, group: str, cursor: Cursor, lease_id: int, ordered: bool
    ) -> None:
        self.id = record.id
        self.subject = subject
        self.data = record.data
        self.headers = record.headers
        self.attempt = cursor.failures.get(record.sequence, 0) + 1 if cursor.failures else 1
        self.lane = cursor.lane.name
        self.ordered = ordered
        self.settled = False
        self.handled = False
        self.record = record
        self.group = group
        self.cursor = cursor
        self.lease_id = lease_id

    def metadata(self) -> Metadata:
        sequence = self.record.sequence + 1
        return Metadata(
            stream_sequence=sequence,
            consumer_sequence=sequence,
            timestamp=datetime.fromtimestamp(self.record.time, UTC),
            pending=self.cursor.pending(),
            redelivery_count=self.attempt - 1,
            consumer=self.group,
            lane=self.lane,
            lease=str(self.lease_id),
        )
