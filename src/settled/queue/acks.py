"""The usual settling: acks alone, of leases this worker knows, as bits; many callers share one call."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Any

import asyncpg
from asyncpg import BitString

from settled.queue.db import listed
from settled.queue.soon import tell
from settled.queue.types import Acked, AckResult

if TYPE_CHECKING:
    from collections.abc import Sequence

    from settled.queue.ack import Settler
    from settled.queue.activity import Activity
    from settled.queue.db import Clock, Link
    from settled.queue.lanes import Lane
    from settled.queue.leases import Lease, Leases
    from settled.queue.ready import ReadySets
    from settled.queue.soon import Done
    from settled.queue.turns import Landed
    from settled.queue.types import AckItem

SETTLE_ACKS = (
    "select * from settle_acks($1, $2::text::bigint[], $3::text::int[], $4::text::uuid[], $5, "
    "$6::text::bigint[], $7::text::bigint[], $8::text::int[], $9::text::real[])"
)
HANDLED = ("completed", "success")
REVERSED = bytes(int(f"{i:08b}"[::-1], 2) for i in range(256))


def bit_string(mask: int, length: int) -> BitString:
    """Bit i of a number as bit i of a varbit, which counts from the left."""
    return BitString.frombytes(mask.to_bytes((length + 7) // 8, "little").translate(REVERSED), length)


class Acks:
    """What one caller acks under one lease: bit i is the message at the lease's base + i."""

    __slots__ = ("count", "done", "lane", "lease", "mask")

    def __init__(self, lane: Lane, lease: Lease, mask: int, count: int, done: Done[Acked]) -> None:
        self.lane = lane
        self.lease = lease
        self.mask = mask
        self.count = count
        self.done = done


async def settle_shortly(
    settler: Settler, items: Sequence[AckItem], group: str, *, atomic: bool
) -> list[AckResult]:
    """Settle items, by the short way where it is open to them, and answer in their order."""
    answers = await _ack_plainly(settler, items, group, atomic=atomic)
    rest = [at for at, answer in enumerate(answers) if answer is None]
    closely = [items[at] for at in rest]
    if rest:
        try:
            looked = await settler.settle_closely(closely, group, atomic=atomic)
        except Exception as error:
            if len(rest) == len(items):
                raise
            # The others are settled, which their caller must hear.
            looked = [AckResult(one.transaction_id, False, "not_applied", str(error)) for one in closely]
        for at, result in zip(rest, looked, strict=True):
            answers[at] = result
    return answers  # type: ignore[return-value]


async def _ack_plainly(
    settler: Settler, items: Sequence[AckItem], group: str, *, atomic: bool
) -> list[AckResult | None]:
    """Ack items by the short way if it is open to them; None for each that must be looked at closer.

    What belongs to one lease is acked all or none; the leases of a call share a trip to the database.
    """
    answers: list[AckResult | None] = [None] * len(items)
    leases = _by_lease(items)
    if atomic and len(leases) > 1:
        return answers
    outcomes: list[tuple[list[int], list[str], asyncio.Future[Acked | Exception | None]]] = []
    for (partition_id, lease_id, own), places in leases.items():
        ids = [items[at].transaction_id for at in places]
        outcome, done = _future()
        if settler.ack_soon(partition_id, lease_id or None, own or group, ids, done):
            outcomes.append((places, ids, outcome))
    failed: list[Exception] = []
    for places, ids, outcome in outcomes:
        acked = await outcome
        if isinstance(acked, Exception):
            failed.append(acked)
            for at, each in zip(places, ids, strict=True):
                answers[at] = AckResult(each, False, "not_applied", str(acked))
        elif acked is not None:
            queue, partition, over = acked.queue, acked.partition, acked.lease_released
            for at, each in zip(places, ids, strict=True):
                answers[at] = AckResult(each, True, "acknowledged", None, queue, partition, over)
    if failed and len(failed) == len(leases):
        raise failed[0]
    return answers


def _by_lease(items: Sequence[AckItem]) -> dict[tuple[str, str | None, str | None], list[int]]:
    """Which items are under which lease; nothing if one is more than an ack."""
    found: dict[tuple[str, str | None, str | None], list[int]] = {}
    for at, item in enumerate(items):
        if item.status not in HANDLED or item.error is not None or item.delay is not None:
            return {}
        key = item.partition_id, item.lease_id, item.group
        places = found.get(key)
        if places is None:
            found[key] = [at]
        else:
            places.append(at)
    return found


def _future() -> tuple[asyncio.Future[Acked | Exception | None], Done[Acked]]:
    waiting: asyncio.Future[Acked | Exception | None] = asyncio.get_running_loop().create_future()

    def done(outcome: Acked | Exception | None) -> None:
        if not waiting.done():
            waiting.set_result(outcome)

    return waiting, done


class AckQueue:
    """Acks that wait for a call, and what becomes of them.

    What is not plain after all (a lease that is over, a message settled before, a failure in the batch)
    changes nothing, and its caller is told None: it must ask for a settlement that looks closer.
    """

    def __init__(
        self, worker: str, ready: ReadySets, leases: Leases, clock: Clock, activity: Activity
    ) -> None:
        self._worker = worker
        self._ready = ready
        self._leases = leases
        self._clock = clock
        self._activity = activity
        self.pending: deque[Acks] = deque()
        self.calls = 0
        self.settled = 0

    def take(self, out: set[tuple[int, int]]) -> dict[Lease, list[Acks]]:
        """Acks of different messages, on lanes no other call is working on."""
        taken: dict[Lease, list[Acks]] = {}
        masks: dict[Lease, int] = {}
        later: list[Acks] = []
        for acks in self.pending:
            lease = acks.lease
            before = masks.get(lease)
            if before is None:
                if lease.key in out:
                    later.append(acks)
                else:
                    masks[lease] = acks.mask
                    taken[lease] = [acks]
            elif before & acks.mask:
                later.append(acks)
            else:
                masks[lease] = before | acks.mask
                taken[lease].append(acks)
        self.pending = deque(later)
        return taken

    async def apply(self, link: Link, taken: dict[Lease, list[Acks]], landed: Landed) -> None:
        """Settle and answer; what is in the way is found by halves, so that nobody else suffers from it."""
        leases = sorted(taken, key=lambda lease: lease.key)
        try:
            row = await self._call(link, leases, taken)
        except asyncpg.PostgresError:
            await self._halve(link, leases, taken, landed)
        except Exception as error:  # the callers must hear of it, whatever it is
            for acks in taken.values():
                _answer(acks, error)
        else:
            if row["status"] == "odd":
                await self._halve(link, leases, taken, landed)
            else:
                await landed()
                self._finish(leases, taken, row["released"], row["pending"])

    async def _halve(
        self, link: Link, leases: list[Lease], taken: dict[Lease, list[Acks]], landed: Landed
    ) -> None:
        if len(leases) == 1:
            _answer(taken[leases[0]], None)
            return
        middle = len(leases) // 2
        for half in (leases[:middle], leases[middle:]):
            await self.apply(link, {lease: taken[lease] for lease in half}, landed)

    async def _call(self, link: Link, leases: list[Lease], taken: dict[Lease, list[Acks]]) -> Any:
        bits, firsts, lasts, counts = [], [], [], []
        for lease in leases:
            mask = count = 0
            for acks in taken[lease]:
                mask |= acks.mask
                count += acks.count
            bits.append(bit_string(mask, lease.length))
            firsts.append(lease.base + (mask & -mask).bit_length() - 1)
            lasts.append(lease.base + mask.bit_length() - 1)
            counts.append(count)
        now = self._clock.now()
        self.calls += 1
        rows = await link.fetch(
            SETTLE_ACKS,
            self._worker,
            listed([lease.lane_id for lease in leases]),
            listed([lease.group_id for lease in leases]),
            listed([lease.id for lease in leases]),
            bits,
            listed(firsts),
            listed(lasts),
            listed(counts),
            listed([max(0.0, now - lease.popped_at) for lease in leases]),
        )
        return rows[0]

    def _finish(
        self,
        leases: list[Lease],
        taken: dict[Lease, list[Acks]],
        released: list[bool],
        pending: list[bool] | None,
    ) -> None:
        for at, lease in enumerate(leases):
            own = taken[lease]
            lane, over = own[0].lane, released[at]
            if over:
                self._leases.drop(lease)
                if pending is not None and pending[at]:
                    self._ready.released(lane.queue.id, lane.id, lease.group_id, None)
                else:
                    self._ready.freed(lane.queue.id, lane.id, lease.group_id)
                self._activity.ring()
            self.settled += sum(acks.count for acks in own)
            _answer(own, Acked(lane.queue.name, lane.name, over))


def _answer(callers: list[Acks], outcome: Acked | Exception | None) -> None:
    for acks in callers:
        tell(acks.done, outcome)
