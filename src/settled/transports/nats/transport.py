"""The transport: one connection, its consumers, and publishing from any thread."""

from __future__ import annotations

import asyncio
import contextlib
import random
import re
import uuid
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import nats.errors
import nats.js.errors
from nats.js.api import AckPolicy, ConsumerConfig, ConsumerInfo, DeliverPolicy, StreamConfig

from settled.message import Delivery
from settled.observe import tracing
from settled.portal import Portal
from settled.signals import ConfigurationError
from settled.transports.base import (
    Abandoned,
    BrokerStatus,
    Channel,
    Outgoing,
    Publication,
    Published,
    Source,
)
from settled.transports.looped import publish_from_anywhere
from settled.transports.nats.advisories import Coroner
from settled.transports.nats.blocking import NatsBlockingChannel
from settled.transports.nats.channel import NatsChannel, capabilities
from settled.transports.nats.connection import Connection, Login, Refused, asks_to_create, logger, parse
from settled.transports.nats.delivery import MSG_ID, NatsDelivery
from settled.transports.nats.feeds import Feed, PullFeed, PushFeed
from settled.transports.nats.letters import DeadLetters, Letter, Office
from settled.transports.nats.sources import (
    Consumer,
    Durable,
    Ephemeral,
    Lasting,
    Settings,
    overlap,
    stream_for,
)

# A message, or its headers, larger than the stream takes.
_REFUSED = (10054, 10097)
_NO_STREAM = 10059
_LINE_BREAK = re.compile("[\r\n]")


class NatsTransport:
    """NATS JetStream.

    >>> NatsTransport("nats://127.0.0.1:4222").broker().detail
    'not connected to 127.0.0.1:4222'
    """

    capabilities = capabilities(None)

    def __init__(
        self,
        url: str,
        *,
        login: Login | None = None,
        name: str = "settled",
        timeout: float = 5.0,
        dead_letters: DeadLetters | None = None,
        on_dead_letter: Callable[[Letter], None] | None = None,
        random: Callable[[], float] = random.random,
    ) -> None:
        servers, who = parse(url, login)
        self._creates = asks_to_create(url)
        self.connection = Connection(servers, who, name=name, timeout=timeout)
        self.office = Office(self.connection, dead_letters or DeadLetters(), on_dead_letter)
        self.random = random
        self._consumers: list[tuple[Source, Consumer]] = []
        self._coroners: list[Coroner] = []
        self._pushed: dict[str, PushFeed] = {}
        self._portal = Portal("settled-nats")

    async def open(self) -> None:
        await self._leave_portal()
        await self.connection.open()

    async def close(self) -> None:
        await self._leave_portal()
        for coroner in self._coroners:
            await coroner.stop()
        self._coroners, self._consumers = [], []
        self._pushed = {}
        await self.connection.close()

    def broker(self) -> BrokerStatus:
        return self.connection.status()

    def refuses(self, error: Exception) -> bool:
        if isinstance(error, nats.js.errors.APIError):
            return error.err_code in _REFUSED
        never = (Refused, nats.errors.MaxPayloadError, nats.errors.BadHeaderError, UnicodeError)
        return isinstance(error, never)

    def lasting(self, name: str) -> Lasting:
        return Lasting(name)

    async def abandoned(self, source: Source) -> Abandoned:
        consumer = await self.consumer(source)
        info = await self.connection.ask(
            lambda jetstream: jetstream.consumer_info(consumer.stream, consumer.name)
        )
        lease = max(consumer.backoff, default=consumer.ack_wait)
        return Abandoned(info.num_ack_pending or 0, lease, is_read=bool(info.num_waiting))

    def position(self, delivery: Delivery) -> int:
        return delivery.sequence if isinstance(delivery, NatsDelivery) else 0

    async def prepare(self, source: Source) -> None:
        """Find the consumer, or make it, and say what the server would ignore in silence."""
        await self.consumer(source)

    def channel(self, source: Source) -> Channel:
        loop = self.connection.home
        if loop is None:
            raise RuntimeError("nats: the transport is not open; await open() first")
        return NatsBlockingChannel(self.async_channel(source), loop)

    def async_channel(self, source: Source) -> NatsChannel:
        return NatsChannel(self, source, self._known(source))

    def feed(self, consumer: Consumer) -> Feed:
        """Where the messages of a consumer come from; a push consumer has one for all its performers."""
        if consumer.deliver_subject is None:
            return PullFeed(self.connection, consumer)
        feed = self._pushed.setdefault(consumer.deliver_subject, PushFeed(self.connection, consumer))
        feed.users += 1
        return feed

    def _known(self, source: Source) -> Consumer | None:
        return next((consumer for known, consumer in self._consumers if known is source), None)

    async def consumer(self, source: Source) -> Consumer:
        """The consumer a source means, looked up once."""
        known = self._known(source)
        if known is not None:
            return known
        settings = await self._settings(source)
        info = await self._resolve(settings, source.channel)
        consumer = Consumer.of(info, settings)
        if consumer.subjects and not any(overlap(source.channel, subject) for subject in consumer.subjects):
            raise ConfigurationError(
                f"subscriber {source.channel!r}: consumer {consumer.stream}/{consumer.name} reads "
                f"{', '.join(consumer.subjects)}; subscribe to that, or name another consumer"
            )
        if consumer.deliver_subject and not consumer.deliver_group and info.push_bound:
            raise ConfigurationError(
                f"subscriber {source.channel!r}: push consumer {consumer.stream}/{consumer.name} is read by "
                "somebody else already; give it a deliver_group to share it"
            )
        self._consumers.append((source, consumer))
        _warn(consumer, source)
        for letters in {source.dead_letter, source.invalid} - {None} if self._creates else ():
            await self._stream_of(str(letters))
        await self.office.prepare(consumer, source)
        coroner = Coroner(self.connection, self.office, consumer, source)
        await coroner.start()
        self._coroners.append(coroner)
        return consumer

    async def remake(self, source: Source, old: Consumer) -> Consumer:
        """Make an ephemeral consumer anew, if it is gone, from the first message that is not settled."""
        known = self._known(source)
        if known is not old or not isinstance(old.settings, Ephemeral):
            return known or old
        with contextlib.suppress(nats.js.errors.NotFoundError):
            await self.connection.jetstream.consumer_info(old.stream, old.name)
            return old
        start = min(old.unsettled, default=old.last + 1)
        logger.warning("nats: ephemeral consumer of %s is gone; made anew from %d", source.channel, start)
        asked = old.settings.config or ConsumerConfig()
        config = asked.evolve(deliver_policy=DeliverPolicy.BY_START_SEQUENCE, opt_start_seq=start)
        settings = replace(old.settings, stream=old.stream, config=config if old.last else asked)
        consumer = Consumer.of(await self._resolve(settings, source.channel), settings)
        consumer.last = old.last
        self._consumers = [(s, consumer if s is source else c) for s, c in self._consumers]
        return consumer

    async def _settings(self, source: Source) -> Settings:
        match source.settings:
            case Durable() | Ephemeral() as settings if source.group is None:
                return settings
            case Durable() | Ephemeral():
                raise ConfigurationError(
                    f"subscriber {source.channel!r}: on NATS a group is a durable consumer; "
                    f"write Durable(stream=..., consumer={source.group!r}) and leave group out"
                )
            case Lasting(consumer) if source.group is None:
                stream = await self._stream_of(source.channel)
                return Durable(stream=stream, consumer=consumer, create=True)
            case None if source.group is not None:
                stream = await self._stream_of(source.channel)
                return Durable(stream=stream, consumer=source.group, create=self._creates)
            case None:
                return Ephemeral()
            case other:
                raise ConfigurationError(
                    f"subscriber {source.channel!r}: source must be a Durable or an Ephemeral, got {other!r}"
                )

    async def _stream_of(self, subject: str) -> str:
        try:
            return await self.connection.ask(lambda jetstream: jetstream.find_stream_name_by_subject(subject))
        except nats.js.errors.NotFoundError as error:
            if self._creates:
                return await self._make_stream(subject)
            raise ConfigurationError(
                f"subscriber {subject!r}: no stream takes this subject; create one that does, or say "
                "?create=true in the URL"
            ) from error

    async def _make_stream(self, subject: str) -> str:
        """A stream for a subject that none takes, named after it."""
        name = stream_for(subject)
        try:
            await self.connection.jetstream.add_stream(StreamConfig(name=name, subjects=[subject]))
        except nats.js.errors.BadRequestError as error:
            raise ConfigurationError(
                f"nats: no stream takes subject {subject!r}, and {name!r} cannot be made: {error.description}"
            ) from error
        logger.info("nats: made stream %s for subject %s", name, subject)
        return name

    async def _resolve(self, settings: Settings, subject: str) -> ConsumerInfo:
        jetstream = self.connection.jetstream
        if isinstance(settings, Ephemeral):
            stream = settings.stream or await self._stream_of(subject)
            config = settings.config or ConsumerConfig()
            if not config.filter_subject and not config.filter_subjects:
                config = config.evolve(filter_subject=subject)
            if config.deliver_subject is None and config.inactive_threshold is None:
                # Longer than the server's 5 s, so that a reconnect finds it.
                config = config.evolve(inactive_threshold=60.0)
            return await jetstream.add_consumer(
                stream, config.evolve(name=f"settled-{uuid.uuid4().hex[:12]}")
            )
        try:
            info: ConsumerInfo = await self.connection.ask(
                lambda jetstream: jetstream.consumer_info(settings.stream, settings.consumer)
            )
        except nats.js.errors.NotFoundError as error:
            if error.err_code == _NO_STREAM:
                raise ConfigurationError(
                    f"subscriber {subject!r}: there is no stream {settings.stream!r}; create it first"
                ) from error
            if not settings.create:
                raise ConfigurationError(
                    f"subscriber {subject!r}: stream {settings.stream!r} has no consumer "
                    f"{settings.consumer!r} ({error.description}); create it, or say create=True, or "
                    "?create=true in the URL"
                ) from error
        else:
            return info
        config = settings.config or ConsumerConfig(ack_policy=AckPolicy.EXPLICIT)
        if not config.filter_subject and not config.filter_subjects:
            config = config.evolve(filter_subject=subject)
        return await jetstream.add_consumer(
            settings.stream, config.evolve(name=settings.consumer, durable_name=settings.consumer)
        )

    def publish(self, message: Outgoing) -> Publication:
        """Publish, acknowledged by the stream."""
        headers = tracing.inject(dict(message.headers))
        if message.lane is not None:
            raise ConfigurationError(
                f"publish to {message.subject!r}: NATS has no lanes; for order, read with max_ack_pending=1"
            )
        call = self._publish(replace(message, headers=headers))
        return publish_from_anywhere(call, self.connection.home, self._portal)

    async def _publish(self, message: Outgoing) -> Published:
        _check_headers(message)
        await self.connection.open()
        identity = message.id or uuid.uuid4().hex
        headers = {**message.headers, MSG_ID: identity}
        subject = message.subject
        if message.delay > 0:
            due = datetime.now(UTC) + timedelta(seconds=message.delay)
            headers["Nats-Schedule"] = f"@at {due.isoformat().replace('+00:00', 'Z')}"
            headers["Nats-Schedule-Target"] = subject
            # The stream keeps the schedule under a subject of its own until it is due.
            subject = f"{subject}.schedule.{uuid.uuid4().hex}"
        try:
            stored = await self.connection.publish(subject, message.data, headers)
        except ConfigurationError:
            # A delayed message needs a stream that allows schedules, which is the user's to decide.
            if not self._creates or message.delay > 0:
                raise
            await self._make_stream(subject)
            stored = await self.connection.publish(subject, message.data, headers)
        return Published(id=identity, duplicate=stored.duplicate, sequence=stored.sequence)

    async def _leave_portal(self) -> None:
        """Give up the connection of sync code that published before the app ran, or after."""
        if self._portal.is_open:
            await asyncio.to_thread(self._portal.run, self.connection.close())
            await asyncio.to_thread(self._portal.close)


def _check_headers(message: Outgoing) -> None:
    """The client would leave out the one, and make a blank of the other."""
    for name, value in (*message.headers.items(), ("id", message.id or "")):
        if not name.strip() or _LINE_BREAK.search(name) or _LINE_BREAK.search(value):
            raise Refused(
                f"publish to {message.subject!r}: invalid header: NATS has none without a name or with a "
                f"line break, got {name!r}: {value[:100]!r}"
            )


def _warn(consumer: Consumer, source: Source) -> None:
    name = f"{consumer.stream}/{consumer.name}"
    if consumer.ack_policy == "none":
        logger.warning(
            "%s: consumer %s has AckPolicy none: the server ignores ack, nak and term in silence, and "
            "nothing comes again",
            source.channel,
            name,
        )
    elif consumer.ack_policy == "all":
        logger.warning(
            "%s: consumer %s has AckPolicy all: an ack settles every message before it too, also one that "
            "failed",
            source.channel,
            name,
        )
