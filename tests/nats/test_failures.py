"""Servers that go away and come back, leaders that change: nothing is lost and nothing settled wrongly."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Iterator

import msgspec
import pytest
from nats.js.api import RetentionPolicy

from settled import App, Reject
from settled.transports.nats import DeadLetters, NatsTransport
from tests.nats.conftest import Desk, desk_on, is_up, running, until
from tests.nats.servers import Server, cluster, server


class Order(msgspec.Struct):
    id: int


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    with caplog.at_level(logging.CRITICAL):
        yield


@pytest.mark.parametrize("kill", [False, True])
def test_a_restarted_server_finds_the_app_waiting_and_its_health_says_so_meanwhile(kill: bool) -> None:
    async def main(one: Server) -> None:
        async with desk_on(one.url, retention=RetentionPolicy.WORK_QUEUE) as desk:
            app, seen = desk.app(), Counter[int]()

            @app.subscriber(
                desk.subject(), source=desk.durable(ack_wait=1), channel_failure_delay=0.1, buffer=5
            )
            async def handle(order: Order) -> None:
                seen[order.id] += 1
                await asyncio.sleep(0.005)

            async with running(app):
                assert app.status().healthy
                for number in range(60):
                    await desk.put(b'{"id": %d}' % number)
                    if number == 30:
                        await asyncio.to_thread(one.stop, kill=kill)
                        await until(lambda: not app.status().healthy)
                        assert "reconnecting" in app.status().broker.detail
                        await until(lambda: app.status().counts.receive_failed > 0)
                        await asyncio.to_thread(one.start)
                        await until(lambda: desk.client.is_connected)
                await until(lambda: app.status().healthy)

                async def empty() -> bool:
                    return await desk.kept() == 0

                await until(empty, 30)
            assert set(seen) == set(range(60))
            assert app.status().counts.rejected == 0

    with server() as one:
        asyncio.run(asyncio.wait_for(main(one), 90))


@pytest.mark.parametrize("push", [False, True])
def test_a_client_that_has_closed_for_good_is_replaced(push: bool) -> None:
    async def main(one: Server) -> None:
        async with desk_on(one.url) as desk:
            app, seen = desk.app(), []
            config = {"deliver_subject": f"push.{desk.stream}"} if push else {}

            @app.subscriber(
                desk.subject(), source=desk.durable(ack_wait=1, **config), channel_failure_delay=0.1
            )
            async def handle(order: Order) -> None:
                seen.append(order.id)
                if order.id == 2:
                    raise Reject("no")

            async with running(app):
                await desk.put(b'{"id": 1}')
                await until(lambda: seen == [1])
                # As the client does on its own account when the server says that its login has expired.
                await app.transport.connection.sending.close()  # type: ignore[attr-defined]
                assert not app.status().healthy
                await desk.put(b'{"id": 2}')
                # Perhaps only at its second delivery: the first may have gone to the client that is no more.
                await until(lambda: 2 in seen)
                await until(lambda: app.status().healthy)
                await until(desk.settled)
                assert len(await desk.letters()) == 1

    with server() as one:
        asyncio.run(asyncio.wait_for(main(one), 60))


def test_the_count_of_deliveries_survives_a_restart() -> None:
    async def main(one: Server) -> None:
        async with desk_on(one.url) as desk:
            app, attempts = desk.app(), []

            @app.subscriber(
                desk.subject(),
                source=desk.durable(max_deliver=3, backoff=[0.2, 0.2]),
                channel_failure_delay=0.1,
            )
            async def handle(order: Order) -> None:
                attempts.append(order.id)
                if len(attempts) == 1:
                    await asyncio.to_thread(one.stop)
                    await asyncio.to_thread(one.start)
                raise ValueError("never")

            await desk.put(b'{"id": 1}')
            async with running(app):

                async def there() -> bool:
                    with contextlib.suppress(Exception):
                        return bool(await desk.letters())
                    return False

                await until(there, 30)
            (letter,) = await desk.letters()
            assert (letter.headers or {})["settled-attempts"] == "3"
            assert len(attempts) == 3

    with server() as one:
        asyncio.run(asyncio.wait_for(main(one), 60))


def test_leaders_change_and_a_node_dies_and_nothing_is_lost() -> None:
    async def main(nodes: list[Server]) -> None:
        url = "nats://" + ",".join(f"127.0.0.1:{node.port}" for node in nodes)
        await is_up(nodes)
        async with desk_on(url, replicas=3) as desk:
            await scenario(desk, url, nodes)

    async def scenario(desk: Desk, url: str, nodes: list[Server]) -> None:
        letters = DeadLetters(replicas=3)
        app = App(transport=NatsTransport(url, dead_letters=letters, timeout=30))
        seen = Counter[int]()

        @app.subscriber(
            desk.subject(),
            source=desk.durable(ack_wait=3, max_deliver=20),
            channel_failure_delay=0.1,
            performers=2,
            buffer=10,
        )
        async def handle(order: Order) -> None:
            seen[order.id] += 1
            if order.id % 50 == 0:
                raise Reject("poison")

        async with running(app):
            for number in range(300):
                await app.publish(desk.subject(), Order(number), id=f"{desk.stream}-{number}")
                if number in (60, 120):
                    for what in (
                        f"STREAM.LEADER.STEPDOWN.{desk.stream}",
                        f"CONSUMER.LEADER.STEPDOWN.{desk.stream}.worker",
                    ):
                        await desk.client.request(f"$JS.API.{what}", b"", timeout=5)
                if number == 180:
                    await asyncio.to_thread(nodes[0].stop, kill=True)
                if number == 240:
                    await asyncio.to_thread(nodes[0].start)
            await until(lambda: len(seen) == 300, 40)

            async def settled() -> bool:
                with contextlib.suppress(Exception):
                    return await desk.settled()
                return False

            await until(settled, 40)
        dead = await desk.letters()
        assert sorted(msgspec.json.decode(letter.data)["id"] for letter in dead) == list(range(0, 300, 50))
        assert (await desk.jetstream.stream_info(desk.stream)).state.messages == 300

    with cluster() as nodes:
        asyncio.run(asyncio.wait_for(main(nodes), 150))
