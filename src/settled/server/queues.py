"""Queues and consumer groups: configuration, figures, lag, seek, deletion."""

from __future__ import annotations

import builtins
from collections import defaultdict
from datetime import UTC, datetime
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal, NotRequired, TypedDict

import msgspec

from settled.queue.types import QUEUE_MODE, QueueOptions

from . import answers, bodies
from .exchange import Answer, HttpError, Request, bad, ok
from .openapi import Time
from .parse import OFFSET, Query, decode, name, timestamp
from .system import GroupLane, GroupRow, LaneRow, Sums

if TYPE_CHECKING:
    from settled.queue.engine import Engine
    from settled.queue.types import QueueStats

_configure = msgspec.json.Decoder(bodies.ConfigureBody)
_seek = msgspec.json.Decoder(bodies.SeekBody)
_subscription = msgspec.json.Decoder(bodies.SubscriptionBody)


class ConfiguredQueue(TypedDict):
    """A queue as it is configured now."""

    configured: bool
    queueId: str
    partitionId: str
    queue: str
    namespace: str
    task: str
    createdAt: Time
    options: QueueOptions


class PartitionRow(LaneRow, TypedDict):
    """One partition in figures, with its queue."""

    queue: str


class PartitionList(TypedDict):
    """Partitions of one queue, or of all: `limit` of `partitionsTotal`, from `offset` on."""

    partitions: list[PartitionRow]
    partitionsTotal: int
    limit: int
    offset: int


class PartitionDepth(TypedDict):
    """What is pending in one partition."""

    partition: str
    pending: int


class Depth(TypedDict):
    """How much is pending, for a group if one was named."""

    queue: str
    group: str | None
    pending: int
    partitionsPending: int
    conflation: bool
    effectivePending: int
    partitionsTotal: int
    partitions: list[PartitionDepth]


class Deleted(TypedDict):
    """The queue is gone; `existed` tells whether it was there."""

    deleted: bool
    queue: str
    existed: bool


class Cleared(TypedDict):
    """How many messages were dropped; `messages` is another name of `count`."""

    cleared: bool
    queue: str
    messages: int
    count: int


class Part(TypedDict):
    """The queues of a namespace or of a task in figures."""

    queues: int
    partitions: int
    messages: Sums


class NamespaceRow(Part):
    """One namespace."""

    namespace: str


class NamespaceList(TypedDict):
    """Namespaces in use."""

    namespaces: list[NamespaceRow]


class TaskRow(Part):
    """One task."""

    task: str


class TaskList(TypedDict):
    """Tasks in use."""

    tasks: list[TaskRow]


class Overview(TypedDict):
    """Everything in a few figures."""

    queues: int
    partitions: int
    namespaces: int
    tasks: int
    consumerGroups: int
    messages: Sums
    lag: dict[Literal["time", "offset"], dict[str, float]]
    statsAge: int
    timestamp: Time


class GroupList(TypedDict):
    """Groups, one row for each queue they read."""

    groups: list[GroupRow]


class GroupQueue(TypedDict):
    """A group on one queue."""

    partitions: list[GroupLane]


class GroupDeleted(TypedDict):
    """The group was forgotten; `queueName` where one queue was named."""

    success: bool
    consumerGroup: str
    deletedPartitions: int
    metadataDeleted: bool
    queueName: NotRequired[str]


class Subscribed(TypedDict):
    """Where the group starts now."""

    success: bool
    consumerGroup: str
    newTimestamp: Time
    rowsUpdated: int


class Sought(TypedDict):
    """Where the group was moved; the last two where one partition was named."""

    success: bool
    consumerGroup: str
    queueName: str
    seekToEnd: bool
    targetTimestamp: Time | None
    partitionsUpdated: int
    partitionName: NotRequired[str]
    updated: NotRequired[bool]


class Queues:
    """Configuration and figures of queues."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def configure(self, request: Request) -> Answer:
        """POST /api/v1/configure."""
        body = decode(request.body, _configure, stored=True)
        for field, value in (("namespace", body.namespace), ("task", body.task)):
            if value:
                name(value, field)
        result = await self._engine.configure(
            name(body.queue, "queue"),
            body.options,
            namespace=body.namespace,
            task=body.task,
            replace=body.mode == "replace",
        )
        return ok(answers.configured(result))

    async def list(self, request: Request) -> Answer:
        """GET /api/v1/resources/queues."""
        query = Query(request.query)
        rows = await self._engine.queues(namespace=query.name("namespace"), task=query.name("task"))
        return ok({"queues": [answers.queue_row(row) for row in rows]})

    async def one(self, request: Request) -> Answer:
        """GET /api/v1/resources/queues/{queue}?limit=&offset=."""
        limit, offset = Query(request.query).page()
        found = await self._engine.queue(request.segments[0], limit=limit, offset=offset)
        return ok(answers.queue_detail(found, limit, offset))

    async def depth(self, request: Request) -> Answer:
        """GET /api/v1/resources/queues/{queue}/depth?group=&limit=&offset=."""
        queue = request.segments[0]
        query = Query(request.query)
        wanted = query.name("group")
        limit, offset = query.page()
        detail = await self._engine.queue(queue)
        if wanted is None:
            pending = {lane.name: lane.pending for lane in detail.lanes}
        else:
            behind = {row.partition: row.lag for row in await self._engine.lanes(queue=queue, group=wanted)}
            pending = {lane.name: behind.get(lane.name, lane.total) for lane in detail.lanes}
        total = sum(pending.values())
        return ok(
            {
                "queue": queue,
                "group": wanted,
                "pending": total,
                "partitionsPending": sum(count > 0 for count in pending.values()),
                "conflation": False,
                "effectivePending": total,
                "partitionsTotal": len(pending),
                "partitions": [
                    {"partition": key, "pending": count}
                    for key, count in islice(pending.items(), offset, offset + limit)
                ],
            }
        )

    async def delete(self, request: Request) -> Answer:
        """DELETE /api/v1/resources/queues/{queue}."""
        queue = request.segments[0]
        existed = await self._engine.delete_queue(queue)
        return ok({"deleted": True, "queue": queue, "existed": existed})

    async def clear(self, request: Request) -> Answer:
        """DELETE /api/v1/queues/{queue}/clear."""
        queue = request.segments[0]
        count = await self._engine.clear_queue(queue, Query(request.query).name("partition"))
        return ok({"cleared": True, "queue": queue, "messages": count, "count": count})

    async def partitions(self, request: Request) -> Answer:
        """GET /api/v1/resources/partitions?queue=&limit=&offset=."""
        query = Query(request.query)
        queue = query.name("queue")
        limit, offset = query.page()
        every = [await self._engine.queue(queue, limit=0)] if queue else await self._engine.queues()
        rows: builtins.list[Any] = []
        skip = offset
        for each in every:
            if len(rows) < limit and skip < each.partitions:
                found = await self._engine.queue(each.name, limit=limit - len(rows), offset=skip)
                rows += [{"queue": each.name, **answers.lane_row(lane)} for lane in found.lanes]
            skip = max(0, skip - each.partitions)
        total = sum(each.partitions for each in every)
        return ok({"partitions": rows, "partitionsTotal": total, "limit": limit, "offset": offset})

    async def namespaces(self, request: Request) -> Answer:
        """GET /api/v1/resources/namespaces."""
        return ok({"namespaces": _by("namespace", await self._engine.queues())})

    async def tasks(self, request: Request) -> Answer:
        """GET /api/v1/resources/tasks."""
        return ok({"tasks": _by("task", await self._engine.queues())})

    async def overview(self, request: Request) -> Answer:
        """GET /api/v1/resources/overview."""
        queues = await self._engine.queues()
        groups = await self._engine.groups()
        total_lag = sum(row.total_lag for row in groups)
        max_lag = max((row.max_time_lag for row in groups), default=0)
        return ok(
            {
                "queues": len(queues),
                "partitions": sum(row.partitions for row in queues),
                "namespaces": len({row.namespace for row in queues if row.namespace}),
                "tasks": len({row.task for row in queues if row.task}),
                "consumerGroups": len({row.group for row in groups}),
                "messages": _sums(queues),
                "lag": {"time": {"max": max_lag}, "offset": {"total": total_lag}},
                "statsAge": 0,
                "timestamp": datetime.now(UTC),
            }
        )


def _sums(queues: list[QueueStats]) -> dict[str, int]:
    fields = ("total", "pending", "processing", "completed", "dead")
    sums = {field: sum(getattr(row, field) for row in queues) for field in fields}
    return {**sums, "deadLetter": sums["dead"]}


def _by(field: str, queues: list[QueueStats]) -> list[dict[str, Any]]:
    kinds: dict[str, list[QueueStats]] = defaultdict(list)
    for row in queues:
        value = getattr(row, field)
        if value:
            kinds[value].append(row)
    return [
        {
            field: value,
            "queues": len(rows),
            "partitions": sum(row.partitions for row in rows),
            "messages": _sums(rows),
        }
        for value, rows in sorted(kinds.items())
    ]


class Groups:
    """Consumer groups: lag, seek, subscription, deletion."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def list(self, request: Request) -> Answer:
        """GET /api/v1/consumer-groups."""
        rows = await self._engine.groups(queue=Query(request.query).name("queue"))
        return ok({"groups": [answers.group(row) for row in rows]})

    async def lagging(self, request: Request) -> Answer:
        """GET /api/v1/consumer-groups/lagging?minLagSeconds=."""
        least = Query(request.query).integer("minLagSeconds", 3600, 0, OFFSET)
        rows = await self._engine.lanes(min_lag_seconds=least)
        return ok([answers.lagging_lane(row) for row in rows if row.lag > 0])

    async def one(self, request: Request) -> Answer:
        """GET /api/v1/consumer-groups/{group}."""
        found: dict[str, dict[str, list[Any]]] = {}
        for row in await self._engine.lanes(group=request.segments[0]):
            found.setdefault(row.queue, {"partitions": []})["partitions"].append(answers.group_lane(row))
        if not found:
            raise HttpError(404, f"consumer group not found: {request.segments[0]}")
        return ok(found)

    async def delete(self, request: Request) -> Answer:
        """DELETE /api/v1/consumer-groups/{group} and .../queues/{queue}."""
        group, *rest = request.segments
        metadata = Query(request.query).flag("deleteMetadata", default=True)
        queue = rest[0] if rest else None
        if group == QUEUE_MODE and queue is None:
            where = f"DELETE /api/v1/consumer-groups/{QUEUE_MODE}/queues/{{queue}}"
            raise bad(
                "group", f"{QUEUE_MODE} is every queue's consumers without a group; name one queue: {where}"
            )
        count = await self._engine.delete_group(group, queue=queue, metadata=metadata)
        answer: dict[str, Any] = {
            "success": True,
            "consumerGroup": group,
            "deletedPartitions": count,
            "metadataDeleted": metadata,
        }
        return ok({**answer, "queueName": queue} if queue else answer)

    async def subscribe(self, request: Request) -> Answer:
        """POST /api/v1/consumer-groups/{group}/subscription."""
        group = request.segments[0]
        moment = timestamp(
            decode(request.body, _subscription).subscription_timestamp, "subscriptionTimestamp"
        )
        count = await self._engine.subscribe(name(group, "group"), None, moment)
        return ok({"success": True, "consumerGroup": group, "newTimestamp": moment, "rowsUpdated": count})

    async def seek(self, request: Request) -> Answer:
        """POST /api/v1/consumer-groups/{group}/queues/{queue}/seek, and .../partitions/{partition}/seek."""
        group, queue, *rest = request.segments
        partition = rest[0] if rest else None
        # Without a body, the seek of one partition goes to its end.
        body = (
            decode(request.body, _seek) if request.body or partition is None else bodies.SeekBody(to_end=True)
        )
        match (body.to_end, body.to_beginning, body.timestamp):
            case (True, _, _):
                to: str | datetime = "end"
            case (_, True, _):
                to = "beginning"
            case (_, _, str(text)):
                to = timestamp(text, "timestamp")
            case _ if partition is not None:
                to = "end"
            case _:
                raise bad("toEnd", "or toBeginning or timestamp is required")
        count = await self._engine.seek(name(group, "group"), queue, to, partition=partition)
        answer = {
            "success": True,
            "consumerGroup": group,
            "queueName": queue,
            "seekToEnd": to == "end",
            "targetTimestamp": to if isinstance(to, datetime) else None,
            "partitionsUpdated": count,
        }
        return ok({**answer, "partitionName": partition, "updated": count > 0} if partition else answer)
