"""The connection to RabbitMQ on one loop: opened again when it is lost, and publishing with confirms."""

from __future__ import annotations

import asyncio
import hashlib
import math
import re
import uuid
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any
from urllib.parse import unquote, urlsplit

import aio_pika
from aio_pika.abc import AbstractConnection
from aiormq.abc import AbstractChannel
from aiormq.exceptions import (
    AMQPError,
    ChannelInvalidStateError,
    ChannelNotFoundEntity,
    ChannelPreconditionFailed,
    DeliveryError,
    InvalidFrameError,
    PublishError,
)
from pamqp.commands import Basic

from settled.codec import content_type_of
from settled.signals import ConfigurationError
from settled.transports.base import Outgoing

FAILURES = "settled-failures"
"""The header of a copy that is sent round again: how often the message failed before."""

BROKERS = ("x-death", "x-first-death-", "x-last-death-", "x-delivery-count", "x-acquired-count")
"""How the headers begin that the broker sets."""

_OUTLIVES_BY = 60_000
_LONGEST = 2**32 - 1 - _OUTLIVES_BY
_LONGEST_TEXT = 255
# The client cuts what is longer.
_LONGEST_NAME = 128
# They have to fit into one frame, which is of 128 KiB.
_MOST_HEADERS = 120_000


class PublishFailed(Exception):
    """The broker did not take the message over."""


class Nacked(PublishFailed):
    """The broker said no, and not why."""


class Refused(PublishFailed):
    """It never will, whatever the moment: the message is too large, or its key is nobody's."""


class Misdirected(PublishFailed, ConfigurationError):
    """No message can go there: there is no such queue or exchange."""


class Link:
    """A connection, and the channel that everything is published through."""

    def __init__(self, url: str, exchange: str, timeout: float) -> None:
        self.exchange = exchange
        self.version: tuple[int, ...] = ()
        self._url = url
        self._timeout = timeout
        self._connection: AbstractConnection | None = None
        self._publisher: AbstractChannel | None = None
        self._opening = asyncio.Lock()
        self._opening_publisher = asyncio.Lock()
        self._parking: dict[str, float] = {}
        self.making = asyncio.Lock()

    @property
    def is_open(self) -> bool:
        return self._connection is not None and self._connection.connected.is_set()

    async def open(self) -> AbstractConnection:
        async with self._opening:
            connection = self._connection
            if connection is None or not self.is_open:
                if connection is not None:
                    await connection.close()
                self._connection = connection = await self._connect()
                transport = connection.transport
                properties = transport.connection.server_properties if transport is not None else {}
                self.version = _version(str(properties.get("version", "")))
                self._parking.clear()
            return connection

    async def _connect(self) -> AbstractConnection:
        try:
            return await aio_pika.connect(self._url, timeout=self._timeout)
        except InvalidFrameError as error:
            if "Connection.Close" not in str(error):
                raise
            # The client does not pass on what the broker says; it is nothing else after the login.
            name = unquote(urlsplit(self._url).path[1:]) or "/"
            # Of a broker that was there before, it may not be up yet.
            kind = ConnectionError if self.version else ConfigurationError
            raise kind(f"rabbitmq: no virtual host {name!r}, or not for this user") from error

    async def close(self) -> None:
        if self._connection is not None:
            await self._connection.close()

    async def channel(self, *, confirms: bool = False) -> AbstractChannel:
        """A channel of one's own."""
        transport = (await self.open()).transport
        if transport is None:
            raise ConnectionError("rabbitmq: the connection was lost")
        return await transport.connection.channel(
            publisher_confirms=confirms, on_return_raises=confirms, timeout=self._timeout
        )

    async def has_queue(self, name: str) -> bool:
        """Whether there is a queue of that name."""
        channel = await self.channel()
        try:
            await channel.queue_declare(name, passive=True)
        except ChannelNotFoundEntity:
            return False
        await channel.close()
        return True

    async def publish(
        self, message: Outgoing, *, exchange: str = "", delay: float = 0.0, kind: str = ""
    ) -> str:
        """Hand a message over, to wait for `delay` seconds first; done when the broker has it on disk.

        Without an exchange it goes straight to the queue that is its subject.
        """
        identity = message.id or uuid.uuid4().hex
        headers: dict[str, Any] = {k: v for k, v in message.headers.items() if k.lower() != "content-type"}
        _check(message, identity, headers)
        _check_names(message)
        properties = Basic.Properties(
            message_id=identity,
            content_type=content_type_of(message.headers),
            headers=headers,
            delivery_mode=2,
            timestamp=datetime.now(UTC),
        )
        await self._publish(message.data, properties, exchange, message.subject, delay, kind)
        return identity

    async def publish_again(
        self, body: bytes, original: Basic.Properties, queue: str, failures: int, delay: float, kind: str
    ) -> None:
        """Put a copy of a message into its queue, or into one where it waits."""
        properties = _like(original, original.message_id, {FAILURES: failures})
        await self._publish(body, properties, "", queue, delay, kind)

    async def publish_letter(
        self, letter: Outgoing, original: Basic.Properties, added: Mapping[str, str]
    ) -> None:
        """Put a dead letter into its queue: the message with all its publisher gave it, and what is added."""
        properties = _like(original, letter.id, added)
        _check(letter, letter.id or "", properties.headers or {})
        await self._publish(letter.data, properties, "", letter.subject, 0.0, "")

    async def _publish(
        self, body: bytes, properties: Basic.Properties, exchange: str, subject: str, delay: float, kind: str
    ) -> None:
        key = subject
        if delay > 0:
            exchange, key = "", await self._park(exchange, key, delay, kind)
        try:
            channel = await self._publishing()
            await channel.basic_publish(
                body,
                exchange=exchange,
                routing_key=key,
                properties=properties,
                mandatory=True,
                timeout=self._timeout,
            )
        except PublishError as error:
            if exchange:
                raise Refused(
                    f"publish to {subject!r}: exchange {exchange!r} has no queue for key {key!r}"
                ) from error
            raise Misdirected(f"publish to {subject!r}: there is no queue {key!r}") from error
        except ChannelNotFoundEntity as error:
            raise Misdirected(f"publish to {subject!r}: {error}") from error
        except ChannelPreconditionFailed as error:
            # It closes the channel, also for those that are published through it at the same time.
            limit = re.search(r"larger than configured max size (\d+)", str(error))
            kind_of = Refused if limit and len(body) > int(limit[1]) else PublishFailed
            raise kind_of(f"publish to {subject!r}: {error}") from error
        except DeliveryError as error:
            why = "the broker refused it; is its queue full, or only just made?"
            raise Nacked(f"publish to {subject!r}: {why}") from error
        except (TimeoutError, AMQPError, ChannelInvalidStateError, OSError) as error:
            raise PublishFailed(f"publish to {subject!r}: {error or 'no answer'}") from error

    async def _publishing(self) -> AbstractChannel:
        if self._publisher is None or self._publisher.is_closed:
            async with self._opening_publisher:
                if self._publisher is None or self._publisher.is_closed:
                    self._publisher = await self.channel(confirms=True)
        return self._publisher

    async def _park(self, exchange: str, key: str, delay: float, kind: str) -> str:
        """The queue in which a message waits: it expires there, and goes on to where it is meant to go.

        All of one queue wait equally long, so the first in is the first out. Delays are rounded up to two
        digits, so that there are not too many of these queues.
        """
        wait = min(_rounded(delay), _LONGEST)
        # Of its kind too: a queue that is there already cannot be declared as another.
        name = _fitting(".".join(part for part in ("settled.delay", kind, str(wait), exchange, key) if part))
        now = asyncio.get_running_loop().time()
        if self._parking.get(name, 0) > now:
            return name
        arguments: dict[str, Any] = {
            "x-message-ttl": wait,
            # It is removed when it was not declared for so long, whatever is in it: so that must be longer.
            "x-expires": wait + _OUTLIVES_BY,
            "x-dead-letter-exchange": exchange,
            "x-dead-letter-routing-key": key,
        }
        if kind == "quorum":
            arguments |= {
                "x-queue-type": "quorum",
                "x-dead-letter-strategy": "at-least-once",
                "x-overflow": "reject-publish",
            }
        channel = await self.channel()
        await channel.queue_declare(name, durable=True, arguments=arguments)
        await channel.close()
        self._parking[name] = now + _OUTLIVES_BY / 2000
        return name


def _like(original: Basic.Properties, identity: str | None, added: Mapping[str, Any]) -> Basic.Properties:
    """The properties of a copy, with headers of their own types."""
    headers = {
        name: value
        for name, value in (original.headers or {}).items()
        if name != FAILURES and not name.startswith(BROKERS)
    }
    return Basic.Properties(
        message_id=identity,
        content_type=original.content_type,
        content_encoding=original.content_encoding,
        correlation_id=original.correlation_id,
        reply_to=original.reply_to,
        message_type=original.message_type,
        app_id=original.app_id,
        priority=original.priority,
        headers={**headers, **added},
        delivery_mode=2,
        timestamp=original.timestamp,
    )


def _check(message: Outgoing, identity: str, headers: Mapping[str, Any]) -> None:
    """What AMQP has no room for would end the connection."""
    for name, text in (("id", identity), ("content-type", content_type_of(message.headers) or "")):
        if len(text.encode()) > _LONGEST_TEXT:
            raise Refused(
                f"publish to {message.subject!r}: {name} must be {_LONGEST_TEXT} bytes at most, got {text!r}"
            )
    size = sum(len(name.encode()) + len(str(value).encode()) + 6 for name, value in headers.items())
    if size > _MOST_HEADERS:
        raise Refused(
            f"publish to {message.subject!r}: headers must be {_MOST_HEADERS} bytes at most, got {size}"
        )


def _check_names(message: Outgoing) -> None:
    """Cut, two names may be one. What others have published is theirs, and not refused for it."""
    for name in message.headers:
        if len(name.encode()) > _LONGEST_NAME:
            raise Refused(
                f"publish to {message.subject!r}: a header's name must be {_LONGEST_NAME} bytes at most, "
                f"got {name!r}"
            )


def _fitting(name: str) -> str:
    """A queue's name that AMQP has room for, which is 255 bytes; the same for the same.

    >>> _fitting("settled.delay.quorum.1000.orders")
    'settled.delay.quorum.1000.orders'
    >>> len(_fitting("settled.delay." + "q" * 250))
    255
    """
    raw = name.encode()
    if len(raw) <= _LONGEST_TEXT:
        return name
    digest = hashlib.sha256(raw).hexdigest()
    return f"{raw[: _LONGEST_TEXT - len(digest) - 1].decode(errors='ignore')}.{digest}"


def _rounded(seconds: float) -> int:
    """Milliseconds, not less than asked for, in two digits.

    >>> _rounded(0.0005), _rounded(1.234), _rounded(2), _rounded(3600)
    (1, 1300, 2000, 3600000)
    """
    wait = max(1, math.ceil(round(seconds * 1000, 3)))
    step: int = 10 ** max(0, len(str(wait)) - 2)
    return -(-wait // step) * step


def _version(text: str) -> tuple[int, ...]:
    """
    >>> _version("4.3.6"), _version("3.13.0-rc.1"), _version("")
    ((4, 3, 6), (3, 13, 0), ())
    """
    numbers = []
    for part in text.partition("-")[0].split("."):
        if not part.isdigit():
            break
        numbers.append(int(part))
    return tuple(numbers)
