"""Long polls: they wake at once, answer on time, and end when nobody listens any more."""

from __future__ import annotations

import asyncio
import time
import uuid
from typing import Any

import aiohttp
import pytest

from settled.server.testing import RunningServer, running_server
from tests.server.http import Http
from tests.server.workers import on_each_worker

ROUNDS = 15


async def wake_up_times(poll: aiohttp.ClientSession, push: aiohttp.ClientSession, queue: str) -> list[float]:
    """Milliseconds from a push's answer to the answer of a pop that waited."""
    spent: list[float] = []

    async def pop() -> tuple[float, Any]:
        params = {"wait": "true", "timeout": "10000", "autoAck": "true"}
        async with poll.get(f"/api/v1/pop/queue/{queue}", params=params) as answer:
            body = await answer.json()
            return time.perf_counter(), body

    for i in range(ROUNDS):
        waiting = asyncio.create_task(pop())
        await asyncio.sleep(0.08)
        items = {"items": [{"queue": queue, "payload": i, "partition": f"p{i % 3}"}]}
        async with push.post("/api/v1/push", json=items) as answer:
            await answer.read()
        pushed = time.perf_counter()
        woken, body = await waiting
        assert [m["data"] for m in body["messages"]] == [i]
        spent.append((woken - pushed) * 1000)
    return spent


def _usual(spent: list[float]) -> float:
    """Return the time of the quickest tenth: the others are also times of a machine that is busy."""
    return sorted(spent)[len(spent) // 10]


def test_a_long_poll_wakes_within_20_ms(server: RunningServer, queue: str) -> None:
    async def main() -> list[float]:
        async with aiohttp.ClientSession(server.url) as poll, aiohttp.ClientSession(server.url) as push:
            return await wake_up_times(poll, push, queue)

    spent = asyncio.run(main())
    assert _usual(spent) < 20, spent


def test_a_long_poll_wakes_when_another_process_took_the_push() -> None:
    """Defect Q1: that two workers exist says nothing; the poll and the push must be on different ones."""

    async def main(url: str) -> list[float]:
        async with on_each_worker(url, 2) as (poll, push):
            return await wake_up_times(poll, push, f"q-{uuid.uuid4().hex}")

    with running_server(workers=2) as server:
        spent = asyncio.run(main(server.url))
    assert _usual(spent) < 20, spent


@pytest.mark.parametrize("milliseconds", [50, 1500])
def test_a_timeout_answers_on_time(http: Http, queue: str, milliseconds: int) -> None:
    started = time.monotonic()
    popped = http.pop(queue, wait="true", timeout=milliseconds)
    spent = (time.monotonic() - started) * 1000
    assert (popped["success"], popped["messages"]) == (True, [])
    assert milliseconds - 5 <= spent < milliseconds + 5000


def test_a_message_goes_to_one_of_many_that_wait(server: RunningServer, queue: str) -> None:
    async def main() -> list[int]:
        async with aiohttp.ClientSession() as session:

            async def pop() -> int:
                params = {"wait": "true", "timeout": "1500"}
                async with session.get(f"{server.url}/api/v1/pop/queue/{queue}", params=params) as answer:
                    return len((await answer.json())["messages"])

            waiting = [asyncio.create_task(pop()) for _ in range(20)]
            await asyncio.sleep(0.2)
            for i in range(5):
                body = {"items": [{"queue": queue, "partition": f"p{i}", "payload": i}]}
                async with session.post(f"{server.url}/api/v1/push", json=body) as answer:
                    await answer.read()
            return await asyncio.gather(*waiting)

    assert sorted(asyncio.run(main())) == [0] * 15 + [1] * 5


def test_a_poll_whose_client_hung_up_takes_no_message(server: RunningServer, http: Http, queue: str) -> None:
    async def hang_up() -> None:
        host, port = server.url.removeprefix("http://").split(":")
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(
            f"GET /api/v1/pop/queue/{queue}?wait=true&timeout=20000 HTTP/1.1\r\nHost: h\r\n\r\n".encode()
        )
        await writer.drain()
        await asyncio.sleep(0.1)
        writer.close()
        await writer.wait_closed()

    asyncio.run(hang_up())
    time.sleep(0.1)
    http.push(queue, "mine")
    assert [m["data"] for m in http.pop(queue)["messages"]] == ["mine"]
