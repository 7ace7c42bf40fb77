"""Buffered pushes and closing a client: nothing is lost, and what is refused is named."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from settled.client import Client, Closed, Message, Refused, SyncClient
from settled.server.testing import RunningServer

LONG = "x" * 300


def run(server: RunningServer, work: Callable[[Client], Awaitable[None]]) -> None:
    async def main() -> None:
        async with asyncio.timeout(60), Client(server.url) as client:
            await work(client)

    asyncio.run(main())


def test_a_flush_sends_every_buffer_though_one_is_refused(server: RunningServer, queue: str) -> None:
    async def work(client: Client) -> None:
        await client.queue(LONG).buffer(seconds=20).push("bad", transaction_id="t1")
        await client.queue(queue).buffer(seconds=30).push("good")
        await client.queue(queue).partition(LONG).buffer(seconds=30).push("bad", transaction_id="t2")
        with pytest.raises(Refused, match="2 buffered messages refused") as refused:
            await client.flush()
        assert "'t1'" in str(refused.value)
        assert "'t2'" in str(refused.value)
        assert isinstance(refused.value.body, list)
        assert {id_ for id_, _ in refused.value.body} == {"t1", "t2"}
        assert [m.data for m in await client.queue(queue).pop()] == ["good"]
        await client.flush()

    run(server, work)


def test_closing_sends_every_buffer_though_one_is_refused(server: RunningServer, queue: str) -> None:
    async def main() -> None:
        client = Client(server.url)
        await client.queue(LONG).buffer(seconds=20).push("bad", transaction_id="t1")
        for number in range(5):
            await client.queue(queue).buffer(seconds=30).push(number)
        with pytest.raises(Refused, match="'t1'"):
            await client.close()
        with pytest.raises(Closed):
            await client.health()
        with pytest.raises(Closed):
            await client.queue(queue).buffer(seconds=30).push("late")

    asyncio.run(main())
    with SyncClient(server.url) as client:
        assert [m.data for m in client.queue(queue).batch(10).pop()] == list(range(5))


def test_a_blocking_client_ends_its_thread_though_closing_raises(server: RunningServer, queue: str) -> None:
    def threads() -> list[threading.Thread]:
        return [t for t in threading.enumerate() if t.name == "settled-client"]

    before = len(threads())
    client = SyncClient(server.url)
    client.queue(LONG).buffer(seconds=20).push("bad")
    client.queue(queue).buffer(seconds=30).push("good")
    assert len(threads()) == before + 1
    with pytest.raises(Refused):
        client.close()
    assert len(threads()) == before
    for use in (
        client.health,
        lambda: client.queue(queue).push(1),
        client.transaction().queue(queue).push(1).commit,
    ):
        with pytest.raises(Closed, match="this client is closed"):
            use()
    client.close()
    assert len(threads()) == before
    with SyncClient(server.url) as other:
        assert [m.data for m in other.queue(queue).batch(10).pop()] == ["good"]


def test_closing_ends_the_calls_of_other_threads(server: RunningServer, queue: str) -> None:
    client = SyncClient(server.url)
    ended: list[BaseException] = []
    begun = threading.Event()

    def consume() -> None:
        begun.set()
        try:
            client.queue(queue).consume(lambda _: None).run()
        except BaseException as error:
            ended.append(error)

    thread = threading.Thread(target=consume)
    thread.start()
    begun.wait()
    client.health()
    client.close()
    thread.join(30)
    assert [type(error) for error in ended] == [Closed]


def test_what_fits_into_a_full_queue_is_sent_and_the_rest_waits(server: RunningServer, queue: str) -> None:
    async def work(client: Client) -> None:
        await client.queue(queue).create(max_size=2)
        for number in range(3):
            await client.queue(queue).buffer(count=3, seconds=30).push(number)
        flushing = asyncio.create_task(client.flush())
        seen: list[int] = []
        while len(seen) < 2:
            seen += [m.data for m in await client.queue(queue, int).auto_ack().pop()]
        await flushing
        while len(seen) < 3:
            seen += [m.data for m in await client.queue(queue, int).auto_ack().pop()]
        assert seen == [0, 1, 2]

    run(server, work)


def test_a_flush_returns_while_others_go_on_pushing(server: RunningServer, queue: str) -> None:
    with SyncClient(server.url) as client:
        jobs = client.queue(queue).buffer(count=10, seconds=0.005)
        stop = threading.Event()

        def produce() -> None:
            deadline = time.monotonic() + 60
            while not stop.is_set() and time.monotonic() < deadline:
                jobs.push(1)

        producers = [threading.Thread(target=produce) for _ in range(2)]
        for producer in producers:
            producer.start()
        try:
            jobs.push("mine", transaction_id="mine")
            began = time.monotonic()
            client.flush()
            assert time.monotonic() - began < 50
            assert any(p.is_alive() for p in producers)
            # It is there: its id is known.
            assert client.queue(queue).push("mine", transaction_id="mine").status == "duplicate"
        finally:
            stop.set()
            for producer in producers:
                producer.join()


def test_a_message_that_cannot_be_sent_does_not_stop_the_buffer(server: RunningServer, queue: str) -> None:
    async def work(client: Client) -> None:
        jobs = client.queue(queue).buffer(count=10, seconds=30)
        await jobs.push("first")
        await jobs.push("bad", transaction_id="t", headers={"h": "\ud800"})
        await jobs.push("last")
        with pytest.raises(Refused, match=r"1 buffered messages refused: 't'.*UnicodeEncodeError"):
            await client.flush()
        messages: list[Message[Any]] = await client.queue(queue).batch(5).pop()
        assert [m.data for m in messages] == ["first", "last"]

    run(server, work)
