"""Kafka as a transport, on librdkafka's mock cluster: conformance, order, rebalances, share groups."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer, KafkaError, KafkaException, Producer, TopicPartition

from settled import App, ConfigurationError, Defer, DontAck, Message, Policy
from settled.bridge import Bridge
from settled.portal import Portal
from settled.settlement import Reason, Reject
from settled.transports.base import (
    AsyncChannel,
    Channel,
    LeaseLost,
    NackMeans,
    Outgoing,
    Published,
    Source,
)
from settled.transports.kafka import KafkaTopic, KafkaTransport
from settled.transports.kafka.lane import Lane
from tests.brokers.kafka import (
    GROUP_AUTHORIZATION_FAILED,
    LOCK_SECONDS,
    OFFSET_COMMIT,
    PRODUCE,
    TOPIC_AUTHORIZATION_FAILED,
    Cluster,
    cluster,
)
from tests.conftest import Order
from tests.transports.blocking import block_on_the_first
from tests.transports.conformance import Conformance, Ordered, Queue, Releases
from tests.transports.crashing import MESSAGES, consume_with_crashes
from tests.transports.refusing import carry

LEASE = 1.5
# Either group protocol. The mock lets a member of a classic group go only when its session is over.
CLASSIC = "session.timeout.ms=1000&heartbeat.interval.ms=200"
NEWER = "group.protocol=consumer"


@pytest.fixture(scope="module")
def kafka() -> Iterator[Cluster]:
    with cluster() as one:
        yield one


@pytest.fixture
def undisturbed() -> Iterator[Cluster]:
    """A cluster of the test's own: the mock drops every lock when anybody's connection to it is closed."""
    with cluster() as own:
        yield own


def address(kafka: Cluster, query: str = NEWER) -> str:
    return f"kafka://{kafka.address}?{query}"


class KafkaBroker:
    lane: str | None = "one"
    counts_attempts = True

    def __init__(self, kafka: Cluster, settings: KafkaTopic, partitions: int = 1, query: str = NEWER) -> None:
        self.kafka = kafka
        self.queue = f"orders-{uuid.uuid4().hex[:8]}"
        self.settings = settings
        self.transport = KafkaTransport(address(kafka, query))
        self.portal = Portal("test")
        self.channels: list[Channel] = []
        kafka.create(self.queue, partitions)
        kafka.create(f"{self.queue}.dead")

    def source(self, **given: Any) -> Source:
        # A group of its own: one that many tests share would have to wait for members that are gone.
        return Source(channel=self.queue, group=self.queue, settings=self.settings, **given)

    def publish(self, message: Outgoing) -> Published:
        return self.portal.run(self.transport.push(message))

    def channel(self, **given: Any) -> Channel:
        self.channels.append(self.portal.run(self._channel(self.source(**given))))
        return self.channels[-1]

    async def _channel(self, source: Source) -> Channel:
        return self.transport.channel(source)

    def wait(self, seconds: float) -> None:
        time.sleep(seconds)

    def lease(self) -> float:
        return LEASE

    def dead_letters(self) -> list[tuple[bytes, str]]:
        return [(data, headers["settled-error"]) for data, headers in self.records(f"{self.queue}.dead")]

    def records(self, topic: str) -> list[tuple[bytes, dict[str, str]]]:
        return [
            (record.value() or b"", {name: value.decode() for name, value in record.headers() or ()})
            for record in self._read(topic)
        ]

    def keys(self, topic: str) -> dict[Any, Any]:
        """The keys of a topic's records, by their values."""
        return {record.value(): record.key() for record in self._read(topic)}

    def _read(self, topic: str) -> list[Any]:
        """What a topic has, read as any other program would."""
        config = {"bootstrap.servers": self.kafka.address, "group.id": uuid.uuid4().hex}
        reader = Consumer({**config, "auto.offset.reset": "earliest", "enable.partition.eof": True})
        reader.subscribe([topic])
        found = []
        try:
            while (record := reader.poll(30)) is not None and record.error() is None:
                found.append(record)
        finally:
            reader.close()
        return found

    def run_async(self, use: Callable[[AsyncChannel], Any]) -> None:
        async def main() -> None:
            channel = self.transport.async_channel(self.source())
            try:
                await use(channel)
            finally:
                await channel.close()

        self.portal.run(main())

    def close(self) -> None:
        for channel in self.channels:
            channel.close()
        self.portal.run(self.transport.close())
        self.portal.close()


@contextlib.contextmanager
def broker_of(
    kafka: Cluster, settings: KafkaTopic, partitions: int = 1, query: str = NEWER
) -> Iterator[KafkaBroker]:
    found = KafkaBroker(kafka, settings, partitions, query)
    try:
        yield found
    finally:
        found.close()


@pytest.fixture
def broker(kafka: Cluster) -> Iterator[KafkaBroker]:
    with broker_of(kafka, KafkaTopic(lease=LEASE)) as found:
        yield found


class TestKafka(Ordered, Conformance):
    @pytest.fixture
    def broker(self, kafka: Cluster) -> Iterator[KafkaBroker]:
        with broker_of(kafka, KafkaTopic(lease=LEASE), query=CLASSIC) as found:
            yield found


def bodies(deliveries: Sequence[Any]) -> list[bytes]:
    return [delivery.data for delivery in deliveries]


def one(channel: Channel) -> Any:
    """The next message, of a group that may be on its way."""
    return batch(channel, 1)[0]


def batch(channel: Channel, size: int) -> list[Any]:
    """So many messages by one receive."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        found = list(channel.receive(size, 1.0))
        if len(found) == size:
            return found
        for delivery in found:
            channel.nack(delivery)
    raise AssertionError(f"no {size} messages within 60 s")


def drain(channel: Channel, count: int) -> list[Any]:
    """So many messages, each acked before the next is asked for."""
    found = []
    while len(found) < count:
        found.append(one(channel))
        channel.ack(found[-1])
    return found


def test_ac_16_a_nack_seeks_back_where_doing_nothing_would_lose_the_message(broker: KafkaBroker) -> None:
    """AC-16 has nack do nothing on Kafka. It is the one criterion that is not kept here, on purpose: not
    committing an offset does not bring its message back, and the commit of the next message buries it.
    """
    for body in (b"1", b"2"):
        broker.publish(Outgoing(subject=broker.queue, data=body))
    channel = broker.channel()
    assert channel.capabilities.nack is NackMeans.REWIND
    channel.nack(one(channel))
    again = one(channel)
    assert (again.data, again.attempt) == (b"1", 1)
    channel.ack(again)
    assert bodies(drain(channel, 1)) == [b"2"]
    channel.close()
    assert not broker.channel().receive(1, 1.0)


def test_only_the_settled_prefix_of_a_partition_is_committed(broker: KafkaBroker) -> None:
    for number in range(4):
        broker.publish(Outgoing(subject=broker.queue, data=b"%d" % number))
    channel = broker.channel()
    taken = batch(channel, 4)
    for number in (0, 3, 2):
        channel.ack(taken[number])
    channel.close()
    assert bodies(drain(broker.channel(), 3)) == [b"1", b"2", b"3"]


def test_what_was_fetched_and_not_handed_out_is_not_committed_and_waits_its_turn(broker: KafkaBroker) -> None:
    for number in range(6):
        broker.publish(Outgoing(subject=broker.queue, data=b"%d" % number))
    channel = broker.channel()
    channel.ack(one(channel))
    given_back = one(channel)
    channel.nack(given_back)
    again = one(channel)
    assert (again.data, again.attempt) == (given_back.data, 1) == (b"1", 1)
    channel.ack(again)
    failed = one(channel)
    channel.requeue(failed, 0)
    channel.close()
    after = drain(broker.channel(), 4)
    assert [(delivery.data, delivery.attempt) for delivery in after] == [
        (b"2", 2),
        (b"3", 1),
        (b"4", 1),
        (b"5", 1),
    ]


def test_a_member_that_has_records_in_hand_still_gives_up_a_partition(kafka: Cluster) -> None:
    with broker_of(kafka, KafkaTopic(), partitions=2) as broker:
        for number in range(200):
            broker.publish(Outgoing(subject=broker.queue, data=b"%d" % number, lane=str(number % 5)))
        here = broker.channel()
        here.ack(one(here))
        there = broker.channel()
        theirs: list[Any] = []
        for _ in range(190):
            # Far fewer than were fetched at once: without a poll in between, the group would wait for them.
            for delivery in here.receive(1, 0):
                # While the group changes, the partition may be somebody else's, or the commit be refused.
                with contextlib.suppress(LeaseLost, KafkaException):
                    here.ack(delivery)
            theirs += there.receive(1, 0.3)
            if theirs:
                break
        assert theirs


def test_attempts_and_delays_are_the_next_consumers_too(broker: KafkaBroker) -> None:
    broker.publish(Outgoing(subject=broker.queue, data=b"1"))
    broker.publish(Outgoing(subject=broker.queue, data=b"2"))
    channel = broker.channel()
    channel.requeue(one(channel), 0)
    again = one(channel)
    requeued = time.time()
    channel.requeue(again, 3.0)
    channel.close()
    first, second = drain(broker.channel(), 2)
    assert time.time() - requeued >= 2.9
    assert (first.data, first.attempt) == (b"1", 3)
    assert (second.data, second.attempt) == (b"2", 1)


def test_a_partition_waits_for_its_message_while_others_go_on(kafka: Cluster) -> None:
    with broker_of(kafka, KafkaTopic(), partitions=2) as broker:
        lanes: dict[str, list[bytes]] = {}
        for number in range(20):
            stored = broker.publish(Outgoing(subject=broker.queue, data=b"%d" % number, lane=str(number % 5)))
            lanes.setdefault(str(stored.lane), []).append(b"%d" % number)
        assert len(lanes) == 2
        channel = broker.channel()
        failed = one(channel)
        requeued = time.time()
        channel.requeue(failed, 3.0)
        seen = drain(channel, 20)
        waited = [delivery for delivery in seen if delivery.lane == failed.lane]
        assert bodies(waited) == lanes.pop(failed.lane)
        assert [delivery.attempt for delivery in waited] == [2] + [1] * (len(waited) - 1)
        assert waited[0].metadata().stream_sequence == 0
        assert [bodies([d for d in seen if d.lane != failed.lane])] == list(lanes.values())
        # Only what waited for it came after it.
        assert seen[-len(waited) :] == waited
        assert time.time() - requeued >= 2.9


def test_without_order_what_is_behind_a_failed_message_goes_on(kafka: Cluster) -> None:
    with broker_of(kafka, KafkaTopic(ordered=False)) as broker:
        for number in range(3):
            broker.publish(Outgoing(subject=broker.queue, data=b"%d" % number))
        channel = broker.channel()
        channel.requeue(one(channel), 2.0)
        assert bodies(drain(channel, 2)) == [b"1", b"2"]
        again = one(channel)
        assert (again.data, again.attempt) == (b"0", 2)
        channel.close()
        assert one(broker.channel()).data == b"0"


@pytest.mark.parametrize("query", [CLASSIC, NEWER], ids=["classic", "newer"])
def test_a_partition_that_went_to_another_consumer_cannot_be_settled_here(kafka: Cluster, query: str) -> None:
    with broker_of(kafka, KafkaTopic(), partitions=2, query=query) as broker:
        for number in range(20):
            broker.publish(Outgoing(subject=broker.queue, data=b"%d" % number, lane=str(number % 5)))
        here, there = broker.channel(), broker.channel()
        mine = batch(here, 20)
        for delivery in mine[:3]:
            here.ack(delivery)
        theirs: list[Any] = []
        deadline = time.monotonic() + 60
        while not theirs and time.monotonic() < deadline:
            here.receive(1, 0.1)
            theirs += there.receive(20, 0.1)
        (lane,) = {delivery.lane for delivery in theirs}
        settled = set(bodies(mine[:3]))
        assert not settled & set(bodies(theirs))
        lost = next(delivery for delivery in mine[3:] if delivery.lane == lane)
        for call in (
            here.ack,
            here.nack,
            here.extend,
            lambda d: here.requeue(d, 0),
            lambda d: here.reject(d, Reject()),
        ):
            with pytest.raises(LeaseLost, match=lost.id):
                call(lost)
        there.ack(theirs[0])
        assert broker.dead_letters() == []


def test_a_letter_that_cannot_be_written_leaves_its_message(broker: KafkaBroker) -> None:
    broker.publish(Outgoing(subject=broker.queue, data=b"poison", lane="eu", headers={"tenant": "acme"}))
    channel = broker.channel()
    delivery = one(channel)
    broker.kafka.fail(PRODUCE, TOPIC_AUTHORIZATION_FAILED, 1)
    with pytest.raises(KafkaException, match="authorization"):
        channel.reject(delivery, Reject(error="no such customer"))
    assert broker.dead_letters() == []
    channel.close()
    after = broker.channel()
    again = one(after)
    after.reject(again, Reject(error="no such customer"))
    after.close()
    assert not broker.channel().receive(1, 1.0)
    ((_, headers),) = broker.records(f"{broker.queue}.dead")
    assert headers["tenant"] == "acme"
    assert headers["settled-reason"] == "delivery error"
    assert headers["settled-group"] == broker.queue


@pytest.mark.parametrize("share", [False, True])
def test_the_letter_of_a_record_that_only_others_may_write_says_where_that_is(
    undisturbed: Cluster, share: bool
) -> None:
    settings = KafkaTopic(share=share, lease=LEASE)
    with broker_of(undisturbed, settings, query=f"{NEWER}&message.max.bytes=20000") as broker:
        other = Producer({"bootstrap.servers": undisturbed.address})
        other.produce(broker.queue, b"x" * 25_000, headers={"tenant": "acme"})
        assert other.flush(30) == 0
        broker.portal.run(broker.transport.open())  # before the mock has locks to drop over it
        channel = broker.channel()
        channel.reject(one(channel), Reject(Reason.DELIVERY_ERROR, "no card"))
        ((body, headers),) = broker.records(f"{broker.queue}.dead")
        assert (body, headers["settled-subject"], headers["settled-attempts"]) == (b"", broker.queue, "1")
        where = f"partition 0 of {broker.queue}, offset 0"
        assert headers["settled-error"] == f"no card (too large to be copied: {where})"
        channel.close()
        assert not broker.channel().receive(1, 1)


def test_a_commit_that_fails_reaches_the_caller_and_the_next_one_makes_up_for_it(broker: KafkaBroker) -> None:
    for body in (b"1", b"2", b"3"):
        broker.publish(Outgoing(subject=broker.queue, data=body))
    channel = broker.channel()
    first = one(channel)
    broker.kafka.fail(OFFSET_COMMIT, GROUP_AUTHORIZATION_FAILED, 1)
    with pytest.raises(KafkaException, match="authorization"):
        channel.ack(first)
    assert bodies(drain(channel, 1)) == [b"2"]
    channel.close()
    assert one(broker.channel()).data == b"3"


def committed(broker: KafkaBroker) -> int:
    """The offset the group's next consumer begins at."""
    looker = Consumer({"bootstrap.servers": broker.kafka.address, "group.id": broker.queue})
    try:
        return looker.committed([TopicPartition(broker.queue, 0)], timeout=10)[0].offset
    finally:
        looker.close()


def test_what_a_handler_is_through_with_is_committed_while_the_next_is_handled(broker: KafkaBroker) -> None:
    for body in (b"1", b"2"):
        broker.publish(Outgoing(subject=broker.queue, data=body))
    channel = broker.channel()
    first = one(channel)
    first.handled = True
    broker.kafka.fail(OFFSET_COMMIT, GROUP_AUTHORIZATION_FAILED, 1)
    channel.ack(first)
    second = one(channel)
    second.handled = True
    channel.ack(second)
    # Waiting for more is no reason not to commit.
    assert not channel.receive(1, 0.5)
    assert committed(broker) == 2


def test_a_consumer_that_its_group_has_left_behind_still_ends_and_leaves(broker: KafkaBroker) -> None:
    broker.publish(Outgoing(subject=broker.queue, data=b"1"))
    channel = broker.channel()
    first = one(channel)
    broker.kafka.fail(OFFSET_COMMIT, KafkaError.UNKNOWN_MEMBER_ID, 20)
    try:
        with pytest.raises(LeaseLost, match="goes on without this consumer"):
            channel.ack(first)
        channel.close()
    finally:
        broker.kafka.works(OFFSET_COMMIT)
    assert one(broker.channel()).data == b"1"


def test_a_consumer_goes_on_when_the_brokers_are_back(broker: KafkaBroker) -> None:
    broker.publish(Outgoing(subject=broker.queue, data=b"1"))
    channel = broker.channel()
    channel.ack(one(channel))
    assert broker.transport.broker().connected
    broker.kafka.down()
    try:
        deadline = time.monotonic() + 60
        while broker.transport.broker().connected and time.monotonic() < deadline:
            channel.receive(1, 0.2)
        assert not broker.transport.broker().connected
    finally:
        broker.kafka.up()
    broker.publish(Outgoing(subject=broker.queue, data=b"2"))
    after = one(channel)
    assert after.data == b"2"
    channel.ack(after)
    assert broker.transport.broker().connected


def test_a_handler_that_takes_long_keeps_its_partitions(kafka: Cluster) -> None:
    with broker_of(kafka, KafkaTopic(), query=f"{CLASSIC}&max.poll.interval.ms=1000") as broker:
        broker.publish(Outgoing(subject=broker.queue, data=b"1"))
        broker.publish(Outgoing(subject=broker.queue, data=b"2"))
        channel = broker.channel()
        slow = one(channel)
        time.sleep(2)
        channel.ack(slow)
        after = one(channel)
        assert after.data == b"2"
        channel.ack(after)


def test_keys_cloud_events_and_what_others_wrote_come_through(broker: KafkaBroker) -> None:
    other = Producer({"bootstrap.servers": broker.kafka.address})
    headers: list[tuple[str, str | bytes | None]] = [("ce_type", "placed"), ("raw", b"\xff"), ("none", None)]
    other.produce(broker.queue, None, key=b"k\xff", headers=headers)
    other.flush(30)
    channel = broker.channel(dead_letter=f"{broker.queue}.dead")
    delivery = one(channel)
    assert delivery.data == b""
    assert delivery.headers["ce-type"] == "placed"
    assert delivery.headers["kafka-key"] == "k\udcff"
    assert delivery.id == f"{broker.queue}:0:0"
    facts = delivery.metadata()
    assert (facts.stream_sequence, facts.lane, facts.consumer) == (0, "0", broker.queue)
    assert abs(facts.timestamp.timestamp() - time.time()) < 600
    channel.reject(delivery, Reject(error="no"))
    reader = Consumer(
        {
            "bootstrap.servers": broker.kafka.address,
            "group.id": uuid.uuid4().hex,
            "auto.offset.reset": "earliest",
        }
    )
    reader.subscribe([f"{broker.queue}.dead"])
    letter = reader.poll(30)
    reader.close()
    assert letter is not None
    assert letter.key() == b"k\xff"
    assert dict(letter.headers() or ())["raw"] == b"\xff"
    assert dict(letter.headers() or ())["ce_type"] == b"placed"


@pytest.mark.parametrize(
    ("query", "words"),
    [
        ("sasl.mechanizm=PLAIN", 'No such configuration property: "sasl.mechanizm"'),
        ("session.timeout.ms=soon", 'Invalid value for configuration property "session.timeout.ms"'),
        ("enable.auto.commit=true", "cannot set enable.auto.commit; offsets are committed when"),
        ("group.id=billing", r"cannot set group.id; say subscriber\(..., group=...\)"),
        ("lease=0", "lease must be a number of seconds from 0.1, got '0'"),
        ("backoff=x", "backoff must be a number of seconds from 0, got 'x'"),
        ("create=yes", "create must be true or false, got 'yes'"),
    ],
)
def test_a_wrong_option_is_named(broker: KafkaBroker, query: str, words: str) -> None:
    async def main() -> None:
        transport = KafkaTransport(f"kafka://{broker.kafka.address}?{query}")
        try:
            await transport.prepare(broker.source())
        finally:
            with contextlib.suppress(ConfigurationError):
                await transport.close()

    with pytest.raises(ConfigurationError, match=words):
        asyncio.run(main())


def test_what_is_missing_or_impossible_is_said_at_start_up(broker: KafkaBroker) -> None:
    prepare, run = broker.transport.prepare, broker.portal.run
    with pytest.raises(ConfigurationError, match=r"no topic 'elsewhere'; run kafka-topics.sh --create"):
        run(prepare(Source(channel="elsewhere")))
    with pytest.raises(ConfigurationError, match="no topic 'grave'"):
        run(prepare(broker.source(dead_letter="grave")))
    with pytest.raises(ConfigurationError, match="'elsewhere' cannot be created"):
        run(prepare(Source(channel="elsewhere", settings=KafkaTopic(create=True))))
    with pytest.raises(ConfigurationError, match="must be a KafkaTopic, got 'orders'"):
        run(prepare(Source(channel=broker.queue, settings="orders")))
    with pytest.raises(ConfigurationError, match="needs lease > 0"):
        run(prepare(Source(channel=broker.queue, settings=KafkaTopic(lease=0))))
    with pytest.raises(ConfigurationError, match="Kafka cannot delay a message, got delay=5"):
        broker.publish(Outgoing(subject=broker.queue, data=b"1", delay=5))
    with pytest.raises(ConfigurationError, match="write kafka://host:9092"):
        KafkaTransport("kafka:///orders")
    run(prepare(broker.source()))


def test_credentials_in_the_url_are_sasl_over_tls() -> None:
    config = KafkaTransport("kafka://ann:s%40fe@one:9092,two:9092?ssl.ca.location=ca.pem").address.consumer(
        "g"
    )
    assert config["bootstrap.servers"] == "one:9092,two:9092"
    assert config["sasl.username"] == "ann"
    assert config["sasl.password"] == "s@fe"
    assert config["sasl.mechanism"] == "PLAIN"
    assert config["security.protocol"] == "SASL_SSL"
    assert config["ssl.ca.location"] == "ca.pem"


def test_a_broker_that_is_not_there_is_an_error_that_names_it() -> None:
    with pytest.raises(ConnectionError, match=r"kafka: 127\.0\.0\.1:1"):
        asyncio.run(KafkaTransport("kafka://127.0.0.1:1", timeout=0.5).open())


def test_a_note_of_somebody_else_with_an_offset_says_nothing() -> None:
    lane = Lane("orders", 0, "g", ordered=True)
    for note in (None, "", "hello", "[]", '{"settled": 3}', '{"settled": [["x", 1, 1]]}'):
        lane.restore(note)
        assert lane.failures == {}


def test_a_note_fits_into_a_commit_however_many_failed() -> None:
    lane = Lane("orders", 0, "g", ordered=False)
    lane.restore(json.dumps({"settled": [[2**62 + n, n, 2**41] for n in range(1000)]}))
    assert len(lane.note()) < 4096
    after = Lane("orders", 0, "g", ordered=False)
    after.restore(lane.note())
    assert after.failures == {at: lane.failures[at] for at in sorted(lane.failures)[: len(after.failures)]}
    assert len(after.failures) > 50


def run_until(app: App, done: Callable[[], bool]) -> Any:
    async def main() -> Any:
        stop = asyncio.Event()
        running = asyncio.create_task(app.serve(stop))
        async with asyncio.timeout(60):
            while not done() and not running.done():
                await asyncio.sleep(0.02)
        stop.set()
        return await running

    return asyncio.run(main())


def test_an_app_blocks_on_a_message_and_then_goes_on_in_order(broker: KafkaBroker) -> None:
    app = App(address(broker.kafka), policy=Policy(dont_ack_delay=0.05))
    seen: list[tuple[int, int]] = []

    @app.subscriber(
        broker.queue, group=broker.queue, buffer=10, requeue_count=3, dead_letter=f"{broker.queue}.dead"
    )
    async def handle(message: Message[Order]) -> None:
        number = message.payload.id
        seen.append((number, message.attempt))
        if number == 1 and seen.count((1, 1)) < 3:
            raise DontAck
        if number == 2:
            raise Defer(0.1, "the bank did not answer")
        await message.ack()

    for number in range(5):
        app.publish(broker.queue, Order(number), id=f"m{number}")
    status = run_until(app, lambda: (4, 1) in seen)
    assert seen == [(0, 1), (1, 1), (1, 1), (1, 1), (2, 1), (2, 2), (2, 3), (3, 1), (4, 1)]
    assert status.counts.settle_failed == 0
    ((body, error),) = broker.dead_letters()
    assert b'"id":2' in body
    assert "no attempts left after 3" in error


def test_none_of_ten_thousand_messages_is_lost_when_the_consumer_is_killed(
    broker: KafkaBroker, tmp_path: Path
) -> None:
    broker.kafka.create(queue := f"{broker.queue}-crash", 4)
    broker.kafka.create(f"{queue}.dead")
    other = Producer({"bootstrap.servers": broker.kafka.address})
    for number in range(MESSAGES):
        other.produce(queue, b"%d" % number, headers=[("content-type", "application/json")])
    assert other.flush(60) == 0
    handled = consume_with_crashes(address(broker.kafka), queue, tmp_path / "record")
    assert set(handled) == set(range(MESSAGES))
    assert {int(body) for body, _ in broker.records(f"{queue}.dead")} == set(range(0, MESSAGES, 1000))


class ShareBroker(KafkaBroker):
    lane = None
    counts_attempts = False

    def lease(self) -> float:
        return LOCK_SECONDS

    def channel(self, **given: Any) -> Channel:
        channel = super().channel(**given)
        # The mock gives a member of a share group nothing before its second heartbeat.
        assert not channel.receive(1, 0)
        return channel


@pytest.fixture
def shared(undisturbed: Cluster) -> Iterator[ShareBroker]:
    found = ShareBroker(undisturbed, KafkaTopic(share=True, lease=LOCK_SECONDS))
    try:
        yield found
    finally:
        found.close()


class TestShareGroup(Releases, Conformance):
    @pytest.fixture
    def broker(self, shared: ShareBroker) -> ShareBroker:
        return shared

    def test_an_extended_lease_holds(self, queue: Queue) -> None:
        """The client has no call to renew a lock, and says so."""
        assert not queue.channel.capabilities.extends

    def test_a_requeue_without_a_delay_waits_a_second_and_then_twice_as_long(self, queue: Queue) -> None:
        """A delay is held under the lock, and so lasts for half a lock at most."""
        queue.publish(b"1")
        queue.channel.requeue(queue.one(), None)
        assert queue.empty()
        queue.channel.ack(queue.one())

    def test_a_message_given_back_goes_to_another_consumer(self, queue: Queue) -> None:
        """Both are members before the first message: the mock drops one's locks when another joins."""
        channels = [queue.channel, queue.broker.channel()]
        queue.publish(b"1")
        deadline = time.monotonic() + 60
        received: list[Any] = []
        while not received and time.monotonic() < deadline:
            channels.reverse()
            received += channels[0].receive(1, 0.2)
        assert received[0].data == b"1"
        channels[0].nack(received[0])
        channels[0].close()
        again = one(channels[1])
        assert (again.data, again.attempt) == (b"1", 2)
        channels[1].ack(again)


def test_a_lock_of_a_share_group_that_ran_out_is_lost(shared: ShareBroker) -> None:
    shared.publish(Outgoing(subject=shared.queue, data=b"1"))
    channel = shared.channel()
    late = one(channel)
    again = one(channel)
    assert again.attempt == 2
    for call in (channel.ack, channel.nack, channel.extend, lambda d: channel.requeue(d, 0)):
        with pytest.raises(LeaseLost, match=late.id):
            call(late)
    channel.ack(again)


def test_acks_of_a_share_group_are_told_together_or_after_a_moment(shared: ShareBroker) -> None:
    for number in range(4):
        shared.publish(Outgoing(subject=shared.queue, data=b"%d" % number))
    channel = shared.channel()
    taken: list[Any] = []
    while len(taken) < 4:
        taken += channel.receive(4, 1)
    channel.ack(taken[0])
    channel.ack(taken[1])
    again = drain(channel, 2)
    assert {delivery.data for delivery in again} == {b"2", b"3"}
    assert {delivery.attempt for delivery in again} == {2}
    channel.close()
    assert not shared.channel().receive(4, 0.5)


def test_a_share_group_counts_and_names_its_limit(shared: ShareBroker) -> None:
    shared.publish(Outgoing(subject=shared.queue, data=b"1"))
    channel = shared.channel()
    assert channel.capabilities.max_attempts == 5
    for attempt in (1, 2, 3):
        delivery = one(channel)
        assert (delivery.attempt, delivery.metadata().redelivery_count) == (attempt, attempt - 1)
        channel.nack(delivery)
    channel.close()
    assert one(shared.channel()).attempt == 4


def test_the_examples_of_the_docs_run(kafka: Cluster) -> None:
    page = (Path(__file__).parents[2] / "docs" / "brokers" / "kafka.md").read_text()
    names: dict[str, Any] = {"__name__": "block"}
    for code in re.findall(r"^```python\n(.*?)^```", page, re.S | re.M):
        exec(compile(code.replace("kafka://127.0.0.1:9092", address(kafka)), "kafka.md", "exec"), names)
    for topic in ("orders", "orders.dead", "jobs", "jobs.dead"):
        kafka.create(topic)
    app, jobs = names["app"], names["jobs"]

    async def main() -> tuple[Any, Any]:
        await names["place"](1, 9.5)
        await names["place"](2, 900.0)
        await jobs.publish("jobs", {"id": 1})
        stop = asyncio.Event()
        running = asyncio.gather(app.serve(stop), jobs.serve(stop))
        async with asyncio.timeout(60):
            while (
                app.status().counts.acked < 1
                or app.status().counts.rejected < 1
                or jobs.status().counts.acked < 1
            ) and not running.done():
                await asyncio.sleep(0.02)
        stop.set()
        return tuple(await running)

    charged, worked = asyncio.run(main())
    assert (charged.counts.acked, charged.counts.requeued, charged.counts.rejected) == (1, 4, 1)
    assert worked.counts.acked == 1


def test_a_message_it_will_never_take_is_a_dead_letter_of_the_bridge_that_carries_it(
    broker: KafkaBroker,
) -> None:
    totals, errors = carry(address(broker.kafka), broker.queue, b"1", b"x" * 1_100_000, b"2")
    assert (totals.written, totals.rejected) == (2, 1)
    assert "size too large" in errors[0]
    assert [data for data, _ in broker.records(broker.queue)] == [b"1", b"2"]


def test_a_bridge_from_kafka_to_kafka_keeps_the_keys(broker: KafkaBroker) -> None:
    copy = f"{broker.queue}-copy"
    broker.kafka.create(copy)
    for lane in ("ann", "bob", None):
        broker.publish(Outgoing(subject=broker.queue, data=str(lane).encode(), lane=lane))
    # What came from Kafka, and what somebody publishes with a lane of their own.
    headers = {"kafka-key": "ann"}
    broker.publish(Outgoing(subject=broker.queue, data=b"cleo", lane="cleo", headers=headers))
    url = address(broker.kafka)
    bridge = Bridge(url, url, channel=broker.queue, to=copy, group=f"{broker.queue}-bridge", limit=4)
    assert asyncio.run(asyncio.wait_for(bridge.run(), 60)).written == 4
    # A record without a key has its partition for one, and so its order.
    assert broker.keys(copy) == {b"ann": b"ann", b"bob": b"bob", b"None": b"0", b"cleo": b"cleo"}


def test_a_bridge_to_a_topic_that_cannot_be_ends(broker: KafkaBroker) -> None:
    broker.kafka.fail(PRODUCE, KafkaError.TOPIC_EXCEPTION, 1)
    with pytest.raises(ConfigurationError, match=f"publish to '{broker.queue}': Broker: Invalid topic"):
        carry(address(broker.kafka), broker.queue, b"1")


def test_what_is_behind_a_message_that_is_not_acked_is_handled_and_that_one_is_a_dead_letter_in_the_end(
    shared: ShareBroker,
) -> None:
    app, settings = App(address(shared.kafka)), KafkaTopic(share=True, max_attempts=3)
    handled = block_on_the_first(app, shared.queue, group=shared.queue, source=settings)
    assert handled == {0: 3, 1: 1, 2: 1, 3: 1, 4: 1}
    ((body, headers),) = shared.records(f"{shared.queue}.dead")
    assert body == b"0"
    assert "the bank is down" in headers["settled-error"]
