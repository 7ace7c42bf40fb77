"""Redis as a transport, streams and lists, on real servers: conformance, claims, recovery, dead letters."""

from __future__ import annotations

import asyncio
import contextlib
import re
import ssl
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import redis
import trustme
from redis.exceptions import RedisError, ResponseError

from settled import App, ConfigurationError, Message, signals
from settled.portal import Portal
from settled.settlement import Reject
from settled.transports.base import (
    AsyncChannel,
    Channel,
    LeaseLost,
    NackMeans,
    Outgoing,
    Published,
    RejectMeans,
    Source,
)
from settled.transports.faces import BlockingChannel
from settled.transports.redis import RedisList, RedisStream, RedisTransport
from settled.transports.redis.lists import element, unwrap
from settled.transports.redis.streams import written
from tests.brokers.redis import Server, server
from tests.conftest import Order
from tests.transports.conformance import Conformance, Extends, Restarts
from tests.transports.crashing import MESSAGES, consume_with_crashes
from tests.transports.refusing import carry

LEASE = 1.5


@pytest.fixture(scope="module")
def valkey() -> Iterator[Server]:
    with server("valkey") as one:
        yield one


class RedisBroker:
    lane = None
    counts_attempts = True

    def __init__(self, one: Server, settings: RedisStream | RedisList) -> None:
        self.server = one
        self.settings = settings
        self.queue = f"orders-{uuid.uuid4().hex[:8]}"
        self.transport = RedisTransport(one.url)
        self.portal = Portal("test")
        self.client = redis.Redis(port=one.port)
        self.channels: list[Channel] = []
        self.portal.run(self.transport.prepare(self.source()))

    def source(self, **given: Any) -> Source:
        return Source(channel=self.queue, settings=self.settings, **given)

    def publish(self, message: Outgoing) -> Published:
        # A server that was restarted a moment ago may have taken a pooled connection with it.
        self.portal.run(self._list_or_stream())
        return self.portal.run(self.transport.push(message))

    async def _list_or_stream(self) -> None:
        self.transport.async_channel(self.source())

    def channel(self, **given: Any) -> Channel:
        self.channels.append(self.portal.run(self._channel(self.source(**given))))
        return self.channels[-1]

    async def _channel(self, source: Source) -> Channel:
        return BlockingChannel(self.transport.async_channel(source), asyncio.get_running_loop())

    def wait(self, seconds: float) -> None:
        time.sleep(seconds)

    def lease(self) -> float:
        return LEASE

    def restart(self) -> None:
        self.server.stop()
        self.server.start()

    def dead_letters(self) -> list[tuple[bytes, str]]:
        return [(data, headers["settled-error"]) for data, headers in self.letters(f"{self.queue}.dead")]

    def letters(self, key: str) -> list[tuple[bytes, dict[str, str]]]:
        found: list[tuple[bytes, dict[str, str]]] = []
        if isinstance(self.settings, RedisList):
            elements: Any = self.client.lrange(key, 0, -1)
            for head, data in filter(None, map(unwrap, reversed(elements))):
                found.append((data, head.headers))
        else:
            entries: Any = self.client.xrange(key)
            for _, fields in entries:
                found.append((fields[b"data"], msgspec.json.decode(fields[b"headers"])))
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
        self.client.close()
        self.portal.run(self.transport.close())
        self.portal.close()


@contextlib.contextmanager
def broker_of(one: Server, settings: RedisStream | RedisList) -> Iterator[RedisBroker]:
    found = RedisBroker(one, settings)
    try:
        yield found
    finally:
        found.close()


@pytest.fixture
def stream(valkey: Server) -> Iterator[RedisBroker]:
    with broker_of(valkey, RedisStream(lease=LEASE, create=True)) as found:
        yield found


@pytest.fixture
def queue_list(valkey: Server) -> Iterator[RedisBroker]:
    with broker_of(valkey, RedisList(lease=LEASE)) as found:
        yield found


class TestStream(Extends, Restarts, Conformance):
    @pytest.fixture
    def broker(self, stream: RedisBroker) -> RedisBroker:
        return stream


class TestList(Extends, Restarts, Conformance):
    @pytest.fixture
    def broker(self, queue_list: RedisBroker) -> RedisBroker:
        return queue_list


def one(channel: Channel) -> Any:
    """The next message."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        for delivery in channel.receive(1, 1.0):
            return delivery
    raise AssertionError("no message within 60 s")


def put(broker: RedisBroker, *bodies: bytes) -> None:
    for body in bodies:
        broker.publish(Outgoing(subject=broker.queue, data=body))


@pytest.fixture(params=["stream", "list"])
def broker(request: pytest.FixtureRequest) -> RedisBroker:
    found: RedisBroker = request.getfixturevalue("stream" if request.param == "stream" else "queue_list")
    return found


def test_ac_16_a_nack_gives_the_message_back_in_order_and_counts_nothing(broker: RedisBroker) -> None:
    """AC-16 has nack do nothing on Redis, where a pop is final. Here nothing is gone before it is settled."""
    put(broker, b"1", b"2", b"3")
    channel, other = broker.channel(), broker.channel()
    assert channel.capabilities.nack is NackMeans.RELEASE
    assert channel.capabilities.reject is RejectMeans.TOGETHER
    batch = channel.receive(3, 5.0)
    assert [delivery.data for delivery in batch] == [b"1", b"2", b"3"]
    for delivery in reversed(batch):
        channel.nack(delivery)
    for body in (b"1", b"2", b"3"):
        again = one(other)
        assert (again.data, again.attempt) == (body, 1)
        other.ack(again)


def test_a_delay_longer_than_the_lease_is_kept(stream: RedisBroker) -> None:
    put(stream, b"1")
    channel = stream.channel()
    delivery = one(channel)
    requeued = time.time()
    channel.requeue(delivery, 2.5 * LEASE)
    again = one(stream.channel())
    assert time.time() - requeued >= 2.4 * LEASE
    assert again.attempt == 2


def test_two_alike_that_are_published_with_a_delay_are_two(broker: RedisBroker) -> None:
    for _ in range(2):
        broker.publish(Outgoing(subject=broker.queue, data=b"1", id="same", delay=0.2))
    channel = broker.channel()
    for _ in range(2):
        delivery = one(channel)
        assert (delivery.id, delivery.data) == ("same", b"1")
        channel.ack(delivery)


def test_what_is_published_with_a_delay_comes_after_it(broker: RedisBroker) -> None:
    published = time.time()
    broker.publish(Outgoing(subject=broker.queue, data=b"1", delay=1.0, headers={"a": "b"}, id="m-1"))
    delivery = one(broker.channel())
    assert time.time() - published >= 0.9
    assert (delivery.id, delivery.data, delivery.headers, delivery.attempt) == ("m-1", b"1", {"a": "b"}, 1)


def test_what_a_dead_consumer_had_goes_to_another_and_the_dead_cannot_settle_it(valkey: Server) -> None:
    with broker_of(valkey, RedisStream(lease=LEASE, create=True)) as broker:
        put(broker, b"1")
        dead, other = broker.channel(), broker.channel()
        lost = one(dead)
        again = one(other)
        assert (again.data, again.attempt) == (b"1", 2)
        for call in (dead.ack, dead.nack, dead.extend, lambda d: dead.requeue(d, 0)):
            with pytest.raises(LeaseLost, match=lost.id):
                call(lost)
        with pytest.raises(LeaseLost):
            dead.reject(lost, Reject(error="no"))
        assert broker.dead_letters() == []
        other.ack(again)


def test_acks_of_a_batch_are_sent_together_or_after_a_moment(
    stream: RedisBroker, caplog: pytest.LogCaptureFixture
) -> None:
    put(stream, b"1", b"2", b"3", b"4")
    channel, other = stream.channel(), stream.channel()
    batch = channel.receive(4, 5.0)
    channel.ack(batch[0])
    channel.ack(batch[1])
    again = [one(other), one(other)]
    assert [(delivery.data, delivery.attempt) for delivery in again] == [(b"3", 2), (b"4", 2)]
    channel.ack(batch[2])
    with pytest.raises(LeaseLost, match=batch[3].id):
        channel.ack(batch[3])
    assert f"left to the broker: stream {stream.queue!r}: message {batch[2].id!r}" in caplog.text
    for delivery in again:
        other.ack(delivery)


@pytest.mark.parametrize("by_url", [False, True])
def test_with_confirm_an_ack_that_returned_is_redis_own_also_with_a_buffer(
    valkey: Server, by_url: bool
) -> None:
    """Defect P9."""
    queue = f"orders-{uuid.uuid4().hex[:8]}"
    app = App(f"{valkey.url}?confirm=true" if by_url else valkey.url)
    client = redis.Redis(port=valkey.port)
    pending: list[int] = []
    source = RedisStream(create=True) if by_url else RedisStream(create=True, confirm=True)

    @app.subscriber(queue, buffer=10, source=source)
    async def handle(message: Message[int]) -> None:
        await message.ack()
        info: Any = client.xpending(queue, "settled")
        pending.append(info["pending"])

    async def main() -> None:
        for number in range(10):
            await app.publish(queue, number)
        stop = asyncio.Event()
        running = asyncio.create_task(app.serve(stop))
        async with asyncio.timeout(30):
            while len(pending) < 10 and not running.done():
                await asyncio.sleep(0.02)
        stop.set()
        await running

    asyncio.run(main())
    assert pending == [9, 8, 7, 6, 5, 4, 3, 2, 1, 0]
    client.close()


def test_the_list_of_a_consumer_without_a_sign_of_life_is_given_back(queue_list: RedisBroker) -> None:
    put(queue_list, b"1", b"2")

    async def die() -> None:
        # As after a kill: nobody closes the channel, and no sign of life follows.
        channel: Any = queue_list.transport.async_channel(queue_list.source())
        assert len(await channel.receive(2, 5.0)) == 2
        channel._living.cancel()

    queue_list.portal.run(die())
    other = queue_list.channel()
    assert [one(other).data, one(other).data] == [b"1", b"2"]


def test_a_closed_list_channel_gives_back_what_it_has(queue_list: RedisBroker) -> None:
    put(queue_list, b"1", b"2")
    channel = queue_list.channel()
    first = one(channel)
    channel.close()
    with pytest.raises(LeaseLost, match=first.id):
        channel.ack(first)
    after = queue_list.channel()
    assert [one(after).data, one(after).data] == [b"1", b"2"]


def test_a_message_whose_arrival_was_missed_is_handed_out_next(queue_list: RedisBroker) -> None:
    async def main() -> None:
        channel: Any = queue_list.transport.async_channel(queue_list.source())
        assert not await channel.receive(1, 0.1)
        await queue_list.transport.push(Outgoing(subject=queue_list.queue, data=b"1"))
        # The server has moved it, and the answer was lost with the connection.
        await asyncio.to_thread(queue_list.client.lmove, queue_list.queue, channel._own, "RIGHT", "LEFT")
        channel._doubtful = True
        (delivery,) = await channel.receive(1, 10.0)
        assert delivery.data == b"1"
        await channel.ack(delivery)
        await channel.close()

    queue_list.portal.run(main())


def test_a_letter_that_cannot_be_written_leaves_its_message(broker: RedisBroker) -> None:
    grave = f"{broker.queue}-grave"
    broker.client.set(grave, "no place for letters")
    put(broker, b"poison")
    channel = broker.channel(dead_letter=grave)
    delivery = one(channel)
    with pytest.raises(ResponseError, match="WRONGTYPE"):
        channel.reject(delivery, Reject(error="no such customer"))
    broker.client.delete(grave)
    channel.reject(delivery, Reject(error="no such customer"))
    ((body, headers),) = broker.letters(grave)
    assert body == b"poison"
    assert headers["settled-error"] == "no such customer"
    assert headers["settled-reason"] == "delivery error"
    assert not channel.receive(1, 0.3)


def test_entries_of_others_are_read_too(stream: RedisBroker) -> None:
    stream.client.xadd(stream.queue, {"name": "ann", "amount": 5})
    stream.client.xadd(stream.queue, {"data": "hello", "headers": "nonsense"})
    channel = stream.channel()
    first, second = one(channel), one(channel)
    assert msgspec.json.decode(first.data) == {"name": "ann", "amount": "5"}
    assert first.headers["content-type"] == "application/json"
    assert abs(first.metadata().timestamp.timestamp() - time.time()) < 600
    assert first.metadata().consumer == "settled"
    assert (second.data, second.headers) == (b"hello", {})
    assert first.id != second.id


def test_elements_of_others_are_read_too_and_two_that_look_alike_are_two(queue_list: RedisBroker) -> None:
    queue_list.client.lpush(queue_list.queue, b"hello", b"hello", b"settled1\nnonsense")
    channel = queue_list.channel()
    first, second, third = one(channel), one(channel), one(channel)
    assert (first.data, second.data, third.data) == (b"hello", b"hello", b"settled1\nnonsense")
    assert len({first.id, second.id, third.id}) == 3
    channel.ack(second)
    channel.requeue(first, 0)
    again = one(channel)
    assert (again.id, again.attempt) == (first.id, 2)


def test_elements_that_are_the_same_are_settled_each_for_itself(valkey: Server) -> None:
    with broker_of(valkey, RedisList(lease=30)) as broker:
        for _ in range(3):
            broker.publish(Outgoing(subject=broker.queue, data=b"1", id="same"))
        channel = broker.channel()
        first, second, third = (one(channel) for _ in range(3))
        channel.ack(first)
        with pytest.raises(LeaseLost):
            channel.ack(first)
        # Those that wait do so each for itself, too.
        channel.requeue(second, 0.1)
        channel.requeue(third, 0.1)
        again = [one(channel), one(channel)]
        assert [delivery.attempt for delivery in again] == [2, 2]
        channel.nack(again[0])
        channel.reject(again[1], Reject(error="no"))
        channel.ack(one(channel))
        assert len(broker.dead_letters()) == 1
        assert not channel.receive(1, 0.3)
        assert not broker.client.keys(f"{broker.queue}:processing:*")


def test_a_group_keeps_no_consumers_that_are_gone(stream: RedisBroker) -> None:
    put(stream, b"1", b"2")
    leaves, stays = stream.channel(), stream.channel()
    leaves.nack(one(leaves))
    held = one(stays)
    leaves.close()
    stays.close()
    consumers: Any = stream.client.xinfo_consumers(stream.queue, "settled")
    pending = sorted(consumer["pending"] for consumer in consumers)
    # One has a message that is not settled: to forget it would be to lose the message.
    assert len(held.data) == 1
    assert pending[-1] == 1
    assert len(consumers) <= 2


def test_an_entry_that_was_trimmed_away_is_reported_and_does_not_come(
    stream: RedisBroker, caplog: pytest.LogCaptureFixture
) -> None:
    put(stream, b"1")
    channel = stream.channel()
    channel.requeue(one(channel), 0.2)
    stream.client.xtrim(stream.queue, maxlen=0, approximate=False)
    deadline = time.monotonic() + 30
    while "was trimmed away before it was settled" not in caplog.text and time.monotonic() < deadline:
        assert not channel.receive(1, 0.2)
    assert "was trimmed away before it was settled" in caplog.text
    pending: Any = stream.client.xpending(stream.queue, "settled")
    assert pending["pending"] == 0


def test_a_stream_with_one_reader_may_delete_what_is_settled(valkey: Server) -> None:
    with broker_of(valkey, RedisStream(create=True, delete=True)) as broker:
        put(broker, b"1", b"2", b"3")
        channel = broker.channel()
        channel.ack(one(channel))
        channel.reject(one(channel), Reject(error="no"))
        assert broker.client.xlen(broker.queue) == 1


def test_two_groups_each_get_everything(stream: RedisBroker) -> None:
    stream.client.xgroup_create(stream.queue, "audit", "0")
    put(stream, b"1")
    channel, audit = stream.channel(), stream.channel(group="audit")
    channel.requeue(one(channel), 0)
    assert one(channel).attempt == 2
    copy = one(audit)
    assert (copy.data, copy.attempt) == (b"1", 1)
    audit.ack(copy)


def test_a_group_that_is_dropped_is_made_again_only_if_asked_for(valkey: Server, stream: RedisBroker) -> None:
    channel = stream.channel()
    assert not channel.receive(1, 0)
    stream.client.xgroup_destroy(stream.queue, "settled")
    put(stream, b"1")
    assert one(channel).data == b"1"
    with broker_of(valkey, RedisStream(create=True)) as strict:
        strict.settings = RedisStream()
        strict.client.xgroup_destroy(strict.queue, "settled")
        with pytest.raises(ConfigurationError, match=f"XGROUP CREATE {strict.queue} settled 0 MKSTREAM"):
            strict.channel().receive(1, 0)


def test_what_is_missing_or_impossible_is_said_at_start_up(stream: RedisBroker) -> None:
    prepare, run = stream.transport.prepare, stream.portal.run
    with pytest.raises(
        ConfigurationError, match="has no group 'settled'; run XGROUP CREATE nowhere settled 0"
    ):
        run(prepare(Source(channel="nowhere")))
    with pytest.raises(ConfigurationError, match="must be a RedisStream or a RedisList, got 'orders'"):
        run(prepare(Source(channel="orders", settings="orders")))
    with pytest.raises(ConfigurationError, match="a list has no groups, got group='g'"):
        run(prepare(Source(channel="orders", group="g", settings=RedisList())))
    with pytest.raises(ConfigurationError, match="the key is no list, but a stream"):
        run(prepare(Source(channel=stream.queue, settings=RedisList())))
    with pytest.raises(ConfigurationError, match="RedisStream needs lease > 0"):
        run(prepare(Source(channel="orders", settings=RedisStream(lease=0))))
    stream.client.lpush(f"{stream.queue}-list", "1")
    with pytest.raises(ConfigurationError, match=r"no stream; a list is read with source=RedisList\(\)"):
        run(prepare(Source(channel=f"{stream.queue}-list", settings=RedisStream(create=True))))
    with pytest.raises(ConfigurationError, match="Redis has no lanes, got lane='eu'"):
        run(stream.transport.push(Outgoing(subject=stream.queue, data=b"1", lane="eu")))


@pytest.mark.parametrize(
    ("query", "words"),
    [
        (
            "leese=3",
            "no option leese; there are lease, backoff, create, delete, lists, maxlen, confirm, and redis",
        ),
        ("lease=0", "lease must be a number from 0.1, got '0'"),
        ("maxlen=many", "maxlen must be a number from 0, got 'many'"),
        ("lists=1", "lists must be true or false, got '1'"),
        ("socket_timeout=soon", "option socket_timeout='soon': could not convert"),
        ("decode_responses=true", "no option decode_responses"),
    ],
)
def test_a_wrong_option_is_named(query: str, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        RedisTransport(f"redis://localhost?{query}")


def test_a_crowd_that_publishes_at_once_waits_its_turn(stream: RedisBroker) -> None:
    async def crowd() -> None:
        sent = [Outgoing(subject=stream.queue, data=b"%d" % n) for n in range(300)]
        await asyncio.gather(*(stream.transport.push(message) for message in sent))

    stream.portal.run(crowd())
    channel = stream.channel()
    found: set[bytes] = set()
    while len(found) < 300:
        for delivery in channel.receive(100, 10):
            found.add(delivery.data)
            channel.ack(delivery)
    assert found == {b"%d" % n for n in range(300)}


def test_publishing_may_trim_a_stream(valkey: Server) -> None:
    async def main() -> int:
        transport = RedisTransport(f"{valkey.url}?maxlen=100")
        for number in range(400):
            await transport.push(Outgoing(subject="trimmed", data=b"%d" % number))
        length: int = await (await transport.connection()).redis.xlen("trimmed")
        await transport.close()
        return length

    assert 100 <= asyncio.run(main()) < 400


def test_a_server_that_is_not_there_or_lets_nobody_in_is_an_error_that_names_it() -> None:
    with pytest.raises(ConnectionError, match=r"redis: 127\.0\.0\.1:1"):
        asyncio.run(RedisTransport("redis://127.0.0.1:1").open())
    with server("valkey", "--requirepass", "s3cret") as one:
        with pytest.raises((ConnectionError, ConfigurationError), match=r"redis: 127.0.0.1.*[Aa]uth"):
            asyncio.run(RedisTransport(one.url).open())

        async def main() -> None:
            transport = RedisTransport(f"unix://:s3cret@{one.socket}?db=1")
            await transport.open()
            assert transport.broker().connected
            one.stop()
            with pytest.raises((RedisError, OSError)):
                await transport.async_channel(Source(channel="orders")).receive(1, 1.0)
            assert not transport.broker().connected
            await transport.close()

        asyncio.run(main())
    assert not RedisTransport("redis://localhost").broker().connected


def test_an_app_on_redis_settles_every_message_one_way(broker: RedisBroker) -> None:
    app = App(f"{broker.server.url}?lists={'true' if isinstance(broker.settings, RedisList) else 'false'}")
    seen: list[tuple[int, int]] = []
    dead: list[tuple[int, str]] = []
    settings = {"source": broker.settings, "dead_letter": f"{broker.queue}-grave"}

    @app.subscriber(broker.queue, performers=2, buffer=10, requeue_count=2, **settings)  # type: ignore[arg-type]
    async def handle(message: Message[Order]) -> None:
        seen.append((message.payload.id, message.attempt))
        if message.payload.id % 10 == 0:
            raise signals.Reject("no such customer")
        await message.nak(0) if message.attempt == 1 and message.payload.id % 10 == 1 else await message.ack()

    @app.subscriber(f"{broker.queue}-grave", source=broker.settings)
    def bury(message: Message[Order]) -> None:
        dead.append((message.payload.id, message.headers["settled-error"]))
        message.ack()

    for number in range(30):
        app.publish(broker.queue, Order(number), delay=0.2 if number == 7 else 0)

    async def main() -> Any:
        stop = asyncio.Event()
        running = asyncio.create_task(app.serve(stop))
        async with asyncio.timeout(60):
            while (len(seen) < 33 or len(dead) < 3) and not running.done():
                await asyncio.sleep(0.02)
        stop.set()
        return await running

    status = asyncio.run(main())
    assert {number for number, _ in seen} == set(range(30))
    assert sorted(number for number, attempt in seen if attempt == 2) == [1, 11, 21]
    assert status.counts.settle_failed == 0
    assert sorted(dead) == [(number, "no such customer") for number in (0, 10, 20)]


@pytest.mark.parametrize("query", ["create=true&lease=1", "lists=true&lease=1"], ids=["stream", "list"])
def test_none_of_ten_thousand_messages_is_lost_when_the_consumer_is_killed(
    valkey: Server, tmp_path: Path, query: str
) -> None:
    queue, url = f"crash-{uuid.uuid4().hex[:8]}", f"{valkey.url}?{query}"
    client = redis.Redis(port=valkey.port)
    client.config_set("appendfsync", "no")

    filling = client.pipeline(transaction=False)
    for number in range(MESSAGES):
        message = Outgoing(subject=queue, data=b"%d" % number, headers={"content-type": "application/json"})
        if "lists" in query:
            filling.lpush(queue, element(message, str(number)))
        else:
            filling.execute_command("XADD", queue, "*", *written(message, str(number)))
    filling.execute()
    handled = consume_with_crashes(url, queue, tmp_path / "record")
    assert set(handled) == set(range(MESSAGES))
    dead = f"{queue}.dead"
    letters = client.llen(dead) if "lists" in query else client.xlen(dead)
    assert letters == MESSAGES // 1000
    client.config_set("appendfsync", "always")
    client.close()


@pytest.mark.parametrize("settings", [RedisStream(create=True), RedisList()], ids=["stream", "list"])
def test_it_works_the_same_on_redis_itself(settings: RedisStream | RedisList) -> None:
    with server("redis") as one_server, broker_of(one_server, settings) as broker:
        put(broker, b"1", b"2")
        channel = broker.channel()
        channel.nack(one(channel))
        again = one(channel)
        assert (again.data, again.attempt) == (b"1", 1)
        channel.requeue(again, 0.1)
        behind = one(channel)
        channel.reject(behind, Reject(error="no"))
        assert behind.data == b"2"
        again = one(channel)
        assert (again.data, again.attempt) == (b"1", 2)
        channel.extend(again)
        channel.ack(again)
        assert not channel.receive(1, 0.2)
        assert broker.dead_letters() == [(b"2", "no")]


def test_a_url_with_tls_is_as_redis_py_has_it(valkey: Server, tmp_path: Path) -> None:
    authority = trustme.CA()
    ca, certificate = tmp_path / "ca.pem", tmp_path / "server.pem"
    authority.cert_pem.write_to_path(ca)
    authority.issue_cert("localhost").private_key_and_cert_chain_pem.write_to_path(certificate)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate)

    async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # The servers in the wheels are built without TLS: it ends here.
        back, forth = await asyncio.open_connection("127.0.0.1", valkey.port)

        async def copy(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
            with contextlib.suppress(OSError):
                while data := await source.read(65536):
                    target.write(data)
                    await target.drain()
            target.close()

        await asyncio.gather(copy(reader, forth), copy(back, writer))

    async def main() -> None:
        front = await asyncio.start_server(pass_on, "127.0.0.1", 0, ssl=context)
        port = front.sockets[0].getsockname()[1]
        transport = RedisTransport(f"rediss://localhost:{port}/0?ssl_ca_certs={ca}")
        published = await transport.push(Outgoing(subject="over-tls", data=b"1", id="m-1"))
        assert published.id == "m-1"
        await transport.close()
        with pytest.raises(ConnectionError, match="certificate verify failed"):
            await RedisTransport(f"rediss://localhost:{port}/0").open()
        front.close()

    asyncio.run(main())


def test_the_examples_of_the_docs_run() -> None:
    page = (Path(__file__).parents[2] / "docs" / "brokers" / "redis.md").read_text()
    names: dict[str, Any] = {"__name__": "block"}
    with server("valkey") as one_server:
        for code in re.findall(r"^```python\n(.*?)^```", page, re.S | re.M):
            here = code.replace("redis://127.0.0.1:6379/0", one_server.url)
            exec(compile(here, "redis.md", "exec"), names)
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
    stream: RedisBroker,
) -> None:
    stream.client.config_set("proto-max-bulk-len", "2mb")
    try:
        totals, errors = carry(stream.server.url, stream.queue, b"1", b"x" * 3_000_000, b"2")
    finally:
        stream.client.config_set("proto-max-bulk-len", "512mb")
    assert (totals.written, totals.rejected) == (2, 1)
    assert "3000000 bytes are too many" in errors[0]
    assert [data for data, _ in stream.letters(stream.queue)] == [b"1", b"2"]


def test_a_bridge_to_a_key_of_another_kind_ends(stream: RedisBroker) -> None:
    stream.client.set("settled-number", 7)
    for query in ("", "?lists=true"):
        with pytest.raises(ConfigurationError, match="'settled-number': the key is of another kind"):
            carry(f"{stream.server.url}{query}", "settled-number", b"1")
