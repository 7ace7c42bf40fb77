"""Consume loops against a real server: what they take, how they end, and what they survive."""

from __future__ import annotations

import asyncio
import logging
import sys
import tempfile
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from settled.client import Client, Message, Refused, Resilience, SyncClient
from settled.server.testing import RunningServer, running_server


def run(url: str, work: Callable[[Client], Awaitable[None]], **options: Any) -> None:
    async def main() -> None:
        async with asyncio.timeout(60), Client(url, **options) as client:
            await work(client)

    asyncio.run(main())


def test_what_was_acknowledged_on_delivery_is_handled_before_a_stop(
    server: RunningServer, queue: str
) -> None:
    async def work(client: Client) -> None:
        await client.queue(queue).push_all(range(10))
        seen: list[int] = []

        async def handle(message: Message[int]) -> None:
            seen.append(message.data)
            if len(seen) == 3:
                consumption.stop()

        consumption = client.queue(queue, int).auto_ack().batch(10).each().consume(handle)
        assert await consumption == 10
        assert seen == list(range(10))
        assert await client.queue(queue).wait(0).pop() == []

    run(server.url, work)


def test_an_auto_ack_pop_that_is_under_way_is_not_given_up_for_a_stop(
    server: RunningServer, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work(client: Client) -> None:
        taken, go_on = asyncio.Event(), asyncio.Event()
        call = client._wire.call

        async def slow(method: str, path: str, *args: Any, **kwargs: Any) -> bytes:
            answer = await call(method, path, *args, **kwargs)
            if b"p1" in answer and method == "GET":
                taken.set()
                await go_on.wait()  # the server has settled them, and the answer is still on its way
            return answer

        monkeypatch.setattr(client._wire, "call", slow)
        seen: list[str] = []

        async def handle(message: Message[str]) -> None:
            seen.append(message.data)

        consumption = client.queue(queue, str).auto_ack().batch(5).each().consume(handle)
        running = asyncio.ensure_future(consumption.run())
        await client.queue(queue).push_all(["p1", "p2"])
        await taken.wait()
        consumption.stop()
        await asyncio.sleep(0.3)
        assert not running.done()
        go_on.set()
        assert await running == 2
        assert seen == ["p1", "p2"]

    run(server.url, work)


def test_messages_lost_to_a_handler_that_raises_are_named(
    sync: SyncClient, queue: str, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("a", "b"):
        sync.queue(queue).push(name, transaction_id=name)

    def handle(_: Message[str]) -> None:
        raise LookupError("mine")

    with pytest.raises(LookupError):
        sync.queue(queue, str).auto_ack().batch(2).each().consume(handle).run()
    assert "acknowledged on delivery, but not handled: message 'b'" in caplog.text


@pytest.mark.parametrize("workers", [1, 3])
def test_no_more_is_taken_than_is_left_of_the_limit(server: RunningServer, queue: str, workers: int) -> None:
    async def work(client: Client) -> None:
        await client.queue(queue).push_all(range(10))
        seen: list[int] = []

        async def handle(message: Message[int]) -> None:
            seen.append(message.data)

        jobs = client.queue(queue, int).auto_ack().batch(4).each().limit(6).concurrency(workers)
        assert await jobs.consume(handle) == 6
        assert sorted(seen) == list(range(6))
        assert [m.data for m in await client.queue(queue).batch(10).pop()] == [6, 7, 8, 9]

    run(server.url, work)


def test_a_lease_that_ended_too_soon_does_not_end_the_consumer(
    server: RunningServer, queue: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def work(client: Client) -> None:
        await client.queue(queue).create(lease_time=1)
        await client.queue(queue).push("x", transaction_id="slow")
        attempts: list[str] = []

        async def handle(message: Message[str]) -> None:
            attempts.append(message.transaction_id)
            if len(attempts) == 1:
                await asyncio.sleep(1.5)

        await client.queue(queue).limit(2).consume(handle).on_success(client.ack)
        assert attempts == ["slow", "slow"]

    run(server.url, work)
    record = next(r for r in caplog.records if r.levelno == logging.ERROR)
    assert record.name.startswith("settled")
    assert "message 'slow'" in record.getMessage()
    assert "comes again when its lease ends" in record.getMessage()


@pytest.mark.parametrize("error", [KeyError("mine"), Refused(400, "no such thing")])
def test_other_errors_of_a_callback_end_the_consumer(
    server: RunningServer, queue: str, error: Exception
) -> None:
    async def work(client: Client) -> None:
        await client.queue(queue).push(1)

        async def handle(_: Message[int]) -> None: ...

        async def callback(_: Message[int]) -> None:
            raise error

        with pytest.raises(type(error)):
            await client.queue(queue).consume(handle).on_success(callback)

    run(server.url, work)


def test_a_consumer_survives_a_server_that_is_away_while_it_acks(caplog: pytest.LogCaptureFixture) -> None:
    async def work(server: RunningServer, port: str, data: str) -> None:
        impatient = Resilience(retries=0, threshold=3, open_for=0.5)
        handled: dict[str, int] = {}
        gone, back = asyncio.Event(), asyncio.Event()

        async def charge(message: Message[int]) -> None:
            handled[message.transaction_id] = handled.get(message.transaction_id, 0) + 1
            gone.set()
            await back.wait()

        async with Client(server.url) as setup:
            await setup.queue("q").create(lease_time=2)
            for number in range(6):
                await setup.queue("q").push(number, transaction_id=f"m{number}")
        async with Client(server.url, resilience=impatient) as client:

            async def failed(message: Message[int], error: Exception) -> None:
                await client.nack(message, str(error))

            billing = client.queue("q").group("billing").batch(5).each().consume(charge)
            running = asyncio.ensure_future(billing.on_success(client.ack).on_error(failed).run())
            await gone.wait()
            await asyncio.to_thread(server.terminate)
            back.set()
            while not any("on_success failed" in r.getMessage() for r in caplog.records):
                assert not running.done(), running.result()
                await asyncio.sleep(0.05)
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "settled.server.command", "serve", "--port", port, "--data", data
            )
            try:
                while len(handled) < 6:  # the sixth was not in the batch that was in hand
                    assert not running.done(), running.result()
                    await asyncio.sleep(0.05)
                billing.stop()
                await running
            finally:
                process.terminate()
                await process.wait()

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as data, running_server(data=data) as server:
        port = server.url.rsplit(":", 1)[1]
        asyncio.run(asyncio.wait_for(work(server, port, data), 100))
