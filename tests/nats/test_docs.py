"""The examples of the docs, run against a real server."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from nats.js.api import ConsumerConfig

import nats
from settled import App
from tests.nats.conftest import Desk, running, until
from tests.nats.servers import Server, server

DOCS = Path(__file__).parents[2] / "docs"


def blocks(page: str, url: str, words: str) -> list[dict[str, Any]]:
    """The Python blocks that have these words, executed, with the server's real address."""
    found = []
    for code in re.findall(r"^```python\n(.*?)^```", (DOCS / page).read_text(), re.S | re.M):
        if words in code:
            names: dict[str, Any] = {"__name__": "block"}
            exec(compile(code.replace("nats://127.0.0.1:4222", url), page, "exec"), names)
            found.append(names)
    assert found, f"{page}: no block with {words!r}"
    return found


def test_the_durable_consumer_of_the_first_example_charges_orders() -> None:
    async def main(url: str) -> None:
        (names,) = blocks("nats.md", url, "class Order")
        client = await nats.connect(url)
        jetstream = client.jetstream()
        app: App = names["app"]
        async with running(app):
            for amount in (9.5, 0.0):
                await app.publish("orders.new", {"id": 1, "amount": amount})
            await until(lambda: app.status().counts.acked == app.status().counts.requeued == 1)
            config = (await jetstream.consumer_info("ORDERS", "billing")).config
            assert (config.max_deliver, config.backoff) == (5, [1, 5, 30, 120])
        await client.close()

    with server() as one:
        for _ in range(2):
            blocks("nats.md", one.url, "# streams.py")
        asyncio.run(main(one.url))


def test_the_explicit_example_settles_as_it_says(capsys: pytest.CaptureFixture[str]) -> None:
    async def main(url: str) -> None:
        (names,) = blocks("nats.md", url, "facts.stream_sequence")
        (publishing,) = blocks("nats.md", url, "async def place")
        client = await nats.connect(url)
        jetstream = client.jetstream()
        await jetstream.add_stream(name="ORDERS", subjects=["orders.>"])
        await jetstream.add_consumer("ORDERS", ConsumerConfig(durable_name="billing"))
        for number in (1, 13, 1):
            await publishing["place"](number)
        await publishing["app"].transport.close()
        async with running(names["app"]):

            async def settled() -> bool:
                info = await jetstream.consumer_info("ORDERS", "billing")
                return info.num_pending == info.num_ack_pending == 0

            await until(settled)
        assert (await jetstream.stream_info("SETTLED_DEAD_LETTERS")).state.messages == 1
        await client.close()

    with server() as one:
        asyncio.run(main(one.url))
    lines = capsys.readouterr().out.splitlines()
    assert lines[:3] == ["1 False", "2 False", "1 True"]
    assert {"1 1 0 1 billing", "2 2 0 0 billing", "1 3 1 0 billing"} == set(lines[3:])


def test_letters_go_to_the_stream_of_the_example(on_desk: Callable[..., None]) -> None:
    async def test(desk: Desk) -> None:
        (names,) = blocks("nats.md", desk.url, "GRAVEYARD")
        app: App = names["app"]

        @app.subscriber(desk.subject(), source=desk.durable())
        async def handle(order: dict[str, int]) -> None: ...

        await desk.put(b"nonsense")
        async with running(app):
            await until(desk.settled)
        (letter,) = await desk.all_of("GRAVEYARD", f"graveyard.{desk.stream}.>")
        assert letter.data == b"nonsense"

    on_desk(test)


def test_the_login_of_the_example_logs_in() -> None:
    async def main(one: Server) -> None:
        (names,) = blocks("nats.md", one.url, "Login(token=")
        transport = names["app"].transport
        await transport.open()
        assert transport.broker().connected
        await transport.close()

    with server("authorization { token: s3cr3t }") as one:
        asyncio.run(main(one))


def test_the_router_of_the_example_assigns_and_hears_back(capsys: pytest.CaptureFixture[str]) -> None:
    async def main(url: str) -> None:
        from settled.router.simulate import Behaviour, Worker

        (names,) = blocks("router.md", url, "async def assign")
        router = names["router"]
        await names["assign"]()
        worker = Worker(router.config, Behaviour())
        async with running(worker.app), running(router.app):
            await until(lambda: router.metrics.value("router_results_total") == 1)

    with server() as one:
        asyncio.run(main(one.url))
    assert capsys.readouterr().out.splitlines() == ["published", "result success"]


def test_every_setting_of_the_example_is_one() -> None:
    import tomllib

    import msgspec

    from settled.router import RouterConfig

    (text,) = re.findall(r"^```toml\n(.*?)^```", (DOCS / "router.md").read_text(), re.S | re.M)
    assert msgspec.convert(tomllib.loads(text), RouterConfig).tenants == ("acme", "globex")
