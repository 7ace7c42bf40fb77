"""Looking at queues, groups and messages without touching them."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import msgspec

from settled.queue import dedup
from settled.queue.cache import micros
from settled.queue.db import sql
from settled.queue.deadletters import check_page
from settled.queue.errors import BadRequest, NotFound
from settled.queue.options import QueueOptions
from settled.queue.poll import parse_time
from settled.queue.segment import Segment
from settled.queue.states import States
from settled.queue.types import (
    GroupLag,
    GroupState,
    JournalEntry,
    LaneLag,
    LaneStats,
    MessageView,
    QueueStats,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from settled.queue.core import Core
    from settled.queue.lanes import Lane

LAGGING = 300
DEAD = 86_400
STATUSES = ("pending", "processing", "completed", "dead_letter")
PAGE = 200
_UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


async def queues(core: Core, name: str | None, namespace: str | None, task: str | None) -> list[QueueStats]:
    """Figures of queues."""
    return [_stats(row) for row in await core.pool.fetch(sql("queue_stats"), name, namespace, task)]


def _stats(row: Any) -> QueueStats:
    options = msgspec.json.decode(row["options"], type=QueueOptions)
    total, pending = row["total"], row["pending"]
    return QueueStats(
        id=str(row["uid"]),
        name=row["name"],
        namespace=row["namespace"],
        task=row["task"],
        created_at=row["created_at"],
        options=options,
        partitions=row["partitions"],
        total=total,
        pending=pending,
        processing=row["processing"],
        completed=total - pending,
        dead=row["dead"],
    )


async def queue(core: Core, name: str, limit: int | None, offset: int) -> QueueStats:
    """Figures of one queue and of some of its lanes, by name."""
    rows = await core.pool.fetch(sql("queue_stats"), name, None, None)
    if not rows:
        raise NotFound("queue", name)
    stats = _stats(rows[0])
    if limit != 0:
        lanes = await core.pool.fetch(sql("lane_stats"), rows[0]["id"], limit, offset)
        stats.lanes = [_lane_stats(row) for row in lanes]
    return stats


def _lane_stats(row: Any) -> LaneStats:
    total, pending = row["total"], row["pending"]
    return LaneStats(
        str(row["uid"]),
        row["name"],
        row["created_at"],
        row["oldest_at"],
        row["newest_at"],
        total,
        pending,
        row["processing"],
        total - pending,
        row["dead"],
    )


async def lanes(core: Core, name: str | None, group: str | None, min_lag: float) -> list[LaneLag]:
    """How far groups are behind, by lane."""
    now = core.clock.now()
    found = []
    for row in await core.pool.fetch(sql("lane_lags"), name, group):
        behind = max(0.0, now - row["oldest_at"].timestamp()) if row["oldest_at"] is not None else 0.0
        if behind >= min_lag:
            found.append(
                LaneLag(
                    group=row["grp"],
                    queue=row["queue"],
                    partition=row["partition"],
                    partition_id=str(row["uid"]),
                    lag=max(0, row["lag"]),
                    time_lag=behind if row["lag"] > 0 else 0.0,
                    total_consumed=row["consumed"],
                    lease_id=str(row["lease"]) if row["lease"] is not None else None,
                    lease_expires_at=row["lease_until"],
                    oldest_pending_at=row["oldest_at"],
                    last_consumed_at=row["last_at"],
                )
            )
    return found


async def groups(core: Core, name: str | None, group: str | None) -> list[GroupLag]:
    """How far groups are behind, by queue."""
    now = core.clock.now()
    return [_group_lag(row, now) for row in await core.pool.fetch(sql("group_lags"), name, group)]


def _group_lag(row: Any, now: float) -> GroupLag:
    behind = max(0.0, now - row["oldest_at"].timestamp()) if row["oldest_at"] is not None else 0.0
    seen = row["last_at"].timestamp() if row["last_at"] is not None else 0.0
    state = "Stable"
    if behind > LAGGING:
        state = "Dead" if not row["leases"] and now - seen > DEAD else "Lagging"
    return GroupLag(
        row["grp"],
        row["queue"],
        row["partitions"],
        row["lagging"],
        row["lag"],
        behind,
        row["leases"],
        state,  # type: ignore[arg-type]
        row["mode"],
        row["starts_at"],
        row["subscribed_at"],
    )


async def locate(core: Core, lane: Lane, transaction_id: str) -> tuple[Segment, int]:
    """The segment with a message, and the message's place in it; NotFound if it is gone.

    One that was deleted by hand is answered if no other has its id.
    """
    raw = transaction_id.encode(errors="replace")
    deleted: tuple[Segment, int] | None = None
    for row in await core.pool.fetch(sql("segment_by_hash"), lane.id, dedup.pack([dedup.fingerprint(raw)])):
        segment = Segment(row["first_seq"], micros(row["created_at"]), row["body"])
        for at, own in enumerate(segment.own_tx() or ()):
            if own == raw:
                if not await core.pool.fetch(sql("is_hole"), lane.id, segment.first_seq + at):
                    return segment, at
                deleted = segment, at
    if deleted is not None:
        return deleted
    before = 2**62 if _UUID.fullmatch(transaction_id) else 0
    while rows := await core.pool.fetch(sql("lane_segments"), lane.id, before, 200):
        for row in rows:  # an id that we made is a message's own id
            segment = Segment(row["first_seq"], micros(row["created_at"]), row["body"])
            if (
                transaction_id in (ids := segment.ids())
                and segment.tx(at := ids.index(transaction_id)) == transaction_id
            ):
                return segment, at
        before = rows[-1]["first_seq"]
    raise NotFound("message", transaction_id)


async def _lane(core: Core, partition_id: str) -> Lane:
    lane = await core.registry.lane_by_uid(partition_id)
    if lane is None:
        raise NotFound("partition", partition_id)
    return lane


async def message(core: Core, partition_id: str, transaction_id: str) -> MessageView:
    """One message and what each group did with it."""
    lane = await _lane(core, partition_id)
    segment, at = await locate(core, lane, transaction_id)
    seq = segment.first_seq + at
    states = await States.read(core, {lane.id: (seq, seq)})
    if (lane.id, seq) in states.holes:
        raise NotFound("message", transaction_id)
    queue = lane.queue
    names = (queue.name, lane.name, lane.uid, queue.namespace, queue.task)
    view = _view(segment, at, names, queue.options.priority, states.of(lane.id, seq), payload=True)
    view.options = queue.options
    return view


def _view(
    segment: Segment,
    at: int,
    names: tuple[str, str, str, str, str],
    priority: int,
    states: list[GroupState],
    *,
    payload: bool,
) -> MessageView:
    row = segment.row(at)
    return MessageView(
        id=row.id,
        transaction_id=row.transaction_id,
        partition_id=names[2],
        queue=names[0],
        partition=names[1],
        namespace=names[3],
        task=names[4],
        seq=segment.first_seq + at,
        created_at=datetime.fromtimestamp(row.created_us / 1e6, UTC),
        groups=states,
        trace_id=row.trace_id,
        producer=row.producer,
        headers=row.headers,
        content_type=row.content_type,
        payload=row.payload if payload else None,
        encrypted=segment.sealed,
        priority=priority,
    )


async def messages(core: Core, where: tuple[str | None, ...], status: str | None, since: Any, until: Any,
                   limit: int, offset: int) -> list[MessageView]:  # fmt: skip
    """Messages, newest first."""
    check_page(limit, offset)
    if status is not None and status not in STATUSES:
        raise BadRequest("status", status, f"must be one of {', '.join(STATUSES)}")
    start = parse_time("from", since) if since is not None else datetime.now(UTC) - timedelta(hours=1)
    end = parse_time("to", until) if until is not None else datetime.max.replace(tzinfo=UTC)
    found: list[MessageView] = []
    last: tuple[Any, ...] = (None, None, None)
    while len(found) < limit:
        rows = await core.pool.fetch(sql("newest_segments"), *where, start, end, PAGE, *last)
        ranges: dict[int, tuple[int, int]] = {}
        for row in rows:
            first, stop = row["first_seq"], row["first_seq"] + row["n"] - 1
            low, high = ranges.get(row["lane_id"], (first, stop))
            ranges[row["lane_id"]] = (min(low, first), max(high, stop))
        states = await States.read(core, ranges)
        for row in rows:
            for view in _views(row, states, start, end):
                if status is not None and view.status != status:
                    continue
                if offset:
                    offset -= 1
                elif len(found) < limit:
                    found.append(view)
        if len(rows) < PAGE:
            break
        last = (rows[-1]["created_at"], rows[-1]["lane_id"], rows[-1]["first_seq"])
    return found


def _views(row: Any, states: States, start: datetime, end: datetime) -> Iterator[MessageView]:
    """The messages of a segment that are there and of that time, newest first."""
    segment = Segment(row["first_seq"], micros(row["created_at"]), row["body"])
    names = (row["queue"], row["partition"], str(row["uid"]), row["namespace"], row["task"])
    for at in reversed(range(segment.n)):
        seq = segment.first_seq + at
        if (row["lane_id"], seq) not in states.holes:
            group_states = states.of(row["lane_id"], seq)
            view = _view(segment, at, names, row["priority"], group_states, payload=False)
            if start <= view.created_at < end:
                yield view


async def delete_message(core: Core, partition_id: str, transaction_id: str) -> None:
    """Take one message out of the log."""
    view = await message(core, partition_id, transaction_id)
    lane = await _lane(core, partition_id)
    await core.pool.fetch("select delete_message($1, $2, $3)", core.worker, lane.id, view.seq)


async def journal(
    core: Core, name: str | None, partition_id: str | None, transaction_id: str | None, limit: int
) -> list[JournalEntry]:
    """How messages were settled, newest first."""
    check_page(limit, 0)
    if transaction_id is not None and partition_id is None:
        raise BadRequest("transactionId", transaction_id, "needs its partitionId")
    ids: list[int] | None = None
    seq: int | None = None
    if partition_id is not None:
        lane = await _lane(core, partition_id)
        ids = [lane.id]
        if transaction_id is not None:
            segment, at = await locate(core, lane, transaction_id)
            seq = segment.first_seq + at
    elif name is not None:
        found = await core.registry.queue(name)
        if found is None:
            raise NotFound("queue", name)
        ids = [r["id"] for r in await core.pool.fetch("select id from lane where queue_id = $1", found.id)]
    rows = await core.pool.fetch(sql("journal"), ids, seq, limit)
    await core.registry.lanes_of({row["lanes"][row["place"] - 1] for row in rows})
    entries = []
    for row in rows:
        i = row["place"] - 1
        lane_id = row["lanes"][i]
        known = core.registry.lanes_by_id.get(lane_id)
        entries.append(
            JournalEntry(
                at=row["at"],
                kind=row["kind"],
                group=await core.registry.group_name(row["groups"][i]),
                partition_id=known.uid if known is not None else "",
                first_seq=row["firsts"][i],
                last_seq=row["lasts"][i],
                count=row["counts"][i],
                worker=row["worker"],
                lease_id=str(row["leases"][i]) if row["leases"] else None,
                attempts=row["attempts"],
                error=row["error"],
                exact=row["counts"][i] in (0, row["lasts"][i] - row["firsts"][i] + 1),
            )
        )
    if ids is not None and seq is not None and any(not entry.exact for entry in entries):
        states = await States.read(core, {ids[0]: (seq, seq)})
        return _life(entries, {state.group: state.status for state in states.of(ids[0], seq)})
    return entries


def _life(entries: list[JournalEntry], states: dict[str, str]) -> list[JournalEntry]:
    """Without calls that settled messages before and behind this one, but not this one as far as is known."""
    certain = {
        entry.group for entry in entries if entry.exact and entry.kind in ("settled", "auto_ack", "dead")
    }
    return [
        entry
        for entry in entries
        if entry.exact or (entry.group not in certain and states.get(entry.group, "completed") == "completed")
    ]
