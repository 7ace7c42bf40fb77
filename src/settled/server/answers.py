"""The bodies of answers in the API's shapes, from the engine's values; pure functions."""

from __future__ import annotations

import base64
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Literal, TypedDict

import msgspec
from msgspec import Raw, Struct

from settled.queue.marks import LEASE_LOST, UNKNOWN
from settled.queue.popped import place, reader
from settled.queue.types import Outcome

if TYPE_CHECKING:
    from collections.abc import Sequence

    from settled.queue.types import (
        AckResult,
        Configured,
        DeadLetter,
        GroupLag,
        LaneLag,
        LaneStats,
        LeaseExtension,
        MessageView,
        Popped,
        PopRequest,
        PushItem,
        PushResult,
        QueueStats,
        Trace,
    )

    from .inspection import DeadLetterRow, MessageDetail, MessageRow, TraceRow
    from .messages import Extended
    from .openapi import Data, PartlyPushed
    from .queues import ConfiguredQueue
    from .system import Counts, GroupLane, GroupRow, LaggingLane, LaneRow, QueueDetail, QueueRow

encode = msgspec.json.encode
JSON = "application/json"
LAGGING_AFTER = 300
Kind = Literal["queue", "bus", "hybrid", "none"]

_SAID = {
    "invalid_lease": LEASE_LOST,
    "not_found": UNKNOWN,
    "not_applied": "Not applied: another acknowledgment of the batch could not be settled",
}


class Pushed(Struct, gc=False):
    """One element of the answer to a push."""

    index: int
    transaction_id: str
    status: str
    message_id: str
    partition_id: str
    trace_id: str | None
    queueName: str  # noqa: N815 - the API's name


class Acked(Struct, gc=False, rename="camel"):
    """The answer to an ack, or one element of a batch's; `noop` where an ack came for a settled message."""

    index: int
    transaction_id: str
    success: bool
    message: Outcome
    error: str | None
    queue_name: str | None
    partition_name: str | None
    lease_released: bool
    dlq: bool
    retry_count: int
    noop: bool


class BusStatus(TypedDict):
    """How many of the groups are done with a message."""

    consumedBy: int
    totalGroups: int


class Mode(TypedDict):
    """Whether messages are consumed as a queue, by groups, by both or by nobody."""

    hasQueueMode: bool
    busGroupsCount: int
    type: Kind


def pushed(results: Sequence[PushResult], items: Sequence[PushItem]) -> bytes:
    """The array that answers a push."""
    return encode(
        [
            Pushed(i, r.transaction_id, r.status, r.message_id, r.partition_id, item.trace_id, r.queue)
            for i, (r, item) in enumerate(zip(results, items, strict=True))
        ]
    )


def partly_pushed(results: Sequence[PushResult]) -> list[PartlyPushed]:
    """What became of each item of a push of which a part is stored."""
    return [
        {
            "index": i,
            "transaction_id": r.transaction_id or None,
            "status": r.status,
            "message_id": r.message_id or None,
            "partition_id": r.partition_id or None,
            "queueName": r.queue,
        }
        for i, r in enumerate(results)
    ]


def acked(index: int, result: AckResult) -> Acked:
    """One settled, or not settled, message."""
    error = result.error
    if error is None and not result.success:
        error = _SAID.get(result.message, result.message)
    return Acked(
        index,
        result.transaction_id,
        result.success,
        result.message,
        error,
        result.queue,
        result.partition,
        result.lease_released,
        result.dlq,
        result.attempts,
        result.noop,
    )


def popped(result: Popped, request: PopRequest) -> bytes:
    """The object that answers a pop; payloads go in as the bytes they came as."""
    if not result.lanes:
        return _empty(result, request, encode(result.group))
    first = result.lanes[0]
    return b'{"success":true%b,"leaseId":%b,"leaseExpiresAt":%b%b,"partitionsClaimed":%d,"messages":[%b]}' % (
        place(first.queue, first.partition, first.partition_id),
        encode(result.lease_id or ""),
        encode(result.expires_at),
        reader(result.group),
        len(result.lanes),
        result.json_messages(),
    )


def _empty(result: Popped, request: PopRequest, group: bytes) -> bytes:
    place = b'"queue":%b,"partition":%b,"consumerGroup":%b' % (
        encode(request.queue),
        encode(request.partition),
        group,
    )
    match result.empty:
        case "paused":
            return b'{"success":true,"paused":true,%b,"messages":[]}' % place
        case "window_buffer":
            return b'{"success":true,"windowBufferActive":true,"leaseId":"",%b,"messages":[]}' % place
        case "timeout" | None:
            return b'{"success":true,%b,"partitionId":null,"leaseId":null,"messages":[]}' % place
        case why:
            # A pop that waited in vain is no error, whatever the reason at the end was.
            if request.wait:
                return b'{"success":true,%b,"partitionId":null,"leaseId":null,"messages":[]}' % place
            return b'{"success":false,"error":%b,%b,"messages":[]}' % (encode(why), place)


def extended(result: LeaseExtension) -> Extended:
    """The answer to a lease renewal."""
    return {
        "leaseId": result.lease_id,
        "success": result.success,
        "error": result.error,
        "renewed": result.renewed,
        "expiresAt": result.expires_at,
        "newExpiresAt": result.expires_at,
    }


def configured(result: Configured) -> ConfiguredQueue:
    """The answer to configure."""
    return {
        "configured": True,
        "queueId": result.queue_id,
        "partitionId": result.partition_id,
        "queue": result.queue,
        "namespace": result.namespace,
        "task": result.task,
        "createdAt": result.created_at,
        "options": result.options,
    }


def data_of(payload: bytes | None, content_type: str) -> Data:
    """A payload as JSON: itself if it is JSON, else text, else base64."""
    if payload is None:
        return {"data": None}
    if content_type == JSON:
        return {"data": Raw(payload)}
    try:
        return {"data": payload.decode(), "contentType": content_type}
    except UnicodeDecodeError:
        return {"data": base64.b64encode(payload).decode(), "contentType": content_type, "encoding": "base64"}


def dead_letter(letter: DeadLetter) -> DeadLetterRow:
    """One dead letter: the documented names, and those of Queen MQ beside them."""
    return {
        "id": letter.id,
        "messageId": letter.message_id,
        "partitionId": letter.partition_id,
        "transactionId": letter.transaction_id,
        "consumerGroup": letter.group,
        "errorMessage": letter.error,
        "retryCount": letter.attempts,
        "unsettledCount": letter.unsettled,
        "originalCreatedAt": letter.created_at,
        "movedToDlqAt": letter.failed_at,
        "queueName": letter.queue,
        "queue": letter.queue,
        "partition": letter.partition,
        "createdAt": letter.created_at,
        "failedAt": letter.failed_at,
        "headers": letter.headers,
        "traceId": letter.trace_id,
        "producerSub": letter.producer,
        **data_of(letter.payload, letter.content_type),
    }


def group(lag: GroupLag) -> GroupRow:
    """One (group, queue) with its lag."""
    return {
        "name": lag.group,
        "topics": [lag.queue],
        "queueName": lag.queue,
        "members": lag.active_leases,
        "partitions": lag.partitions,
        "partitionsWithLag": lag.partitions_with_lag,
        "totalLag": lag.total_lag,
        "maxTimeLag": lag.max_time_lag,
        "state": lag.state,
        "subscriptionMode": lag.subscription_mode,
        "subscriptionTimestamp": lag.subscription_timestamp,
        "subscriptionCreatedAt": lag.subscription_created_at,
    }


def lagging_lane(lag: LaneLag) -> LaggingLane:
    """One lagging partition, in the snake_case of that route."""
    return {
        "consumer_group": lag.group,
        "queue_name": lag.queue,
        "partition_name": lag.partition,
        "partition_id": lag.partition_id,
        "worker_id": lag.lease_id,
        "offset_lag": lag.lag,
        "time_lag_seconds": lag.time_lag,
        "lag_hours": round(lag.time_lag / 3600, 3),
        "oldest_unconsumed_at": lag.oldest_pending_at,
        "last_consumed_at": lag.last_consumed_at,
    }


def group_lane(lag: LaneLag) -> GroupLane:
    """One partition of a group's detail."""
    now = datetime.now(UTC)
    return {
        "partition": lag.partition,
        "partitionId": lag.partition_id,
        "workerId": lag.lease_id,
        "lastConsumedAt": lag.last_consumed_at,
        "totalConsumed": lag.total_consumed,
        "offsetLag": lag.lag,
        "timeLagSeconds": lag.time_lag,
        "leaseActive": lag.lease_expires_at is not None and lag.lease_expires_at > now,
        "leaseExpiresAt": lag.lease_expires_at,
    }


def _counts(stats: QueueStats | LaneStats) -> Counts:
    return {
        "total": stats.total,
        "pending": stats.pending,
        "processing": stats.processing,
        "completed": stats.completed,
        "failed": stats.dead,
        "deadLetter": stats.dead,
    }


def queue_row(stats: QueueStats) -> QueueRow:
    """One queue of the list."""
    return {
        "id": stats.id,
        "name": stats.name,
        "namespace": stats.namespace,
        "task": stats.task,
        "createdAt": stats.created_at,
        "partitions": stats.partitions,
        "messages": _counts(stats),
    }


def queue_detail(stats: QueueStats, limit: int, offset: int) -> QueueDetail:
    """One queue with some of its partitions."""
    return {
        **queue_row(stats),
        "options": stats.options,
        "totals": _counts(stats),
        "partitions": [lane_row(lane) for lane in stats.lanes],
        "partitionsTotal": stats.partitions,
        "limit": limit,
        "offset": offset,
    }


def lane_row(lane: LaneStats) -> LaneRow:
    """One partition of a queue."""
    return {
        "id": lane.id,
        "name": lane.name,
        "createdAt": lane.created_at,
        "oldestMessage": lane.oldest,
        "newestMessage": lane.newest,
        "stats": _counts(lane),
    }


def message(view: MessageView) -> MessageRow:
    """One message of a listing."""
    named = [g for g in view.groups if g.group != "__QUEUE_MODE__"]
    plain = next((g for g in view.groups if g.group == "__QUEUE_MODE__"), None)
    leases = [g.lease_expires_at for g in view.groups if g.lease_expires_at is not None]
    return {
        "id": view.id,
        "transactionId": view.transaction_id,
        "partitionId": view.partition_id,
        "queue": view.queue,
        "partition": view.partition,
        "queuePath": f"{view.queue}/{view.partition}",
        "namespace": view.namespace,
        "task": view.task,
        "status": view.status,
        "queueStatus": plain.status if plain else None,
        "busStatus": {"consumedBy": sum(g.status == "completed" for g in named), "totalGroups": len(named)},
        "offset": view.seq,
        "traceId": view.trace_id,
        "producerSub": view.producer,
        "headers": view.headers,
        "queuePriority": view.priority,
        "createdAt": view.created_at,
        "leaseExpiresAt": min(leases, default=None),
    }


def message_detail(view: MessageView) -> MessageDetail:
    """One message with its payload and what each group did with it."""
    data = data_of(view.payload, view.content_type)
    errors = [g.error for g in view.groups if g.error]
    return {
        **message(view),
        **data,
        "payload": data["data"],
        "isEncrypted": view.encrypted,
        "errorMessage": errors[0] if errors else None,
        "retryCount": max((g.attempts for g in view.groups), default=0),
        "queueConfig": view.options,
        "mode": mode([view]),
        "consumerGroups": [
            {
                "name": g.group,
                "status": g.status,
                "consumed": g.status in ("completed", "dead_letter"),
                "attempts": g.attempts,
                "unsettled": g.unsettled,
                "error": g.error,
                "leaseExpiresAt": g.lease_expires_at,
            }
            for g in view.groups
        ],
    }


def mode(views: Sequence[MessageView]) -> Mode:
    """Whether these messages are consumed as a queue, by groups, by both or by nobody."""
    groups = {g.group for view in views for g in view.groups}
    plain = "__QUEUE_MODE__" in groups
    named = len(groups - {"__QUEUE_MODE__"})
    kind: Kind = ("hybrid" if named else "queue") if plain else ("bus" if named else "none")
    return {"hasQueueMode": plain, "busGroupsCount": named, "type": kind}


def trace(note: Trace) -> TraceRow:
    """One trace, in the snake_case of those routes."""
    return {
        "id": note.id,
        "event_type": note.event_type,
        "data": Raw(note.data),
        "consumer_group": note.group,
        "worker_id": note.worker,
        "created_at": note.created_at,
        "trace_names": note.names,
        "transaction_id": note.transaction_id,
        "partition_id": note.partition_id,
        "queue_name": note.queue,
        "partition_name": note.partition,
    }
