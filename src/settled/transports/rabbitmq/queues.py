"""What a subscription reads on RabbitMQ, as a user says it and as the broker has it."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from aiormq.abc import AbstractChannel
from aiormq.exceptions import AMQPChannelError, ChannelPreconditionFailed

from settled.signals import ConfigurationError
from settled.transports.rabbitmq.link import Link

logger = logging.getLogger("settled")

_DEFAULT_LIMIT = 20
"""What RabbitMQ 4 allows on a quorum queue that says nothing itself."""
_NEVER = 2**31 - 1
"""A limit that is none. Before RabbitMQ 4 a quorum queue with no limit puts what it gets back at its end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RabbitQueue:
    """How a queue is read, and what is made of it if it is missing."""

    create: bool | None = None
    """Make the queue and its dead letters' if they are missing; None does as the URL says."""
    type: Literal["quorum", "classic"] = "quorum"
    """What a new queue is."""
    bind: tuple[str, ...] = ()
    """By which keys a new queue is bound to the URL's exchange; by default the name of the channel."""
    delivery_limit: int | None = None
    """How often a new quorum queue delivers again before it gives up; -1 never does, and None is the broker's
    own default. For an existing one, what a policy sets, which cannot be asked for."""
    backoff: float | None = None
    """How many seconds a failed message waits; None does as the URL says, else as the queue itself,
    else as the subscriber."""
    native_dead_letters: bool = False
    """Let the queue's own dead-letter exchange have what is rejected. It is not told why."""
    prefetch: int | None = None
    """How many messages may be underway to this consumer; None is as many as its buffer has room for."""
    arguments: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """More arguments of a new queue."""

    def __post_init__(self) -> None:
        if self.type not in ("quorum", "classic"):
            raise ConfigurationError(f"rabbitmq: type must be 'quorum' or 'classic', got {self.type!r}")
        if self.backoff is not None and not self.backoff >= 0:
            raise ConfigurationError(f"rabbitmq: backoff must be 0 or more seconds, got {self.backoff!r}")
        if self.prefetch is not None and self.prefetch < 1:
            raise ConfigurationError(f"rabbitmq: prefetch must be at least 1, got {self.prefetch!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """A queue as the broker has it."""

    name: str
    settings: RabbitQueue
    type: str | None
    """None if the broker would not tell, as it does not to users who may not configure the queue."""
    version: tuple[int, ...]
    limit: int | None = None
    """So many failed deliveries it forgives; the next one is the last."""
    retries: bool = False
    """Whether the queue itself delays what failed (RabbitMQ 4.3), by the backoff."""
    backoff: float | None = None
    """How many seconds a failed message waits; None if nobody has said so."""

    @property
    def counts(self) -> bool:
        """Whether the broker counts failed deliveries."""
        return self.type == "quorum"

    @property
    def counts_releases(self) -> bool:
        """Whether giving a message back is a failed delivery too; from 4.3 on it is not."""
        return self.counts and self.version < (4, 3)

    def gives_up(self, failures: int) -> bool:
        """Whether the broker would not deliver it again if this delivery, after so many, fails too."""
        return self.counts and self.limit is not None and failures >= self.limit


async def prepare(
    link: Link,
    channel: str,
    name: str,
    settings: RabbitQueue,
    dead: list[str],
    *,
    create: bool,
    backoff: float | None,
) -> Facts:
    """Look at the queue and at where its dead letters go, or make them; tell what is wrong."""
    if not await link.has_queue(name):
        if not create:
            raise ConfigurationError(_missing(name, f"subscriber {channel!r}"))
        await make(link, name, settings, backoff)
        if link.exchange:
            amqp = await link.channel()
            await amqp.exchange_declare(link.exchange, exchange_type="topic", durable=True)
            for key in settings.bind or (channel,):
                await amqp.queue_bind(name, link.exchange, key)
            await amqp.close()
    for letters in dead:
        if not await link.has_queue(letters):
            if not create:
                raise ConfigurationError(_missing(letters, f"dead letters of {channel!r}"))
            await make(link, letters, RabbitQueue(type=settings.type, delivery_limit=-1), None)
    found = await describe(link, name)
    kind = None if found is None else str(found.get("x-queue-type", "classic"))
    if kind == "stream":
        raise ConfigurationError(f"queue {name!r}: a stream cannot give messages back; read a quorum queue")
    if kind == "quorum" and link.version < (4,) and "x-delivery-limit" not in (found or {}):
        logger.warning(
            "%s: queue %r has no x-delivery-limit, so RabbitMQ before 4.0 puts what is given back at "
            "its end, and order is lost",
            channel,
            name,
        )
    own = _own_backoff(found or {})
    return Facts(
        name=name,
        settings=settings,
        type=kind,
        version=link.version,
        limit=_limit(found or {}, settings, link.version) if kind == "quorum" else None,
        retries=own is not None and (backoff is None or _milliseconds(backoff) == _milliseconds(own)),
        backoff=own if backoff is None else backoff,
    )


def _missing(name: str, whose: str) -> str:
    return (
        f"{whose}: RabbitMQ has no queue {name!r}; declare it, or let it be made: "
        "source=RabbitQueue(create=True), or ?create=true in the URL"
    )


def _own_backoff(found: Mapping[str, Any]) -> float | None:
    """The seconds by which the queue itself delays whatever failed, however often."""
    least, most = found.get("x-delayed-retry-min"), found.get("x-delayed-retry-max")
    if found.get("x-delayed-retry-type") != "failed" or least is None or least != most:
        return None
    return int(least) / 1000


def _milliseconds(seconds: float) -> int:
    return max(1, round(seconds * 1000))


def _limit(found: Mapping[str, Any], settings: RabbitQueue, version: tuple[int, ...]) -> int | None:
    limit = found.get("x-delivery-limit", settings.delivery_limit)
    if limit is None and version >= (4,):
        limit = _DEFAULT_LIMIT
    return None if limit is None or not 0 <= int(limit) < _NEVER else int(limit)


async def make(link: Link, name: str, settings: RabbitQueue, backoff: float | None) -> None:
    """Declare a queue as we read it best."""
    arguments: dict[str, Any] = {"x-queue-type": settings.type}
    if settings.type == "quorum":
        limit = settings.delivery_limit
        if link.version < (4,) and (limit is None or limit < 0):
            limit = _NEVER
        if limit is not None:
            arguments["x-delivery-limit"] = limit
        if backoff and link.version >= (4, 3):
            # Not `all`: what is given back must not wait.
            delay = _milliseconds(backoff)
            arguments |= {
                "x-delayed-retry-type": "failed",
                "x-delayed-retry-min": delay,
                "x-delayed-retry-max": delay,
            }
    amqp = await link.channel()
    try:
        await amqp.queue_declare(name, durable=True, arguments={**arguments, **settings.arguments})
    except ChannelPreconditionFailed as error:
        raise ConfigurationError(f"queue {name!r}: {error}") from error
    await amqp.close()


async def describe(link: Link, name: str) -> dict[str, Any] | None:
    """The arguments of a queue; None if the broker does not let us see them.

    The protocol has no question for this. But a queue that is declared as what it is not is refused, and the
    refusal names one difference: declared again with that put right, it names the next.
    """
    arguments: dict[str, Any] = {}
    for _ in range(20):
        amqp = await link.channel()
        try:
            await _declare_as(amqp, name, arguments)
        except ChannelPreconditionFailed as error:
            difference = _difference(str(error))
            if difference is None or difference[0] in arguments:
                return None
            arguments[difference[0]] = difference[1]
        except AMQPChannelError:
            return None
        else:
            await amqp.close()
            return arguments
    return None


async def _declare_as(amqp: AbstractChannel, name: str, arguments: Mapping[str, Any]) -> None:
    await amqp.queue_declare(
        name,
        durable=bool(arguments.get("durable", True)),
        auto_delete=bool(arguments.get("auto_delete", False)),
        exclusive=bool(arguments.get("exclusive", False)),
        arguments={key: value for key, value in arguments.items() if key.startswith("x-")},
    )


_REFUSAL = re.compile(
    r"inequivalent arg '(?P<name>[^']+)'.* but current is "
    r"(?:the value )?'(?P<value>[^']*)'(?: of type '(?P<type>\w+)')?"
)


def _difference(refusal: str) -> tuple[str, Any] | None:
    """The argument that a refusal names, as the queue has it.

    >>> _difference("inequivalent arg 'x-max-length' for queue 'a': received none but current is the value "
    ...             "'100' of type 'signedint'")
    ('x-max-length', 100)
    >>> _difference("inequivalent arg 'x-queue-type' for queue 'a': received 'b' but current is 'quorum'")
    ('x-queue-type', 'quorum')
    """
    found = _REFUSAL.search(refusal)
    if found is None:
        return None
    name, value, kind = found["name"], found["value"], found["type"]
    if value in ("true", "false"):
        return name, value == "true"
    is_number = value.lstrip("-").isdigit() and kind not in ("longstr", "shortstr")
    return name, int(value) if is_number else value
