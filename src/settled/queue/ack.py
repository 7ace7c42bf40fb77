"""Settling: acks of many callers become bits in one call; what cannot be settled is taken out alone."""

from __future__ import annotations

import asyncio
from collections import deque
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, TypeAlias

import asyncpg

from settled.queue.acks import AckQueue, Acks, bit_string, settle_shortly
from settled.queue.db import Link
from settled.queue.errors import BadRequest, Unavailable
from settled.queue.marks import LEASE_LOST, SETTLED_BEFORE, UNPROVEN, Mark, Settlement, overlaps, refusal
from settled.queue.turns import Turns
from settled.queue.types import AckItem, AckResult

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterable, Sequence

    from settled.queue.activity import Activity
    from settled.queue.cache import SegmentCache
    from settled.queue.db import Clock
    from settled.queue.lanes import Lane, Registry
    from settled.queue.leases import Lease, Leases
    from settled.queue.ready import ReadySets
    from settled.queue.soon import Done
    from settled.queue.types import Acked

SETTLERS = 2
KINDS = {"completed": "ack", "success": "ack", "failed": "failed", "dlq": "dlq", "retry": "retry"}
SETTLE = f"select * from settle({', '.join(f'${i}' for i in range(1, 22))})"  # noqa: S608 - placeholders only
ROUNDS = 50
Released: TypeAlias = "tuple[Lane, int, bool, float | None]"
"""A lane whose lease is over: its group, whether more is to be read there, and when something comes due."""


class Settler:
    """Gathers settlements into calls."""

    def __init__(
        self,
        dsn: str,
        worker: str,
        registry: Registry,
        cache: SegmentCache,
        ready: ReadySets,
        leases: Leases,
        clock: Clock,
        activity: Activity,
    ) -> None:
        self._activity = activity
        self._worker = worker
        self._registry = registry
        self._cache = cache
        self._ready = ready
        self._leases = leases
        self._clock = clock
        self._links = [Link(dsn) for _ in range(SETTLERS)]
        self._pending: deque[Settlement] = deque()
        self.plain = AckQueue(worker, ready, leases, clock, activity)
        self._out: set[tuple[int, int]] = set()
        self._turns = Turns()
        self._closing = False
        self._tasks: list[asyncio.Task[None]] = []
        self.calls = 0
        self.settled = 0
        self.refused = 0
        self.outcomes = {"failed_retry": 0, "failed_dlq": 0, "failed_dropped": 0, "released": 0}

    async def start(self) -> None:
        """Begin settling."""
        await asyncio.gather(*(link.get() for link in self._links))
        self._tasks = [asyncio.create_task(self._run(link)) for link in self._links]

    async def close(self) -> None:
        """Settle what is waiting and stop."""
        self._closing = True
        self._turns.ring()
        await asyncio.gather(*self._tasks)
        for link in self._links:
            await link.close()

    def ack_soon(
        self,
        partition_id: str,
        lease_id: str | None,
        group: str,
        transaction_ids: Sequence[str],
        done: Done[Acked],
    ) -> bool:
        """Ack messages of one known lease, all or none; False, and nothing is done, if it takes `settle`."""
        lane = self._registry.lanes_by_uid.get(partition_id)
        group_id = self._registry.groups.get(group)
        if lane is None or group_id is None or self._closing:
            return False
        lease = self._leases.known(lease_id, lane.id, group_id)
        if lease is None or (not lease_id and lease.lost != []):  # who says no lease may mean another
            return False
        mask = lease.mask(transaction_ids)
        if not mask:
            return False
        self.plain.pending.append(Acks(lane, lease, mask, len(transaction_ids), done))
        self._turns.ring(len(self.plain.pending))
        return True

    async def settle(self, items: Sequence[AckItem], group: str, *, atomic: bool) -> list[AckResult]:
        """Settle items and answer in their order."""
        for partition_id, own in {(i.partition_id, i.group or group) for i in items if not i.lease_id}:
            lane, group_id = self._registry.lanes_by_uid.get(partition_id), self._registry.groups.get(own)
            if lane is not None and group_id is not None:
                lease = self._leases.known(None, lane.id, group_id)
                if lease is not None:
                    await self._leases.look(lease)
        return await settle_shortly(self, items, group, atomic=atomic)

    async def settle_closely(self, items: Sequence[AckItem], group: str, *, atomic: bool) -> list[AckResult]:
        """Settle items of any kind, each looked up under its lease."""
        for _ in range(3):
            results, marks = await self.find(items, group)
            if marks and not (atomic and any(r is not None for r in results)):
                if self._closing:
                    raise Unavailable("the engine is closing")
                settlement = Settlement([m for m in marks if m is not None], atomic)
                self._pending.append(settlement)
                self._turns.ring()
                await settlement.future
            stale = [
                m
                for m in marks
                if m is not None
                and m.item.lease_id is None
                and m.result is not None
                and m.result.message == "invalid_lease"
            ]
            if not stale or (not atomic and len(stale) < len(items)):
                break
            # No lease id was given and the one we remembered is over: see who holds the lane now.
        answers = []
        for item, result, mark in zip(items, results, marks, strict=True):
            if result is None and mark is not None and mark.result is None:
                mark.refuse("not_applied", "not settled because another item of the same call could not be")
            answer = result or (mark.result if mark is not None else None)
            if answer is None or not answer.success:
                self.refused += 1
            answers.append(answer or AckResult(item.transaction_id, False, "not_applied"))
        return answers

    async def find(
        self, items: Sequence[AckItem], group: str
    ) -> tuple[list[AckResult | None], list[Mark | None]]:
        """Each item's message under its lease, or the answer that there is none."""
        results: list[AckResult | None] = []
        marks: list[Mark | None] = []
        taken: dict[tuple[str, int], set[int]] = {}
        last: tuple[str, str | None, str | None] | None = None
        lane: Lane | None = None
        lease: Lease | None = None
        seen: set[int] = set()
        for item in items:
            kind = KINDS.get(item.status)
            if kind is None:
                raise BadRequest("status", item.status, f"must be one of {', '.join(KINDS)}")
            if item.delay is not None and not 0 <= item.delay <= 366 * 86_400:
                raise BadRequest("delay", item.delay, "must be 0 s to a year")
            key = (item.partition_id, item.lease_id, item.group)
            if key != last:  # neighbours nearly always share a lease
                last = key
                lane, lease = await self._lease(item, item.group or group)
                if lease is not None:
                    seen = taken.setdefault((lease.id, lease.lane_id), set())
            seq = lease.place(item.transaction_id) if lease is not None else None
            if lane is None or lease is None or seq is None or seq in seen:
                results.append(refusal(item, lane, lease))
                marks.append(None)
                continue
            if not item.lease_id and lease.disputed(seq):
                results.append(refusal(item, lane, None, UNPROVEN))
                marks.append(None)
                continue
            seen.add(seq)
            results.append(None)
            marks.append(Mark(item, lane, lease, seq, kind))
        return results, marks

    async def _lease(self, item: AckItem, group: str) -> tuple[Lane | None, Lease | None]:
        """The lane and lease an item speaks of."""
        registry = self._registry
        lane = registry.lanes_by_uid.get(item.partition_id) or await registry.lane_by_uid(item.partition_id)
        group_id = registry.groups.get(group) or await registry.group(group)
        if lane is None:
            return None, None
        lease = self._leases.known(item.lease_id or None, lane.id, group_id)
        if lease is not None and not item.lease_id and lease.place(item.transaction_id) is None:
            lease = None  # it was over, perhaps, and another worker has handed out the next
        if lease is None:
            lease = await self._leases.find(item.lease_id or None, lane.id, group_id, self._clock.now())
        if lease is not None and not item.lease_id:
            await self._leases.look(lease)
        return lane, lease

    async def _run(self, link: Link) -> None:
        while True:
            acks = self.plain.take(self._out) if self._turns.may_start(len(self.plain.pending)) else {}
            if acks:
                with self._turns.out(sum(map(len, acks.values()))) as landed:
                    await self._hold(acks, self.plain.apply(link, acks, landed))
            taken = self._take()
            if taken:
                leases = {mark.lease for settlement in taken for mark in settlement.marks}
                await self._hold(leases, self._finish(link, taken))
            if not acks and not taken:
                if self._closing and not self._pending and not self.plain.pending:
                    return
                await self._turns.wait()

    async def _hold(self, leases: Iterable[Lease], work: Coroutine[Any, Any, None]) -> None:
        """Keep other calls off these lanes while the work is done."""
        keys = {lease.key for lease in leases}
        self._out |= keys
        try:
            await work
        finally:
            self._out -= keys
            self._turns.ring()

    async def _finish(self, link: Link, settlements: list[Settlement]) -> None:
        """Apply and answer; what the database refuses together is tried one by one, so only the bad fails."""
        released: list[Released] = []
        try:
            await self.apply(link, settlements, released)
        except asyncpg.PostgresError as error:
            if len(settlements) == 1:
                settlements[0].fail(error)
            else:
                for settlement in settlements:
                    await self._finish(link, [settlement])
        except Exception as error:  # the callers must hear of it, whatever it is
            for settlement in settlements:
                settlement.fail(error)
        else:
            for settlement in settlements:
                settlement.finish()
        finally:
            self.tell(released)

    def tell(self, released: list[Released]) -> None:
        """Leases are over, and that is on disk: tell who waits, here and elsewhere."""
        for lane, group_id, pending, due in released:
            if pending:
                self._ready.released(lane.queue.id, lane.id, group_id, due)
                if due is not None:
                    self._activity.look()
            else:
                self._ready.freed(lane.queue.id, lane.id, group_id)
        if released:
            self._activity.ring()

    def _take(self) -> list[Settlement]:
        """Settlements that touch different messages, on lanes no other call is working on."""
        taken: list[Settlement] = []
        touched: dict[tuple[str, int], set[int]] = {}
        later: list[Settlement] = []
        while self._pending and len(taken) < 2000:
            settlement = self._pending.popleft()
            if settlement.future.done():
                continue
            if overlaps(settlement, touched, self._out):
                later.append(settlement)
            else:
                taken.append(settlement)
        self._pending.extendleft(reversed(later))
        return taken

    async def apply(self, link: Any, settlements: list[Settlement], released: list[Released]) -> None:
        """Settle; what cannot be is taken out and the rest tried again, until nothing is in the way.

        The leases that are over then are noted in `released`, for `tell` after the commit.
        """
        for _ in range(ROUNDS):
            marks = [mark for settlement in settlements for mark in settlement.live()]
            if not marks or await self._call(link, marks, released):
                return
        for settlement in settlements:  # nobody behaves like this; one by one they cannot hinder each other
            while live := settlement.live():
                if await self._call(link, live, released):
                    break

    async def _call(self, link: Any, marks: list[Mark], told: list[Released]) -> bool:
        """One call of settle(); False if something had to be taken out."""
        ranges: dict[Lease, list[Mark]] = {}
        singles: list[Mark] = []
        for mark in marks:
            if mark.single:
                singles.append(mark)
            else:
                ranges.setdefault(mark.lease, []).append(mark)
        singles.sort(key=lambda m: (m.lease.lane_id, m.lease.group_id, m.seq))
        leases = sorted(ranges, key=lambda lease: (lease.lane_id, lease.group_id))
        bits, firsts, lasts, counts, took = [], [], [], [], []
        now = self._clock.now()
        for lease in leases:
            own = ranges[lease]
            base, mask = lease.base, 0
            if len(own) > 64:
                flags = bytearray(lease.length)
                for mark in own:
                    flags[mark.seq - base] = 1
                mask = int(bytes(flags[::-1]).translate(_DIGITS) or b"0", 2)
            else:
                for mark in own:
                    mask |= 1 << (mark.seq - base)
            bits.append(bit_string(mask, lease.length))
            firsts.append(base + (mask & -mask).bit_length() - 1)
            lasts.append(base + mask.bit_length() - 1)
            counts.append(len(own))
            took.append(max(0.0, now - lease.popped_at))
        copies = [await self._copy(link, mark) for mark in singles]
        rows = await link.fetch(
            SETTLE,
            self._worker,
            [lease.lane_id for lease in leases],
            [lease.group_id for lease in leases],
            [lease.id for lease in leases],
            bits,
            firsts,
            lasts,
            counts,
            took,
            [m.lease.lane_id for m in singles],
            [m.lease.group_id for m in singles],
            [m.lease.id for m in singles],
            [m.seq for m in singles],
            [m.kind for m in singles],
            [m.error for m in singles],
            [m.delay for m in singles],
            [c[0] for c in copies],
            [c[1] for c in copies],
            [c[2] for c in copies],
            [c[3] for c in copies],
            [c[4] for c in copies],
        )
        self.calls += 1
        if any(row["status"] in _PROBLEMS for row in rows):
            self._take_out(rows, leases, ranges, singles)
            return False
        self._answer(rows, ranges, singles, told)
        return True

    async def _copy(self, link: Any, mark: Mark) -> tuple[str, str, datetime, bytes, bytes]:
        """What a dead letter keeps of a message."""
        if mark.kind in ("ack", "retry"):
            return _NOTHING
        segment = await self._cache.message(link, mark.lease.lane_id, mark.seq)
        if segment is None:  # removed by retention meanwhile: there is nothing left to keep
            return (_NOTHING[0], mark.item.transaction_id, _NOTHING[2], b"", b"null")
        at = mark.seq - segment.first_seq
        created = datetime.fromtimestamp(segment.created(at) / 1e6, UTC)
        headers, payload = segment.stored(at)
        return segment.id(at), segment.tx(at), created, headers, payload

    def _take_out(
        self, rows: list[Any], leases: list[Lease], ranges: dict[Lease, list[Mark]], singles: list[Mark]
    ) -> None:
        for row in rows:
            match row["status"]:
                case "bad_lease":
                    self._leases.drop(leases[row["item"]])
                    for mark in ranges[leases[row["item"]]]:
                        mark.refuse("invalid_lease", LEASE_LOST)
                case "answered":
                    lease, already = leases[row["item"]], row["bits"]
                    taken = already.to_int()
                    for mark in ranges[lease]:
                        if taken >> (len(already) - 1 - (mark.seq - lease.base)) & 1:
                            mark.refuse("not_found", SETTLED_BEFORE)
                case "bad_lease_single":
                    self._leases.drop(singles[row["item"]].lease)
                    singles[row["item"]].refuse("invalid_lease", LEASE_LOST)
                case "answered_single":
                    singles[row["item"]].refuse("not_found", SETTLED_BEFORE)

    def _answer(
        self,
        rows: list[Any],
        ranges: dict[Lease, list[Mark]],
        singles: list[Mark],
        told: list[Released],
    ) -> None:
        released: set[tuple[int, int]] = set()
        outcomes: dict[int, tuple[str, int]] = {}
        for row in rows:
            if row["status"] == "single":
                outcomes[row["item"]] = (row["outcome"], row["attempts"])
                continue
            if row["status"] == "released":
                released.add((row["lane_id"], row["group_id"]))
                lane = self._registry.lanes_by_id.get(row["lane_id"])
                if lane is not None:
                    due = row["due"].timestamp() if row["due"] is not None else None
                    told.append((lane, row["group_id"], row["pending"], due))
        for lease, marks in ranges.items():
            free = lease.key in released
            queue, partition = marks[0].lane.queue.name, marks[0].lane.name
            for mark in marks:
                mark.result = AckResult(
                    mark.item.transaction_id, True, "acknowledged", None, queue, partition, free
                )
            self.settled += len(marks)
        for at, mark in enumerate(singles):
            outcome, attempts = outcomes[at]
            free = mark.lease.key in released
            mark.result = AckResult(
                mark.item.transaction_id, True, outcome, None, mark.lane.queue.name, mark.lane.name, free,  # type: ignore[arg-type]
                outcome == "failed_dlq", attempts,
            )  # fmt: skip
            self.settled += 1
            if outcome in self.outcomes:
                self.outcomes[outcome] += 1
        for lease in {*ranges, *(mark.lease for mark in singles)}:
            if lease.key in released:
                self._leases.drop(lease)


_PROBLEMS = {"bad_lease", "answered", "bad_lease_single", "answered_single"}
_NOTHING = ("00000000-0000-0000-0000-000000000000", "", datetime(1970, 1, 1, tzinfo=UTC), b"", b"")
_DIGITS = bytes([48, 49]) + bytes(254)
