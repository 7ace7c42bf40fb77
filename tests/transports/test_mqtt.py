"""MQTT 5 as a transport, on a real mosquitto."""

from __future__ import annotations

import asyncio
import gc
import re
import ssl
import threading
import time
import uuid
import warnings
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
from paho.mqtt import publish
from paho.mqtt.client import MQTTMessage, MQTTv5

from settled import App, ConfigurationError, DontAck, Message, Reject
from settled.message import Delivery
from settled.portal import Portal
from settled.settlement import Reject as Rejection
from settled.transports.base import AsyncChannel, Channel, LeaseLost, Outgoing, Published, Source
from settled.transports.faces import BlockingChannel
from settled.transports.mqtt import MqttTopic, MqttTransport, PublishFailed
from tests.brokers.mosquitto import Mosquitto, mosquitto
from tests.conftest import Order
from tests.transports.conformance import Conformance, Queue, Releases, Restarts
from tests.transports.crashing import MESSAGES, consume_with_crashes
from tests.transports.refusing import carry

PAGE = Path(__file__).parents[2] / "docs" / "brokers" / "mqtt.md"


@pytest.fixture(scope="module")
def server() -> Iterator[Mosquitto]:
    with mosquitto() as one:
        yield one


class MqttBroker:
    lane = None
    counts_attempts = True

    def __init__(self, server: Mosquitto) -> None:
        self.server = server
        self.queue = f"orders/{uuid.uuid4().hex[:8]}"
        self.url = f"{server.url}?client_id={uuid.uuid4().hex[:8]}"
        self.portal = Portal("test")
        self.transport = MqttTransport(self.url)
        self.source = Source(channel=self.queue)
        self.letters = self.reader(f"dead/{self.queue}", "letters")
        self.portal.run(self.transport.prepare(self.source))

    def reader(self, topic: str, name: str) -> Channel:
        """A session of its own on a topic, there from now on."""
        source = Source(channel=topic, settings=MqttTopic(client_id=f"{name}-{self.queue[-8:]}"))
        self.portal.run(self.transport.prepare(source))
        return self.channel(source)

    def publish(self, message: Outgoing) -> Published:
        return self.portal.run(self.transport.push(message))

    def channel(self, source: Source | None = None) -> Channel:
        async def make() -> Channel:
            return BlockingChannel(
                self.transport.async_channel(source or self.source), asyncio.get_running_loop()
            )

        return self.portal.run(make())

    def wait(self, seconds: float) -> None:
        time.sleep(seconds)

    def lease(self) -> float:
        return 0.0

    def restart(self) -> None:
        self.server.stop()
        self.server.start()

    def dead_letters(self) -> list[tuple[bytes, str]]:
        found = []
        while received := self.letters.receive(100, 0.5):
            for delivery in received:
                self.letters.ack(delivery)
                found.append((delivery.data, delivery.headers["settled-error"]))
        return found

    def run_async(self, use: Callable[[AsyncChannel], Any]) -> None:
        async def main() -> None:
            channel = self.transport.async_channel(self.source)
            await use(channel)
            await channel.close()

        self.portal.run(main())

    def close(self) -> None:
        self.portal.run(self.transport.close())
        self.portal.close()


@pytest.fixture
def broker(server: Mosquitto) -> Iterator[MqttBroker]:
    found = MqttBroker(server)
    yield found
    found.close()


class TestMqtt(Releases, Restarts, Conformance):
    def test_an_unsettled_message_comes_again_when_its_lease_is_over(self, queue: Queue) -> None:
        """There is no lease that runs out: the session has it until it is acknowledged."""
        queue.publish(b"1")
        queue.one()
        assert queue.empty()
        queue.channel.close()
        again = Queue(queue.broker, queue.broker.channel())
        delivery = again.one()
        # The broker does not count, and this consumer has forgotten.
        assert delivery.attempt == 1
        again.channel.ack(delivery)
        assert again.empty()


def gather(channel: Channel, count: int) -> list[Delivery]:
    found: list[Delivery] = []
    deadline = time.monotonic() + 30
    while len(found) < count:
        assert time.monotonic() < deadline
        found += channel.receive(count - len(found), 5)
    return found


def run_until(app: App, done: Callable[[], bool], *before: Coroutine[Any, Any, Any]) -> None:
    async def main() -> None:
        for call in before:
            await call
        stop = asyncio.Event()
        running = asyncio.create_task(app.serve(stop))
        async with asyncio.timeout(60):
            while not done() and not running.done():
                await asyncio.sleep(0.02)
        stop.set()
        await running

    asyncio.run(main())


def test_ac_16_a_nack_on_mqtt_withholds_the_ack_and_hands_the_message_out_again_without_a_reconnect(
    broker: MqttBroker, log: pytest.LogCaptureFixture
) -> None:
    """Defect P5. AC-16 has it do nothing: then the message would only come again when this process does."""
    broker.publish(Outgoing(subject=broker.queue, data=b"1", id="m-1"))
    channel = broker.channel()
    (first,) = gather(channel, 1)
    channel.nack(first)
    (again,) = gather(channel, 1)
    assert (again.data, again.id, again.attempt) == (b"1", "m-1", 1)
    assert again.connection == first.connection  # type: ignore[attr-defined]
    with pytest.raises(LeaseLost, match="is not this consumer's any more"):
        channel.ack(first)
    channel.nack(again)
    channel.close()
    # It was never acknowledged, so the session sends it again.
    other = broker.channel()
    (later,) = gather(other, 1)
    assert later.data == b"1"
    other.ack(later)
    assert "lost" not in log.text  # the connection is ours to close


def test_messages_given_back_in_any_order_come_again_in_the_order_they_came(broker: MqttBroker) -> None:
    """Defect P5."""
    for number in range(6):
        broker.publish(Outgoing(subject=broker.queue, data=b"%d" % number))
    channel = broker.channel()
    taken = gather(channel, 4)
    for one in (taken[2], taken[0], taken[3], taken[1]):
        channel.nack(one)
    assert [one.data for one in gather(channel, 6)] == [b"0", b"1", b"2", b"3", b"4", b"5"]


def test_what_is_in_hand_when_another_message_is_given_back_is_not_handled_twice(broker: MqttBroker) -> None:
    for body in (b"in hand", b"parked", b"given back"):
        broker.publish(Outgoing(subject=broker.queue, data=body))
    channel, other = broker.channel(), broker.channel()
    (in_hand,) = gather(other, 1)
    (parked,) = gather(channel, 1)
    channel.requeue(parked, 0.5)
    (given_back,) = gather(channel, 1)
    channel.nack(given_back)
    seen = gather(channel, 2)
    assert sorted(delivery.data for delivery in seen) == [b"given back", b"parked"]
    # It was received through the connection before, and is acknowledged through this one.
    other.ack(in_hand)
    for delivery in seen:
        channel.ack(delivery)
    other.close()
    channel.close()
    assert not broker.channel().receive(1, 0.5)


class SlowLine:
    """A session whose messages wait to be let in, as on a line that is full."""

    def __init__(self, broker: MqttBroker) -> None:
        self._broker = broker
        self.session = broker.portal.run(broker.transport.session(broker.source))
        self.waiting: list[MQTTMessage] = []
        self._let_in = self.session._arrived
        self.session._arrived = self.waiting.append  # type: ignore[method-assign]

    def let_in(self, change: Callable[[MQTTMessage], None] = lambda _: None) -> None:
        async def now() -> None:
            self.session._arrived = self._let_in  # type: ignore[method-assign]
            for message in self.waiting:
                change(message)
                self._let_in(message)
            self.waiting.clear()

        in_the_end(lambda: bool(self.waiting))
        self._broker.portal.run(now())

    def reconnect(self) -> None:
        async def now() -> None:
            assert self.session._wire is not None
            await self.session._wire.close()
            await self.session.wire()

        self._broker.portal.run(now())


def test_a_copy_that_comes_after_its_message_was_acked_is_not_handled_again(broker: MqttBroker) -> None:
    broker.publish(Outgoing(subject=broker.queue, data=b"1", id="m-1"))
    channel = broker.channel()
    (delivery,) = gather(channel, 1)
    line = SlowLine(broker)
    line.reconnect()
    channel.ack(delivery)
    line.let_in()
    assert not channel.receive(1, 0.3)
    # Nor is it the broker's any more.
    line.reconnect()
    broker.publish(Outgoing(subject=broker.queue, data=b"2"))
    assert [one.data for one in gather(channel, 1)] == [b"2"]
    assert not line.session._owed


def test_another_message_under_the_packet_id_of_one_that_was_acked_is_handled(broker: MqttBroker) -> None:
    broker.publish(Outgoing(subject=broker.queue, data=b"1", id="m-1"))
    channel = broker.channel()
    (delivery,) = gather(channel, 1)
    line = SlowLine(broker)
    line.reconnect()
    channel.ack(delivery)

    def another(message: MQTTMessage) -> None:
        message.properties.UserProperty = [("message-id", "m-2")]

    line.let_in(another)
    (other,) = gather(channel, 1)
    assert other.id == "m-2"
    channel.ack(other)


def test_what_was_acked_before_its_copy_came_is_acked_when_the_session_ends(broker: MqttBroker) -> None:
    broker.publish(Outgoing(subject=broker.queue, data=b"1", id="m-1"))
    channel = broker.channel()
    (delivery,) = gather(channel, 1)
    SlowLine(broker).reconnect()
    channel.ack(delivery)
    channel.close()
    again = broker.transport.session(broker.source)
    del broker.portal.run(again)._arrived
    assert not broker.channel().receive(1, 0.5)


def test_the_next_thing_handled_is_the_message_given_back_also_with_a_buffer(broker: MqttBroker) -> None:
    for number in range(12):
        broker.publish(Outgoing(subject=broker.queue, data=b"%d" % number))
    broker.portal.run(broker.transport.close())
    app = App(broker.url)
    seen: list[int] = []

    @app.subscriber(broker.queue, buffer=5, dont_ack_delay=0)
    async def handle(number: int) -> None:
        seen.append(number)
        if number in (3, 7) and seen.count(number) < 3:
            raise DontAck

    run_until(app, lambda: 11 in seen)
    assert seen == [0, 1, 2, 3, 3, 3, 4, 5, 6, 7, 7, 7, 8, 9, 10, 11]


def test_performers_share_what_comes_and_so_do_the_members_of_a_group(broker: MqttBroker) -> None:
    apps = [App(f"{broker.server.url}?client_id={broker.queue[-8:]}-{name}") for name in "ab"]
    seen: list[tuple[str, int]] = []

    def subscribe(app: App, name: str) -> None:
        @app.subscriber(broker.queue, group="billing", performers=3, buffer=4)
        async def handle(order: Order) -> None:
            seen.append((name, order.id))

    for app, name in zip(apps, "ab", strict=True):
        subscribe(app, name)

    async def main() -> None:
        stop = asyncio.Event()
        running = [asyncio.create_task(app.serve(stop)) for app in apps]
        async with asyncio.timeout(60):
            while not all(app.status().healthy and app.status().running for app in apps):
                await asyncio.sleep(0.02)
            for number in range(100):
                await apps[0].publish(broker.queue, Order(number))
            while len(seen) < 100:
                await asyncio.sleep(0.02)
            await asyncio.sleep(0.2)
            stop.set()
            await asyncio.gather(*running)

    asyncio.run(main())
    assert sorted(number for _, number in seen) == list(range(100))
    assert {name for name, _ in seen} == {"a", "b"}


def test_a_dead_letter_for_nobody_leaves_the_message_in_the_session(broker: MqttBroker) -> None:
    source = Source(channel=broker.queue, dead_letter=f"nobody/{broker.queue}")
    channel = broker.channel(source)
    broker.publish(Outgoing(subject=broker.queue, data=b"poison"))
    (delivery,) = gather(channel, 1)
    with pytest.raises(PublishFailed, match="nobody subscribes to it, so it would be lost"):
        channel.reject(delivery, Rejection(error="no"))
    (again,) = gather(channel, 1)
    assert again.data == b"poison"
    letters = broker.reader(f"nobody/{broker.queue}", "late")
    channel.reject(again, Rejection(error="no"))
    (letter,) = gather(letters, 1)
    assert (letter.data, letter.headers["settled-error"]) == (b"poison", "no")
    letters.ack(letter)


def test_a_publish_that_the_broker_refuses_or_nobody_hears_is_an_error(broker: MqttBroker) -> None:
    with pytest.raises(PublishFailed, match="the broker refuses it: Not authorized"):
        broker.publish(Outgoing(subject="forbidden/1", data=b"1"))
    with pytest.raises(PublishFailed, match="nobody subscribes to it"):
        broker.publish(Outgoing(subject="nobody/1", data=b"1"))
    careless = App(f"{broker.server.url}?unheard=true")
    careless.publish("nobody/1", 1)
    asyncio.run(careless.transport.close())


def test_a_wildcard_reads_many_topics_and_says_which(broker: MqttBroker) -> None:
    base = broker.queue
    source = Source(channel=f"{base}/+/new", settings=MqttTopic(client_id=f"w-{base[-8:]}"))
    broker.portal.run(broker.transport.prepare(source))
    letters = broker.reader(f"dead/{base}/#", "wild")
    channel = broker.channel(source)
    headers = {"tenant": "acme", "content-type": "application/json"}
    broker.publish(Outgoing(subject=f"{base}/eu/new", data=b"{}", headers=headers))
    (delivery,) = gather(channel, 1)
    assert (delivery.subject, dict(delivery.headers)) == (f"{base}/eu/new", headers)
    assert delivery.metadata().consumer.startswith(f"w-{base[-8:]}-")  # type: ignore[union-attr]
    channel.reject(delivery, Rejection(error="no"))
    (letter,) = gather(letters, 1)
    assert letter.subject == f"dead/{base}/eu/new"
    letters.ack(letter)


def test_a_session_that_the_broker_has_lost_is_told_with_what_it_means_and_counted(
    log: pytest.LogCaptureFixture,
) -> None:
    """Defect P5."""
    log.set_level("INFO", "settled")
    with mosquitto() as forgetful:
        broker = MqttBroker(forgetful)
        broker.publish(Outgoing(subject=broker.queue, data=b"1"))
        channel = broker.channel()
        (delivery,) = gather(channel, 1)
        began = f"the broker had no session of client {delivery.client_id} and begins one"  # type: ignore[attr-defined]
        assert began in log.text
        assert broker.transport.broker().sessions_lost == 0
        forgetful.stop(kill=True)
        (forgetful.directory / "mosquitto.db").unlink(missing_ok=True)
        forgetful.start()
        deadline = time.monotonic() + 30
        with pytest.raises(LeaseLost, match="the broker has lost the session"):
            while time.monotonic() < deadline:
                try:
                    channel.ack(delivery)
                except OSError:
                    time.sleep(0.05)
        warned = [record for record in log.records if "has lost the session" in record.getMessage()]
        assert [record.levelname for record in warned] == ["WARNING"]
        assert "the right to settle the 1 messages in hand" in warned[0].getMessage()
        assert broker.transport.broker().sessions_lost == 1
        assert "sessions lost: 1" in broker.transport.broker().detail
        assert not channel.receive(1, 0.2)
        broker.publish(Outgoing(subject=broker.queue, data=b"2"))
        (after,) = gather(channel, 1)
        assert after.data == b"2"
        channel.ack(after)
        broker.close()


def test_an_ack_that_does_not_reach_the_broker_brings_the_message_again(broker: MqttBroker) -> None:
    broker.publish(Outgoing(subject=broker.queue, data=b"1"))
    channel = broker.channel()
    (delivery,) = gather(channel, 1)
    broker.server.stop()
    try:
        in_the_end(lambda: not broker.transport.broker().connected)
        with pytest.raises(OSError):
            channel.ack(delivery)
    finally:
        broker.server.start()
    again = Queue(broker, channel).in_the_end()
    assert again.data == b"1"
    channel.ack(again)
    assert not channel.receive(1, 0.3)


def in_the_end(happens: Callable[[], bool], seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not happens():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)


def test_messages_without_a_guarantee_are_settled_like_others_while_this_process_lives(
    broker: MqttBroker,
) -> None:
    for number in range(3):
        publish.single(
            broker.queue,
            b"%d" % number,
            qos=0,
            hostname="127.0.0.1",
            port=broker.server.port,
            protocol=MQTTv5,
        )
    channel = broker.channel()
    first, second, third = gather(channel, 3)
    channel.ack(first)
    channel.nack(second)
    (again,) = gather(channel, 1)
    assert (again.data, again.attempt) == (b"1", 1)
    channel.requeue(third, 0)
    (later,) = gather(channel, 1)
    assert (later.data, later.attempt) == (b"2", 2)
    channel.ack(again)
    channel.ack(later)


def test_two_processes_with_one_client_id_are_told(broker: MqttBroker, log: pytest.LogCaptureFixture) -> None:
    first = broker.channel()
    assert not first.receive(1, 0)
    twin = MqttTransport(broker.url)
    broker.portal.run(twin.prepare(broker.source))
    assert not first.receive(1, 0.2)
    assert "another process has the same client_id" in log.text
    broker.portal.run(twin.close())


def test_what_is_missing_or_wrong_is_said_with_what_to_do(server: Mosquitto) -> None:
    def refused(url: str, channel: str = "orders", **subscription: Any) -> str:
        app = App(url)

        @app.subscriber(channel, **subscription)
        async def handle(order: Order) -> None: ...

        with pytest.raises(ConfigurationError) as told:
            asyncio.run(app.serve())
        return str(told.value)

    named = f"{server.url}?client_id=test"
    assert "add ?client_id=NAME to the URL" in refused(server.url)
    assert "source must be an MqttTopic" in refused(named, source="orders")
    assert "name a topic outside of it: dead_letter=..." in refused(named, "#")
    assert "would read its dead letters in 'orders/dead'" in refused(
        named, "orders/#", dead_letter="orders/dead"
    )
    for query, told in (
        ("visibility=30", "no option visibility; there are backoff"),
        ("backoff=soon", "backoff must be a number of seconds from 0 on, got 'soon'"),
        ("unheard=maybe", "unheard must be true or false, got 'maybe'"),
    ):
        with pytest.raises(ConfigurationError, match=told):
            App(f"{server.url}?{query}")
    with pytest.raises(ConfigurationError, match="has no path, got '/vhost'"):
        App(f"{server.url}/vhost")
    with pytest.raises(ConfigurationError, match="MQTT has no lanes"):
        App(named).publish("orders", 1, lane="eu")
    with pytest.raises(ConfigurationError, match="cannot publish for later, got delay=5"):
        App(named).publish("orders", 1, delay=5)
    with pytest.raises(ConfigurationError, match="receive_maximum must be at least 1, got 0"):
        MqttTopic(receive_maximum=0)


def test_tls_with_the_certificate_authority_in_the_url(server: Mosquitto) -> None:
    async def main() -> None:
        transport = MqttTransport(f"{server.tls_url}&client_id=tls")
        await transport.open()
        assert transport.broker().connected
        source = Source(channel="secret")
        await transport.prepare(source)
        # More than a TLS record holds, so that some of it is read from the socket before it is asked for.
        bodies = [bytes([number]) * 40_000 for number in range(5)]
        for body in bodies:
            await transport.push(Outgoing(subject="secret", data=body))
        channel = transport.async_channel(source)
        seen: list[bytes] = []
        async with asyncio.timeout(30):
            while len(seen) < 5:
                for delivery in await channel.receive(5, 5):
                    seen.append(delivery.data)
                    await channel.ack(delivery)
        assert seen == bodies
        await channel.close()
        await transport.close()
        assert not transport.broker().connected

    asyncio.run(main())


def test_a_broker_that_nobody_vouches_for_is_not_trusted(server: Mosquitto) -> None:
    async def main() -> None:
        stranger = MqttTransport(server.tls_url.partition("?")[0])
        with pytest.raises(ssl.SSLCertVerificationError, match="certificate verify failed"):
            await stranger.open()

    with warnings.catch_warnings():
        # The client leaves the socket of a failed handshake to the garbage collector.
        warnings.simplefilter("ignore", ResourceWarning)
        asyncio.run(main())
        gc.collect()


def test_an_app_settles_every_message_one_way(broker: MqttBroker) -> None:
    broker.portal.run(broker.transport.close())
    app = App(broker.url)
    seen: list[tuple[int, int]] = []
    buried: list[int] = []

    @app.subscriber(broker.queue, performers=2, buffer=5, requeue_count=3)
    def handle(message: Message[Order]) -> None:
        seen.append((message.payload.id, message.attempt))
        if message.payload.kind == "poison":
            raise Reject("no such customer")
        if message.payload.kind == "flaky":
            message.nak(0.05) if message.attempt < 3 else message.ack()
        else:
            message.ack()

    @app.subscriber(f"dead/{broker.queue}", source=MqttTopic(client_id=f"letters-{broker.queue[-8:]}"))
    async def bury(order: Order) -> None:
        buried.append(order.id)

    async def fill() -> None:
        kinds = ("good", "poison", "flaky")
        for number in range(9):
            await app.publish(broker.queue, Order(number, kinds[number % 3]))

    run_until(app, lambda: len(seen) == 15 and len(buried) == 3, fill())
    assert sorted(buried) == [1, 4, 7]
    assert sorted(seen) == sorted(
        [(n, 1) for n in range(9)] + [(n, attempt) for n in (2, 5, 8) for attempt in (2, 3)]
    )
    assert app.status().counts.settle_failed == 0


def test_the_example_of_the_docs_checks_defers_and_buries(
    server: Mosquitto, capsys: pytest.CaptureFixture[str]
) -> None:
    (code,) = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.S | re.M)
    names: dict[str, Any] = {"__name__": "shop"}
    exec(compile(code.replace("mqtt://127.0.0.1:1883", server.url), PAGE.name, "exec"), names)
    app: App = names["app"]

    async def fill() -> None:
        for subscription in app.subscriptions:
            await app.transport.prepare(subscription.source)  # type: ignore[attr-defined]
        for celsius in (20.0, -300.0, 95.0):
            await app.publish("plant/7/temperature", {"sensor": "t7", "celsius": celsius})

    def settled() -> bool:
        checked, kept = (subscription.counts for subscription in app.status().subscriptions)
        return (checked.acked, checked.rejected, kept.acked) == (1, 1, 1) and checked.requeued >= 1

    run_until(app, settled, fill())
    assert capsys.readouterr().out == "t7 colder than possible\n"


def test_none_of_ten_thousand_messages_is_lost_when_the_consumer_is_killed_again_and_again(
    broker: MqttBroker, tmp_path: Path
) -> None:
    async def fill() -> None:
        for start in range(0, MESSAGES, 500):
            await asyncio.gather(
                *(
                    broker.transport.push(Outgoing(subject=broker.queue, data=b"%d" % number))
                    for number in range(start, start + 500)
                )
            )

    # The consumer's session must be there, but this process must not be the one that reads it.
    broker.portal.run(fill())
    broker.portal.run(broker.transport.close())
    counts = consume_with_crashes(broker.url, broker.queue, tmp_path / "handled")
    assert set(counts) == set(range(MESSAGES))
    broker.letters = broker.reader(f"dead/{broker.queue}", "letters")
    dead = broker.dead_letters()
    assert {int(body) for body, _ in dead} == set(range(0, MESSAGES, 1000))
    assert {error for _, error in dead} == {"a round number"}


def test_a_message_it_will_never_take_is_a_dead_letter_of_the_bridge_that_carries_it(
    broker: MqttBroker,
) -> None:
    odd = [
        Outgoing(subject="", data=b"1", id="long", headers={"h": "x" * 70_000}),
        Outgoing(subject="", data=b"1", id="lines", headers={"h": "one\ntwo"}),
        Outgoing(subject="", data=b"1", id="kind", headers={"content-type": "text/\ufffe"}),
        Outgoing(subject="", data=b"1", id="no\0id"),
        Outgoing(subject="", data=b"1", id="bytes", headers={"h": "\udcff"}),
    ]
    totals, errors = carry(broker.server.url, broker.queue, b"1", b"x" * 4_000_000, *odd, b"2")
    assert (totals.written, totals.rejected) == (2, 6)
    assert "a message must be 4000000 bytes at most" in errors[0]
    assert "does not take it" in errors[1]
    assert r"no control characters, got 'h': 'one\ntwo'" in errors[2]
    channel = broker.channel()
    assert sorted(delivery.data for delivery in gather(channel, 2)) == [b"1", b"2"]


def test_a_reason_of_several_lines_is_told_in_one(broker: MqttBroker) -> None:
    broker.publish(Outgoing(subject=broker.queue, data=b"1"))
    channel = broker.channel()
    (delivery,) = gather(channel, 1)
    channel.reject(delivery, Rejection(error="no such customer\n  in line 3\0"))
    assert broker.dead_letters() == [(b"1", "no such customer in line 3")]


def test_a_bridge_to_a_topic_that_cannot_be_ends(broker: MqttBroker) -> None:
    for topic, why in (("orders/#", "no wildcards"), ("forbidden/1", "Not authorized")):
        with pytest.raises(ConfigurationError, match=why):
            carry(broker.server.url, topic, b"1")


def test_an_app_that_counts_attempts_is_told_that_the_broker_does_not(
    broker: MqttBroker, caplog: pytest.LogCaptureFixture
) -> None:
    app = App(f"{broker.server.url}?client_id=told-{broker.queue[-8:]}")

    @app.subscriber(broker.queue, requeue_count=3)
    def handle(number: int) -> None:
        app.stop()

    broker.publish(Outgoing(subject=broker.queue, data=b"1", headers={"content-type": "application/json"}))
    # Its session begins with the app, so somebody has to publish until it is there.
    publishing = threading.Event()

    def publish() -> None:
        while not publishing.wait(0.2):
            broker.publish(Outgoing(subject=broker.queue, data=b"1"))

    thread = threading.Thread(target=publish)
    thread.start()
    app.run()
    publishing.set()
    thread.join()
    assert "allows 3 attempts, but this broker does not count them" in caplog.text
