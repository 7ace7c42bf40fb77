"""What a client receives and sends: Message[T], results of pushes and acks, dead letters."""

from __future__ import annotations

import base64
import uuid
from collections.abc import Mapping
from datetime import datetime
from functools import cache
from typing import Any, Generic, TypeVar

import msgspec
from msgspec import Raw, Struct

from settled.codec import BYTES, JSON, Decode, decoder, encoder

from .errors import InvalidPayload

T = TypeVar("T")

_encode = encoder(JSON)


class WireMessage(Struct, rename="camel", gc=False):
    """A message as it is in the answer to a pop."""

    id: str
    transaction_id: str
    partition_id: str
    partition: str
    created_at: str
    data: Raw = Raw(b"null")
    lease_id: str | None = None
    consumer_group: str | None = None
    trace_id: str | None = None
    producer_sub: str | None = None
    headers: dict[str, str] | None = None
    retry_count: int = 0
    queue: str | None = None
    content_type: str = JSON
    encoding: str | None = None


class Popped(Struct, rename="camel"):
    """The answer to a pop."""

    messages: list[WireMessage] = []
    queue: str | None = None


class Message(Generic[T]):
    """One message that was handed out; `data` is decoded to the queue's payload type at first use."""

    __slots__ = ("_data", "_decoded", "_type", "_wire", "queue")

    def __init__(self, wire: WireMessage, queue: str | None, payload: type[T]) -> None:
        self._wire = wire
        self._type = payload
        self._decoded = False
        self._data: Any = None
        self.queue = queue

    @property
    def data(self) -> T:
        """The payload; raises InvalidPayload if it is not what was promised."""
        if not self._decoded:
            decode = _decoder(self._type)  # type: ignore[arg-type]  # types are hashable
            try:
                self._data = decode(_bytes(self._wire), {"content-type": self._wire.content_type})
            except Exception as error:  # a pydantic model raises what it likes
                raise InvalidPayload(f"message {self.transaction_id!r} of {self.queue!r}: {error}") from error
            self._decoded = True
        return self._data  # type: ignore[no-any-return]

    @property
    def raw(self) -> bytes:
        """The payload as JSON text; of what is no JSON, the string that the server has for it."""
        return bytes(self._wire.data)

    @property
    def id(self) -> str:
        """The server's id of the message."""
        return self._wire.id

    @property
    def transaction_id(self) -> str:
        """The producer's id of the message, unique in its partition."""
        return self._wire.transaction_id

    @property
    def partition_id(self) -> str:
        """The id of the partition; every ack names it."""
        return self._wire.partition_id

    @property
    def partition(self) -> str:
        """The name of the partition."""
        return self._wire.partition

    @property
    def lease_id(self) -> str | None:
        """The lease this message is held under; None if it was acknowledged on delivery."""
        return self._wire.lease_id or None

    @property
    def group(self) -> str | None:
        """The consumer group it was handed to."""
        return self._wire.consumer_group

    @property
    def headers(self) -> dict[str, str]:
        """The headers it was pushed with."""
        return self._wire.headers or {}

    @property
    def trace_id(self) -> str | None:
        """The trace id it was pushed with."""
        return self._wire.trace_id

    @property
    def attempt(self) -> int:
        """Which delivery this is, counting from 1."""
        return self._wire.retry_count + 1

    @property
    def created_at(self) -> datetime:
        """When it was pushed."""
        return datetime.fromisoformat(self._wire.created_at)

    def __repr__(self) -> str:
        return f"Message({self.queue!r}, {self.partition!r}, {self.transaction_id!r})"


class Receipt(Struct, frozen=True):
    """The fields that an ack sends, of a message that the caller kept as a dict."""

    transaction_id: str
    partition_id: str
    lease_id: str | None = None
    group: str | None = None


Delivered = Message[Any] | Mapping[str, Any]
"""A delivered message: as a pop returned it, or a dict with the API's names (`transactionId`, ...)."""


def receipt(message: Delivered) -> Message[Any] | Receipt:
    """The fields of a delivered message that an ack needs.

    >>> receipt({"transactionId": "t-1", "partitionId": "p"})
    Receipt(transaction_id='t-1', partition_id='p', lease_id=None, group=None)
    >>> receipt({"transactionId": "t-1"})
    Traceback (most recent call last):
    ValueError: partitionId is required to ensure message uniqueness, got None
    """
    if isinstance(message, Message):
        return message
    if not isinstance(message, Mapping):
        raise TypeError(f"a message or a dict with transactionId and partitionId is needed, got {message!r}")
    for field, why in (("transactionId", ""), ("partitionId", " to ensure message uniqueness")):
        if not message.get(field):
            raise ValueError(f"{field} is required{why}, got {message.get(field)!r}")
    return Receipt(
        message["transactionId"],
        message["partitionId"],
        message.get("leaseId") or None,
        message.get("consumerGroup"),
    )


class Pushed(Struct, frozen=True):
    """What became of one pushed message."""

    status: str
    transaction_id: str
    message_id: str | None = None
    partition_id: str | None = None
    error: str | None = None


class Settled(Struct, frozen=True, rename="camel"):
    """What became of one ack.

    `message` is acknowledged, failed_retry, failed_dlq, failed_dropped or released.
    """

    transaction_id: str
    success: bool
    message: str = ""
    error: str | None = None
    lease_released: bool = False
    dlq: bool = False


class DeadLetter(Struct, frozen=True, rename="camel"):
    """One dead letter, with its own copy of the data."""

    id: str
    message_id: str
    partition_id: str
    transaction_id: str
    consumer_group: str
    queue_name: str
    partition: str
    retry_count: int
    original_created_at: datetime
    moved_to_dlq_at: datetime
    data: Any = None
    error_message: str | None = None
    headers: dict[str, str] | None = None
    unsettled_count: int = 0


class DeadLetters(Struct, frozen=True):
    """One page of dead letters and how many there are in all."""

    messages: list[DeadLetter]
    total: int
    limit: int
    offset: int


class Outgoing(Struct, rename="camel", omit_defaults=True):
    """One message on its way to the server; it always has an id, so that a retry cannot push it twice."""

    queue: str
    payload: Raw
    partition: str
    transaction_id: str
    headers: dict[str, str] | None = None
    delay_seconds: float | None = None
    trace_id: str | None = None
    content_type: str | None = None
    encoding: str | None = None


def outgoing(
    queue: str,
    partition: str,
    payload: object,
    *,
    transaction_id: str | None = None,
    headers: dict[str, str] | None = None,
    delay: float | None = None,
    trace_id: str | None = None,
) -> Outgoing:
    """Encode a payload once, here, and give it an id if it has none; bytes stay bytes, all else is JSON."""
    raw = isinstance(payload, (bytes, bytearray, memoryview))
    return Outgoing(
        queue,
        Raw(_encode(payload)),  # which makes base64 of bytes
        partition,
        transaction_id or str(uuid.uuid4()),
        headers,
        delay,
        trace_id,
        BYTES if raw else None,
        "base64" if raw else None,
    )


def _bytes(wire: WireMessage) -> bytes:
    """The payload as it was pushed: JSON comes as it is, text as a string, everything else as base64."""
    if wire.content_type == JSON or wire.content_type.endswith("+json"):
        return bytes(wire.data)
    text = msgspec.json.decode(wire.data, type=str)
    return base64.b64decode(text) if wire.encoding == "base64" else text.encode()


@cache
def _decoder(type_: Any) -> Decode:
    return decoder(type_)
