"""Dead letters: listed, pushed again, dropped."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import msgspec

from settled.codec import BYTES
from settled.queue.db import sql
from settled.queue.errors import BadRequest, Conflict, NotFound, QueueError, Unavailable
from settled.queue.lanes import check_uuid
from settled.queue.marks import Settlement
from settled.queue.poll import parse_time
from settled.queue.sealing import open_value
from settled.queue.segment import JSON, PRODUCER_KEY, TRACE_KEY, TYPE_KEY, new_base, uuid_text
from settled.queue.types import (
    AckItem,
    DeadLetter,
    DeadLetterFilter,
    DeadLetterRefused,
    DeadLettersDone,
    Page,
    PushItem,
    PushResult,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from settled.queue.ack import Released
    from settled.queue.core import Core
    from settled.queue.transact import _Pushes as Pushes

MAX_PAGE = 10_000
MAX_OFFSET = 2**53
MAX_PART = 1_000
BURY = "select bury($1, $2, $3, $4, $5, $6, $7, $8, $9, $10)"
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
        unsettled=row["unsettled"],
        payload=payload,
        content_type=own.pop(TYPE_KEY, kind),
        trace_id=own.pop(TRACE_KEY, None),
        producer=own.pop(PRODUCER_KEY, None),
        headers=own,
        created_at=row["created_at"],
        failed_at=row["failed_at"],
    )


def _where(chosen: DeadLetterFilter) -> tuple[Any, ...]:
    """The filter as the arguments of `dead_letters_where`."""
    start = parse_time("from", chosen.since) if chosen.since is not None else None
    end = parse_time("to", chosen.until) if chosen.until is not None else None
    ids = [check_uuid("ids", each) for each in chosen.ids] if chosen.ids is not None else None
    return chosen.queue, chosen.partition, chosen.group, start, end, chosen.error, ids


async def dead_letters(core: Core, chosen: DeadLetterFilter, limit: int, offset: int) -> Page[DeadLetter]:
    """One page, newest first."""
    check_page(limit, offset)
    where = _where(chosen)
    rows = await core.pool.fetch(sql("dead_letters"), *where, limit, offset)
    if rows:
        total = rows[0]["total"]
    elif offset:
        total = await core.pool.fetchval(sql("dead_letters_total"), *where)
    else:
        total = 0
    return Page([_letter(row) for row in rows], total, limit, offset)


async def dead_letter(core: Core, dead_letter_id: str) -> DeadLetter:
    """One of them."""
    found = await dead_letters(core, DeadLetterFilter(ids=[dead_letter_id]), 1, 0)
    if not found.rows:
        raise NotFound("dead letter", dead_letter_id)
    return found.rows[0]


class _Part:
    """One part of a bulk operation: the dead letters behind a place, oldest first.

    Those that die while the operation runs are not in it: one that dies again at once is not sent again.
    """

    def __init__(self, core: Core, chosen: DeadLetterFilter, limit: int, after: str | None) -> None:
        if not 1 <= limit <= MAX_PART:
            raise BadRequest("limit", limit, f"must be 1..{MAX_PART}")
        self._core = core
        self._limit = limit
        self._after: tuple[datetime | None, str | None] = (None, None)
        self._is_first = after is None
        queue, partition, group, since, until, error, ids = _where(chosen)
        if after is not None:
            until, failed_at, last = _place(after)
            self._after = failed_at, last
        else:
            now = datetime.fromtimestamp(core.clock.now(), UTC)
            until = min(until, now) if until is not None else now
        self._until = until
        self._where = queue, partition, group, since, until, error, ids

    async def count(self) -> int | None:
        """How many there are in all, if this is the first part."""
        if not self._is_first:
            return None
        counted: int = await self._core.pool.fetchval(sql("dead_letters_total"), *self._where)
        return counted

    async def rows(self) -> list[Any]:
        """The dead letters of this part."""
        return await self._core.pool.fetch(sql("dead_letters_next"), *self._where, *self._after, self._limit)

    def next(self, rows: Sequence[Any]) -> str | None:
        """The place behind these rows; None if there can be nothing more."""
        if len(rows) < self._limit:
            return None
        last = rows[-1]
        return f"{self._until.isoformat()},{last['failed_at'].isoformat()},{last['id']}"


def _place(after: str) -> tuple[datetime, datetime, str]:
    try:
        until, failed_at, last = after.split(",")
    except ValueError:
        raise BadRequest("after", after, "must be the `next` of the part before") from None
    return parse_time("after", until), parse_time("after", failed_at), check_uuid("after", last)


async def retry_dead_letters(
    core: Core, chosen: DeadLetterFilter, limit: int, after: str | None, *, dry_run: bool
) -> DeadLettersDone:
    """Let the groups of dead letters try their messages again, up to `limit` of them."""
    part = _Part(core, chosen, limit, after)
    matched = await part.count()
    if dry_run:
        return DeadLettersDone(matched, 0, [], None)
    rows = await part.rows()
    states = await core.pool.fetch(sql("dead_letters_put_back"), core.worker, [row["id"] for row in rows])
    back = {row["id"] for row in states if row["state"] is not None}
    for queue_id, lane_id, group in {
        (row["queue_id"], row["lane_id"], row["consumer_group"]) for row in rows if row["id"] in back
    }:
        core.ready.released(queue_id, lane_id, await core.registry.group(group), None)
    if back:
        core.activity.ring()
    done, refused = len(back), []
    for row in states:
        if row["state"] is None:
            letter = str(row["id"])
            try:
                await requeue(core, letter)
                done += 1
            except NotFound:  # somebody else was quicker
                continue
            except Unavailable:
                raise
            except QueueError as error:
                refused.append(DeadLetterRefused(letter, str(error)))
    return DeadLettersDone(matched, done, refused, part.next(rows))


async def purge_dead_letters(
    core: Core, chosen: DeadLetterFilter, limit: int, after: str | None, *, dry_run: bool
) -> DeadLettersDone:
    """Drop dead letters for good, up to `limit` of them."""
    part = _Part(core, chosen, limit, after)
    matched = await part.count()
    if dry_run:
        return DeadLettersDone(matched, 0, [], None)
    rows = await part.rows()
    gone = await core.pool.fetch(sql("dead_letters_delete"), [row["id"] for row in rows])
    return DeadLettersDone(matched, len(gone), [], part.next(rows))


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
        BURY,
        core.worker, lane.id, group_id, segment.first_seq + at, *copy, BY_HAND,
    )  # fmt: skip
    match state:
        case "buried":
            core.ready.released(lane.queue.id, lane.id, group_id, None)
            core.activity.ring()
        case "leased":
            lease = await core.leases.find(None, lane.id, group_id, core.clock.now())
            own = lease.id if lease is not None else None
            if not await bury(core, [AckItem(transaction_id, partition_id, "dlq", own, BY_HAND)], group):
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
