"""What the pages on cloud brokers show, run against a server of each."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from settled import App
from tests.brokers.docs import example
from tests.brokers.pubsub import pubsub_server
from tests.brokers.servicebus import servicebus_server
from tests.brokers.sqs import CREDENTIALS, sqs_server


def serve_until(app: App, done: Callable[[], bool], start: Callable[[], object]) -> None:
    """Run the app, publish, and stop when a thing is so."""

    async def main() -> None:
        stop = asyncio.Event()
        running = asyncio.create_task(app.serve(stop))
        try:
            async with asyncio.timeout(60):
                while not running.done() and not all(
                    one.status == "started" for one in app.status().subscriptions
                ):
                    await asyncio.sleep(0.02)
                await asyncio.to_thread(start)
                while not running.done() and not done():
                    await asyncio.sleep(0.02)
        finally:
            stop.set()
            await running

    asyncio.run(main())


def test_the_example_for_sqs_charges_and_defers(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable, value in CREDENTIALS.items():
        monkeypatch.setenv(variable, value)
    with sqs_server() as server:
        app: App = example("sqs.md", f"sqs://127.0.0.1:{server.port}?region=eu-west-1&wait=1")["app"]

        def publish() -> None:
            for amount in (5, 0):
                app.publish("orders", {"id": 1, "amount": amount})

        serve_until(app, lambda: app.status().counts.acked == app.status().counts.requeued == 1, publish)


def test_the_example_for_service_bus_charges_notes_and_rejects() -> None:
    with servicebus_server() as server:
        app: App = example("servicebus.md", f"servicebus://a:Yg%3D%3D@127.0.0.1:{server.port}?emulator=true")[
            "app"
        ]

        def publish() -> None:
            for amount in (5, -1):
                app.publish("orders", {"id": 1, "amount": amount})
            app.publish("events", {})

        serve_until(app, lambda: (app.status().counts.acked, app.status().counts.rejected) == (2, 1), publish)


def test_the_example_for_pubsub_charges() -> None:
    with pubsub_server() as server:
        app: App = example("pubsub.md", f"pubsub://my-project?emulator=127.0.0.1:{server.port}")["app"]
        serve_until(app, lambda: app.status().counts.acked == 1, lambda: app.publish("orders", {"id": 1}))
