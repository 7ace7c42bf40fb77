"""Dead letters: listed, pushed again, dropped."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from settled.queue.db import sql
from settled.queue.errors import BadRequest, Conflict, NotFound
from settled.queue.lanes import check_uuid
from settled.queue.marks import Settlement
from settled.queue.poll import parse_time
from settled.queue.pop import Ask
from settled.queue.segment import JSON, PRODUCER_KEY, TRACE_KEY, TYPE_KEY, new_base, uuid_text
from settled.queue.types import AckItem, DeadLetter, Page, PopRequest, PushItem, PushResult

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime

    from settled.queue.core import Core
    from settled.queue.transact import _Pushes as Pushes

MAX_PAGE = 10_000
MAX_OFFSET = 2**53


def check_page(limit: int, offset: int) -> None:
    """Refuse pages that make no sense."""
    if not 1 <= limit <= MAX_PAGE:
        raise BadRequest("limit", limit, f"must be 1..{MAX_PAGE}")
    if not 0 <= offset <= MAX_OFFSET:
        raise BadRequest("offset", offset, "must be 0 or more")


def _letter(row: Any) -> DeadLetter:
    own: dict[str, str] = msgspec.json.decode(row["headers"] or b"{}")
    return DeadLetter(
        id=str(row["id"]),
        message_id=str(row["message_id"]),
        partition_id=str(row["lane_uid"]),
        transaction_id=row["transaction_id"],
        queue=row["queue"],
        partition=row["partition"],
        group=row["consumer_group"],
        error=row["error"],
        attempts=row["attempts"],
        payload=row["payload"],
        content_type=own.pop(TYPE_KEY, JSON),
        trace_id=own.pop(TRACE_KEY, None),
        producer=own.pop(PRODUCER_KEY, None),
        headers=own,
        created_at=row["created_at"],
        failed_at=row["failed_at"],
    )


async def dead_letters(
    core: Core,
    queue: str | None,
    partition: str | None,
    group: str | None,
    since: str | datetime | None,
    until: str | datetime | None,
    limit: int,
    offset: int,
) -> Page[DeadLetter]:
    """One page, newest first."""
    check_page(limit, offset)
    start = parse_time("from", since) if since is not None else None
    end = parse_time("to", until) if until is not None else None
    rows = await core.pool.fetch(sql("dead_letters"), queue, partition, group, start, end, limit, offset)
    if rows:
        total = rows[0]["total"]
    elif offset:
        total = await core.pool.fetchval(sql("dead_letters_total"), queue, partition, group, start, end)
    else:
        total = 0
    return Page([_letter(row) for row in rows], total, limit, offset)


async def requeue(core: Core, dead_letter_id: str) -> PushResult:
    """Push a dead letter's copy again and drop it, in one transaction."""
    from settled.queue.transact import _Pushes  # transact imports the modules below this one

    dead_letter_id = check_uuid("id", dead_letter_id)
    row = await core.pool.fetchrow("select * from dead_letter where id = $1", dead_letter_id)
    if row is None:
        raise NotFound("dead letter", dead_letter_id)
    letter = _letter(row)
    again = PushItem(
        letter.queue,
        letter.payload,
        letter.partition,
        f"{letter.transaction_id[:210]}:{uuid_text(new_base())}",
        letter.headers,
        letter.content_type,
        0,
        letter.trace_id,
        letter.producer,
    )
    work: Pushes = _Pushes(core, [again])
    busy = await core.pusher.exclusive(await work.prepare())
    try:
        async with core.pool.transaction() as connection:
            if not await connection.fetch(sql("dead_letter_take"), dead_letter_id):
                raise NotFound("dead letter", dead_letter_id)
            await work.apply(connection, refuse=True)
    except BaseException:
        work.forget()
        raise
    finally:
        core.pusher.free(busy)
    return work.commit()[0]


async def retry_message(core: Core, partition_id: str, transaction_id: str, group: str | None) -> int:
    """Requeue the dead letters of one message."""
    lane = await core.registry.lane_by_uid(partition_id)
    rows = await core.pool.fetch(sql("dead_letters_of"), lane.id, transaction_id, group) if lane else []
    if not rows:
        raise NotFound("dead letter of message", transaction_id)
    for row in rows:
        await requeue(core, str(row["id"]))
    return len(rows)


async def bury_message(core: Core, partition_id: str, transaction_id: str, group: str) -> None:
    """Send a message to the dead letters: it must be the next one its group would get, or leased to it."""
    lane = await core.registry.lane_by_uid(partition_id)
    if lane is None:
        raise NotFound("partition", partition_id)
    item = AckItem(transaction_id, partition_id, "dlq", None, "moved to the dead letters by hand")
    group_id = await core.registry.group(group)
    held = await core.leases.find(None, lane.id, group_id, core.clock.now())
    if held is not None:
        result = (await core.settler.settle([item], group, atomic=True))[0]
        if not result.success:
            raise Conflict(f"message {transaction_id!r}: {result.error}")
        return
    ask = Ask(
        PopRequest(lane.queue.name, lane.name, group=group, batch=10_000, lease_seconds=60),
        group_id,
        [],
        lane,
    )
    await core.popper.ask(ask)
    lease = core.leases.known(None, lane.id, group_id) if ask.popped is not None else None
    if lease is None or ask.popped is None:
        raise NotFound("message", transaction_id)
    others = [
        AckItem(message.transaction_id, partition_id, "retry", lease.id)
        for message in ask.popped.messages()
        if message.transaction_id != transaction_id
    ]
    there = lease.place(transaction_id) is not None
    _, marks = await core.settler.find([*others, item] if there else others, group)
    settlement = Settlement([mark for mark in marks if mark is not None], True)
    async with core.pool.link() as link:
        await core.settler.apply(link, [settlement])
    if not there:
        raise NotFound("message", transaction_id)


async def delete_dead_letters(core: Core, ids: Sequence[str]) -> int:
    """Drop dead letters for good."""
    return len(await core.pool.fetch(sql("dead_letters_delete"), [check_uuid("id", i) for i in ids]))
