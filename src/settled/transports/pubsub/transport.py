"""The transport: a connection a loop, its subscriptions, and publishing."""

from __future__ import annotations

import contextlib
import logging
import os
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import grpc
from google.api_core.exceptions import (
    Aborted,
    AlreadyExists,
    DeadlineExceeded,
    GoogleAPICallError,
    InvalidArgument,
    NotFound,
    PermissionDenied,
    RetryError,
    ServiceUnavailable,
    Unknown,
)
from google.api_core.retry import AsyncRetry, if_exception_type
from google.pubsub_v1 import PublisherAsyncClient, PubsubMessage, SubscriberAsyncClient
from google.pubsub_v1 import types as pubsub
from google.pubsub_v1.services.publisher.transports import PublisherGrpcAsyncIOTransport
from google.pubsub_v1.services.subscriber.transports import SubscriberGrpcAsyncIOTransport

from settled.settlement import one_line
from settled.signals import ConfigurationError
from settled.transports.base import AsyncChannel, BrokerStatus, Outgoing, Published, Source
from settled.transports.looped import LoopTransport
from settled.transports.pubsub.channel import ID, PubSubChannel, capabilities
from settled.transports.pubsub.settings import DEFAULTS, Subscription
from settled.transports.urls import flag, masked, parse, seconds

logger = logging.getLogger("settled")

_LONGEST_ATTRIBUTE = 1024
# So long the first question waits for an answer: the client itself would try for a minute.
_ANSWERS_WITHIN = 10.0
_RETRY = AsyncRetry(
    initial=0.1,
    maximum=2.0,
    predicate=if_exception_type(Aborted, ServiceUnavailable, Unknown),
    timeout=_ANSWERS_WITHIN,
)


class _Clients:
    """One connection, and the two services on it."""

    def __init__(self, emulator: str | None, endpoint: str | None) -> None:
        if emulator is not None:
            self._channel = grpc.aio.insecure_channel(emulator)
            publishing = PublisherGrpcAsyncIOTransport(channel=self._channel)
            subscribing = SubscriberGrpcAsyncIOTransport(channel=self._channel)
            self.publisher = PublisherAsyncClient(transport=publishing)
            self.subscriber = SubscriberAsyncClient(transport=subscribing)
        else:
            options: Any = {"api_endpoint": endpoint} if endpoint else None
            self.publisher = PublisherAsyncClient(client_options=options)
            self.subscriber = SubscriberAsyncClient(client_options=options)

    async def close(self) -> None:
        for client in (self.publisher, self.subscriber):
            transport: Any = client.transport
            await transport.close()


class PubSubTransport(LoopTransport[_Clients]):
    """Google Cloud Pub/Sub, by project. A channel is a topic; a group is a subscription of it.

    Credentials are Google's application default ones. `PUBSUB_EMULATOR_HOST` is honoured.

    >>> PubSubTransport("pubsub://my-project").broker().detail
    'not connected to project my-project'
    """

    capabilities = capabilities(None)

    def __init__(self, url: str) -> None:
        super().__init__()
        known: dict[str, Callable[[str], Any]] = {
            "ack_deadline": int,
            "backoff": seconds,
            "create": flag,
            "emulator": str,
            "endpoint": str,
            "max_attempts": int,
            "wait": seconds,
        }
        parts, options = parse(url, known)
        self._project = parts.netloc or os.environ.get("GOOGLE_CLOUD_PROJECT", "")
        if not self._project or parts.path.strip("/"):
            raise ConfigurationError(
                f"pubsub: the URL has a project only, as in pubsub://my-project; got {masked(url)!r}"
            )
        self._emulator = options.pop("emulator", None) or os.environ.get("PUBSUB_EMULATOR_HOST")
        self._endpoint = options.pop("endpoint", None)
        self._defaults = Subscription(**options).over(DEFAULTS)
        self._trouble: str | None = f"not connected to project {self._project}"
        self._found: dict[str, pubsub.Subscription] = {}

    async def connect(self) -> _Clients:
        return _Clients(self._emulator, self._endpoint)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Remembers whether Pub/Sub could be reached."""
        try:
            yield
        except GoogleAPICallError as error:
            away = error.grpc_status_code is grpc.StatusCode.UNAVAILABLE
            self._trouble = f"project {self._project}: {error}" if away else None
            raise
        self._trouble = None

    def refuses(self, error: Exception) -> bool:
        return isinstance(error, (InvalidArgument, UnicodeError))

    def broker(self) -> BrokerStatus:
        return BrokerStatus(connected=self._trouble is None, detail=self._trouble or self._project)

    def settings(self, source: Source) -> Subscription:
        """How a subscriber reads."""
        match source.settings:
            case None:
                return self._defaults
            case Subscription() as settings:
                return settings.over(self._defaults)
            case other:
                raise ConfigurationError(
                    f"subscriber {source.channel!r}: source must be a pubsub.Subscription, got {other!r}"
                )

    def group(self, source: Source) -> str:
        """The name of the subscription: the group, or the same as the topic."""
        return source.group or source.channel

    def dead_letters(self, source: Source) -> str:
        """The topic for rejects if the subscriber does not say."""
        return source.dead_letter or f"{self.group(source)}.dead"

    async def subscription(self, source: Source) -> pubsub.Subscription:
        """The subscription a source means, looked up once."""
        name = self.group(source)
        found = self._found.get(name)
        if found is None:
            found = self._found[name] = await self._look_up(source)
        topic = found.topic.rpartition("/")[2]
        if source.group is not None and topic not in ("", source.channel):
            raise ConfigurationError(
                f"subscriber {source.channel!r}: subscription {name!r} is one of topic {topic!r}; subscribe "
                "to that, or name another group: a project has one subscription of a name"
            )
        return found

    async def prepare(self, source: Source) -> None:
        """Look up, or make, the subscription, and see that dead letters are kept by somebody."""
        await self.subscription(source)
        for topic in {self.dead_letters(source), source.invalid} - {None}:
            await self._check_dead(str(topic), self.settings(source))

    async def _look_up(self, source: Source) -> pubsub.Subscription:
        clients, settings, name = await self.connection(), self.settings(source), self.group(source)
        path = f"projects/{self._project}/subscriptions/{name}"
        try:
            with self.watching():
                return await clients.subscriber.get_subscription(
                    subscription=path, timeout=_ANSWERS_WITHIN, retry=_RETRY
                )
        except (RetryError, ServiceUnavailable, DeadlineExceeded) as error:
            self._trouble = f"project {self._project}: {error}"
            where = self._emulator or self._endpoint or "pubsub.googleapis.com"
            why = one_line(str(error.cause if isinstance(error, RetryError) else error))
            raise ConnectionError(f"pubsub: {where} does not answer: {why}") from error
        except PermissionDenied:
            logger.warning(
                "pubsub: %s may not be looked up; taken to have an ack deadline of 10 s and no limits", path
            )
            return pubsub.Subscription(name=path, ack_deadline_seconds=10)
        except NotFound as error:
            if not settings.create:
                raise ConfigurationError(
                    f"pubsub: no subscription {name!r} in project {self._project!r}; run: gcloud pubsub "
                    f"subscriptions create {name} --topic={source.channel}, or say create=True"
                ) from error
        topic, dead = (
            await self._make_topic(source.channel),
            await self._make_topic(self.dead_letters(source)),
        )
        wanted = pubsub.Subscription(
            name=path,
            topic=topic,
            ack_deadline_seconds=settings.ack_deadline or 60,
            enable_message_ordering=bool(settings.ordered),
            enable_exactly_once_delivery=bool(settings.exactly_once),
        )
        if settings.max_attempts:
            wanted.dead_letter_policy.dead_letter_topic = dead
            wanted.dead_letter_policy.max_delivery_attempts = settings.max_attempts
        return await self._make(wanted)

    async def _check_dead(self, topic: str, settings: Subscription) -> None:
        """A topic forgets what nobody subscribes to."""
        clients, path = await self.connection(), f"projects/{self._project}/topics/{topic}"
        with contextlib.suppress(NotFound, PermissionDenied):
            async for _ in await clients.publisher.list_topic_subscriptions(topic=path):
                return
        if not settings.create:
            raise ConfigurationError(
                f"pubsub: nothing keeps the dead letters on topic {topic!r}; run: gcloud pubsub topics "
                f"create {topic} && gcloud pubsub subscriptions create {topic} --topic={topic}, "
                "or say create=True"
            )
        await self._make_kept(topic)

    async def _make_kept(self, topic: str) -> None:
        """A topic, and a subscription of its name that keeps what comes."""
        path = f"projects/{self._project}/subscriptions/{topic}"
        await self._make(pubsub.Subscription(name=path, topic=await self._make_topic(topic)))

    async def _make_topic(self, name: str) -> str:
        clients, path = await self.connection(), f"projects/{self._project}/topics/{name}"
        with contextlib.suppress(AlreadyExists):
            await clients.publisher.create_topic(name=path)
        return path

    async def _make(self, wanted: pubsub.Subscription) -> pubsub.Subscription:
        clients = await self.connection()
        try:
            return await clients.subscriber.create_subscription(wanted)
        except AlreadyExists:
            return await clients.subscriber.get_subscription(subscription=wanted.name)

    def async_channel(self, source: Source) -> AsyncChannel:
        return PubSubChannel(self, source, self.settings(source), self._found.get(self.group(source)))

    async def push(self, message: Outgoing) -> Published:
        """Publish to a topic; the lane is the ordering key."""
        if message.delay > 0:
            raise ConfigurationError(
                f"publish to {message.subject!r}: delay={message.delay:g}: Pub/Sub has no delayed messages; "
                "publish when it is due, or requeue with a delay"
            )
        attributes = {name: _cut(name, value) for name, value in message.headers.items()}
        # A message has to have data or an attribute.
        if message.id is not None or not (message.data or attributes):
            attributes[ID] = message.id or uuid.uuid4().hex
        sent = PubsubMessage(data=message.data, attributes=attributes, ordering_key=message.lane or "")
        try:
            id_ = await self._publish(message.subject, sent)
        except NotFound as error:
            if not self._defaults.create:
                raise ConfigurationError(
                    f"pubsub: no topic {message.subject!r} in project {self._project!r}; "
                    f"run: gcloud pubsub topics create {message.subject}"
                ) from error
            await self._make_kept(message.subject)
            id_ = await self._publish(message.subject, sent)
        return Published(id=attributes.get(ID) or id_, lane=message.lane)

    async def _publish(self, topic: str, sent: PubsubMessage) -> str:
        clients, path = await self.connection(), f"projects/{self._project}/topics/{topic}"
        with self.watching():
            answer = await clients.publisher.publish(topic=path, messages=[sent], timeout=30.0)
        return str(answer.message_ids[0])


def _cut(name: str, value: str) -> str:
    """An error may be longer than an attribute; anything else is refused by Pub/Sub rather than cut."""
    if name != "settled-error":
        return value
    return one_line(value, _LONGEST_ATTRIBUTE)
