"""A message as RabbitMQ delivered it."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Any

from aiormq.abc import DeliveredMessage
from pamqp.commands import Basic

from settled.message import Delivery, Metadata
from settled.transports.rabbitmq.link import BROKERS, FAILURES


class RabbitDelivery(Delivery):
    """A delivery that is open as long as the AMQP channel it came through."""

    __slots__ = ("amqp", "consumer", "counted", "place", "properties", "tag")

    def __init__(self, message: DeliveredMessage, subject: str) -> None:
        properties = message.header.properties
        headers = properties.headers or {}
        self.counted = _number(headers.get("x-delivery-count"))
        own = plain(headers)
        if properties.content_type:
            own["content-type"] = properties.content_type
        super().__init__(
            id=properties.message_id or uuid.uuid4().hex,
            subject=subject,
            data=message.body,
            headers=own,
            attempt=1 + self.counted + _number(headers.get(FAILURES)),
        )
        self.amqp = message.channel
        self.properties = properties
        # Where it stands among all that came: the same as before if it was given back.
        self.place = 0
        assert isinstance(message.delivery, Basic.Deliver)  # noqa: S101
        self.tag = int(message.delivery.delivery_tag or 0)
        self.consumer = message.delivery.consumer_tag

    @property
    def deliveries(self) -> int:
        return 1 + self.counted

    def metadata(self) -> Metadata:
        return Metadata(
            timestamp=self.properties.timestamp,
            redelivery_count=self.attempt - 1,
            consumer=self.consumer,
        )


def plain(headers: Mapping[str, Any] | None) -> dict[str, str]:
    """The headers that a publisher set, as text.

    >>> plain({"tenant": "acme", "n": 1, "x-death": [{}], "x-delivery-count": 2, "settled-failures": 1})
    {'tenant': 'acme', 'n': '1'}
    """
    found = {}
    for name, value in (headers or {}).items():
        if name == FAILURES or name.startswith(BROKERS):
            continue
        if isinstance(value, bytes):
            found[name] = value.decode("utf-8", "replace")
        elif isinstance(value, (str, int, float)):
            found[name] = str(value)
    return found


def _number(value: object) -> int:
    return value if isinstance(value, int) else 0
