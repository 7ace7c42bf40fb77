"""`postgresql://`: the queue's engine in this process, on a Postgres of yours; no server in between."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from settled.codec import BYTES, content_type_of
from settled.message import Metadata
from settled.queue.engine import Engine
from settled.queue.popped import PoppedMessage
from settled.queue.types import DEFAULT_PARTITION, AckItem, BadRequest, NotFound, PopRequest, PushItem
from settled.transports.base import Outgoing, Published, Source
from settled.transports.queue import (
    DEFAULT_GROUP,
    QueueDelivery,
    QueueTransport,
    Verdict,
    headers,
    lost,
    note_given_up,
)
from settled.transports.rules import Rules
from settled.transports.urls import port_of, split


class EngineDelivery(QueueDelivery[PoppedMessage]):
    """A message as the engine handed it out."""

    __slots__ = ()

    def metadata(self) -> Metadata:
        popped = self.popped
        return Metadata(
            stream_sequence=popped.seq,
            consumer_sequence=popped.seq,
            timestamp=popped.created_at,
            redelivery_count=popped.attempts,
            consumer=popped.group,
            lane=popped.partition,
            lease=popped.lease_id,
        )


class PostgresTransport(QueueTransport):
    """Queues in a Postgres database, reached by its DSN."""

    def __init__(self, dsn: str) -> None:
        super().__init__()
        for host in split(dsn).netloc.rpartition("@")[2].split(","):
            port_of(split(f"postgresql://{host}"))
        self._dsn = dsn

    async def connect(self) -> EngineBackend:
        return EngineBackend(await Engine.open(self._dsn))

    def refuses(self, error: Exception) -> bool:
        return isinstance(error, (BadRequest, UnicodeError))


class EngineBackend:
    """The engine, spoken to as a backend."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    async def rules(self, queue: str) -> Rules:
        try:
            options = (await self.engine.queue(queue, limit=0)).options
        except NotFound:
            return Rules()
        return Rules.of(
            lease=options.lease_time,
            retry=options.retry,
            retry_limit=options.retry_limit,
            gives_up=options.dlq_after_max_retries,
        )

    async def pop(self, source: Source, limit: int, wait: float, ordered: bool) -> list[QueueDelivery[Any]]:
        popped = await self.engine.pop(
            PopRequest(
                queue=source.channel,
                group=source.group or DEFAULT_GROUP,
                batch=limit,
                partitions=limit,
                wait=wait,
            )
        )
        return [
            EngineDelivery(
                message,
                message.queue,
                message.payload,
                headers(message.content_type, message.headers),
                message.attempts + 1,
                ordered,
            )
            for message in popped.messages()
        ]

    async def settle(self, group: str, verdicts: Sequence[Verdict]) -> list[str | None]:
        items = [
            AckItem(
                transaction_id=verdict.delivery.id,
                partition_id=verdict.delivery.popped.partition_id,
                status=verdict.status,
                lease_id=verdict.delivery.popped.lease_id,
                error=verdict.error,
                delay=verdict.delay,
            )
            for verdict in verdicts
        ]
        results = await self.engine.ack(items, group, atomic=False)
        note_given_up(verdicts[-1], results[-1].message)
        return [None if result.success else (result.error or result.message) for result in results]

    async def extend(self, delivery: QueueDelivery[Any], seconds: float) -> None:
        extension = await self.engine.extend(delivery.popped.lease_id or "", seconds)
        if not extension.success:
            raise lost(delivery, extension.error or "its lease is gone")

    async def push(self, messages: Sequence[Outgoing]) -> list[Published]:
        results = await self.engine.push([_item(message) for message in messages])
        return [
            Published(id=result.transaction_id, duplicate=result.status == "duplicate", lane=result.partition)
            for result in results
        ]

    async def close(self) -> None:
        await self.engine.close()


def _item(message: Outgoing) -> PushItem:
    others = {name: value for name, value in message.headers.items() if name.lower() != "content-type"}
    return PushItem(
        queue=message.subject,
        payload=message.data,
        partition=message.lane or DEFAULT_PARTITION,
        transaction_id=message.id,
        headers=others or None,
        content_type=content_type_of(message.headers) or BYTES,
        delay_seconds=message.delay,
    )
