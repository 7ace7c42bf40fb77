"""Publishing: acknowledged, deduplicated, with headers and a trace, from async and sync code."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider

from settled import App, ConfigurationError
from settled.transports.nats import NatsTransport
from settled.transports.nats.connection import Refused
from tests.nats.conftest import Desk, running, until
from tests.nats.servers import Server

OnDesk = Callable[..., None]


def test_a_second_publish_of_an_id_is_a_duplicate(on_desk: OnDesk) -> None:
    async def test(desk: Desk) -> None:
        app = App(desk.url)
        first = await app.publish(desk.subject(), {"id": 1}, id="order-1", headers={"tenant": "t1"})
        second = await app.publish(desk.subject(), {"id": 1}, id="order-1")
        await app.transport.close()
        assert (first.id, first.duplicate, first.sequence) == ("order-1", False, 1)
        assert (second.duplicate, second.sequence) == (True, 1)
        stored = await desk.jetstream.get_msg(desk.stream, seq=1)
        assert stored.headers == {
            "tenant": "t1",
            "content-type": "application/json",
            "Nats-Msg-Id": "order-1",
        }

    on_desk(test)


def test_sync_code_publishes_with_and_without_a_running_app(nats_server: Server, on_desk: OnDesk) -> None:
    async def test(desk: Desk) -> None:
        app, published = App(desk.url), []

        @app.subscriber(desk.subject(), source=desk.durable())
        def handle(order: dict[str, int]) -> None:
            if order["id"] == 1:
                published.append(app.publish(desk.subject(), {"id": 2}).result())
            published.append(order["id"])

        first = await asyncio.to_thread(lambda: app.publish(desk.subject(), {"id": 1}).result())
        assert first.sequence == 1
        async with running(app):
            await until(lambda: 2 in published)
        last = await asyncio.to_thread(lambda: app.publish(desk.subject(), {"id": 3}).result())
        assert last.sequence == 3
        await app.transport.close()

    on_desk(test)


def test_the_current_span_travels_in_traceparent(on_desk: OnDesk) -> None:
    async def test(desk: Desk) -> None:
        app = App(desk.url)
        tracer = TracerProvider().get_tracer("test")
        with tracer.start_as_current_span("request") as span:
            await app.publish(desk.subject(), 1)
            await app.publish(desk.subject(), 2, headers={"traceparent": "00-given"})
        await app.publish(desk.subject(), 3)
        await app.transport.close()
        found = [(await desk.jetstream.get_msg(desk.stream, seq=n)).headers or {} for n in (1, 2, 3)]
        trace_id = trace.format_trace_id(span.get_span_context().trace_id)
        assert found[0]["traceparent"].startswith(f"00-{trace_id}-")
        assert found[1]["traceparent"] == "00-given"
        assert "traceparent" not in found[2]

    on_desk(test)


def test_a_subject_that_no_stream_takes_is_refused_at_once(on_desk: OnDesk) -> None:
    async def test(desk: Desk) -> None:
        app = App(transport=NatsTransport(desk.url, timeout=60))
        began = time.monotonic()
        with pytest.raises(ConfigurationError, match=r"no stream takes subject 'nowhere.at.all'"):
            await app.publish("nowhere.at.all", 1)
        assert time.monotonic() - began < 30
        with pytest.raises(ConfigurationError, match="NATS has no lanes"):
            app.publish(desk.subject(), 1, lane="a")
        await app.transport.close()

    on_desk(test)


def test_a_delayed_message_comes_when_it_is_due(nats_server: Server, on_desk: OnDesk) -> None:
    async def test(desk: Desk) -> None:
        config = (await desk.jetstream.stream_info(desk.stream)).config
        await desk.jetstream.update_stream(config.evolve(allow_msg_schedules=True))
        app, at = App(desk.url), []

        @app.subscriber(desk.subject(), source=desk.durable())
        async def handle(order: int) -> None:
            at.append(time.monotonic())

        async with running(app):
            began = time.monotonic()
            await app.publish(desk.subject(), 1, delay=1.2)
            await until(lambda: bool(at))
        assert at[0] - began == pytest.approx(1.2, abs=0.5)

    on_desk(test)


def test_an_app_publishes_from_one_loop_after_another(nats_server: Server, on_desk: OnDesk) -> None:
    async def test(desk: Desk) -> None:
        app = App(desk.url)

        async def publish(number: int) -> None:
            await app.publish(desk.subject(), number)
            if number == 2:
                await app.transport.close()
            else:
                # As a script does that ends its loop without a word.
                await app.transport.connection.sending.close()

        for number in (1, 2):
            await asyncio.to_thread(asyncio.run, publish(number))
        assert await desk.kept() == 2

    on_desk(test)


def test_without_the_extra_the_url_is_refused_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("settled.transports.nats")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "nats", None)
    with pytest.raises(ConfigurationError, match=r"pip install 'settled\[nats\]'"):
        App("nats://127.0.0.1:4222")


def test_a_server_that_is_not_there_is_named_with_the_reason() -> None:
    async def main() -> None:
        transport = NatsTransport("nats://ann:secret@127.0.0.1:1")
        with pytest.raises(
            ConnectionError, match=r"cannot connect to 127.0.0.1:1: ConnectionRefusedError"
        ) as found:
            await transport.open()
        assert "secret" not in str(found.value)

    asyncio.run(main())


def test_a_message_that_is_too_large_with_its_headers_is_refused_and_the_next_one_goes(
    on_desk: OnDesk, caplog: pytest.LogCaptureFixture
) -> None:
    async def test(desk: Desk) -> None:
        app = App(desk.url)
        with pytest.raises(Refused, match=r"1048576 bytes at most .max_payload., got 10486") as refused:
            await app.publish(desk.subject(), b"x" * (1024 * 1024 - 10))
        assert app.transport.refuses(refused.value)  # type: ignore[attr-defined]
        assert (await app.publish(desk.subject(), b"y")).sequence == 1
        await app.transport.close()
        assert "lost the connection" not in caplog.text

    on_desk(test)
