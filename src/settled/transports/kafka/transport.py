"""The transport: a producer a loop, and the clients that channels read with."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import msgspec
from confluent_kafka import Consumer, KafkaError, KafkaException, Message, Producer, ShareConsumer
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from settled.message import Delivery
from settled.settlement import Reject
from settled.signals import ConfigurationError
from settled.transports.base import BrokerStatus, Channel, Outgoing, Published, Source
from settled.transports.faces import BlockingChannel
from settled.transports.kafka.blocking import KafkaBlockingChannel
from settled.transports.kafka.channel import KafkaChannel, logger
from settled.transports.kafka.records import KEY, outgoing
from settled.transports.kafka.settings import DEFAULT_GROUP, Address, Config
from settled.transports.kafka.share import SHARED, ShareChannel
from settled.transports.letters import destination, letter, without_body
from settled.transports.looped import LoopTransport

_FLUSH_WITHIN = 30.0

_NO_TOPIC = (KafkaError.TOPIC_EXCEPTION, KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_TOPIC)
"""No message can go there, and the client has waited for that to change."""


class _Broker(msgspec.Struct):
    state: str


class _Statistics(msgspec.Struct):
    brokers: dict[str, _Broker]


class Writer:
    """A producer, and the thread that hears what became of what it sent."""

    def __init__(self, producer: Producer) -> None:
        self.producer = producer
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._listen, name="settled-kafka-producer", daemon=True)
        self._thread.start()

    def _listen(self) -> None:
        while not self._ending.is_set():
            self.producer.poll(0.1)

    async def send(self, topic: str, data: bytes, key: bytes | None, headers: list[Any]) -> Message:
        """Wait until the brokers have it; KafkaException if they do not take it."""
        done: Future[Message] = Future()

        def delivered(error: KafkaError | None, record: Message) -> None:
            if error is not None:
                done.set_exception(KafkaException(error))
            else:
                done.set_result(record)

        while True:
            try:
                self.producer.produce(topic, data, key, headers=headers, on_delivery=delivered)
                break
            except BufferError:
                await asyncio.sleep(0.01)
        # What is on its way cannot be called back.
        return await asyncio.shield(asyncio.wrap_future(done))

    async def close(self) -> None:
        left = await asyncio.to_thread(self.producer.flush, _FLUSH_WITHIN)
        self._ending.set()
        await asyncio.to_thread(self._thread.join)
        if left:
            logger.error("kafka: %d messages were not published within %g s", left, _FLUSH_WITHIN)


class KafkaTransport(LoopTransport[Writer]):
    """Kafka, through librdkafka; every property of its own may be in the URL's query.

    >>> KafkaTransport("kafka://127.0.0.1:9092?security.protocol=SSL").broker().detail
    'not connected to 127.0.0.1:9092'
    """

    capabilities = KafkaChannel.capabilities
    variants = MappingProxyType({"share groups": SHARED})
    lane_header = KEY

    def __init__(self, url: str, *, timeout: float = 10.0) -> None:
        super().__init__()
        self.address = Address.parse(url)
        self._timeout = timeout
        self._connected = False
        self._trouble = ""

    async def connect(self) -> Writer:
        watched = {"statistics.interval.ms": 2000, "stats_cb": self._statistics}
        producer = self._client(Producer, {**self.address.producer(), **watched})
        try:
            await asyncio.to_thread(producer.list_topics, timeout=self._timeout)
        except KafkaException as error:
            raise ConnectionError(f"kafka: {self.address.servers}: {_words(error)}") from error
        self.heard()
        return Writer(producer)

    def _client(self, kind: Any, config: Config) -> Any:
        try:
            return kind({**config, "error_cb": self._error, "logger": logger})
        except KafkaException as error:
            raise ConfigurationError(f"kafka: {_words(error)}; the URL's options are librdkafka's") from error

    def consumer(self, group: str) -> Consumer:
        """A client for a member of a classic group."""
        found: Consumer = self._client(Consumer, self.address.consumer(group))
        return found

    def share_consumer(self, group: str) -> ShareConsumer:
        """A client for a member of a share group."""
        found: ShareConsumer = self._client(ShareConsumer, self.address.share_consumer(group))
        return found

    def heard(self) -> None:
        """A broker has answered."""
        self._connected = True

    def _error(self, error: KafkaError) -> None:
        self._trouble = str(error.str())
        if error.code() == KafkaError._ALL_BROKERS_DOWN or error.fatal():
            self._connected = False

    def _statistics(self, text: str) -> None:
        # Told by a producer that may have nothing to do: how a connection that came back is noticed.
        found = msgspec.json.decode(text, type=_Statistics)
        if any(broker.state == "UP" for broker in found.brokers.values()):
            self.heard()

    def refuses(self, error: Exception) -> bool:
        codes = (KafkaError.MSG_SIZE_TOO_LARGE, KafkaError.INVALID_MSG_SIZE, KafkaError.INVALID_RECORD)
        return isinstance(error, KafkaException) and error.args[0].code() in codes

    def broker(self) -> BrokerStatus:
        servers = self.address.servers
        if self._connected:
            return BrokerStatus(connected=True, detail=servers)
        why = f": {self._trouble}" if self._trouble else ""
        return BrokerStatus(connected=False, detail=f"not connected to {servers}{why}")

    async def prepare(self, source: Source) -> None:
        """Look for the topic, or create it; a dead-letter topic that was named must be there too."""
        settings = self.address.settings(source)
        await asyncio.to_thread(self._rehearse, source.group or DEFAULT_GROUP, share=settings.share)
        writer = await self.connection()
        there = (await asyncio.to_thread(writer.producer.list_topics, timeout=self._timeout)).topics
        needed = {source.channel, source.dead_letter, source.invalid} - {None} - there.keys()
        for topic in sorted(map(str, needed)):
            if not settings.create:
                raise ConfigurationError(
                    f"subscriber {source.channel!r}: there is no topic {topic!r}; run kafka-topics.sh "
                    f"--create --topic {topic}, or say KafkaTopic(create=True), or ?create=true in the URL"
                )
            await self._create(topic)
        dead = default_letters(source)
        if source.dead_letter is None and dead not in there:
            if settings.create:
                await self._create(dead)
            else:
                logger.warning(
                    "%s: there is no topic %s for its dead letters: unless brokers make topics themselves, "
                    "a message that is rejected stays and blocks its partition",
                    source.channel,
                    dead,
                )

    def _rehearse(self, group: str, *, share: bool) -> None:
        """Make a consumer that goes nowhere, to hear what is wrong with its properties."""
        nowhere: Config = {"bootstrap.servers": "", "log_level": 0}
        if share:
            self._client(ShareConsumer, {**self.address.share_consumer(group), **nowhere}).close()
        else:
            self._client(Consumer, {**self.address.consumer(group), **nowhere}).close()

    async def _create(self, topic: str) -> None:
        admin = self._client(AdminClient, self.address.client())
        try:
            made = admin.create_topics([NewTopic(topic)], operation_timeout=self._timeout)[topic]
            await asyncio.wrap_future(made)
        except KafkaException as error:
            if error.args[0].code() != KafkaError.TOPIC_ALREADY_EXISTS:
                raise ConfigurationError(
                    f"kafka: topic {topic!r} cannot be created: {_words(error)}; create it yourself"
                ) from error

    def async_channel(self, source: Source) -> KafkaChannel | ShareChannel:
        settings = self.address.settings(source)
        return (ShareChannel if settings.share else KafkaChannel)(self, source, settings)

    def channel(self, source: Source) -> Channel:
        channel, loop = self.async_channel(source), asyncio.get_running_loop()
        if isinstance(channel, KafkaChannel):
            return KafkaBlockingChannel(channel, loop)
        return BlockingChannel(channel, loop)

    async def push(self, message: Outgoing) -> Published:
        if message.delay:
            raise ConfigurationError(
                f"publish to {message.subject!r}: Kafka cannot delay a message, got delay={message.delay:g}; "
                "raise Defer in the handler, or publish later"
            )
        id_, key, headers = outgoing(message)
        writer = await self.connection()
        try:
            stored = await writer.send(message.subject, message.data, key, headers)
        except KafkaException as error:
            if error.args[0].code() not in _NO_TOPIC:
                raise
            if not self.address.create:
                raise ConfigurationError(f"publish to {message.subject!r}: {_words(error)}") from error
            await self._create(message.subject)
            stored = await writer.send(message.subject, message.data, key, headers)
        self.heard()
        return Published(id=id_, sequence=stored.offset(), lane=str(stored.partition()))

    async def write_letter(
        self, source: Source, delivery: Delivery, rejection: Reject, group: str, key: str | None
    ) -> None:
        """Publish a dead letter, with the key of the original."""
        to = destination(source, rejection) or default_letters(source)
        dead = replace(letter(delivery, rejection, group, to), lane=key)
        try:
            await self.push(dead)
        except KafkaException as error:
            if not self.refuses(error):
                raise
            place = delivery.metadata()
            where = f"partition {place.lane} of {delivery.subject}, offset {place.stream_sequence}"
            await self.push(without_body(dead, where))


def default_letters(source: Source) -> str:
    """The topic for the dead letters of a subscription that named none."""
    return f"{source.channel}.dead"


def _words(error: KafkaException) -> str:
    return str(error.args[0].str())
