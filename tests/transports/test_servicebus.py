"""Azure Service Bus, on a stand-in: conformance of queues and sessions, and what is special there."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from azure.servicebus import ServiceBusMessage, ServiceBusSubQueue
from azure.servicebus.amqp import AmqpAnnotatedMessage

from settled import App, ConfigurationError, Defer, Message
from settled.message import Delivery
from settled.settlement import Reason, Reject
from settled.transports.base import DelayMeans, LeaseLost, Outgoing, RejectMeans, Source
from settled.transports.servicebus import Entity, ServiceBusTransport
from tests.brokers.looped import LoopedBroker, name
from tests.brokers.processes import Server
from tests.brokers.servicebus import LOCK, servicebus_server
from tests.transports.blocking import block_on_the_first
from tests.transports.conformance import Conformance, Extends, Ordered, Releases, Restarts
from tests.transports.crashing import MESSAGES, consume_with_crashes
from tests.transports.refusing import carry

# The client leaves the socket of a lost connection to the garbage collector, which complains.
LEFT = "<(function (StreamWriter|_SelectorTransport)|socket.socket)"
pytestmark = pytest.mark.filterwarnings(
    f"ignore:Exception ignored in. {LEFT}:pytest.PytestUnraisableExceptionWarning"
)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with servicebus_server() as found:
        yield found


def url_of(server: Server) -> str:
    # The client waits in steps of this: shorter ones make links open and close sooner.
    options = "emulator=true&socket_timeout=0.04"
    return f"servicebus://settled:c2V0dGxlZA%3D%3D@127.0.0.1:{server.port}?{options}"


class ServiceBusBroker(LoopedBroker):
    transport: ServiceBusTransport
    lost = False

    def __init__(self, server: Server, source: Source | None = None) -> None:
        self.server = server
        super().__init__(ServiceBusTransport(url_of(server)), source or Source(channel=name()))

    async def _open(self) -> None:
        # To prepare opens a link, which takes this client half a second.
        await self.transport.open()

    def lease(self) -> float:
        return float(LOCK)

    def restart(self) -> None:
        self.server.restart()
        self.lost = True

    def close(self) -> None:
        super().close()
        if self.lost:
            # So that no later test is blamed for what is left.
            gc.collect()

    def dead_letters(self) -> list[tuple[bytes, str]]:
        return [(body, error) for body, _, error in self.portal.run(self._dead_letters())]

    async def _dead_letters(self) -> list[tuple[bytes, str, str]]:
        client = (await self.transport.connection()).client
        async with client.get_queue_receiver(
            self.queue, sub_queue=ServiceBusSubQueue.DEAD_LETTER
        ) as receiver:
            found = []
            for message in await receiver.receive_messages(10, max_wait_time=10):
                body = b"".join(message.body)
                found.append((body, message.dead_letter_reason, message.dead_letter_error_description))
                await receiver.complete_message(message)
            return found


class SessionBroker(ServiceBusBroker):
    lane = "one"


@pytest.fixture
def broker(server: Server) -> Iterator[ServiceBusBroker]:
    found = ServiceBusBroker(server)
    yield found
    found.close()


@pytest.fixture
def sessions(server: Server) -> Iterator[SessionBroker]:
    found = SessionBroker(server, Source(channel=name(), settings=Entity(sessions=True, idle=0.2)))
    yield found
    found.close()


class TestQueue(Extends, Restarts, Conformance):
    pass


class TestSessions:
    """What order can change."""

    queue = Conformance.queue
    test_limit = Conformance.test_a_limit_is_a_limit
    test_extend = Conformance.test_an_extended_lease_holds
    test_slow = Extends.test_a_handler_slower_than_the_lease_keeps_its_message_and_those_behind_it
    test_lane = Ordered.test_a_lane_is_in_order_and_waits_for_its_first_message
    test_buffered = Ordered.test_what_was_buffered_behind_a_message_given_back_does_not_overtake_it
    test_other = Releases.test_a_message_given_back_goes_to_another_consumer
    test_woken = Conformance.test_a_waiting_receive_is_woken

    @pytest.fixture
    def broker(self, sessions: SessionBroker) -> SessionBroker:
        return sessions


def test_ac_15_a_nack_abandons_so_another_consumer_has_it_at_once(broker: ServiceBusBroker) -> None:
    one, other = broker.channel(), broker.channel()
    broker.publish(Outgoing(subject=broker.queue, data=b"1"))
    (delivery,) = one.receive(1, 10)
    one.nack(delivery)
    (again,) = other.receive(1, 10)
    assert (again.data, again.attempt) == (b"1", 2), "Service Bus counts an abandon"
    other.ack(again)


def test_a_dead_letter_is_native_with_reason_and_description(broker: ServiceBusBroker) -> None:
    channel = broker.channel()
    assert channel.capabilities.reject is RejectMeans.NATIVE
    broker.publish(Outgoing(subject=broker.queue, data=b"1"))
    (delivery,) = channel.receive(1, 10)
    channel.reject(delivery, Reject(Reason.UNACCEPTABLE, "no such field"))
    assert broker.portal.run(broker._dead_letters()) == [(b"1", "unacceptable", "no such field")]


def test_dead_letters_may_go_to_a_queue(broker: ServiceBusBroker) -> None:
    dead = name()
    broker.source = Source(channel=broker.queue, dead_letter=dead)
    channel = broker.channel()
    assert channel.capabilities.reject is RejectMeans.PUBLISH
    broker.publish(Outgoing(subject=broker.queue, data=b"1"))
    (delivery,) = channel.receive(1, 10)
    channel.reject(delivery, Reject(error="no"))
    assert broker.read(Source(channel=dead)) == [(b"1", "no")]


def test_a_dead_letter_that_cannot_be_written_leaves_the_message(broker: ServiceBusBroker) -> None:
    broker.source = Source(channel=broker.queue, dead_letter="missing-dead")
    channel = broker.channel()
    broker.publish(Outgoing(subject=broker.queue, data=b"1"))
    (delivery,) = channel.receive(1, 10)
    with pytest.raises(ConfigurationError, match="no queue or topic 'missing-dead'"):
        channel.reject(delivery, Reject(error="no"))
    (again,) = channel.receive(1, 20)
    assert again.data == b"1"


def test_a_delayed_copy_has_all_of_the_message_and_its_attempts(broker: ServiceBusBroker) -> None:
    channel = broker.channel()
    assert channel.capabilities.delay is DelayMeans.PARKED
    headers = {"tenant": "acme", "content-type": "application/json"}
    broker.publish(Outgoing(subject=broker.queue, data=b"{}", headers=headers, id="m-1"))
    (first,) = channel.receive(1, 10)
    channel.nack(first)
    (second,) = channel.receive(1, 10)
    channel.requeue(second, 0.2)
    (third,) = channel.receive(1, 20)
    channel.requeue(third, 0.2)
    (fourth,) = channel.receive(1, 20)
    assert (fourth.id, fourth.attempt, fourth.data) == ("m-1", 4, b"{}")
    assert dict(fourth.headers) == headers
    channel.ack(fourth)


def test_a_delayed_publish(broker: ServiceBusBroker) -> None:
    started = time.monotonic()
    broker.publish(Outgoing(subject=broker.queue, data=b"1", delay=1.5))
    (delivery,) = broker.channel().receive(1, 20)
    assert delivery.data == b"1"
    assert time.monotonic() - started >= 1.3


def test_subscriptions_of_a_topic_each_have_all_and_a_delay_is_not_a_copy_there(server: Server) -> None:
    topic = name()
    broker = ServiceBusBroker(server, Source(channel=f"{topic}/billing"))
    try:
        other = Source(channel=topic, group="audit")
        for source in (broker.source, other):
            broker.portal.run(broker.transport.prepare(source))
        broker.publish(Outgoing(subject=topic, data=b"1"))
        channel = broker.channel()
        assert channel.capabilities.delay is DelayMeans.HELD
        (delivery,) = channel.receive(1, 10)
        started = time.monotonic()
        channel.requeue(delivery, LOCK + 1)
        (again,) = channel.receive(1, 30)
        assert time.monotonic() - started >= LOCK + 0.8
        assert (again.data, again.attempt) == (b"1", 2)
        channel.ack(again)
        broker.source = other
        audit = broker.channel()
        (copy,) = audit.receive(10, 10)
        audit.ack(copy)
        assert not audit.receive(10, 0.3), "the other subscription has it once"
    finally:
        broker.close()


def test_the_sessions_of_a_queue_are_read_one_after_the_other(sessions: SessionBroker) -> None:
    for lane in ("eu", "us", "asia"):
        for number in range(3):
            sessions.publish(Outgoing(subject=sessions.queue, data=b"%d" % number, lane=lane))
    channel = sessions.channel()
    seen: dict[str, list[bytes]] = {}
    deadline = time.monotonic() + 60
    while sum(map(len, seen.values())) < 9 and time.monotonic() < deadline:
        for delivery in channel.receive(2, 5):
            seen.setdefault(str(delivery.lane), []).append(delivery.data)
            channel.ack(delivery)
    assert seen == {lane: [b"0", b"1", b"2"] for lane in ("eu", "us", "asia")}


def test_what_is_held_in_a_session_is_not_overtaken(sessions: SessionBroker) -> None:
    for number in range(3):
        sessions.publish(Outgoing(subject=sessions.queue, data=b"%d" % number, lane="eu"))
    channel = sessions.channel()
    (first,) = channel.receive(1, 10)
    channel.requeue(first, 1)
    seen: list[bytes] = []
    deadline = time.monotonic() + 60
    while len(seen) < 3 and time.monotonic() < deadline:
        for delivery in channel.receive(1, 5):
            seen.append(delivery.data)
            channel.ack(delivery)
    assert seen == [b"0", b"1", b"2"]


def test_settling_after_the_lock_is_refused(broker: ServiceBusBroker) -> None:
    broker.publish(Outgoing(subject=broker.queue, data=b"1"))
    channel = broker.channel()
    (delivery,) = channel.receive(1, 10)
    time.sleep(LOCK + 0.3)
    for settle in (channel.ack, channel.nack, channel.extend):
        with pytest.raises(LeaseLost, match=delivery.id):
            settle(delivery)
    with pytest.raises(LeaseLost):
        channel.requeue(delivery, 1)
    (again,) = channel.receive(1, 10)
    assert again.attempt == 2
    channel.ack(again)
    assert not channel.receive(1, 0.3), "no copy was made of what was not ours any more"


def test_the_broker_itself_says_that_a_lock_is_lost(broker: ServiceBusBroker) -> None:
    broker.publish(Outgoing(subject=broker.queue, data=b"1"))
    channel = broker.channel()
    (delivery,) = channel.receive(1, 10)
    message: Any = delivery.message  # type: ignore[attr-defined]
    channel.nack(delivery)
    message._settled = False
    with pytest.raises(LeaseLost, match="lock"):
        channel.ack(delivery)


def test_a_message_of_another_producer_and_a_batch_are_read_as_they_are(broker: ServiceBusBroker) -> None:
    async def send() -> None:
        client = (await broker.transport.connection()).client
        async with client.get_queue_sender(broker.queue) as sender:
            await sender.send_messages(
                [
                    ServiceBusMessage("text", content_type="text/plain", application_properties={"n": 7}),
                    ServiceBusMessage(b"\x00", message_id="m-2", application_properties={"n": "\u00b2"}),
                ]
            )
            for value in ("text", {"a": [1]}):
                await sender.send_messages(AmqpAnnotatedMessage(value_body=value))

    broker.portal.run(send())
    channel = broker.channel()
    found: list[Delivery] = []
    while len(found) < 4:
        found += channel.receive(4 - len(found), 10)
    assert (found[0].data, dict(found[0].headers)) == (b"text", {"n": "7", "content-type": "text/plain"})
    assert (found[1].data, found[1].id) == (b"\x00", "m-2")
    assert dict(found[1].headers) == {"n": "\u00b2"}
    assert [one.data for one in found[2:]] == [b"text", b'{"a":[1]}']
    facts = found[0].metadata()
    assert facts.stream_sequence is not None
    assert facts.timestamp is not None
    assert abs(facts.timestamp.timestamp() - time.time()) < 60


def test_what_is_missing_says_how_to_make_it(server: Server) -> None:
    async def main() -> None:
        transport = ServiceBusTransport(url_of(server))
        await transport.open()
        try:
            with pytest.raises(ConfigurationError, match="az servicebus queue create --name missing-1"):
                await transport.prepare(Source(channel="missing-1"))
            with pytest.raises(
                ConfigurationError, match="subscription create --topic-name missing-2 --name b"
            ):
                await transport.prepare(Source(channel="missing-2", group="b"))
            with pytest.raises(ConfigurationError, match="the subscription is named twice"):
                await transport.prepare(Source(channel="t/s", group="b"))
            with pytest.raises(ConfigurationError, match=r"must be a servicebus\.Entity, got 7"):
                transport.async_channel(Source(channel="x", settings=7))
        finally:
            await transport.close()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("url", "error"),
    [
        ("servicebus://x?session=1", "no option 'session' in the URL; there are backoff, emulator"),
        ("servicebus://", "has no namespace; write servicebus://namespace"),
        ("servicebus://x/orders", "the URL has a namespace only"),
        ("servicebus://x?max_delivery_count=0", r"max_delivery_count must be 1\.\.2000, got 0"),
    ],
)
def test_a_wrong_url_says_what_is_wrong(url: str, error: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AZURE_SERVICEBUS_CONNECTION_STRING", raising=False)
    with pytest.raises(ConfigurationError, match=error):
        App(url)


def test_the_connection_string_may_be_in_the_environment(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (
        f"Endpoint=sb://127.0.0.1:{server.port};SharedAccessKeyName=a;SharedAccessKey=Yg==;"
        "UseDevelopmentEmulator=true;"
    )
    monkeypatch.setenv("AZURE_SERVICEBUS_CONNECTION_STRING", text)
    app, queue, seen = App("servicebus://"), name(), []

    @app.subscriber(queue)
    def handle(number: int) -> None:
        seen.append(number)
        app.stop()

    app.publish(queue, 7)
    app.run()
    assert seen == [7]


def test_a_broker_that_is_away_is_an_error_until_it_is_back(broker: ServiceBusBroker) -> None:
    broker.publish(Outgoing(subject=broker.queue, data=b"1"))
    channel = broker.channel()
    (delivery,) = channel.receive(1, 10)
    broker.lost = True
    broker.server.stop()
    try:
        with pytest.raises(Exception, match=r"connect|Connect|socket|closed|timed"):
            channel.receive(1, 60)
        assert not broker.transport.broker().connected
    finally:
        broker.server.start()
    deadline = time.monotonic() + 60
    again = None
    while again is None and time.monotonic() < deadline:
        try:
            again = next(iter(channel.receive(1, 5)), None)
        except Exception:
            time.sleep(0.1)
    assert again is not None
    assert (again.id, again.attempt) == (delivery.id, 2)
    channel.ack(again)
    assert broker.transport.broker().connected


def test_a_consumer_that_is_killed_again_and_again_loses_nothing(
    broker: ServiceBusBroker, tmp_path: Path
) -> None:
    async def send() -> None:
        client = (await broker.transport.connection()).client
        async with client.get_queue_sender(broker.queue) as sender:
            for start in range(0, MESSAGES, 200):
                await sender.send_messages([ServiceBusMessage(b"%d" % n) for n in range(start, start + 200)])

    broker.portal.run(send())
    seen = consume_with_crashes(url_of(broker.server), broker.queue, tmp_path / "seen")
    assert set(seen) == set(range(MESSAGES))


def test_a_message_it_will_never_take_is_a_dead_letter_of_the_bridge_that_carries_it(
    broker: ServiceBusBroker,
) -> None:
    long = Outgoing(subject="", data=b"1", id="i" * 200)
    raw = Outgoing(subject="", data=b"1", id="raw", headers={"h": "\udcff"})
    totals, errors = carry(url_of(broker.server), broker.queue, b"1", b"x" * 300_000, long, raw, b"2")
    assert (totals.written, totals.rejected) == (2, 3)
    for why in ("MessageSizeExceeded", "message_id cannot be longer", "surrogates not allowed"):
        assert any(why in error for error in errors), why


def test_what_is_behind_a_message_that_is_not_acked_is_handled_and_that_one_is_a_dead_letter_in_the_end(
    broker: ServiceBusBroker,
) -> None:
    settings = Entity(max_delivery_count=3)
    handled = block_on_the_first(App(url_of(broker.server)), broker.queue, source=settings)
    assert handled == {0: 3, 1: 1, 2: 1, 3: 1, 4: 1}
    ((body, error),) = broker.dead_letters()
    assert body == b"0"
    assert "DontAck: no attempts left after 3, by the broker's own limit; the bank is down" in error


def test_a_delay_is_a_copy_so_the_limit_of_the_queue_does_not_cut_the_attempts(
    broker: ServiceBusBroker, log: pytest.LogCaptureFixture
) -> None:
    app = App(url_of(broker.server))
    attempts: list[int] = []

    @app.subscriber(broker.queue, requeue_count=5, source=Entity(max_delivery_count=2))
    async def handle(message: Message[int]) -> None:
        attempts.append(message.attempt)
        raise Defer(0.01, "not yet")

    async def main() -> None:
        await app.publish(broker.queue, 1)
        stop = asyncio.Event()
        running = asyncio.create_task(app.serve(stop))
        async with asyncio.timeout(60):
            while not app.status().counts.rejected and not running.done():
                await asyncio.sleep(0.02)
        stop.set()
        await running

    asyncio.run(main())
    assert attempts == [1, 2, 3, 4, 5]
    assert "allows 5 attempts, but the broker gives a message up after 2 deliveries" in log.text
    ((_, error),) = broker.dead_letters()
    assert error == "Defer: no attempts left after 5; not yet"
