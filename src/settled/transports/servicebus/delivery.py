"""A Service Bus message as it is handed out, and copies of it."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
from azure.servicebus import ServiceBusMessage, ServiceBusReceivedMessage
from azure.servicebus.amqp import AmqpMessageBodyType

from settled.message import Delivery, Metadata
from settled.transports.base import Outgoing

_ID = "settled-id"
_EARLIER = "settled-earlier-attempts"
"""How often a message was delivered before it was copied: the broker counts a copy's from the start."""


class ServiceBusDelivery(Delivery):
    """A message under its lock, or under that of its session."""

    __slots__ = ("message", "receiver")

    def __init__(self, message: ServiceBusReceivedMessage, receiver: Any, subject: str) -> None:
        headers = _headers(message)
        identity = headers.pop(_ID, "") or message.message_id
        earlier = headers.pop(_EARLIER, "")
        session = message.session_id
        super().__init__(
            id=identity or str(message.sequence_number),
            subject=subject,
            data=_data(message),
            headers=headers,
            attempt=(int(earlier) if earlier.isdecimal() else 0) + (message.delivery_count or 0) + 1,
            lane=session,
            ordered=session is not None and receiver.session is not None,
        )
        self.message = message
        self.receiver = receiver

    @property
    def deliveries(self) -> int:
        return (self.message.delivery_count or 0) + 1

    def metadata(self) -> Metadata:
        return Metadata(
            stream_sequence=self.message.sequence_number,
            timestamp=self.message.enqueued_time_utc,
            redelivery_count=self.attempt - 1,
            lane=self.lane,
            # A session has one lock, for all of its messages that are out.
            lease=self.lane if self.ordered else str(self.message.lock_token),
        )


def _data(message: ServiceBusReceivedMessage) -> bytes:
    """The body; of producers that send AMQP values instead of bytes, text as it is and the rest as JSON."""
    body: Any = message.body
    match message.body_type:
        case AmqpMessageBodyType.DATA:
            return b"".join(body)
        case AmqpMessageBodyType.SEQUENCE:
            body = list(body)
    if isinstance(body, (str, bytes)):
        return body.encode() if isinstance(body, str) else body
    return msgspec.json.encode(_plain(body), enc_hook=_text)


def _plain(value: Any) -> Any:
    """The client gives the strings inside a value as bytes."""
    match value:
        case dict():
            return {_plain(name): _plain(inner) for name, inner in value.items()}
        case list() | tuple():
            return [_plain(inner) for inner in value]
        case bytes():
            return value.decode(errors="replace")
        case _:
            return value


def _headers(message: ServiceBusReceivedMessage) -> dict[str, str]:
    properties: Mapping[Any, Any] = message.application_properties or {}
    headers = {_text(name): _text(value) for name, value in properties.items()}
    if message.content_type is not None:
        headers.setdefault("content-type", message.content_type)
    return headers


def _text(value: Any) -> str:
    # Whatever another producer wrote: a message that cannot be read must not stop the queue.
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


def outgoing(message: Outgoing, identity: str) -> ServiceBusMessage:
    """A message to send; its lane is the session. Text that cannot be encoded is an error here, not later."""
    for text in (identity, message.lane or "", *message.headers, *message.headers.values()):
        text.encode()
    properties: dict[Any, Any] = dict(message.headers)
    return ServiceBusMessage(
        message.data,
        application_properties=properties,
        message_id=identity,
        session_id=message.lane,
        content_type=message.headers.get("content-type"),
        scheduled_enqueue_time_utc=_after(message.delay) if message.delay > 0 else None,
    )


def copy(delivery: ServiceBusDelivery, delay: float) -> ServiceBusMessage:
    """The same message, for later; under an id of its own, or duplicate detection would drop it."""
    old = delivery.message
    properties: dict[Any, Any] = dict(old.application_properties or {})
    properties |= {_ID: delivery.id, _EARLIER: str(delivery.attempt)}
    return ServiceBusMessage(
        delivery.data,
        application_properties={_text(name): value for name, value in properties.items()},
        message_id=f"{delivery.id}:{delivery.attempt}"[-128:],
        session_id=old.session_id,
        content_type=old.content_type,
        correlation_id=old.correlation_id,
        subject=old.subject,
        to=old.to,
        reply_to=old.reply_to,
        time_to_live=old.time_to_live,
        scheduled_enqueue_time_utc=_after(delay),
    )


def _after(delay: float) -> datetime:
    return datetime.now(UTC) + timedelta(seconds=delay)
