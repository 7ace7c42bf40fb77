"""Answers that are lost after the server applied a call: the client says what is known, and no more."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from settled.client import Client, Uncertain, Unsettled
from settled.server.testing import RunningServer


class Proxy:
    """Passes everything on, but hangs up in place of the answer to the next request with `lose` in it."""

    def __init__(self, port: int) -> None:
        self._to = port
        self._tasks: set[asyncio.Task[None]] = set()
        self.lose: bytes | None = None

    def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._pass_on(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.sleep(0.05)  # so that the sockets are closed

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", self._to)
        lost = asyncio.Event()

        async def up() -> None:
            while data := await reader.read(65536):
                if self.lose is not None and self.lose in data:
                    self.lose = None
                    lost.set()
                back.write(data)
                await back.drain()

        async def down() -> None:
            while (data := await there.read(65536)) and not lost.is_set():
                writer.write(data)
                await writer.drain()

        tasks = [asyncio.create_task(up()), asyncio.create_task(down())]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            writer.transport.abort()
            back.transport.abort()


def run(server: RunningServer, work: Callable[[Client, Proxy], Awaitable[None]]) -> None:
    async def main() -> None:
        proxy = Proxy(int(server.url.rsplit(":", 1)[1]))
        front = await asyncio.start_server(proxy.accept, "127.0.0.1", 0)
        port = front.sockets[0].getsockname()[1]
        try:
            async with asyncio.timeout(60), Client(f"http://127.0.0.1:{port}") as client:
                await work(client, proxy)
                assert proxy.lose is None, "no answer was lost"
        finally:
            front.close()
            await proxy.close()

    asyncio.run(main())


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("group", [None, "g"])
def test_an_ack_whose_answer_was_lost_is_an_ack(
    server: RunningServer, queue: str, batch: int, group: str | None
) -> None:
    async def work(client: Client, proxy: Proxy) -> None:
        jobs = client.queue(queue) if group is None else client.queue(queue).group(group)
        await jobs.push_all(range(batch))
        first, *rest = await jobs.batch(batch).pop()
        proxy.lose = b"/api/v1/ack"
        assert (await client.ack(first)).success
        for message in rest:
            await client.ack(message)
        assert await jobs.wait(0).pop() == []

    run(server, work)


def test_an_ack_that_came_too_late_is_none_though_an_answer_was_lost(
    server: RunningServer, queue: str
) -> None:
    async def work(client: Client, proxy: Proxy) -> None:
        await client.queue(queue).create(lease_time=1)
        await client.queue(queue).push("x")
        [late] = await client.queue(queue).pop()
        [_again] = await client.queue(queue).pop()
        proxy.lose = b"/api/v1/ack"
        with pytest.raises(Uncertain):
            await client.ack(late)

    run(server, work)


def test_a_nack_whose_answer_was_lost_is_uncertain(server: RunningServer, queue: str) -> None:
    async def work(client: Client, proxy: Proxy) -> None:
        await client.queue(queue).create(retry_delay=0)
        await client.queue(queue).push("x")
        [message] = await client.queue(queue).pop()
        proxy.lose = b"/api/v1/ack"
        with pytest.raises(Uncertain, match="may have been applied"):
            await client.nack(message, "no")
        [again] = await client.queue(queue).pop()
        assert again.attempt == 2
        with pytest.raises(Unsettled) as refused:
            await client.nack(message, "no")
        assert not isinstance(refused.value, Uncertain)

    run(server, work)


def test_a_transaction_whose_answer_was_lost_is_uncertain_and_applied_once(
    server: RunningServer, queue: str
) -> None:
    async def work(client: Client, proxy: Proxy) -> None:
        await client.queue(queue).push("in")
        [message] = await client.queue(queue).pop()
        proxy.lose = b"/api/v1/transaction"
        with pytest.raises(Uncertain, match="may have been applied"):
            await client.transaction().ack(message).queue(f"{queue}-out").push("out").commit()
        assert [m.data for m in await client.queue(f"{queue}-out").batch(5).pop()] == ["out"]

    run(server, work)


def test_a_dead_letter_whose_retry_had_no_answer_is_uncertain(server: RunningServer, queue: str) -> None:
    async def work(client: Client, proxy: Proxy) -> None:
        await client.queue(queue).push("x")
        [message] = await client.queue(queue).pop()
        await client.reject(message, "no")
        [letter] = (await client.queue(queue).get_dlq()).messages
        proxy.lose = b"/retry"
        with pytest.raises(Uncertain, match="may have been applied"):
            await client.retry_dead_letter(letter.id)
        assert [m.data for m in await client.queue(queue).batch(5).pop()] == ["x"]

    run(server, work)


def test_a_push_whose_answer_was_lost_is_one_push(server: RunningServer, queue: str) -> None:
    async def work(client: Client, proxy: Proxy) -> None:
        proxy.lose = b"/api/v1/push"
        await client.queue(queue).push("x")
        assert [m.data for m in await client.queue(queue).batch(5).pop()] == ["x"]

    run(server, work)
