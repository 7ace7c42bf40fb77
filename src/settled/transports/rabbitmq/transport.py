"""`amqp://` and `amqps://`: RabbitMQ as a transport."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from urllib.parse import parse_qsl, urlencode, urlunsplit

from aiormq.exceptions import AMQPError, ChannelInvalidStateError

from settled.signals import ConfigurationError
from settled.transports.base import BrokerStatus, Outgoing, Published, Source
from settled.transports.looped import LoopTransport
from settled.transports.rabbitmq.channel import RabbitChannel, capabilities, dead_letters_of
from settled.transports.rabbitmq.link import Link, Misdirected, Nacked, PublishFailed, Refused
from settled.transports.rabbitmq.queues import Facts, RabbitQueue, make, prepare
from settled.transports.urls import certificates, file, flag, masked, option, port_of, split

_OURS = ("create", "exchange", "backoff")
_TIMEOUT = 30.0
# A quorum queue has no leader at first, and until it has one it takes nothing.
_NEW_FOR = 10.0
_TRY_AGAIN_AFTER = 0.1


def _auth(text: str) -> str:
    if text.lower() not in ("plain", "external"):
        raise ValueError("must be plain or external")
    return text


def _heartbeat(text: str) -> str:
    if not (text.isdecimal() and int(text) < 65535):
        raise ValueError("must be 0 to 65534 s; 0 is none")
    return text


def _yes_or_no(text: str) -> str:
    # The client takes all but a 0 for a yes.
    return "1" if flag(text) else "0"


_CLIENTS: Mapping[str, Callable[[str], str]] = {
    "auth": _auth,
    "cadata": str,
    "cafile": certificates,
    "capath": str,
    "certfile": file,
    "heartbeat": _heartbeat,
    "keyfile": file,
    "name": str,
    "no_verify_ssl": _yes_or_no,
}
"""The options of the client, and what sees that they are right: it takes wrong ones in silence."""


class RabbitTransport(LoopTransport[Link]):
    """Queues on RabbitMQ 3.10 or newer.

    `nack` is `basic.nack` with requeue, as seed 004 wants it. A quorum queue before RabbitMQ 4.3 counts it as
    a failed delivery. Options in the URL: `create=true` makes queues that are missing, read or written,
    `exchange=events` publishes there and binds what is made to it, `backoff=5` is how long a failed message
    waits; and those of aio-pika (`heartbeat`, `name`, `cafile`, `certfile`, `keyfile`, …).
    """

    capabilities = capabilities(None)

    def __init__(self, url: str) -> None:
        super().__init__()
        parts = split(url)
        port = port_of(parts) or (5671 if parts.scheme == "amqps" else 5672)
        if not parts.hostname:
            raise ConfigurationError(f"{parts.scheme}://: no host in {masked(url)!r}; write amqp://host")
        options = dict(parse_qsl(parts.query, keep_blank_values=True))
        unknown = options.keys() - {*_OURS, *_CLIENTS}
        if unknown:
            known = ", ".join(sorted((*_OURS, *_CLIENTS)))
            raise ConfigurationError(
                f"{parts.scheme}://: no option {', '.join(sorted(unknown))}; there are {known}"
            )
        self._create = _flag(options.get("create", "false"))
        self._exchange = options.get("exchange", "")
        self._backoff = _seconds(options["backoff"]) if "backoff" in options else None
        self._address = f"{parts.hostname}:{port}"
        theirs = {
            name: option(parts.scheme, name, options[name], read)
            for name, read in _CLIENTS.items()
            if name in options
        }
        # Without a path the client would ask for a virtual host without a name.
        self._url = urlunsplit(parts._replace(query=urlencode(theirs), path=parts.path or "/"))
        self._facts: dict[Source, Facts] = {}
        self._link: Link | None = None
        self._new_until: dict[str, float] = {}

    async def connect(self) -> Link:
        link = Link(self._url, self._exchange, _TIMEOUT)
        await link.open()
        self._link = link
        return link

    def refuses(self, error: Exception) -> bool:
        return isinstance(error, (Refused, UnicodeError))

    def broker(self) -> BrokerStatus:
        link = self._link
        version = ".".join(map(str, link.version)) if link is not None else ""
        connected = link is not None and link.is_open
        return BrokerStatus(connected=connected, detail=f"RabbitMQ {version} at {self._address}")

    async def push(self, message: Outgoing) -> Published:
        if message.lane is not None:
            raise ConfigurationError(
                f"publish to {message.subject!r}: RabbitMQ has no lanes; for order, publish to a queue of "
                "its own and read it with one performer"
            )
        try:
            return await self._push(message)
        except Misdirected:
            if not self._create or self._exchange:
                raise
            await self._make(message.subject)
        except Nacked:
            if not self._is_new(message.subject):
                raise
        while True:
            try:
                return await self._push(message)
            except Nacked:
                if not self._is_new(message.subject):
                    raise
                await asyncio.sleep(_TRY_AGAIN_AFTER)

    async def _make(self, queue: str) -> None:
        """Make a queue that is written to: one publish does it, the others that want it wait."""
        try:
            link = await self.connection()
            async with link.making:
                if not self._is_new(queue) or not await link.has_queue(queue):
                    # From now on: others publish to it while it is being made.
                    self._new_until[queue] = time.monotonic() + _NEW_FOR
                    await make(link, queue, RabbitQueue(), self._backoff)
        except (TimeoutError, AMQPError, ChannelInvalidStateError, OSError) as error:
            raise PublishFailed(
                f"publish to {queue!r}: the queue could not be made: {error or 'no answer'}"
            ) from error

    def _is_new(self, queue: str) -> bool:
        return self._new_until.get(queue, 0.0) > time.monotonic()

    async def _push(self, message: Outgoing) -> Published:
        link = await self.connection()
        if message.delay > 0 and not self._exchange and not await link.has_queue(message.subject):
            # When its time comes, nobody would be left to tell.
            raise Misdirected(f"publish to {message.subject!r}: there is no queue {message.subject!r}")
        identity = await link.publish(
            message, exchange=self._exchange, delay=message.delay, kind="quorum" if message.delay else ""
        )
        return Published(id=identity)

    def async_channel(self, source: Source) -> RabbitChannel:
        return RabbitChannel(self, source, self._facts.get(source))

    async def prepare(self, source: Source) -> None:
        await self.facts(source)

    async def facts(self, source: Source) -> Facts:
        """The queue that a subscription reads, made if that is wanted; looked at once."""
        if source not in self._facts:
            settings = source.settings if source.settings is not None else RabbitQueue()
            if not isinstance(settings, RabbitQueue):
                raise ConfigurationError(
                    f"subscriber {source.channel!r}: source must be a RabbitQueue, got {settings!r}"
                )
            if source.group is not None and not self._exchange:
                raise ConfigurationError(
                    f"subscriber {source.channel!r}: group {source.group!r} needs an exchange that every "
                    "group has a queue on; add ?exchange=NAME to the URL"
                )
            name = source.channel if source.group is None else f"{source.channel}.{source.group}"
            default = [] if settings.native_dead_letters else [dead_letters_of(name)]
            named = [to for to in (source.dead_letter, source.invalid) if to is not None]
            dead = named if source.dead_letter is not None else named + default
            create = self._create if settings.create is None else settings.create
            backoff = self._backoff if settings.backoff is None else settings.backoff
            link = await self.connection()
            self._facts[source] = await prepare(
                link, source.channel, name, settings, dead, create=create, backoff=backoff
            )
        return self._facts[source]

    def forget(self, source: Source) -> None:
        """Look at the queue anew."""
        self._facts.pop(source, None)


def _flag(text: str) -> bool:
    if text.lower() not in ("true", "false", "1", "0"):
        raise ConfigurationError(f"amqp://: create must be true or false, got {text!r}")
    return text.lower() in ("true", "1")


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < 1e6:
        raise ConfigurationError(f"amqp://: backoff must be 0 or more seconds, got {text!r}")
    return seconds


__all__ = ["PublishFailed", "RabbitTransport"]
