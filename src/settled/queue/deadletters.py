"""Dead letters: listed, pushed again, dropped."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import msgspec

from settled.codec import BYTES
from settled.queue.db import sql
from settled.queue.errors import BadRequest, Conflict, NotFound
from settled.queue.lanes import check_uuid
from settled.queue.marks import Settlement
from settled.queue.poll import parse_time
from settled.queue.sealing import open_value
from settled.queue.segment import JSON, PRODUCER_KEY, TRACE_KEY, TYPE_KEY, new_base, uuid_text
from settled.queue.types import AckItem, DeadLetter, Page, PushItem, PushResult

if TYPE_CHECKING:
    from collections.abc import Sequence

    from settled.queue.ack import Released
    from settled.queue.core import Core
    from settled.queue.transact import _Pushes as Pushes

MAX_PAGE = 10_000
MAX_OFFSET = 2**53
BY_HAND = "moved to the dead letters by hand"


def check_page(limit: int, offset: int) -> None:
    """Refuse pages that make no sense."""
    if not 1 <= limit <= MAX_PAGE:
        raise BadRequest("limit", limit, f"must be 1..{MAX_PAGE}")
    if not 0 <= offset <= MAX_OFFSET:
        raise BadRequest("offset", offset, "must be 0 or more")


def _letter(row: Any) -> DeadLetter:
    try:
        payload, headers, kind = open_value(row["payload"]), open_value(row["headers"]), JSON
    except Conflict:  # its key is not here: nobody can read it, but it can be listed and dropped
        payload, headers, kind = row["payload"], b"", BYTES
    own: dict[str, str] = msgspec.json.decode(headers or b"{}")
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
        payload=payload,
        content_type=own.pop(TYPE_KEY, kind),
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
    """Let a dead letter's group try its message again; of a message that is gone, push the copy."""
    dead_letter_id = check_uuid("id", dead_letter_id)
    row = await core.pool.fetchrow("select * from dead_letter where id = $1", dead_letter_id)
    if row is None:
        raise NotFound("dead letter", dead_letter_id)
    letter = _letter(row)
    if await core.pool.fetchval("select put_back($1, $2)", core.worker, dead_letter_id) is None:
        open_value(row["payload"])  # without its key it stays where it is
        return await _push_copy(core, letter)
    group_id = await core.registry.group(letter.group)
    core.ready.released(row["queue_id"], row["lane_id"], group_id, None)
    core.activity.ring()
    names = letter.queue, letter.partition, letter.partition_id
    return PushResult(letter.transaction_id, letter.message_id, "queued", *names)


async def _push_copy(core: Core, letter: DeadLetter) -> PushResult:
    """Push a dead letter's copy, for every group, and drop it, in one transaction."""
    from settled.queue.transact import _Pushes  # transact imports the modules below this one

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
    async with work.room():
        busy = await core.pusher.exclusive(await work.prepare())
        try:
            async with core.pool.transaction() as connection:
                if not await connection.fetch(sql("dead_letter_take"), letter.id):
                    raise NotFound("dead letter", letter.id)
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
    """Make a dead letter of a message that waits for its group, or is leased to it."""
    from settled.queue.inspection import locate  # inspection pages as this module does

    lane = await core.registry.lane_by_uid(partition_id)
    if lane is None:
        raise NotFound("partition", partition_id)
    group_id = await core.registry.group(group)
    segment, at = await locate(core, lane, transaction_id)
    created = datetime.fromtimestamp(segment.created(at) / 1e6, UTC)
    copy = (segment.id(at), segment.tx(at), created, *segment.stored(at))
    state = await core.pool.fetchval(
        "select bury($1, $2, $3, $4, $5, $6, $7, $8, $9, $10)",
        core.worker, lane.id, group_id, segment.first_seq + at, *copy, BY_HAND,
    )  # fmt: skip
    match state:
        case "buried":
            core.ready.released(lane.queue.id, lane.id, group_id, None)
            core.activity.ring()
        case "leased":
            if not await bury(core, [AckItem(transaction_id, partition_id, "dlq", None, BY_HAND)], group):
                raise Conflict(f"message {transaction_id!r} was just settled by who has it")
        case "batch":
            raise Conflict(
                f"message {transaction_id!r} is in a batch that a Spark query of group {group!r} has open: "
                "it is settled with that"
            )
        case "far":
            raise Conflict(f"message {transaction_id!r} is too far behind the next one for group {group!r}")
        case _:
            raise NotFound(f"message pending for group {group!r}", transaction_id)


async def bury(core: Core, items: Sequence[AckItem], group: str) -> int:
    """Make dead letters of leased messages that nobody tried: no attempt is counted; answers how many."""
    _, marks = await core.settler.find(items, group)
    settlement = Settlement([mark for mark in marks if mark is not None], False)
    for mark in settlement.marks:
        mark.kind = "bury"
    released: list[Released] = []
    async with core.pool.link() as link:
        await core.settler.apply(link, [settlement], released)
    core.settler.tell(released)
    return sum(mark.result is not None and mark.result.success for mark in settlement.marks)


async def delete_dead_letters(core: Core, ids: Sequence[str]) -> int:
    """Drop dead letters for good."""
    return len(await core.pool.fetch(sql("dead_letters_delete"), [check_uuid("id", i) for i in ids]))
