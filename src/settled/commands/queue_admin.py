"""Looking after the queue, by its server or in its database: the same calls, the same rows."""

from __future__ import annotations

import base64
import contextlib
from collections.abc import AsyncIterator
from datetime import datetime
from typing import Any, Literal, Protocol

import msgspec

from settled.codec import JSON, TEXT
from settled.signals import ConfigurationError
from settled.transports import KINDS
from settled.transports.urls import in_one_line, masked, split

Work = Literal["retry", "purge"]
PART = 500
_ELSEWHERE = {
    "nats": ("settled.dead.ORDERS.billing.>", "orders.new"),
    "tls": ("settled.dead.ORDERS.billing.>", "orders.new"),
    "sqs": ("orders-dead", "orders"),
    "servicebus": ("'orders/$deadletterqueue'", "orders"),
    "mqtt": ("dead/orders", "orders"),
    "mqtts": ("dead/orders", "orders"),
}
"""A channel of dead letters and the one they came from, by scheme; on other brokers it ends in .dead."""


class Group(msgspec.Struct):
    """How far a consumer group is behind on a queue."""

    name: str
    lag: int
    seconds_behind: float


class Queue(msgspec.Struct):
    """A queue in figures."""

    name: str
    partitions: int
    pending: int
    processing: int
    completed: int
    dead: int
    groups: list[Group]


class Letter(msgspec.Struct):
    """A dead letter; `payload` is JSON, a text, or base64 where `encoding` says so."""

    id: str
    queue: str
    partition: str
    group: str
    transaction_id: str
    error: str | None
    attempts: int
    created_at: datetime
    failed_at: datetime
    content_type: str
    headers: dict[str, str]
    payload: Any
    encoding: str | None = None


class Filter(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, rename={
    "group": "consumerGroup", "since": "from", "until": "to",
}):  # fmt: skip
    """A choice of dead letters, as the HTTP API takes it."""

    queue: str | None = None
    partition: str | None = None
    group: str | None = None
    error: str | None = None
    since: str | None = None
    until: str | None = None
    ids: list[str] | None = None


class Done(msgspec.Struct):
    """A part of a bulk operation."""

    matched: int | None
    done: int
    refused: list[dict[str, str]]
    next: str | None


class Away(Exception):
    """The queue cannot be reached, or failed."""


class QueueAdmin(Protocol):
    """What an operator may ask of a queue."""

    async def queues(self) -> list[Queue]:
        """All queues with their groups, by name."""

    async def letters(self, chosen: Filter, limit: int) -> tuple[list[Letter], int]:
        """The newest dead letters of a choice, and how many there are in all."""

    async def letter(self, letter_id: str) -> Letter:
        """One dead letter."""

    async def work(self, what: Work, chosen: Filter, after: str | None, *, dry_run: bool) -> Done:
        """Send again, or drop, a part of a choice of dead letters."""


@contextlib.asynccontextmanager
async def queue_admin(url: str) -> AsyncIterator[QueueAdmin]:
    """The queue at a URL; ConfigurationError for other brokers, Away if it is not there."""
    scheme = split(url).scheme
    match scheme:
        case "http" | "https":
            async with _over_http(url) as found:
                yield found
        case "postgresql":
            async with _in_database(url) as found:
                yield found
        case _ if scheme in KINDS:
            raise ConfigurationError(_other(scheme))
        case _:
            raise ConfigurationError(f"no queue at {masked(url)!r}; write http://… or postgresql://…")


def _other(scheme: str) -> str:
    dead, channel = _ELSEWHERE.get(scheme, ("orders.dead", "orders"))
    return (
        f"this command works on the queue, http://… or postgresql://…, not on {scheme}://: a channel of dead "
        f"letters is one like any other there, and `settled bridge URL URL --from {dead} --to {channel}` "
        "sends them again"
    )


@contextlib.asynccontextmanager
async def _over_http(url: str) -> AsyncIterator[QueueAdmin]:
    try:
        from settled.client.api import Api
        from settled.client.errors import ClientError, Refused
        from settled.client.resilience import Resilience
        from settled.client.wire import Wire
    except ModuleNotFoundError as error:
        raise ConfigurationError(f"http:// needs {error.name}; run: pip install 'settled[client]'") from error
    wire = Wire(url, Resilience(), 60.0, {})
    try:
        yield _Http(Api(wire))
    except Refused as error:
        if error.status in (400, 404):
            raise ConfigurationError(error.error) from error
        raise Away(in_one_line(error)) from error
    except ClientError as error:
        raise Away(in_one_line(error)) from error
    finally:
        await wire.close()


class _Http:
    def __init__(self, api: Any) -> None:
        self._api = api

    async def queues(self) -> list[Queue]:
        listed = (await self._api.json("GET", "/api/v1/resources/queues"))["queues"]
        groups = (await self._api.json("GET", "/api/v1/consumer-groups"))["groups"]
        return [
            Queue(
                name=row["name"],
                partitions=row["partitions"],
                pending=row["messages"]["pending"],
                processing=row["messages"]["processing"],
                completed=row["messages"]["completed"],
                dead=row["messages"]["deadLetter"],
                groups=[
                    Group(each["name"], each["totalLag"], each["maxTimeLag"])
                    for each in groups
                    if each["queueName"] == row["name"]
                ],
            )
            for row in listed
        ]

    async def letters(self, chosen: Filter, limit: int) -> tuple[list[Letter], int]:
        if chosen.ids is not None:
            found = [await self.letter(each) for each in chosen.ids]
            return found[:limit], len(found)
        params = {**msgspec.to_builtins(chosen), "limit": str(limit)}
        page = await self._api.json("GET", "/api/v1/dlq", **params)
        return [_letter(row) for row in page["messages"]], page["total"]

    async def letter(self, letter_id: str) -> Letter:
        return _letter(await self._api.json("GET", f"/api/v1/dlq/{letter_id}"))

    async def work(self, what: Work, chosen: Filter, after: str | None, *, dry_run: bool) -> Done:
        body = {
            **msgspec.to_builtins(chosen),
            "all": chosen == Filter(),
            "limit": PART,
            "after": after,
            "dryRun": dry_run,
        }
        answer = await self._api.json("POST", f"/api/v1/dlq/{what}", body)
        return msgspec.convert(answer, Done)


def _letter(row: dict[str, Any]) -> Letter:
    return Letter(
        id=row["id"],
        queue=row["queue"],
        partition=row["partition"],
        group=row["consumerGroup"],
        transaction_id=row["transactionId"],
        error=row["errorMessage"],
        attempts=row["retryCount"],
        created_at=datetime.fromisoformat(row["createdAt"]),
        failed_at=datetime.fromisoformat(row["failedAt"]),
        content_type=row.get("contentType", JSON),
        headers=row["headers"],
        payload=row["data"],
        encoding=row.get("encoding"),
    )


@contextlib.asynccontextmanager
async def _in_database(url: str) -> AsyncIterator[QueueAdmin]:
    try:
        from settled.queue.engine import Engine
        from settled.queue.errors import BadRequest, NotFound, QueueError
    except ModuleNotFoundError as error:
        raise ConfigurationError(
            f"postgresql:// needs {error.name}; run: pip install 'settled[queue]'"
        ) from error
    try:
        async with await Engine.open(url, maintain=False) as engine:
            yield _Database(engine)
    except (BadRequest, NotFound) as error:
        raise ConfigurationError(str(error)) from error
    except QueueError as error:
        raise Away(in_one_line(error)) from error


class _Database:
    def __init__(self, engine: Any) -> None:
        self._engine = engine

    async def queues(self) -> list[Queue]:
        groups = await self._engine.groups()
        return [
            Queue(
                name=row.name,
                partitions=row.partitions,
                pending=row.pending,
                processing=row.processing,
                completed=row.completed,
                dead=row.dead,
                groups=[
                    Group(each.group, each.total_lag, each.max_time_lag)
                    for each in groups
                    if each.queue == row.name
                ],
            )
            for row in await self._engine.queues()
        ]

    async def letters(self, chosen: Filter, limit: int) -> tuple[list[Letter], int]:
        page = await self._engine.dead_letters(**msgspec.structs.asdict(chosen), limit=limit)
        return [_of_engine(row) for row in page.rows], page.total

    async def letter(self, letter_id: str) -> Letter:
        return _of_engine(await self._engine.dead_letter(letter_id))

    async def work(self, what: Work, chosen: Filter, after: str | None, *, dry_run: bool) -> Done:
        from settled.queue.types import DeadLetterFilter

        call = self._engine.retry_dead_letters if what == "retry" else self._engine.purge_dead_letters
        wanted = DeadLetterFilter(**msgspec.structs.asdict(chosen))
        done = await call(wanted, limit=PART, after=after, dry_run=dry_run)
        refused = [{"id": each.id, "error": each.error} for each in done.refused]
        return Done(done.matched, done.done, refused, done.next)


def _of_engine(row: Any) -> Letter:
    payload, encoding = _shown(row.payload, row.content_type)
    return Letter(
        id=row.id,
        queue=row.queue,
        partition=row.partition,
        group=row.group,
        transaction_id=row.transaction_id,
        error=row.error,
        attempts=row.attempts,
        created_at=row.created_at,
        failed_at=row.failed_at,
        content_type=row.content_type,
        headers=row.headers,
        payload=payload,
        encoding=encoding,
    )


def _shown(data: bytes, content_type: str) -> tuple[Any, str | None]:
    """A payload as JSON can hold it."""
    if content_type == JSON or content_type.endswith("+json"):
        return msgspec.json.decode(data), None
    if content_type == TEXT:
        return data.decode(errors="replace"), None
    return base64.b64encode(data).decode(), "base64"
