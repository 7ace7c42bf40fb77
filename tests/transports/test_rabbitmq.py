"""RabbitMQ as a transport, on a real server: quorum and classic queues."""

from __future__ import annotations

import asyncio
import re
import time
import uuid
from collections.abc import Callable, Coroutine, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import aio_pika
import aiormq
import pytest

from settled import App, ConfigurationError, Defer, DontAck, Message, Reject
from settled.message import Delivery
from settled.portal import Portal
from settled.pump import Counts
from settled.pump.settlers import perform
from settled.settlement import Nack
from settled.settlement import Reject as Rejection
from settled.transports.base import (
    AsyncChannel,
    Attempts,
    Channel,
    LeaseLost,
    Outgoing,
    Published,
    RejectMeans,
    Source,
)
from settled.transports.faces import BlockingChannel
from settled.transports.rabbitmq import PublishFailed, RabbitQueue, RabbitTransport
from settled.transports.rabbitmq.link import Misdirected
from tests.brokers.rabbitmq import RabbitServer, rabbitmq
from tests.conftest import Order
from tests.transports.conformance import Conformance, Queue, Releases, Restarts
from tests.transports.crashing import MESSAGES, consume_with_crashes
from tests.transports.refusing import carry

PAGE = Path(__file__).parents[2] / "docs" / "brokers" / "rabbitmq.md"


@pytest.fixture(scope="module")
def server() -> Iterator[RabbitServer]:
    with rabbitmq() as one:
        yield one


async def all_of(server: RabbitServer, queue: str) -> list[aio_pika.abc.AbstractIncomingMessage]:
    """What a queue has, taken out of it."""
    found = []
    async with await aio_pika.connect(server.url) as connection:
        reading = await (await connection.channel()).get_queue(queue)
        while (message := await reading.get(fail=False)) is not None:
            await message.ack()
            found.append(message)
    return found


class RabbitBroker:
    lane = None
    counts_attempts = False

    def __init__(self, server: RabbitServer, settings: RabbitQueue) -> None:
        self.server = server
        self.queue = f"orders-{uuid.uuid4().hex[:8]}"
        self.settings = settings
        self.portal = Portal("test")
        self.transport = RabbitTransport(f"{server.url}?create=true")
        self.source = Source(channel=self.queue, settings=settings)
        self.portal.run(self.transport.prepare(self.source))

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

    def dead_letters(self, queue: str | None = None) -> list[tuple[bytes, str]]:
        return [
            (message.body, str(message.headers["settled-error"]))
            for message in self.all_of(queue or f"{self.queue}.dead")
        ]

    def all_of(self, queue: str) -> list[aio_pika.abc.AbstractIncomingMessage]:
        return self.portal.run(all_of(self.server, queue))

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
def open_broker(server: RabbitServer) -> Iterator[Callable[..., RabbitBroker]]:
    opened: list[RabbitBroker] = []

    def make(**settings: Any) -> RabbitBroker:
        opened.append(RabbitBroker(server, RabbitQueue(**settings)))
        return opened[-1]

    yield make
    for one in opened:
        one.close()


@pytest.fixture(params=["quorum", "classic"])
def broker(request: pytest.FixtureRequest, open_broker: Callable[..., RabbitBroker]) -> RabbitBroker:
    return open_broker(type=request.param)


class TestQuorumQueue(Releases, Restarts, Conformance):
    @pytest.fixture
    def broker(self, open_broker: Callable[..., RabbitBroker]) -> RabbitBroker:
        return open_broker(type="quorum")

    def test_an_unsettled_message_comes_again_when_its_lease_is_over(self, queue: Queue) -> None:
        """There is no lease that runs out: it is the consumer's as long as that has its channel."""
        queue.publish(b"1")
        queue.one()
        assert queue.empty()
        queue.channel.close()
        again = Queue(queue.broker, queue.broker.channel())
        again.channel.ack(again.one())
        assert again.empty()


class TestClassicQueue:
    """What a classic queue does in its own way; the rest is the same code as above."""

    @pytest.fixture
    def broker(self, open_broker: Callable[..., RabbitBroker]) -> RabbitBroker:
        return open_broker(type="classic")

    queue = Conformance.queue
    test_whole = Conformance.test_what_is_published_is_received_whole
    test_nack = Releases.test_a_nacked_message_is_there_at_once
    test_delay = Conformance.test_a_requeued_message_comes_after_its_delay_and_counts
    test_immediate_requeue = Conformance.test_a_requeue_of_no_delay_is_immediate
    test_dead_letters = Conformance.test_a_rejected_message_is_a_dead_letter_with_its_body_and_error
    test_another_consumer = Releases.test_a_message_given_back_goes_to_another_consumer
    test_async_face = Conformance.test_the_async_face_does_the_same


def test_ac_13_a_nack_on_rabbitmq_makes_the_message_ready_at_once(broker: RabbitBroker) -> None:
    broker.publish(Outgoing(subject=broker.queue, data=b"1"))
    channel = broker.channel()
    (delivery,) = channel.receive(1, 10)
    assert ready(broker, broker.queue) == 0
    channel.nack(delivery)
    in_the_end(lambda: ready(broker, broker.queue) == 1)
    # The first consumer is still there, and yet another one gets it.
    other = broker.channel()
    (again,) = other.receive(1, 10)
    assert again.data == b"1"
    other.ack(again)
    assert not channel.receive(1, 0.2)


def ready(broker: RabbitBroker, queue: str) -> int:
    async def ask() -> int:
        async with await aio_pika.connect(broker.server.url) as connection:
            declared = await (await connection.channel()).declare_queue(queue, passive=True)
            return declared.declaration_result.message_count or 0

    return broker.portal.run(ask())


def in_the_end(happens: Callable[[], bool], seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not happens():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)


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


def counts_releases(broker: RabbitBroker) -> bool:
    return broker.portal.run(broker.transport.facts(broker.source)).counts_releases


def test_the_next_thing_handled_is_the_message_given_back_also_with_a_buffer(broker: RabbitBroker) -> None:
    # Not where that would cost those behind it a delivery.
    buffer = 1 if counts_releases(broker) else 5
    for number in range(12):
        broker.publish(Outgoing(subject=broker.queue, data=b"%d" % number))
    app = App(broker.server.url)
    seen: list[int] = []

    @app.subscriber(broker.queue, source=broker.settings, buffer=buffer, dont_ack_delay=0)
    async def handle(number: int) -> None:
        seen.append(number)
        if number in (3, 7) and seen.count(number) < 3:
            raise DontAck

    run_until(app, lambda: 11 in seen)
    assert seen == [0, 1, 2, 3, 3, 3, 4, 5, 6, 7, 7, 7, 8, 9, 10, 11]


def test_blocking_on_a_message_does_not_use_up_the_attempts_of_those_behind_it(broker: RabbitBroker) -> None:
    for number in range(6):
        broker.publish(Outgoing(subject=broker.queue, data=b"%d" % number))
    app = App(broker.server.url)
    tries: dict[int, list[int]] = {}

    @app.subscriber(broker.queue, source=broker.settings, buffer=4, requeue_count=3, dont_ack_delay=0.05)
    async def handle(message: Message[int]) -> None:
        seen = tries.setdefault(message.payload, [])
        seen.append(message.attempt)
        if message.payload == 0 and len(seen) < 6:
            raise DontAck
        if message.payload and len(seen) == 1:
            raise Defer(0.1)
        await message.ack()

    run_until(app, lambda: app.status().counts.acked + app.status().counts.rejected == 6)
    assert {number: seen for number, seen in tries.items() if number} == {n: [1, 2] for n in range(1, 6)}
    assert tries[0] == ([1, 2, 3, 4, 5, 6] if counts_releases(broker) else [1] * 6)
    assert broker.dead_letters() == []


def test_what_has_come_but_was_not_handed_out_is_not_given_back_where_that_counts(
    open_broker: Callable[..., RabbitBroker],
) -> None:
    broker = open_broker(prefetch=4)
    for number in range(8):
        broker.publish(Outgoing(subject=broker.queue, data=b"%d" % number))
    channel = broker.channel()
    (first,) = gather(channel, 1)
    in_the_end(lambda: ready(broker, broker.queue) == 4)
    for _ in range(3):
        channel.nack(first)
        taken: list[Delivery] = []
        while not any(delivery.data == b"0" for delivery in taken):
            taken += gather(channel, 1)
        first = next(delivery for delivery in taken if delivery.data == b"0")
        assert {delivery.attempt for delivery in taken if delivery is not first} <= {1}
        for delivery in taken:
            if delivery is not first:
                channel.ack(delivery)
    channel.ack(first)
    while ready(broker, broker.queue):
        channel.ack(gather(channel, 1)[0])


def test_what_is_buffered_on_its_last_delivery_is_kept_at_a_stop(
    open_broker: Callable[..., RabbitBroker],
) -> None:
    broker = open_broker(delivery_limit=1)
    for number in range(3):
        broker.publish(Outgoing(subject=broker.queue, data=b"%d" % number))
    channel = broker.channel()
    for _ in range(2):
        for delivery in gather(channel, 3):
            # As the pump does with what is in its buffer.
            perform(channel, delivery, Nack())
    channel.close()
    in_the_end(lambda: ready(broker, broker.queue) == 3)
    assert broker.dead_letters() == []


def test_what_was_released_in_any_order_comes_back_in_the_old_one(broker: RabbitBroker) -> None:
    for number in range(4):
        broker.publish(Outgoing(subject=broker.queue, data=b"%d" % number))
    channel = broker.channel()
    taken = gather(channel, 4)
    for delivery in (taken[3], taken[1], taken[2], taken[0]):
        channel.nack(delivery)
    again = gather(channel, 4)
    assert [delivery.data for delivery in again] == [b"0", b"1", b"2", b"3"]
    for delivery in again:
        channel.ack(delivery)


def gather(channel: Channel, count: int) -> list[Delivery]:
    found: list[Delivery] = []
    deadline = time.monotonic() + 30
    while len(found) < count:
        assert time.monotonic() < deadline
        found += channel.receive(count - len(found), 5)
    return found


def test_a_message_that_nobody_settles_does_not_stop_the_others(broker: RabbitBroker) -> None:
    for number in range(5):
        broker.publish(Outgoing(subject=broker.queue, data=b"%d" % number))
    channel = broker.channel()
    assert [channel.receive(1, 10)[0].data for _ in range(5)] == [b"0", b"1", b"2", b"3", b"4"]


def test_attempts_count_over_delays_and_consumers(broker: RabbitBroker) -> None:
    broker.publish(Outgoing(subject=broker.queue, data=b"1", headers={"tenant": "acme"}, id="m-1"))
    channel = broker.channel()
    for attempt, delay in ((1, 0.0), (2, 0.1), (3, 0.0), (4, None)):
        (delivery,) = gather(channel, 1)
        assert (delivery.attempt, delivery.id, dict(delivery.headers)) == (attempt, "m-1", {"tenant": "acme"})
        assert delivery.metadata().redelivery_count == attempt - 1
        channel.requeue(delivery, delay)
    channel.close()
    other = broker.channel()
    (delivery,) = gather(other, 1)
    assert delivery.attempt == 5
    other.ack(delivery)


def test_a_dead_letter_that_cannot_be_stored_leaves_the_message_on_the_queue(broker: RabbitBroker) -> None:
    source = Source(channel=broker.queue, settings=broker.settings, dead_letter=f"{broker.queue}.full")
    broker.portal.run(broker.transport.prepare(source))
    full = f"{broker.queue}.full"

    async def fill() -> None:
        async with await aio_pika.connect(broker.server.url) as connection:
            channel = await connection.channel()
            await channel.queue_delete(full)
            arguments: dict[str, Any] = {"x-max-length": 0, "x-overflow": "reject-publish"}
            await channel.declare_queue(full, durable=True, arguments=arguments)

    broker.portal.run(fill())
    broker.publish(Outgoing(subject=broker.queue, data=b"poison"))
    channel = broker.channel(source)
    (delivery,) = channel.receive(1, 10)
    with pytest.raises(PublishFailed, match="refused it"):
        channel.reject(delivery, Rejection(error="no"))
    (again,) = channel.receive(1, 20)
    assert again.data == b"poison"

    async def remove() -> None:
        async with await aio_pika.connect(broker.server.url) as connection:
            await (await connection.channel()).queue_delete(full)

    broker.portal.run(remove())
    with pytest.raises(PublishFailed, match="there is no queue"):
        channel.reject(again, Rejection(error="no"))
    channel.ack(again)


def test_a_message_for_nobody_is_an_error(open_broker: Callable[..., RabbitBroker]) -> None:
    broker = open_broker()
    app = App(broker.server.url)

    async def publish(to: str, delay: float = 0) -> None:
        await app.publish(to, 1, delay=delay)

    for delay in (0.0, 1.0):
        with pytest.raises(PublishFailed, match="there is no queue 'nowhere'"):
            broker.portal.run(publish("nowhere", delay))
    broker.portal.run(publish(broker.queue))
    broker.portal.run(app.transport.close())


def test_a_message_may_be_published_for_later(broker: RabbitBroker) -> None:
    channel = broker.channel()
    started = time.monotonic()
    broker.publish(Outgoing(subject=broker.queue, data=b"1", delay=1.0, id="later"))
    (delivery,) = gather(channel, 1)
    assert time.monotonic() - started >= 0.9
    assert (delivery.data, delivery.id, delivery.attempt) == (b"1", "later", 1)
    # It may wait once more, and as long as when it was published.
    channel.requeue(delivery, 1.0)
    (again,) = gather(channel, 1)
    assert (again.id, again.attempt) == ("later", 2)
    channel.ack(again)


def test_the_limit_of_a_quorum_queue_is_told_at_the_start_and_loses_nothing(
    open_broker: Callable[..., RabbitBroker], log: pytest.LogCaptureFixture
) -> None:
    broker = open_broker(delivery_limit=2)
    assert broker.channel().capabilities.max_attempts == 3
    broker.publish(Outgoing(subject=broker.queue, data=b"1"))
    app = App(broker.server.url)
    seen: list[int] = []

    @app.subscriber(broker.queue, source=broker.settings, on_error="dont_ack", dont_ack_delay=0)
    async def handle(message: Message[int]) -> None:
        seen.append(message.attempt)
        raise DontAck

    run_until(app, lambda: len(seen) >= 3 and app.status().counts.nacked >= 3)
    assert "gives a message up after 3 deliveries" in log.text
    if broker.portal.run(broker.transport.facts(broker.source)).version >= (4, 3):
        # Giving back is not counted, so the limit is never reached that way.
        assert set(seen) == {1}
        return
    assert seen == [1, 2, 3]
    ((body, error),) = broker.dead_letters()
    assert body == b"1"
    assert "released on delivery 3; the queue's delivery limit is 2" in error


def test_a_delay_is_a_copy_so_the_delivery_limit_does_not_cut_the_attempts(
    open_broker: Callable[..., RabbitBroker], log: pytest.LogCaptureFixture
) -> None:
    broker = open_broker(delivery_limit=1)
    broker.publish(Outgoing(subject=broker.queue, data=b"1"))
    app = App(broker.server.url)
    seen: list[int] = []

    @app.subscriber(broker.queue, source=broker.settings, requeue_count=4)
    async def handle(message: Message[int]) -> None:
        seen.append(message.attempt)
        raise Defer(0.05, "not yet")

    run_until(app, lambda: app.status().counts.rejected > 0)
    assert seen == [1, 2, 3, 4]
    assert "allows 4 attempts, but the broker gives a message up after 2 deliveries" in log.text
    ((_, error),) = broker.dead_letters()
    assert error == "Defer: no attempts left after 4; not yet"


def test_what_was_only_buffered_survives_the_limit(open_broker: Callable[..., RabbitBroker]) -> None:
    broker = open_broker(delivery_limit=1)
    broker.publish(Outgoing(subject=broker.queue, data=b"1"))
    channel = broker.channel()
    for _ in range(4):
        (delivery,) = gather(channel, 1)
        channel.nack(delivery)
    (delivery,) = gather(channel, 1)
    assert delivery.data == b"1"
    channel.ack(delivery)
    assert broker.dead_letters() == []


def test_an_existing_queue_is_read_as_what_it_is(open_broker: Callable[..., RabbitBroker]) -> None:
    broker = open_broker()
    queues: dict[str, dict[str, Any]] = {
        "q": {"x-queue-type": "quorum", "x-delivery-limit": 4, "x-max-length": 9, "x-message-ttl": 10**6},
        "c": {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": f"{broker.queue}.dead"},
        "s": {"x-queue-type": "stream"},
    }

    async def declare() -> None:
        async with await aio_pika.connect(broker.server.url) as connection:
            channel = await connection.channel()
            for name, arguments in queues.items():
                await channel.declare_queue(f"{broker.queue}-{name}", durable=True, arguments=arguments)

    broker.portal.run(declare())

    def capabilities_of(name: str) -> Any:
        source = Source(channel=f"{broker.queue}-{name}")
        broker.portal.run(broker.transport.prepare(source))
        return broker.channel(source).capabilities

    assert capabilities_of("q").max_attempts == 5
    assert capabilities_of("q").attempts is Attempts.BROKER
    assert capabilities_of("c").max_attempts is None
    assert capabilities_of("c").attempts is Attempts.HEADER
    with pytest.raises(ConfigurationError, match="a stream cannot give messages back"):
        capabilities_of("s")


def test_a_queue_may_have_its_own_dead_letter_exchange_do_it(
    open_broker: Callable[..., RabbitBroker],
) -> None:
    broker = open_broker()
    source = Source(
        channel=f"{broker.queue}-native",
        settings=RabbitQueue(
            native_dead_letters=True,
            arguments={"x-dead-letter-exchange": "", "x-dead-letter-routing-key": f"{broker.queue}.dead"},
        ),
    )
    broker.portal.run(broker.transport.prepare(source))
    channel = broker.channel(source)
    assert channel.capabilities.reject is RejectMeans.NATIVE
    broker.publish(Outgoing(subject=source.channel, data=b"poison"))
    channel.reject(channel.receive(1, 10)[0], Rejection(error="no"))
    in_the_end(lambda: ready(broker, f"{broker.queue}.dead") == 1)
    (dead,) = broker.all_of(f"{broker.queue}.dead")
    assert dead.body == b"poison"
    assert dead.headers["x-first-death-reason"] == "rejected"


def test_every_group_of_an_exchange_gets_every_message(server: RabbitServer) -> None:
    name = uuid.uuid4().hex[:8]
    app = App(f"{server.url}?create=true&exchange=events-{name}")
    seen: list[tuple[str, int]] = []

    @app.subscriber("orders", group=f"billing-{name}")
    async def bill(order: Order) -> None:
        seen.append(("billing", order.id))
        if order.id == 2:
            raise Reject("no such customer")

    @app.subscriber("orders", group=f"shipping-{name}", source=RabbitQueue(bind=("orders", "parcels.*")))
    def ship(order: Order) -> None:
        seen.append(("shipping", order.id))
        if order.id == 1:
            app.publish("parcels.eu", Order(3))

    async def main() -> None:
        running = asyncio.create_task(app.serve())
        async with asyncio.timeout(60):
            while not app.status().running or app.status().subscriptions[1].status.value != "started":
                await asyncio.sleep(0.02)
            await app.publish("orders", Order(1))
            await app.publish("orders", Order(2), id="m" * 255)
            while len(seen) < 5 or not app.status().counts.rejected:
                await asyncio.sleep(0.02)
            assert app.status().broker is not None
            assert app.status().healthy
            with pytest.raises(PublishFailed, match=r"has no queue for key 'unbound'"):
                await app.publish("unbound", Order(4))
            app.stop()
            await running

    asyncio.run(main())
    assert sorted(seen) == [("billing", 1), ("billing", 2), ("shipping", 1), ("shipping", 2), ("shipping", 3)]
    (dead,) = asyncio.run(all_of(server, f"orders.billing-{name}.dead"))
    # The id of a letter tells the group too; where there is no room for both it is cut.
    assert dead.message_id is not None
    assert (dead.message_id[:4], len(dead.message_id)) == ("mmmm", 128)


def test_a_queue_that_was_deleted_is_made_again_where_that_is_wanted(broker: RabbitBroker) -> None:
    channel = broker.channel()
    assert not channel.receive(1, 0.1)

    async def delete() -> None:
        async with await aio_pika.connect(broker.server.url) as connection:
            await (await connection.channel()).queue_delete(broker.queue)

    broker.portal.run(delete())
    publisher = RabbitTransport(broker.server.url)  # which makes nothing

    def arrives() -> bool:
        try:
            broker.portal.run(publisher.push(Outgoing(subject=broker.queue, data=b"1")))
        except PublishFailed:
            channel.receive(1, 0.1)
            return False
        return True

    in_the_end(arrives)
    broker.portal.run(publisher.close())
    (delivery,) = gather(channel, 1)
    channel.ack(delivery)


def test_messages_of_others_are_read_too(broker: RabbitBroker) -> None:
    async def put() -> None:
        async with await aio_pika.connect(broker.server.url) as connection:
            channel = await connection.channel()
            message = aio_pika.Message(
                b"{}",
                content_type="application/json",
                headers={"n": 1, "t": [1]},
                correlation_id="c-1",
            )
            await channel.default_exchange.publish(message, broker.queue)
            underlay = await channel.get_underlay_channel()
            await underlay.basic_publish(b"bare", routing_key=broker.queue)

    broker.portal.run(put())
    channel = broker.channel()
    # The client's messages have a priority, which newer brokers heed.
    first, second = sorted(gather(channel, 2), key=lambda delivery: delivery.data != b"{}")
    assert dict(first.headers) == {"n": "1", "content-type": "application/json"}
    assert (second.data, dict(second.headers), bool(second.id)) == (b"bare", {}, True)
    channel.ack(second)
    # A copy that waits for its turn has all that the publisher gave it.
    channel.requeue(first, 0.1)
    (first,) = gather(channel, 1)
    properties = first.properties  # type: ignore[attr-defined]
    assert (properties.headers["t"], properties.correlation_id, first.attempt) == ([1], "c-1", 2)
    channel.ack(first)
    with pytest.raises(LeaseLost, match="is not this consumer's any more"):
        channel.ack(first)


def test_a_dead_letter_has_all_that_the_publisher_gave_the_message(broker: RabbitBroker) -> None:
    headers: dict[str, Any] = {
        "n": 5,
        "f": 1.5,
        "yes": True,
        "none": None,
        "list": [1, 2],
        "table": {"a": 1},
        "at": datetime(2026, 1, 2, tzinfo=UTC),
        "text": "x",
    }

    async def put() -> None:
        async with await aio_pika.connect(broker.server.url) as connection:
            message = aio_pika.Message(
                b"{}",
                content_type="application/json",
                correlation_id="c-1",
                reply_to="answers",
                type="Order",
                priority=3,
                message_id="m-1",
                app_id="shop",
                headers={**headers, "settled-error": "of an earlier death"},
            )
            exchange = (await connection.channel()).default_exchange
            await exchange.publish(message, broker.queue)

    broker.portal.run(put())
    channel = broker.channel()
    (delivery,) = gather(channel, 1)
    # Sent round once, it has a count that is no part of it.
    channel.requeue(delivery, 0.1)
    (delivery,) = gather(channel, 1)
    channel.reject(delivery, Rejection(error="no"))
    (dead,) = broker.all_of(f"{broker.queue}.dead")
    given = {name: value for name, value in dead.headers.items() if not name.startswith(("settled-", "x-"))}
    assert given == headers
    assert (dead.headers["settled-error"], dead.headers["settled-attempts"]) == ("no", "2")
    assert "settled-failures" not in dead.headers
    assert (dead.correlation_id, dead.reply_to, dead.type, dead.priority) == ("c-1", "answers", "Order", 3)
    assert (dead.message_id, dead.app_id, dead.content_type) == ("m-1", "shop", "application/json")


def test_what_is_missing_or_wrong_is_said_with_what_to_do(server: RabbitServer) -> None:
    def refused(url: str, **subscription: Any) -> str:
        app = App(url)

        @app.subscriber("no-such-queue", **subscription)
        async def handle(order: Order) -> None: ...

        with pytest.raises(ConfigurationError) as told:
            asyncio.run(app.serve())
        return str(told.value)

    assert "RabbitMQ has no queue 'no-such-queue'" in refused(server.url)
    assert "RabbitQueue(create=True)" in refused(server.url)
    assert "add ?exchange=NAME" in refused(server.url, group="billing")
    assert "source must be a RabbitQueue" in refused(server.url, source="orders")
    assert "no virtual host 'shop/eu', or not for this user" in refused(f"{server.url}/shop%2Feu")
    with pytest.raises(ConfigurationError, match="no option visibility; there are auth"):
        App(f"{server.url}?visibility=30")
    with pytest.raises(ConfigurationError, match="create must be true or false, got 'maybe'"):
        App(f"{server.url}?create=maybe")
    with pytest.raises(ConfigurationError, match="backoff must be 0 or more seconds, got 'soon'"):
        App(f"{server.url}?backoff=soon")
    with pytest.raises(ConfigurationError, match="RabbitMQ has no lanes"):
        App(server.url).publish("orders", 1, lane="eu")


def test_create_makes_a_queue_that_is_written_to(server: RabbitServer) -> None:
    async def main() -> None:
        names = [f"written-{uuid.uuid4().hex[:8]}" for _ in range(2)]
        plain, creating = App(server.url), App(f"{server.url}?create=true")
        with pytest.raises(Misdirected, match=f"there is no queue '{names[0]}'"):
            await plain.publish(names[0], {"id": 1})
        got = []

        for name, delay in zip(names, (0, 0.1), strict=True):
            await creating.publish(name, {"id": 1}, delay=delay)

            @creating.subscriber(name)
            async def handle(order: Order) -> None:
                got.append(order.id)

        stop = asyncio.Event()
        serving = asyncio.create_task(creating.serve(stop))
        async with asyncio.timeout(20):
            while len(got) < 2:
                await asyncio.sleep(0.02)
        stop.set()
        await serving
        await plain.transport.close()

    asyncio.run(main())


def test_create_makes_a_queue_once_for_all_who_publish_to_it_at_the_same_time(server: RabbitServer) -> None:
    async def main() -> None:
        for _ in range(3):
            app, name = App(f"{server.url}?create=true"), f"written-{uuid.uuid4().hex[:8]}"
            await asyncio.gather(*(app.publish(name, {"id": number}) for number in range(20)))
            assert len(await all_of(server, name)) == 20
            await app.transport.close()

    asyncio.run(main())


def test_a_queue_with_the_longest_name_is_retried_after_a_delay(
    open_broker: Callable[..., RabbitBroker],
) -> None:
    broker = open_broker()
    source = Source(channel=broker.queue.ljust(250, "q"), settings=broker.settings)
    broker.portal.run(broker.transport.prepare(source))
    broker.publish(Outgoing(subject=source.channel, data=b"1", delay=0.1))
    channel = broker.channel(source)
    (delivery,) = gather(channel, 1)
    channel.requeue(delivery, 0.2)
    (again,) = gather(channel, 1)
    assert (again.data, again.attempt) == (b"1", 2)
    channel.ack(again)


def test_a_user_who_may_not_configure_queues_can_still_read_them(
    open_broker: Callable[..., RabbitBroker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The broker refuses to say what kind of queue it is; a copy with a header counts on any."""
    broker = open_broker()

    async def refuse(*_: Any, **__: Any) -> None:
        raise aiormq.exceptions.ChannelAccessRefused("no")

    monkeypatch.setattr("settled.transports.rabbitmq.queues._declare_as", refuse)
    broker.transport.forget(broker.source)
    broker.publish(Outgoing(subject=broker.queue, data=b"1"))
    channel = broker.channel()
    for attempt in (1, 2, 3):
        (delivery,) = gather(channel, 1)
        assert delivery.attempt == attempt
        channel.requeue(delivery, 0)


def test_tls_with_the_certificate_authority_in_the_url(server: RabbitServer) -> None:
    async def main() -> None:
        transport = RabbitTransport(server.tls_url)
        await transport.open()
        assert transport.broker().connected
        assert transport.broker().detail.startswith("RabbitMQ ")
        await transport.close()
        assert not transport.broker().connected
        stranger = RabbitTransport(server.tls_url.partition("?")[0])
        with pytest.raises(Exception, match="certificate verify failed"):
            await stranger.open()
        address = server.tls_url.partition("?")[0]
        for no in ("false", "no", "0"):
            careful = RabbitTransport(f"{address}?no_verify_ssl={no}")
            with pytest.raises(Exception, match="certificate verify failed"):
                await careful.open()
        careless = RabbitTransport(f"{address}?no_verify_ssl=true")
        await careless.open()
        await careless.close()

    asyncio.run(main())


def test_the_example_of_the_docs_charges_defers_and_rejects(server: RabbitServer) -> None:
    (code,) = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.S | re.M)
    names: dict[str, Any] = {"__name__": "shop"}
    exec(compile(code.replace("amqp://guest:guest@127.0.0.1:5672", server.url), PAGE.name, "exec"), names)
    app: App = names["app"]

    async def fill() -> None:
        await app.transport.prepare(app.subscriptions[0].source)  # type: ignore[attr-defined]
        for amount in (5.0, -1.0, 2_000.0):
            await app.publish("orders", {"id": 1, "amount": amount})

    def counts() -> Counts:
        return app.status().counts

    run_until(app, lambda: counts().rejected == 2, fill())
    assert (counts().acked, counts().requeued, counts().rejected) == (1, 4, 2)


def test_none_of_ten_thousand_messages_is_lost_when_the_consumer_is_killed_again_and_again(
    open_broker: Callable[..., RabbitBroker], tmp_path: Path
) -> None:
    broker = open_broker()

    async def fill() -> None:
        for start in range(0, MESSAGES, 500):
            await asyncio.gather(
                *(
                    broker.transport.push(Outgoing(subject=broker.queue, data=b"%d" % number))
                    for number in range(start, start + 500)
                )
            )

    broker.portal.run(fill())
    counts = consume_with_crashes(broker.server.url, broker.queue, tmp_path / "handled")
    assert set(counts) == set(range(MESSAGES))
    in_the_end(lambda: ready(broker, broker.queue) == 0)
    dead = broker.dead_letters()
    assert {int(body) for body, _ in dead} == set(range(0, MESSAGES, 1000))
    assert {error for _, error in dead} == {"a round number"}


def test_a_message_it_will_never_take_is_a_dead_letter_of_the_bridge_that_carries_it(
    open_broker: Callable[..., RabbitBroker],
) -> None:
    broker = open_broker(type="classic")
    many = Outgoing(subject="", data=b"1", id="many", headers={"h": "x" * 200_000})
    long = Outgoing(subject="", data=b"1", id="i" * 300)
    named = Outgoing(subject="", data=b"1", id="named", headers={"n" * 130 + "A": "1", "n" * 130 + "B": "2"})
    messages = (b"1", b"x" * 4_000_001, many, long, named, b"2")
    totals, errors = carry(broker.server.url, broker.queue, *messages)
    assert (totals.written, totals.rejected) == (2, 4)
    for why in (
        "larger than configured max size 4000000",
        "headers must be 120000",
        "id must be 255 bytes",
        "name must be 128 bytes",
    ):
        assert any(why in error for error in errors), why
    assert {message.body for message in broker.all_of(broker.queue)} == {b"1", b"2"}


def test_a_bridge_to_a_queue_or_an_exchange_that_is_not_there_ends(
    open_broker: Callable[..., RabbitBroker],
) -> None:
    broker = open_broker(type="classic")
    with pytest.raises(ConfigurationError, match="there is no queue 'nowhere'"):
        carry(broker.server.url, "nowhere", b"1")
    with pytest.raises(ConfigurationError, match="no exchange 'nowhere'"):
        carry(f"{broker.server.url}?exchange=nowhere", "orders", b"1")
    totals, errors = carry(f"{broker.server.url}?exchange=amq.topic", "unheard", b"1")
    assert (totals.rejected, len(errors)) == (1, 1)
    assert "exchange 'amq.topic' has no queue for key 'unheard'" in errors[0]


def test_a_message_that_is_too_large_takes_nobody_along(open_broker: Callable[..., RabbitBroker]) -> None:
    """It ends the channel that others are publishing through at that moment."""
    broker = open_broker(type="classic")

    async def publish(body: bytes) -> bool | None:
        try:
            await broker.transport.push(Outgoing(subject=broker.queue, data=body))
        except PublishFailed as error:
            return broker.transport.refuses(error)
        return None

    async def main() -> list[bool | None]:
        bodies = [b"%d" % n for n in range(20)] + [b"x" * 4_000_001] + [b"%d" % n for n in range(20)]
        return await asyncio.gather(*map(publish, bodies))

    told = broker.portal.run(main())
    assert told[20] is True
    assert True not in told[:20] + told[21:]
