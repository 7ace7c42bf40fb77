"""Several operations in one database transaction: pushes, acks, and the cycle of a stream query."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any
from uuid import UUID

import asyncpg
import msgspec

from settled.queue.batch import Batch, Chunk, Duplicate, Gone
from settled.queue.db import sql
from settled.queue.errors import BadRequest, Conflict, NotFound, Unavailable
from settled.queue.lanes import check_uuid
from settled.queue.marks import LEASE_LOST, UNPROVEN, Settlement
from settled.queue.names import read_lease
from settled.queue.releases import release, release_rest, released
from settled.queue.schedule import schedule
from settled.queue.types import (
    AckItem,
    AckOp,
    AckResult,
    CycleResult,
    LeaseExtension,
    PushResult,
    TransactionResult,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from settled.queue.ack import Released
    from settled.queue.core import Core
    from settled.queue.lanes import Lane
    from settled.queue.types import CycleAck, PushItem, PushOp, StateOp

ATTEMPTS = 5
MAX_LEASE = 86_400


class _Refused(Exception):
    """Nothing is applied; says why."""


class _Pushes:
    """The pushes of a transaction: laid out by lane, applied on its connection, told after its commit."""

    def __init__(self, core: Core, items: Sequence[PushItem]) -> None:
        self._core = core
        self._items = items
        self._later = [item for item in items if item.delay_seconds > 0]
        self._chunks: dict[Lane, Chunk] = {}
        self._places: list[Chunk | None] = []
        self._batches: list[Batch] = []
        self._scheduled: list[PushResult] = []

    @asynccontextmanager
    async def room(self) -> AsyncIterator[None]:
        """Apply and commit inside of this: QueueFull if a queue has no room for its messages."""
        await self._find()
        async with self._core.room.hold(self._core.room.limited(self._items)):
            yield

    async def _find(self) -> None:
        await self._core.registry.ensure({(item.queue, item.partition) for item in self._items})

    async def prepare(self) -> list[Lane]:
        """Find or make the lanes; answers them, to be kept out of flushes."""
        await self._find()
        lanes = self._core.registry.lanes
        self._chunks, self._places = {}, []
        for item in self._items:
            if item.delay_seconds > 0:
                self._places.append(None)
                continue
            lane = lanes[(item.queue, item.partition)]
            chunk = self._chunks.setdefault(lane, Chunk(lane))
            chunk.extend([item])
            self._places.append(chunk)
        return list(self._chunks)

    async def apply(self, connection: Any, *, refuse: bool) -> None:
        """Append, in the transaction."""
        if refuse:
            for chunk in self._chunks.values():
                own = [tx for tx in chunk.tx if tx]
                if len(set(own)) < len(own):
                    raise _Refused(f"a transactionId comes twice in partition {chunk.lane.name!r}")
        batches = [Batch(lane, [chunk]) for lane, chunk in self._chunks.items()]
        self._batches = await self._core.pusher.append(connection, batches, refuse=refuse)
        if self._later:
            self._scheduled = await schedule(self._core, connection, self._later)

    def forget(self) -> None:
        """The transaction failed: what was noted of its ids is wrong."""
        for lane in self._chunks:
            lane.remembered.rewind()

    def commit(self) -> list[PushResult]:
        """The transaction is on disk: tell everybody, and answer in item order."""
        self._core.pusher.commit(self._batches)
        if self._later:
            self._core.scheduler.look()
        taken = dict.fromkeys(self._chunks.values(), 0)
        later = iter(self._scheduled)
        results = []
        for item, chunk in zip(self._items, self._places, strict=True):
            if chunk is None:
                results.append(next(later))
                continue
            message_id, duplicate = chunk.results[taken[chunk]]
            taken[chunk] += 1
            tx, status = item.transaction_id or message_id, "duplicate" if duplicate else "queued"
            results.append(PushResult(tx, message_id, status, item.queue, item.partition, chunk.lane.uid))  # type: ignore[arg-type]
        return results


async def transaction(
    core: Core, operations: Sequence[PushOp | AckOp], required_leases: Sequence[str]
) -> TransactionResult:
    """Pushes and acks, all or nothing."""
    if not operations:
        raise BadRequest("operations", operations, "must hold at least one operation")
    pushes = [item for op in operations if not isinstance(op, AckOp) for item in op.items]
    acks = [_with_group(op) for op in operations if isinstance(op, AckOp)]
    leases = [_required(lease) for lease in required_leases]
    work = _Pushes(core, pushes)
    async with work.room():
        result = await _transaction(core, work, operations, acks, leases)
    if result.success:
        settled = [each for each in result.results if isinstance(each, AckResult)]
        await release_rest(core, acks, "", settled)
    return result


async def _transaction(
    core: Core,
    work: _Pushes,
    operations: Sequence[PushOp | AckOp],
    acks: list[AckItem],
    leases: list[tuple[int, int, str]],
) -> TransactionResult:
    for _ in range(ATTEMPTS):
        lanes = await work.prepare()
        found, marks = await core.settler.find(await _proven(core, acks, leases), "")
        if any(result is not None for result in found):
            return _failed(operations, found)
        settlement = Settlement([mark for mark in marks if mark is not None], True)
        leases_over: list[Released] = []
        busy = await core.pusher.exclusive(lanes)
        try:
            async with core.pool.transaction() as connection:
                await work.apply(connection, refuse=True)
                if leases:
                    await _check_leases(connection, leases)
                await core.settler.apply(connection, [settlement], leases_over)
                if any(mark.result is None or not mark.result.success for mark in settlement.marks):
                    raise _Refused("")
        except Gone:
            work.forget()
            continue
        except (_Refused, Duplicate) as error:
            work.forget()
            settlement.finish()
            return _failed(operations, [mark.result for mark in settlement.marks], str(error))
        except BaseException:
            work.forget()
            raise
        finally:
            core.pusher.free(busy)
        pushed = iter(work.commit())
        core.settler.tell(leases_over)
        acked = iter([mark.result for mark in settlement.marks])
        results: list[Any] = []
        for op in operations:
            results += [next(acked)] if isinstance(op, AckOp) else [next(pushed) for _ in op.items]
        return TransactionResult(True, results)
    raise Unavailable("a queue of the transaction is deleted again and again", 0.1)


def _with_group(op: AckOp) -> AckItem:
    item = op.item
    return AckItem(
        item.transaction_id,
        item.partition_id,
        item.status,
        item.lease_id,
        item.error,
        item.delay,
        item.group or op.group,
        item.release_rest,
    )


def _not_applied(item: AckItem | PushItem) -> AckResult:
    return AckResult(item.transaction_id or "", False, "not_applied", "another operation failed")


def _failed(
    operations: Sequence[PushOp | AckOp], acked: Sequence[AckResult | None], error: str = ""
) -> TransactionResult:
    """Why nothing was applied; the results tell which operation was in the way."""
    why = next((r.error for r in acked if r is not None and r.error and r.message != "not_applied"), None)
    found = iter(acked)
    results: list[PushResult | AckResult] = []
    for op in operations:
        if isinstance(op, AckOp):
            own = next(found)
            results.append(own if own is not None and not own.success else _not_applied(op.item))
        else:
            results += map(_not_applied, op.items)
    return TransactionResult(False, results, error or why or "the transaction was not applied")


def _required(lease_id: str) -> tuple[int, int, str]:
    read = read_lease(lease_id)
    if read is None:
        raise BadRequest("requiredLeases", lease_id, "is not a lease id")
    return read[0], read[1], str(UUID(lease_id))


async def _proven(core: Core, acks: list[AckItem], leases: list[tuple[int, int, str]]) -> list[AckItem]:
    """Acks with the lease that the transaction requires for their partition and group, if they name none."""
    if not leases or all(item.lease_id for item in acks):
        return acks
    required: dict[tuple[int, int], str] = {}
    for lane_id, group_id, lease in leases:
        lanes = await core.pool.fetchval(sql("wide_lanes"), lease) or [lane_id]
        required.update({(each, group_id): lease for each in lanes})
    proven = []
    for item in acks:
        lane = None if item.lease_id else await core.registry.lane_by_uid(item.partition_id)
        if lane is not None:
            group_id = await core.registry.group(item.group or "")
            item = msgspec.structs.replace(item, lease_id=required.get((lane.id, group_id)))
        proven.append(item)
    return proven


async def _check_leases(connection: Any, leases: list[tuple[int, int, str]]) -> None:
    wanted = sorted(set(leases))
    rows = await connection.fetch(sql("lease_valid"), *(list(column) for column in zip(*wanted, strict=True)))
    if rows[0][0] < len(wanted):
        raise _Refused("a required lease is invalid or expired")


async def extend(core: Core, lease_id: str, seconds: float) -> LeaseExtension:
    """Renew a lease on every lane under it."""
    if not 0 < seconds <= MAX_LEASE:
        raise BadRequest("seconds", seconds, f"must be more than 0 and at most {MAX_LEASE}")
    read = read_lease(lease_id)
    if read is None:
        return LeaseExtension(lease_id, False, error="Lease not found")
    lane_id, group_id, wide = read
    lease = str(UUID(lease_id))
    lanes = [lane_id]
    if wide:
        lanes = await core.pool.fetchval(sql("wide_lanes"), lease) or lanes
    rows = await core.pool.fetch(sql("extend"), lanes, group_id, lease, float(seconds))
    if rows:
        # Memory is not told: a pop that tries the lane when the lease would have ended finds it leased. A
        # hold noted here could outlive the lease, whose last ack may have been answered before this.
        return LeaseExtension(lease_id, True, min(row["lease_until"] for row in rows), renewed=len(rows))
    expired = await core.pool.fetchval(sql("lease_state"), lanes, group_id, lease)
    return LeaseExtension(lease_id, False, error="Lease already expired" if expired else "Lease not found")


async def cycle(
    core: Core,
    query_id: str,
    partition_id: str,
    group: str,
    state_ops: Sequence[StateOp],
    push_items: Sequence[PushItem],
    ack: CycleAck | None,
    release_lease: bool,
) -> CycleResult:
    """State, pushes and the source ack of a stream cycle, all or nothing."""
    query_id = check_uuid("query_id", query_id)
    lane = await core.registry.lane_by_uid(partition_id)
    if lane is None:
        raise NotFound("partition", partition_id)
    work = _Pushes(core, push_items)
    async with work.room():
        return await _cycle(core, work, query_id, lane, group, state_ops, ack, release_lease)


async def _cycle(
    core: Core,
    work: _Pushes,
    query_id: str,
    lane: Lane,
    group: str,
    state_ops: Sequence[StateOp],
    ack: CycleAck | None,
    release_lease: bool,
) -> CycleResult:
    group_id = await core.registry.group(group)
    for _ in range(ATTEMPTS):
        lanes = await work.prepare()
        settlement, lease = await _cycle_marks(core, lane, group_id, group, ack)
        leases_over: list[Released] = []
        busy = await core.pusher.exclusive(lanes)
        try:
            async with core.pool.transaction() as connection:
                await work.apply(connection, refuse=False)
                await _apply_state(connection, query_id, lane, state_ops)
                await core.settler.apply(connection, [settlement], leases_over)
                _check_cycle(settlement)
                if ack is not None and release_lease and lease is not None:
                    await release(core, connection, lane, group_id, lease)
        except Gone:
            work.forget()
            continue
        except asyncpg.ForeignKeyViolationError:
            work.forget()
            raise NotFound("stream query", query_id) from None
        except BaseException:
            work.forget()
            raise
        finally:
            core.pusher.free(busy)
        results = work.commit()
        core.settler.tell(leases_over)
        free = ack is not None and release_lease
        if free and lease is not None:
            released(core, lane, group_id, lease)
        dead = any(mark.result is not None and mark.result.dlq for mark in settlement.marks)
        done = sum(mark.result is not None and mark.result.success for mark in settlement.marks)
        return CycleResult(query_id, lane.uid, lane.queue.name, len(state_ops), results, done, free, dead)
    raise Unavailable("a queue of the cycle is deleted again and again", 0.1)


def _check_cycle(settlement: Settlement) -> None:
    """The named message, the last one, must be settled now; those before it may have been already."""
    for mark in settlement.marks:
        result = mark.result
        if result is None or (
            not result.success and (result.message != "not_found" or mark is settlement.marks[-1])
        ):
            raise Conflict(result.error or result.message if result is not None else "not settled")


async def _cycle_marks(
    core: Core, lane: Lane, group_id: int, group: str, ack: CycleAck | None
) -> tuple[Settlement, str | None]:
    """Everything under the lease up to and with the named message."""
    if ack is None:
        return Settlement([], True), None
    now = core.clock.now()
    lease = core.leases.known(ack.lease_id or None, lane.id, group_id)
    lease = lease or await core.leases.find(ack.lease_id or None, lane.id, group_id, now)
    if lease is None:
        raise Conflict(LEASE_LOST)
    if not ack.lease_id:
        await core.leases.look(lease)
    if lease.place(ack.transaction_id) is None:
        raise Conflict(f"message {ack.transaction_id!r} is not under the lease")
    items = []
    for transaction_id in lease.transaction_ids():
        place = lease.place(transaction_id)
        if not ack.lease_id and place is not None and lease.disputed(place):
            raise Conflict(UNPROVEN)
        items.append(AckItem(transaction_id, lane.uid, ack.status, lease.id, ack.error, None, group))
        if transaction_id == ack.transaction_id:
            break
    found, marks = await core.settler.find(items, group)
    refused = next((result for result in found if result is not None), None)
    if refused is not None:
        raise Conflict(refused.error or refused.message)
    return Settlement([mark for mark in marks if mark is not None], False), lease.id


async def _apply_state(connection: Any, query_id: str, lane: Lane, operations: Sequence[StateOp]) -> None:
    """Apply state changes in their order; runs of one kind go together."""
    last: dict[str, str | None] = {}
    for op in operations:
        if op.type not in ("upsert", "delete"):
            raise BadRequest("state_ops.type", op.type, "must be upsert or delete")
        value = bytes(op.value if op.value is not None else b"null").decode()
        if "\0" in op.key or "\\u0000" in value:
            raise BadRequest("state_ops", op.key, "must not contain NUL")
        last[op.key] = value if op.type == "upsert" else None
    puts = {key: value for key, value in last.items() if value is not None}
    drops = [key for key, value in last.items() if value is None]
    if puts:
        await connection.fetch(sql("state_put"), query_id, lane.id, list(puts), list(puts.values()))
    if drops:
        await connection.fetch(sql("state_drop"), query_id, lane.id, drops)
