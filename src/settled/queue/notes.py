"""Traces left on messages, and the state of stream queries."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from settled.queue.db import sql
from settled.queue.deadletters import check_page
from settled.queue.errors import BadRequest, Conflict, NotFound
from settled.queue.inspection import locate
from settled.queue.lanes import check_name, check_uuid
from settled.queue.segment import JSON
from settled.queue.types import Page, StateRow, StreamQuery, Trace, TraceName

if TYPE_CHECKING:
    from collections.abc import Sequence

    from settled.queue.core import Core


async def trace(
    core: Core,
    partition_id: str,
    transaction_id: str,
    data: bytes,
    names: Sequence[str],
    event_type: str,
    group: str | None,
) -> str:
    """Leave a note on a message."""
    lane = await core.registry.lane_by_uid(partition_id)
    if lane is None:
        raise NotFound("partition", partition_id)
    await locate(core, lane, transaction_id)
    names = [check_name("traceNames", name) for name in names]
    check_name("eventType", event_type)
    if group is not None:
        check_name("consumerGroup", group)
    made = await core.pool.fetchval(
        sql("trace_add"), lane.id, transaction_id, group, event_type, names, data, core.worker
    )
    return str(made)


def _trace(row: Any) -> Trace:
    return Trace(
        id=str(row["id"]),
        transaction_id=row["transaction_id"],
        partition_id=str(row["uid"]),
        queue=row["queue"],
        partition=row["partition"],
        group=row["consumer_group"],
        event_type=row["event_type"],
        names=row["names"],
        data=row["data"],
        worker=row["worker"],
        created_at=row["created_at"],
    )


async def traces(core: Core, partition_id: str, transaction_id: str) -> list[Trace]:
    """The notes on one message."""
    lane = await core.registry.lane_by_uid(partition_id)
    if lane is None:
        raise NotFound("partition", partition_id)
    return [_trace(row) for row in await core.pool.fetch(sql("traces"), lane.id, transaction_id)]


async def traces_by_name(core: Core, name: str, limit: int, offset: int) -> Page[Trace]:
    """The notes under one name."""
    check_page(limit, offset)
    rows = await core.pool.fetch(sql("traces_by_name"), check_name("traceName", name), limit, offset)
    found = [_trace(row) for row in rows]
    read: dict[tuple[str, str], tuple[bytes | None, str]] = {}
    for note in found:
        key = (note.partition_id, note.transaction_id)
        if key not in read:
            read[key] = await _message(core, *key)
        note.payload, note.content_type = read[key]
    return Page(found, rows[0]["total"] if rows else 0, limit, offset)


async def _message(core: Core, partition_id: str, transaction_id: str) -> tuple[bytes | None, str]:
    """What is in a message, if it is still there."""
    lane = await core.registry.lane_by_uid(partition_id)
    try:
        segment, at = await locate(core, lane, transaction_id) if lane is not None else (None, 0)
    except NotFound:
        segment = None
    if segment is None:
        return None, JSON
    row = segment.row(at)
    return row.payload, row.content_type


async def trace_names(core: Core, limit: int, offset: int) -> Page[TraceName]:
    """The names in use."""
    check_page(limit, offset)
    rows = await core.pool.fetch(sql("trace_names"), limit, offset)
    found = [TraceName(row["name"], row["traces"], row["messages"], row["last_seen"]) for row in rows]
    return Page(found, rows[0]["total"] if rows else 0, limit, offset)


async def register_query(
    core: Core, name: str, source: str, config_hash: str, sink: str | None, reset: bool
) -> StreamQuery:
    """Register a stream query, or find it again."""
    for field, value in (("name", name), ("source_queue", source), ("config_hash", config_hash)):
        check_name(field, value)
    async with core.pool.transaction() as connection:
        made = await connection.fetch(sql("stream_make"), name, source, sink, config_hash)
        if made:
            return StreamQuery(str(made[0]["id"]), name, config_hash, True, False)
        row = (await connection.fetch(sql("stream_get"), name))[0]
        if not reset:
            if row["config_hash"] != config_hash:
                raise Conflict(
                    f"config_hash mismatch: stream query {name!r} exists with config_hash "
                    f"{row['config_hash']!r}, got {config_hash!r}; send reset: true to replace it"
                )
            return StreamQuery(str(row["id"]), name, config_hash, False, False)
        await connection.fetch("delete from stream_state where query_id = $1", row["id"])
        await connection.fetch(sql("stream_reset"), row["id"], source, sink, config_hash)
        return StreamQuery(str(row["id"]), name, config_hash, False, True)


async def state(
    core: Core, query_id: str, partition_id: str, keys: Sequence[str], prefix: str | None, ripe: int | None
) -> list[StateRow]:
    """A query's state on one lane."""
    query_id = check_uuid("query_id", query_id)
    lane = await core.registry.lane_by_uid(partition_id)
    if lane is None:
        raise NotFound("partition", partition_id)
    if any("\0" in key for key in (*keys, prefix or "")):
        raise BadRequest("keys", keys, "must not contain NUL")
    rows = await core.pool.fetch(sql("state_get"), query_id, lane.id, list(keys), prefix, ripe)
    return [StateRow(row["key"], row["value"].encode(), row["updated_at"]) for row in rows]
