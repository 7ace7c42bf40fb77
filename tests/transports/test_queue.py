"""The queue as a transport, in-process and through its server: conformance, and apps on it."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from settled import App, ConfigurationError, Defer, Message, Reject
from settled.portal import Portal
from settled.queue.embedded import EmbeddedPostgres
from settled.queue.engine import Engine
from settled.server.testing import running_server
from settled.settlement import Reason
from settled.settlement import Reject as Rejection
from settled.transports.base import AsyncChannel, Channel, LeaseLost, Outgoing, Published, Source
from settled.transports.http import HttpTransport
from settled.transports.postgres import PostgresTransport
from settled.transports.queue import Backend, QueueChannel, QueueTransport
from tests.conftest import Order
from tests.transports.conformance import Conformance, Extends, Ordered, Restarts

LEASE = 2


@pytest.fixture(scope="module")
def postgres() -> Iterator[EmbeddedPostgres]:
    # Not under pytest's own directory: root's Postgres runs as somebody who may not enter that.
    with tempfile.TemporaryDirectory() as directory, EmbeddedPostgres.start(directory) as server:
        yield server


@pytest.fixture(scope="module")
def dsn(postgres: EmbeddedPostgres) -> str:
    return postgres.dsn


@pytest.fixture(scope="module")
def url(dsn: str) -> Iterator[str]:
    with running_server(dsn=dsn) as server:
        yield server.url


class QueueBroker:
    lane = "one"
    counts_attempts = True

    def __init__(self, transport: QueueTransport, postgres: EmbeddedPostgres) -> None:
        self.restart = postgres.restart
        self.queue = f"orders-{uuid.uuid4().hex[:8]}"
        self.transport = transport
        self.portal = Portal("test")
        self.engine = self.portal.run(_open(postgres.dsn))
        self.configure({"leaseTime": LEASE, "retryLimit": 10, "retryDelay": 1000})

    def configure(self, options: dict[str, Any]) -> None:
        self.portal.run(self.engine.configure(self.queue, options))

    def publish(self, message: Outgoing) -> Published:
        return self.portal.run(self.transport.push(message))

    def channel(self) -> Channel:
        return self.portal.run(self._channel())

    async def _channel(self) -> Channel:
        return self.transport.channel(Source(channel=self.queue))

    def wait(self, seconds: float) -> None:
        self.portal.run(asyncio.sleep(seconds))

    def lease(self) -> float:
        return float(LEASE)

    def dead_letters(self) -> list[tuple[bytes, str]]:
        page = self.portal.run(self.engine.dead_letters(queue=self.queue))
        return [(letter.payload, letter.error or "") for letter in page.rows]

    def run_async(self, use: Callable[[AsyncChannel], Any]) -> None:
        self.portal.run(use(QueueChannel(self.transport, Source(channel=self.queue))))

    def close(self) -> None:
        self.portal.run(self.transport.close())
        self.portal.run(self.engine.close())
        self.portal.close()


async def _open(dsn: str) -> Engine:
    return await Engine.open(dsn)


@pytest.fixture(params=["postgresql", "http"])
def transport(request: pytest.FixtureRequest, dsn: str) -> QueueTransport:
    if request.param == "postgresql":
        return PostgresTransport(dsn)
    return HttpTransport(request.getfixturevalue("url"))


@pytest.fixture
def broker(transport: QueueTransport, postgres: EmbeddedPostgres) -> Iterator[QueueBroker]:
    found = QueueBroker(transport, postgres)
    yield found
    found.close()


PUBLISHES = """
import asyncio, sys
from settled import App

async def main():
    print((await App(sys.argv[1]).publish("letters", 1)).id)

if sys.argv[2] == "async":
    asyncio.run(main())
else:
    print(App(sys.argv[1]).publish("letters", 1).result().id)
"""


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_script_that_publishes_ends_without_a_word_of_its_client(url: str, kind: str) -> None:
    """Defect P12: it ended with `Unclosed client session`."""
    command = [sys.executable, "-c", PUBLISHES, url, kind]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert len(done.stdout.split()) == 1
    assert done.stderr == ""


class TestQueue(Extends, Ordered, Restarts, Conformance):
    pass


def test_an_app_on_the_queue_settles_every_message_one_way(broker: QueueBroker) -> None:
    app = App(transport=broker.transport)
    seen: list[tuple[int, int]] = []

    @app.subscriber(broker.queue, performers=4, buffer=20)
    async def handle(message: Message[Order]) -> None:
        order = message.payload
        seen.append((order.id, message.attempt))
        if order.kind == "poison":
            raise Reject("no such customer")
        if order.kind == "flaky" and message.attempt == 1:
            raise Defer(0.1, "the bank did not answer")
        await message.ack()

    async def main() -> Any:
        for number in range(100):
            kind = "poison" if number % 25 == 0 else "flaky" if number % 10 == 1 else "good"
            await app.publish(broker.queue, Order(number, kind), id=f"m{number}")
        stop = asyncio.Event()
        running = asyncio.create_task(app.serve(stop))
        async with asyncio.timeout(30):
            while len(seen) < 110:
                await asyncio.sleep(0.05)
            await asyncio.sleep(0.3)
            stop.set()
            return await running

    status = asyncio.run(main())
    assert {number for number, _ in seen} == set(range(100))
    assert len(seen) == 110
    assert status.counts.settle_failed == 0
    assert len(broker.dead_letters()) == 4


def test_a_sync_handler_publishes_on_and_duplicates_are_told(broker: QueueBroker) -> None:
    app = App(transport=broker.transport)
    target = f"{broker.queue}-next"
    done: list[int] = []

    @app.subscriber(broker.queue)
    def forward(order: Order) -> None:
        assert not app.publish(target, order, id=f"order-{order.id}").result().duplicate
        assert app.publish(target, order, id=f"order-{order.id}").result().duplicate

    @app.subscriber(target)
    def arrived(order: Order) -> None:
        done.append(order.id)
        if len(done) == 5:
            app.stop()

    for number in range(5):
        app.publish(broker.queue, Order(number)).result()
    app.run()
    assert sorted(done) == list(range(5))


@pytest.mark.parametrize(
    ("payload", "content_type"), [(b"\x00\xff", None), ("grün", None), ({"a": 1}, "application/msgpack")]
)
def test_payloads_of_any_kind_come_back_whole(
    broker: QueueBroker, payload: Any, content_type: str | None
) -> None:
    app = App(transport=broker.transport)
    seen: list[Any] = []

    @app.subscriber(broker.queue)
    def handle(payload: Any) -> None:
        seen.append(payload)
        app.stop()

    app.publish(broker.queue, payload, content_type=content_type, headers={"tenant": "acme"})
    app.run()
    assert seen == [payload]


def test_dead_letters_may_go_to_a_channel(broker: QueueBroker) -> None:
    app = App(transport=broker.transport)
    dead = f"{broker.queue}-dead"
    seen: list[tuple[int, str]] = []

    @app.subscriber(broker.queue, dead_letter=dead)
    def handle(order: Order) -> None:
        raise Reject("no such customer")

    @app.subscriber(dead)
    def bury(message: Message[Order]) -> None:
        seen.append((message.payload.id, message.headers["settled-error"]))
        message.ack()
        app.stop()

    app.publish(broker.queue, Order(1))
    app.run()
    assert seen == [(1, "no such customer")]


@pytest.mark.parametrize("to_channel", [False, True])
def test_a_reason_of_any_text_makes_one_dead_letter(broker: QueueBroker, to_channel: bool) -> None:
    app = App(transport=broker.transport)
    dead = f"{broker.queue}-dead" if to_channel else None
    handled: list[int] = []
    letters: list[str] = []

    @app.subscriber(broker.queue, dead_letter=dead)
    def handle(order: Order) -> None:
        handled.append(order.id)
        raise Reject("nul \0, half a character \ud800 " + "x" * 9000)

    if dead is not None:

        @app.subscriber(dead)
        async def bury(message: Message[Order]) -> None:
            letters.append(message.headers["settled-error"])
            await message.ack()

    async def main() -> None:
        await app.publish(broker.queue, Order(1))
        stop = asyncio.Event()
        running = asyncio.create_task(app.serve(stop))
        async with asyncio.timeout(30):
            while not letters:
                letters.extend(error for _, error in await asyncio.to_thread(broker.dead_letters))
                await asyncio.sleep(0.05)
        stop.set()
        await running

    asyncio.run(main())
    assert handled == [1]
    assert letters[0].startswith("nul , half a character \\ud800 xx")


def test_an_app_keeps_to_the_queues_own_limit_and_says_so(
    broker: QueueBroker, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="settled")
    broker.configure({"leaseTime": LEASE, "retryLimit": 2, "retryDelay": 0})
    app = App(transport=broker.transport)
    attempts: list[int] = []

    @app.subscriber(broker.queue, requeue_count=6)
    def handle(message: Message[Order]) -> None:
        attempts.append(message.attempt)
        raise Defer(0, f"the bank said no {message.attempt} times")

    @app.subscriber(f"{broker.queue}-other")
    async def other(order: Order) -> None: ...

    assert status_of(app, broker, Order(1)).counts.rejected == 1
    assert attempts == [1, 2]
    [(_, error)] = broker.dead_letters()
    assert error == "Defer: no attempts left after 2, by the broker's own limit; the bank said no 2 times"
    assert "allows 6 attempts, but the broker gives a message up after 2" in caplog.text
    assert "allows unlimited attempts, but the broker gives a message up after 3" in caplog.text


def test_the_queue_is_told_why_a_message_is_sent_round_again(broker: QueueBroker) -> None:
    app = App(transport=broker.transport)
    attempts: list[int] = []

    @app.subscriber(broker.queue)
    async def handle(message: Message[Order]) -> None:
        attempts.append(message.attempt)
        if message.attempt == 2:
            # Less than the app knows of: the queue itself gives up what the app sends round again.
            options = {"leaseTime": LEASE, "retryLimit": 2, "retryDelay": 0}
            await asyncio.to_thread(broker.configure, options)
        raise Defer(0, f"the bank said no {message.attempt} times")

    status = status_of(app, broker, Order(1))
    assert attempts == [1, 2]
    assert [error for _, error in broker.dead_letters()] == ["the bank said no 2 times"]
    assert (status.counts.requeued, status.counts.rejected) == (1, 1)


def status_of(app: App, broker: QueueBroker, order: Order) -> Any:
    """Run the app until the order is a dead letter."""

    async def main() -> Any:
        await app.publish(broker.queue, order)
        stop = asyncio.Event()
        running = asyncio.create_task(app.serve(stop))
        async with asyncio.timeout(60):
            while not await asyncio.to_thread(broker.dead_letters):
                await asyncio.sleep(0.05)
        stop.set()
        return await running

    return asyncio.run(main())


def test_an_ack_after_the_lease_is_refused(broker: QueueBroker) -> None:
    broker.publish(Outgoing(subject=broker.queue, data=b"1"))
    channel = broker.channel()
    (delivery,) = channel.receive(1, 5)
    broker.wait(LEASE + 0.5)
    with pytest.raises(LeaseLost, match=delivery.id):
        channel.ack(delivery)
    with pytest.raises(LeaseLost):
        channel.extend(delivery)


def test_acks_of_a_batch_are_sent_together_or_after_a_moment(broker: QueueBroker) -> None:
    for number in range(4):
        broker.publish(Outgoing(subject=broker.queue, data=b"%d" % number, lane="one"))
    channel = broker.channel()
    deliveries = channel.receive(4, 5)
    channel.ack(deliveries[0])
    channel.ack(deliveries[1])
    broker.wait(LEASE + 0.5)
    again = channel.receive(4, 5)
    assert [delivery.data for delivery in again] == [b"2", b"3"]
    for delivery in again:
        channel.ack(delivery)
    channel.close()


class Watched:
    """A backend whose settle calls do not go out before the next pop has."""

    def __init__(self, inner: Backend) -> None:
        self._inner = inner
        self._pops = self._settled = 0
        self.rules, self.extend, self.push, self.close = inner.rules, inner.extend, inner.push, inner.close

    async def pop(self, *arguments: Any) -> Any:
        self._pops += 1
        return await self._inner.pop(*arguments)

    async def settle(self, *arguments: Any) -> Any:
        self._settled += 1
        async with asyncio.timeout(30):
            while self._pops <= self._settled:
                await asyncio.sleep(0.01)
        return await self._inner.settle(*arguments)


def test_the_next_batch_is_asked_for_while_the_acks_of_the_last_one_travel(broker: QueueBroker) -> None:
    headers = {"content-type": "application/json"}
    for number in range(12):
        data = b'{"id":%d}' % number
        broker.publish(Outgoing(subject=broker.queue, data=data, headers=headers, lane="one"))
    transport = broker.transport
    seen: list[int] = []
    connect = transport.connect

    async def watched() -> Backend:
        return Watched(await connect())

    transport.connect = watched  # type: ignore[method-assign]
    app = App(transport=transport)

    @app.subscriber(broker.queue, buffer=4)
    async def handle(order: Order) -> None:
        seen.append(order.id)

    async def main() -> Any:
        stop = asyncio.Event()
        running = asyncio.create_task(app.serve(stop))
        async with asyncio.timeout(60):
            while app.status().counts.acked < 12:
                await asyncio.sleep(0.01)
        stop.set()
        return await running

    counts = asyncio.run(main()).counts
    transport.connect = connect  # type: ignore[method-assign]
    assert seen == list(range(12))
    assert (counts.acked, counts.settle_failed) == (12, 0)
    # When the app has ended, nothing is on its way any more.
    broker.wait(LEASE + 0.5)
    assert not broker.channel().receive(1, 0)


def test_a_rejection_waits_for_its_batch_a_moment_at_most(broker: QueueBroker) -> None:
    for number in range(3):
        broker.publish(Outgoing(subject=broker.queue, data=b"%d" % number, lane="one"))
    channel = broker.channel()
    deliveries = channel.receive(3, 5)
    channel.reject(deliveries[0], Rejection(Reason.DELIVERY_ERROR, "no such customer"))
    deadline = time.monotonic() + 20
    while not broker.dead_letters() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert len(broker.dead_letters()) == 1
    for delivery in deliveries[1:]:
        channel.ack(delivery)
    channel.close()
    broker.wait(LEASE + 0.5)
    assert not broker.channel().receive(3, 0.5)


def test_a_missing_extra_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "asyncpg", None)
    for name in list(sys.modules):
        if name.startswith(("settled.queue", "settled.transports.postgres")):
            monkeypatch.delitem(sys.modules, name)
    with pytest.raises(
        ConfigurationError, match=r"postgresql:// needs asyncpg; run: pip install 'settled\[queue\]'"
    ):
        App("postgresql://localhost/x")


def test_schemes(tmp_path: Path) -> None:
    assert isinstance(App("postgresql://localhost/x").transport, PostgresTransport)
    assert isinstance(App("http://localhost:6632").transport, HttpTransport)


def test_a_handler_with_a_loop_of_its_own_publishes_on_the_apps_connection(dsn: str) -> None:
    transport = PostgresTransport(dsn)
    app = App(transport=transport)
    name = f"orders-{uuid.uuid4().hex[:8]}"

    @app.subscriber(name)
    def handle(number: int) -> None:
        async def publish() -> None:
            await app.publish(f"{name}-next", number)

        asyncio.run(publish())
        app.stop()

    async def main() -> int:
        await app.publish(name, 1)
        status = await asyncio.wait_for(app.serve(), 60)
        return status.counts.acked

    connected: list[object] = []
    connect = transport.connect

    async def counted() -> Any:
        connected.append(1)
        return await connect()

    transport.connect = counted  # type: ignore[method-assign]
    assert asyncio.run(main()) == 1
    assert len(connected) == 1
