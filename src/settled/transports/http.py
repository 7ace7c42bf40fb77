"""`http://`: the queue through its server."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from datetime import datetime
from typing import Any
from urllib.parse import quote

import msgspec

from settled.client.errors import Refused
from settled.client.resilience import Resilience
from settled.client.wire import Wire
from settled.codec import BYTES, JSON, TEXT, content_type_of
from settled.message import Metadata
from settled.signals import ConfigurationError
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
from settled.transports.urls import masked, port_of, split

_REFUSED_FOR_GOOD = (400, 413, 415, 422)


class _Popped(msgspec.Struct, rename="camel"):
    transaction_id: str
    partition_id: str
    partition: str
    created_at: datetime
    consumer_group: str = DEFAULT_GROUP
    data: msgspec.Raw = msgspec.Raw(b"null")
    content_type: str = JSON
    encoding: str | None = None
    lease_id: str | None = None
    headers: dict[str, str] | None = None
    retry_count: int = 0


class _PoppedAnswer(msgspec.Struct):
    messages: list[_Popped] = []


class _Options(msgspec.Struct, frozen=True, rename="camel"):
    retry: str = "in_order"
    retry_limit: int = Rules().max_attempts or 0
    dlq_after_max_retries: bool = True
    lease_time: float = Rules().lease


class _Described(msgspec.Struct):
    options: _Options = _Options()


class _Pushed(msgspec.Struct):
    transaction_id: str
    status: str


class _Verdict(msgspec.Struct, rename="camel", omit_defaults=True):
    transaction_id: str
    partition_id: str
    lease_id: str | None
    status: str
    error: str | None = None
    delay_seconds: float | None = None


class _Settled(msgspec.Struct):
    success: bool
    message: str = ""
    error: str | None = None


_popped = msgspec.json.Decoder(_PoppedAnswer)
_described = msgspec.json.Decoder(_Described)
_pushed = msgspec.json.Decoder(list[_Pushed])
_settled = msgspec.json.Decoder(list[_Settled])


class HttpDelivery(QueueDelivery[_Popped]):
    """A message as the server sent it."""

    __slots__ = ()

    def metadata(self) -> Metadata:
        popped = self.popped
        return Metadata(
            timestamp=popped.created_at,
            redelivery_count=popped.retry_count,
            consumer=popped.consumer_group,
            lane=popped.partition,
            lease=popped.lease_id,
        )


class HttpTransport(QueueTransport):
    """Queues on a server, reached by its URL."""

    def __init__(self, url: str, resilience: Resilience | None = None) -> None:
        super().__init__()
        parts = split(url)
        port_of(parts)
        if not parts.hostname:
            raise ConfigurationError(f"{parts.scheme}: write {parts.scheme}://host:6632, got {masked(url)!r}")
        if parts.query:
            name = parts.query.partition("=")[0]
            raise ConfigurationError(f"{parts.scheme}: the URL has no options, got {name!r}")
        self._url = url
        self._resilience = resilience or Resilience()

    async def connect(self) -> HttpBackend:
        backend = HttpBackend(Wire(self._url, self._resilience, 30.0, {}))
        try:
            await backend.wire.call("GET", "/health")
        except BaseException:
            await backend.close()
            raise
        return backend

    def refuses(self, error: Exception) -> bool:
        return isinstance(error, UnicodeError) or (
            isinstance(error, Refused) and error.status in _REFUSED_FOR_GOOD
        )


class HttpBackend:
    """The HTTP API, spoken to as a backend."""

    def __init__(self, wire: Wire) -> None:
        self.wire = wire

    async def rules(self, queue: str) -> Rules:
        try:
            answer = await self.wire.call("GET", f"/api/v1/resources/queues/{quote(queue, safe='')}?limit=1")
        except Refused as refused:
            if refused.status == 404:
                return Rules()
            raise
        options = _described.decode(answer).options
        return Rules.of(
            lease=options.lease_time,
            retry=options.retry,
            retry_limit=options.retry_limit,
            gives_up=options.dlq_after_max_retries,
        )

    async def pop(self, source: Source, limit: int, wait: float, ordered: bool) -> list[QueueDelivery[Any]]:
        group = source.group or DEFAULT_GROUP
        params = {"batch": str(limit), "partitions": str(limit), "consumerGroup": group}
        if wait > 0:
            params |= {"wait": "true", "timeout": str(max(1, round(wait * 1000)))}
        path = f"/api/v1/pop/queue/{quote(source.channel, safe='')}"
        answer = await self.wire.call("GET", path, params=params, wait=wait)
        messages = _popped.decode(answer).messages if answer else []
        return [
            HttpDelivery(
                message,
                source.channel,
                _bytes(message),
                headers(message.content_type, message.headers),
                message.retry_count + 1,
                ordered,
            )
            for message in messages
        ]

    async def settle(self, group: str, verdicts: Sequence[Verdict]) -> list[str | None]:
        items = [
            _Verdict(
                verdict.delivery.id,
                verdict.delivery.popped.partition_id,
                verdict.delivery.popped.lease_id,
                verdict.status,
                verdict.error,
                verdict.delay,
            )
            for verdict in verdicts
        ]
        body = {"consumerGroup": group, "acknowledgments": items, "atomic": False}
        answer = _settled.decode(await self.wire.call("POST", "/api/v1/ack/batch", body))
        note_given_up(verdicts[-1], answer[-1].message)
        return [None if result.success else (result.error or result.message) for result in answer]

    async def extend(self, delivery: QueueDelivery[Any], seconds: float) -> None:
        lease = quote(delivery.popped.lease_id or "", safe="")
        try:
            await self.wire.call("POST", f"/api/v1/lease/{lease}/extend", {"seconds": seconds})
        except Refused as refused:
            raise lost(delivery, refused.error) from refused

    async def push(self, messages: Sequence[Outgoing]) -> list[Published]:
        body = {"items": [_item(message) for message in messages]}
        results = _pushed.decode(await self.wire.call("POST", "/api/v1/push", body))
        return [
            Published(id=pushed.transaction_id, duplicate=pushed.status == "duplicate", lane=message.lane)
            for pushed, message in zip(results, messages, strict=True)
        ]

    async def close(self) -> None:
        await self.wire.close()


def _item(message: Outgoing) -> dict[str, Any]:
    others = {name: value for name, value in message.headers.items() if name.lower() != "content-type"}
    return {
        "queue": message.subject,
        "partition": message.lane,
        "transactionId": message.id,
        "headers": others or None,
        "delaySeconds": message.delay or None,
        **_payload(message.data, content_type_of(message.headers) or BYTES),
    }


def _payload(data: bytes, content_type: str) -> dict[str, Any]:
    """JSON goes as it is, text as a string, everything else as base64."""
    if content_type == JSON:
        return {"payload": msgspec.Raw(data)}
    if content_type == TEXT:
        return {"payload": data.decode(), "contentType": content_type}
    return {"payload": base64.b64encode(data).decode(), "contentType": content_type, "encoding": "base64"}


def _bytes(message: _Popped) -> bytes:
    if message.content_type == JSON or message.content_type.endswith("+json"):
        return bytes(message.data)
    text = msgspec.json.decode(message.data, type=str)
    return base64.b64decode(text) if message.encoding == "base64" else text.encode()
