"""The hot routes: push, pop, ack, batch ack, lease extension and transaction."""

from __future__ import annotations

import asyncio
import uuid
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal, TypedDict

import msgspec

from settled.queue.types import (
    DEFAULT_PARTITION,
    QUEUE_MODE,
    Acked,
    AckResult,
    Appended,
    Outcome,
    Popped,
    PopRequest,
    PushOp,
    PushResult,
)

from . import answers, bodies, spliced
from .convert import (
    DONE,
    NULL,
    ack_item,
    ack_items,
    operations,
    plain_ack,
    plain_push,
    push_items,
)
from .exchange import Answer, HttpError, Request, bad, ok
from .openapi import Time
from .parse import decode, name, pop_query
from .schemas import ITEMS_LIMIT, LEASE_LIMIT

if TYPE_CHECKING:
    from collections.abc import Callable

    from settled.queue.engine import Engine

    from .router import Reply

PAUSE = 1.0

_push = msgspec.json.Decoder(bodies.PushBody)
_ack = msgspec.json.Decoder(bodies.AckBody)
_ack_batch = msgspec.json.Decoder(bodies.AckBatchBody)
_transaction = msgspec.json.Decoder(bodies.TransactionBody)
_extend = msgspec.json.Decoder(bodies.ExtendBody)

_REFUSED = {"invalid_lease": 409, "not_found": 404}


class BatchRefused(TypedDict):
    """A batch of which one ack could not be settled, so none was; `results` tells which."""

    success: bool
    message: Outcome
    error: str
    results: list[answers.Acked]


class PushedOperation(msgspec.Struct, rename="camel", tag_field="type", tag="push"):
    """A push of a transaction."""

    index: int
    success: bool
    status: Literal["queued", "duplicate", "scheduled"]
    transaction_id: str
    message_id: str
    partition_id: str
    queue_name: str


class AckedOperation(answers.Acked, tag_field="type", tag="ack"):
    """An ack of a transaction."""


class Transacted(TypedDict):
    """All was done; results in the order of the operations, each item of a push for itself."""

    transactionId: str
    success: bool
    results: list[PushedOperation | AckedOperation]


class UnappliedOperation(answers.Acked):
    """A push or an ack of a transaction that failed."""

    type: Literal["push", "ack"]


class TransactionRefused(TypedDict):
    """Nothing was done; `results` tells what was in the way."""

    transactionId: str
    success: bool
    results: list[UnappliedOperation]
    error: str
    message: str


class Extended(TypedDict):
    """Until when the lease is held and on how many partitions, or why not."""

    leaseId: str
    success: bool
    error: str | None
    renewed: int
    expiresAt: Time | None
    newExpiresAt: Time | None


class Messages:
    """Handlers over one engine; `stop()` ends the pops that wait."""

    def __init__(self, engine: Engine, room: Callable[[], bool]) -> None:
        self._engine = engine
        self._room = room
        self._stopping = False
        self._polls: set[asyncio.Task[Any]] = set()

    def stop(self) -> None:
        """Answer every waiting pop now, and let none wait from here on."""
        self._stopping = True
        for poll in self._polls:
            poll.cancel()

    async def push(self, request: Request) -> Answer:
        """POST /api/v1/push."""
        items = push_items(decode(request.body, _push, stored=True).items)
        if not items:
            return Answer(201, b"[]")
        return Answer(201, answers.pushed(await self._engine.push(items), items))

    def push_soon(self, request: Request, reply: Reply) -> bool:
        """POST /api/v1/push of plain messages of one partition."""
        items = decode(request.body, _push, stored=True).items
        if not items or not plain_push(items):
            return False
        first = items[0]
        if len(items) == 1:
            ids, payloads = [first.transaction_id], [bytes(first.payload or first.data or NULL)]
        else:
            ids = [item.transaction_id for item in items]
            payloads = [bytes(item.payload or item.data or NULL) for item in items]

        def done(result: Appended | Exception | None) -> None:
            reply(Answer(201, spliced.appended(result, ids)) if isinstance(result, Appended) else result)

        partition = DEFAULT_PARTITION if first.partition is None else first.partition
        return self._engine.push_soon(first.queue, partition, ids, payloads, done)

    async def pop_queue(self, request: Request) -> Answer:
        """GET /api/v1/pop/queue/{queue} and .../partition/{partition}."""
        return await self._pop(request, pop_request(request.segments, request.query))

    def pop_soon(self, request: Request, reply: Reply) -> bool:
        """GET /api/v1/pop/queue/{queue} of a queue that has messages."""
        wanted = pop_request(request.segments, request.query)
        if not self._room():
            return False

        def done(result: Popped | Exception | None) -> None:
            if not isinstance(result, Popped):
                reply(result)
                return
            if request.gone:
                self._engine.give_back(result)
            reply(Answer(200, answers.popped(result, wanted)))

        return self._engine.pop_soon(wanted, done)

    async def pop_any(self, request: Request) -> Answer:
        """GET /api/v1/pop?namespace=&task=."""
        query = pop_query(request.query)
        if query.namespace is None and query.task is None:
            raise bad("namespace", "or task is required; to pop one queue use /api/v1/pop/queue/{queue}")
        return await self._pop(
            request,
            PopRequest(
                namespace=query.namespace,
                task=query.task,
                group=query.group,
                batch=query.batch,
                partitions=query.partitions,
                auto_ack=query.auto_ack,
                wait=query.wait,
                lease_seconds=query.lease_seconds,
                release_rest=query.release_rest,
                subscription_mode=query.mode,
                subscription_from=query.origin,
            ),
        )

    async def _pop(self, request: Request, wanted: PopRequest) -> Answer:
        if not self._room():
            why = "the answers that clients have not read yet hold too many bytes; read them, and pop again"
            raise HttpError(503, why, extra=b"retry-after: 1\r\n")
        if wanted.wait and not self._stopping:
            result = await self._wait(request, wanted)
        else:
            result = await self._engine.pop(wanted)
        if request.gone:
            self._engine.give_back(result)
        return Answer(200, answers.popped(result, wanted))

    async def _wait(self, request: Request, wanted: PopRequest) -> Popped:
        task = asyncio.current_task()
        assert task is not None  # noqa: S101 - a handler always runs in a task
        self._polls.add(task)
        request.cancellable = True
        try:
            result = await self._engine.pop(wanted)
            if result.empty == "paused":
                # Whoever polls in a loop must not spin while consumption is switched off.
                await asyncio.sleep(min(PAUSE, wanted.wait))
        except asyncio.CancelledError:
            if not self._told_to_stop(request):
                raise
            task.uncancel()
            return Popped(group=wanted.group, empty="timeout")
        else:
            return result
        finally:
            request.cancellable = False
            self._polls.discard(task)

    def _told_to_stop(self, request: Request) -> bool:
        return self._stopping and not request.gone

    async def ack(self, request: Request) -> Answer:
        """POST /api/v1/ack."""
        item = ack_item(decode(request.body, _ack), "", None)
        result = (await self._engine.ack([item], item.group or ""))[0]
        return Answer(_status(result), msgspec.json.encode(answers.acked(0, result)))

    async def ack_batch(self, request: Request) -> Answer:
        """POST /api/v1/ack/batch: all or nothing, unless `atomic` is false."""
        body = decode(request.body, _ack_batch)
        items = ack_items(body)
        if not items:
            return Answer(200, b"[]")
        results = await self._engine.ack(items, items[0].group or "", atomic=body.atomic)
        shown = [answers.acked(i, result) for i, result in enumerate(results)]
        refused = [result for result in shown if not result.success and result.message != "not_applied"]
        if not body.atomic or not refused:
            return Answer(200, msgspec.json.encode(shown))
        first = refused[0]
        error = f"acknowledgments[{first.index}]: {first.error}; nothing was settled"
        return ok({"success": False, "message": first.message, "error": error, "results": shown}, 409)

    def ack_soon(self, request: Request, reply: Reply) -> bool:
        """POST /api/v1/ack of one message that was handled."""
        body = decode(request.body, _ack)
        if not plain_ack(body):
            return False

        def done(settled: Acked | Exception | None) -> None:
            if isinstance(settled, Acked):
                reply(Answer(200, spliced.acked(body.transaction_id, settled)))
            else:
                reply(settled)

        group = body.consumer_group or QUEUE_MODE
        return self._engine.ack_soon(body.partition_id, body.lease_id, group, [body.transaction_id], done)

    def ack_batch_soon(self, request: Request, reply: Reply) -> bool:
        """POST /api/v1/ack/batch of messages of one lease that were handled."""
        body = decode(request.body, _ack_batch)
        acks = body.acknowledgments
        if not acks or len(acks) > ITEMS_LIMIT:
            return False
        first = acks[0]
        partition_id, lease_id, group = first.partition_id, first.lease_id, first.consumer_group
        for ack in acks:
            if ack.partition_id != partition_id or ack.lease_id != lease_id or ack.consumer_group != group:
                return False
            # As plain_ack, without a call for each.
            if ack.error is not None or ack.delay_seconds is not None or ack.status not in DONE:
                return False
            if ack.release_rest:
                return False
        ids = [ack.transaction_id for ack in acks]

        def done(settled: Acked | Exception | None) -> None:
            if isinstance(settled, Acked):
                reply(Answer(200, spliced.all_acked(ids, settled)))
            else:
                reply(settled)

        whole = group or body.consumer_group or QUEUE_MODE
        return self._engine.ack_soon(partition_id, lease_id, whole, ids, done)

    async def extend(self, request: Request) -> Answer:
        """POST /api/v1/lease/{leaseId}/extend; the body may be left out."""
        seconds = decode(request.body, _extend).seconds if request.body else None
        if seconds is None:
            seconds = 60
        if not 0 < seconds <= LEASE_LIMIT:
            raise bad("seconds", f"must be more than 0 and at most {LEASE_LIMIT}, got {seconds}")
        result = await self._engine.extend(request.segments[0], seconds)
        if result.success:
            return ok(answers.extended(result))
        return ok(answers.extended(result), 404 if "not found" in (result.error or "") else 409)

    async def transaction(self, request: Request) -> Answer:
        """POST /api/v1/transaction."""
        body = decode(request.body, _transaction, stored=True)
        wanted = operations(body)
        result = await self._engine.transaction(wanted, body.required_leases or ())
        kinds = [
            kind
            for op in wanted
            for kind in (["push"] * len(op.items) if isinstance(op, PushOp) else ["ack"])
        ]
        shown = [
            _operation(i, kind, each)
            for i, (kind, each) in enumerate(zip(kinds, result.results, strict=True))
        ]
        answer = {"transactionId": str(uuid.uuid4()), "success": result.success, "results": shown}
        if result.success:
            return ok(answer)
        why = next(
            (r.message for r in result.results if isinstance(r, AckResult) and r.message != "not_applied"),
            "conflict",
        )
        return ok({**answer, "error": f"Transaction rolled back: {result.error}", "message": why}, 409)


@lru_cache(maxsize=4096)
def pop_request(segments: tuple[str, ...], raw: bytes) -> PopRequest:
    """What a pop of a queue asks for, remembered, since consumers repeat themselves."""
    query = pop_query(raw)
    queue, *rest = segments
    return PopRequest(
        queue=name(queue, "queue"),
        partition=name(rest[0], "partition") if rest else None,
        group=query.group,
        batch=query.batch,
        partitions=query.partitions,
        auto_ack=query.auto_ack,
        wait=query.wait,
        lease_seconds=query.lease_seconds,
        release_rest=query.release_rest,
        subscription_mode=query.mode,
        subscription_from=query.origin,
    )


def _status(result: AckResult) -> int:
    return 200 if result.success else _REFUSED.get(result.message, 409)


def _operation(index: int, kind: str, result: PushResult | AckResult) -> dict[str, Any]:
    if isinstance(result, AckResult):
        return {"type": kind, **msgspec.to_builtins(answers.acked(index, result))}
    return {
        "index": index,
        "type": kind,
        "success": result.status != "duplicate",
        "status": result.status,
        "transactionId": result.transaction_id,
        "messageId": result.message_id,
        "partitionId": result.partition_id,
        "queueName": result.queue,
    }
