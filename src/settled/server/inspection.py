"""Dead letters, single messages, their journal and the traces left on them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, TypedDict

import msgspec

from settled.queue.types import DeadLetterFilter, JournalEntry, QueueOptions

from . import answers, bodies
from .answers import BusStatus, Mode
from .convert import letter_id, partition_id
from .exchange import Answer, HttpError, Request, bad, ok
from .openapi import Data, Paged, Pagination, Time
from .parse import LIMIT, OFFSET, QUEUE_MODE, Query, decode, end_of, name, timestamp

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from settled.queue import types
    from settled.queue.engine import Engine

_dead_letters = msgspec.json.Decoder(bodies.DeadLettersBody)
_trace = msgspec.json.Decoder(bodies.TraceBody)


class DeadLetterRow(Data, TypedDict):
    """A message that will not be tried again for its group.

    `retryCount` are attempts that failed, `unsettledCount` deliveries that ended without a verdict.
    """

    id: str
    messageId: str
    partitionId: str
    transactionId: str
    consumerGroup: str
    errorMessage: str | None
    retryCount: int
    unsettledCount: int
    originalCreatedAt: Time
    movedToDlqAt: Time
    queueName: str
    queue: str
    partition: str
    createdAt: Time
    failedAt: Time
    headers: dict[str, str]
    traceId: str | None
    producerSub: str | None


class DeadLetterPage(Pagination, TypedDict):
    """Dead letters, newest first."""

    messages: list[DeadLetterRow]
    pagination: Pagination


class Requeued(TypedDict):
    """The message that a dead letter became again."""

    success: bool
    transactionId: str
    messageId: str
    partitionId: str
    queueName: str


class RefusedLetter(TypedDict):
    """A dead letter that stays, and why."""

    id: str
    error: str


class DeadLettersDone(TypedDict):
    """A part of the dead letters that were chosen.

    `matched` counts all of them, in the answer to the first call; send `next` as `after` until it is null.
    """

    success: bool
    matched: int | None
    done: int
    refused: list[RefusedLetter]
    next: str | None
    dryRun: bool


class Dropped(TypedDict):
    """The dead letter is gone."""

    success: bool
    id: str


class MessageRow(TypedDict):
    """One message of a listing."""

    id: str
    transactionId: str
    partitionId: str
    queue: str
    partition: str
    queuePath: str
    namespace: str
    task: str
    status: str
    queueStatus: str | None
    busStatus: BusStatus
    offset: int
    traceId: str | None
    producerSub: str | None
    headers: dict[str, str]
    queuePriority: int
    createdAt: Time
    leaseExpiresAt: Time | None


class QueueMessages(TypedDict):
    """Messages of a queue, newest first."""

    messages: list[MessageRow]


class MessageList(QueueMessages):
    """Messages, newest first."""

    mode: Mode


class MessageGroup(TypedDict):
    """What one group did with a message; `unsettled` deliveries ended without a verdict."""

    name: str
    status: Literal["pending", "processing", "retrying", "completed", "dead_letter"]
    consumed: bool
    attempts: int
    unsettled: int
    error: str | None
    leaseExpiresAt: Time | None


class MessageDetail(MessageRow, Data, TypedDict):
    """One message with its payload and what each group did with it."""

    payload: Any
    isEncrypted: bool
    errorMessage: str | None
    retryCount: int
    queueConfig: QueueOptions | None
    mode: Mode
    consumerGroups: list[MessageGroup]


class Named(TypedDict):
    """Which message it was."""

    success: bool
    partitionId: str
    transactionId: str


class MessageDeleted(Named):
    """The message is gone."""

    message: Literal["deleted"]


class MessageRetried(Named):
    """How many of its dead letters were put back."""

    requeued: int


class Buried(Named):
    """For which group the message is a dead letter now."""

    consumerGroup: str


class Journal(TypedDict):
    """How messages were settled, newest first."""

    entries: list[JournalEntry]


class TraceLeft(TypedDict):
    """The note was left."""

    success: bool
    traceId: str


class TraceRow(TypedDict):
    """A note on a message."""

    id: str
    event_type: str
    data: Any
    consumer_group: str | None
    worker_id: str
    created_at: Time
    trace_names: list[str]
    transaction_id: str
    partition_id: str
    queue_name: str
    partition_name: str


class NamedTraceRow(TraceRow):
    """A note on a message, with the message."""

    message_payload: Any


class TraceList(TypedDict):
    """The notes on a message."""

    traces: list[TraceRow]


class TracePage(Paged, TypedDict):
    """The notes of a name."""

    traces: list[NamedTraceRow]


class TraceNameRow(TypedDict):
    """A name and how often it was used."""

    trace_name: str
    trace_count: int
    message_count: int
    last_seen: Time


class TraceNamePage(Paged, TypedDict):
    """The names in use."""

    trace_names: list[TraceNameRow]


class DeadLetters:
    """Dead letters: listing, putting back, dropping."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def list(self, request: Request) -> Answer:
        """GET /api/v1/dlq."""
        query = Query(request.query)
        page = await self._engine.dead_letters(
            queue=query.name("queue"),
            partition=query.name("partition"),
            group=query.name("consumerGroup"),
            since=query.time("from"),
            until=query.end("to"),
            error=query.name("error"),
            limit=query.integer("limit", 100, 1, LIMIT),
            offset=query.integer("offset", 0, 0, OFFSET),
        )
        return ok(
            {
                "messages": [answers.dead_letter(row) for row in page.rows],
                "total": page.total,
                "limit": page.limit,
                "offset": page.offset,
                "pagination": {"limit": page.limit, "offset": page.offset, "total": page.total},
            }
        )

    async def one(self, request: Request) -> Answer:
        """GET /api/v1/dlq/{id}."""
        letter = await self._engine.dead_letter(letter_id(request.segments[0]))
        return ok(answers.dead_letter(letter))

    async def retry_many(self, request: Request) -> Answer:
        """POST /api/v1/dlq/retry."""
        return await self._many(request, self._engine.retry_dead_letters)

    async def purge_many(self, request: Request) -> Answer:
        """POST /api/v1/dlq/purge."""
        return await self._many(request, self._engine.purge_dead_letters)

    async def _many(self, request: Request, work: Callable[..., Awaitable[types.DeadLettersDone]]) -> Answer:
        body = decode(request.body, _dead_letters)
        chosen = DeadLetterFilter(
            queue=_optional(body.queue, "queue"),
            partition=_optional(body.partition, "partition"),
            group=_optional(body.group, "consumerGroup"),
            since=None if body.since is None else timestamp(body.since, "from"),
            until=None if body.until is None else end_of(body.until, "to"),
            error=_optional(body.error, "error"),
            ids=None if body.ids is None else [partition_id(each, "ids") for each in body.ids],
        )
        if chosen == DeadLetterFilter() and not body.all:
            raise bad(
                "body", "must name queue, partition, consumerGroup, error, from, to or ids, or all: true"
            )
        limit = int(body.limit) if body.limit is not None else 500
        done = await work(chosen, limit=limit, after=body.after, dry_run=body.dry_run)
        return ok(
            {
                "success": not done.refused,
                "matched": done.matched,
                "done": done.done,
                "refused": [{"id": each.id, "error": each.error} for each in done.refused],
                "next": done.next,
                "dryRun": body.dry_run,
            }
        )

    async def requeue(self, request: Request) -> Answer:
        """POST /api/v1/dlq/{id}/retry and .../replay."""
        result = await self._engine.requeue(letter_id(request.segments[0]))
        return ok(
            {
                "success": True,
                "transactionId": result.transaction_id,
                "messageId": result.message_id,
                "partitionId": result.partition_id,
                "queueName": result.queue,
            }
        )

    async def delete(self, request: Request) -> Answer:
        """DELETE /api/v1/dlq/{id}."""
        letter = letter_id(request.segments[0])
        if not await self._engine.delete_dead_letters([letter]):
            raise HttpError(404, f"dead letter not found: {letter}")
        return ok({"success": True, "id": letter})


class Inspection:
    """Single messages and the traces left on them."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def list(self, request: Request) -> Answer:
        """GET /api/v1/messages."""
        query = Query(request.query)
        status = query.text("status")
        if status not in (None, "pending", "processing", "completed", "dead_letter"):
            raise bad("status", f"must be pending, processing, completed or dead_letter, got {status!r}")
        views = await self._engine.messages(
            queue=query.name("queue"),
            partition=query.name("partition"),
            namespace=query.name("ns") or query.name("namespace"),
            task=query.name("task"),
            status=status,
            since=query.time("from"),
            until=query.end("to"),
            limit=query.integer("limit", 200, 1, LIMIT),
            offset=query.integer("offset", 0, 0, OFFSET),
        )
        return ok({"messages": [answers.message(view) for view in views], "mode": answers.mode(views)})

    async def of_queue(self, request: Request) -> Answer:
        """GET /api/v1/status/queues/{queue}/messages."""
        limit, offset = _paging(request, 100)
        views = await self._engine.messages(queue=request.segments[0], limit=limit, offset=offset)
        return ok({"messages": [answers.message(view) for view in views]})

    async def one(self, request: Request) -> Answer:
        """GET /api/v1/messages/{partitionId}/{transactionId}."""
        return ok(answers.message_detail(await self._engine.message(*_address(request))))

    async def delete(self, request: Request) -> Answer:
        """DELETE /api/v1/messages/{partitionId}/{transactionId}."""
        partition, transaction = _address(request)
        await self._engine.delete_message(partition, transaction)
        return ok({**_named(partition, transaction), "message": "deleted"})

    async def retry(self, request: Request) -> Answer:
        """POST /api/v1/messages/{partitionId}/{transactionId}/retry: put its dead letters back."""
        partition, transaction = _address(request)
        group = Query(request.query).name("consumerGroup")
        count = await self._engine.retry_message(partition, transaction, group=group)
        return ok({**_named(partition, transaction), "requeued": count})

    async def bury(self, request: Request) -> Answer:
        """POST /api/v1/messages/{partitionId}/{transactionId}/dlq: to the dead letters."""
        partition, transaction = _address(request)
        group = Query(request.query).name("consumerGroup") or QUEUE_MODE
        await self._engine.bury_message(partition, transaction, group=group)
        return ok({**_named(partition, transaction), "consumerGroup": group})

    async def journal(self, request: Request) -> Answer:
        """GET /api/v1/journal: how messages were settled, when, by whom."""
        query = Query(request.query)
        partition = query.text("partitionId")
        entries = await self._engine.journal(
            queue=query.name("queue"),
            partition_id=None if partition is None else partition_id(partition),
            transaction_id=query.name("transactionId"),
            limit=query.integer("limit", 100, 1, LIMIT),
        )
        return ok({"entries": entries})

    async def trace(self, request: Request) -> Answer:
        """POST /api/v1/traces."""
        body = decode(request.body, _trace, stored=True)
        given = body.trace_names
        names = [given] if isinstance(given, str) else given or []
        note = await self._engine.trace(
            partition_id(body.partition_id),
            name(body.transaction_id, "transactionId"),
            bytes(body.data),
            names=[name(each, "traceNames") for each in names[:100]],
            event_type=name(body.event_type or "info", "eventType"),
            group=name(body.consumer_group, "consumerGroup") if body.consumer_group else None,
        )
        return ok({"success": True, "traceId": note}, 201)

    async def traces(self, request: Request) -> Answer:
        """GET /api/v1/traces/{partitionId}/{transactionId}."""
        notes = await self._engine.traces(*_address(request))
        return ok({"traces": [answers.trace(note) for note in notes]})

    async def traces_by_name(self, request: Request) -> Answer:
        """GET /api/v1/traces/by-name/{name}."""
        limit, offset = _paging(request, 100)
        page = await self._engine.traces_by_name(request.segments[0], limit=limit, offset=offset)
        rows = [
            {
                **answers.trace(note),
                "message_payload": answers.data_of(note.payload, note.content_type)["data"],
            }
            for note in page.rows
        ]
        return ok({"traces": rows, **_page(page.total, limit, offset)})

    async def trace_names(self, request: Request) -> Answer:
        """GET /api/v1/traces/names."""
        limit, offset = _paging(request, 50)
        page = await self._engine.trace_names(limit=limit, offset=offset)
        rows = [
            {
                "trace_name": row.name,
                "trace_count": row.traces,
                "message_count": row.messages,
                "last_seen": row.last_seen,
            }
            for row in page.rows
        ]
        return ok({"trace_names": rows, **_page(page.total, limit, offset)})


def _optional(value: str | None, field: str) -> str | None:
    return None if value is None else name(value, field)


def _address(request: Request) -> tuple[str, str]:
    partition, transaction = request.segments
    return partition_id(partition), name(transaction, "transactionId")


def _named(partition: str, transaction: str) -> dict[str, Any]:
    return {"success": True, "partitionId": partition, "transactionId": transaction}


def _paging(request: Request, default: int) -> tuple[int, int]:
    query = Query(request.query)
    return query.integer("limit", default, 1, LIMIT), query.integer("offset", 0, 0, OFFSET)


def _page(total: int, limit: int, offset: int) -> dict[str, Any]:
    return {"total": total, "pagination": {"limit": limit, "offset": offset, "total": total}}
