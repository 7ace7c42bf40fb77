"""Dead letters on a cluster: with one server down they are written as before."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable

import nats.errors
import nats.js.errors
import pytest
from nats.aio.client import Client
from nats.js.api import ConsumerConfig, StreamConfig

import nats
from settled import App, Message
from settled.router import Router
from tests.nats.conftest import DEAD, is_up, running, until
from tests.nats.servers import Server, cluster
from tests.router.conftest import config

ADVISORIES = "SETTLED_ADVISORIES"


def on_cluster(test: Callable[[list[Server], str, Client], Awaitable[None]]) -> None:
    async def main(nodes: list[Server]) -> None:
        url = "nats://" + ",".join(f"127.0.0.1:{node.port}" for node in nodes)
        await is_up(nodes)
        client = await nats.connect([node.url for node in nodes], reconnect_time_wait=0.1)
        try:
            await client.jetstream().add_stream(name="ORDERS", subjects=["orders.>"], num_replicas=3)
            await test(nodes, url, client)
        finally:
            await client.close()

    with cluster() as nodes:
        asyncio.run(asyncio.wait_for(main(nodes), 150))


async def replicas(client: Client, stream: str) -> int:
    return (await client.jetstream().stream_info(stream)).config.num_replicas or 1


async def has_leaders(client: Client) -> bool:
    """Whether somebody answers for the cluster and for the stream that is read."""
    with contextlib.suppress(nats.errors.Error, nats.js.errors.APIError):
        jetstream = client.jetstream(timeout=1)
        info = await jetstream.stream_info(await jetstream.find_stream_name_by_subject("orders.new"))
        return info.cluster is not None and bool(info.cluster.leader)
    return False


async def stop_the_one_with(client: Client, stream: str, nodes: list[Server]) -> None:
    """Kill the server that leads a stream; with one replica, the only one that has it."""
    cluster_info = (await client.jetstream().stream_info(stream)).cluster
    assert cluster_info is not None
    number = int(str(cluster_info.leader).removeprefix("n"))
    await asyncio.to_thread(nodes[number].stop, kill=True)
    await until(lambda: has_leaders(client), 30)


def reader(url: str, seen: list[int]) -> App:
    app = App(url)

    @app.subscriber("orders.new", group="billing")
    async def leave(message: Message[int]) -> None:
        seen.append(message.payload)

    return app


@contextlib.asynccontextmanager
async def reading(url: str) -> AsyncIterator[list[int]]:
    """An app that never settles what it reads, so that it runs out of deliveries."""
    seen: list[int] = []
    async with running(reader(url, seen)):
        yield seen


async def make_consumer(client: Client) -> None:
    await client.jetstream().add_consumer(
        "ORDERS",
        ConsumerConfig(durable_name="billing", filter_subject="orders.new", ack_wait=0.5, max_deliver=2),
    )


async def publish(client: Client, subject: str, data: bytes) -> None:
    """Publish once, after an election if need be."""

    async def stored() -> bool:
        with contextlib.suppress(nats.errors.Error, nats.js.errors.Error):
            await client.jetstream().publish(subject, data, headers={"Nats-Msg-Id": "1"})
            return True
        return False

    await until(stored, 30)


async def letters(client: Client, stream: str) -> list[bytes]:
    count = (await client.jetstream().stream_info(stream)).state.messages
    found = [await client.jetstream().get_msg(stream, seq=number + 1) for number in range(count)]
    return [letter.data or b"" for letter in found]


def test_with_a_server_down_a_group_starts_and_what_runs_out_of_deliveries_gets_its_letter() -> None:
    """Defect P2."""

    async def test(nodes: list[Server], url: str, client: Client) -> None:
        await make_consumer(client)
        async with reading(url):
            assert await replicas(client, ADVISORIES) == 3
            assert await replicas(client, DEAD) == 3
        await stop_the_one_with(client, ADVISORIES, nodes)
        async with reading(url) as seen:
            await publish(client, "orders.new", b"7")
            await until(lambda: seen == [7, 7], 30)

            async def has_a_letter() -> bool:
                return await letters(client, DEAD) == [b"7"]

            await until(has_a_letter, 30)

    on_cluster(test)


def test_with_a_server_down_a_router_starts_and_what_runs_out_of_deliveries_gets_its_letter() -> None:
    """Defect P2."""

    async def test(nodes: list[Server], url: str, client: Client) -> None:
        settings = config(url, replicas=3, nats_js_max_deliver=2, nats_js_backoff_seconds=(0.5, 0.5))
        first = Router(settings)
        await first.open()
        async with running(first.app):
            assert await replicas(client, ADVISORIES) == 3
        await stop_the_one_with(client, ADVISORIES, nodes)
        # Somebody takes a result twice and does not settle it, while no router is there.
        taken = await client.subscribe("_router.router-results", queue="router-results")
        await publish(client, settings.result_subject, b"{}")
        for _ in range(2):
            await taken.next_msg(20)
        await taken.unsubscribe()
        router = Router(settings)
        await router.open()
        async with running(router.app):
            exhausted = "router_jetstream_maxdeliver_exhausted_total"
            await until(lambda: router.metrics.value(exhausted, reason="not_settled_in_time") == 1, 30)
            assert await letters(client, settings.dead_letter_stream) == [b"{}"]

    on_cluster(test)


def test_an_existing_stream_with_fewer_replicas_gets_them() -> None:
    """Defect P2: made by an older version, or for a stream with one replica."""

    async def test(_: list[Server], url: str, client: Client) -> None:
        await make_consumer(client)
        subjects = [f"$JS.EVENT.ADVISORY.CONSUMER.{kind}.>" for kind in ("MAX_DELIVERIES", "MSG_TERMINATED")]
        await client.jetstream().add_stream(StreamConfig(name=ADVISORIES, subjects=subjects, num_replicas=1))
        async with reading(url):
            assert await replicas(client, ADVISORIES) == 3

    on_cluster(test)


def test_a_stream_of_letters_whose_only_server_is_down_is_named(caplog: pytest.LogCaptureFixture) -> None:
    """Defect P2: what is left of it, in one line."""

    async def test(nodes: list[Server], url: str, client: Client) -> None:
        await make_consumer(client)
        await client.jetstream().add_stream(
            StreamConfig(name=DEAD, subjects=["settled.dead.>"], num_replicas=1)
        )
        await stop_the_one_with(client, DEAD, nodes)
        with pytest.raises(ConnectionError, match=f"stream '{DEAD}', which keeps dead letters"):
            await reader(url, []).serve()

    caplog.set_level(logging.ERROR)
    on_cluster(test)
