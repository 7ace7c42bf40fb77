"""Bounds of one request: bytes of an answer, of all answers, and how long one may stay unread."""

from __future__ import annotations

import asyncio
import socket
import time
from typing import TYPE_CHECKING

import pytest

from settled.server import listener as listening
from settled.server.exchange import Answer, Request
from settled.server.listener import Listener
from settled.server.testing import RunningServer, running_server
from tests.server.http import Http

if TYPE_CHECKING:
    from collections.abc import Iterator

LIMIT = 1_000_000


@pytest.fixture(scope="module")
def bounded() -> Iterator[RunningServer]:
    with running_server(pop_limit=LIMIT) as server:
        yield server


@pytest.mark.parametrize("auto_ack", ["true", "false"])
def test_a_pop_is_bounded_in_bytes_and_the_rest_comes_with_the_next(
    bounded: RunningServer, queue: str, auto_ack: str
) -> None:
    """Defect Q4."""
    http = Http(bounded.url)
    for i in range(0, 30, 5):
        http.push(queue, *({"n": n, "text": "x" * 200_000} for n in range(i, i + 5)))
    seen: list[int] = []
    while messages := http.pop(queue, batch=10_000, autoAck=auto_ack)["messages"]:
        assert sum(len(message["data"]["text"]) for message in messages) <= LIMIT
        seen += [message["data"]["n"] for message in messages]
        if auto_ack == "false":
            assert {http.ack(message).status for message in messages} == {200}
    assert seen == list(range(30))


def test_pops_are_refused_while_too_many_bytes_wait_for_their_readers(
    bounded: RunningServer, queue: str
) -> None:
    """Defect Q4: six clients that did not read kept 3.8 GB."""
    http = Http(bounded.url)
    for _ in range(2):
        http.push(queue, "x" * 14_000_000)
    http.push(f"{queue}-small", 1)
    port = int(bounded.url.rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port)) as idle:
        idle.sendall(b"GET /api/v1/pop/queue/%b?autoAck=true HTTP/1.1\r\nHost: h\r\n\r\n" % queue.encode())
        deadline = time.monotonic() + 20
        while (refused := http("GET", f"/api/v1/pop/queue/{queue}-none")).status == 200:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert (refused.status, refused.headers["retry-after"]) == (503, "1")
        assert "have not read yet" in refused.body["error"]
        assert http.push(queue, 1)[0]["status"] == "queued"
    while http("GET", f"/api/v1/pop/queue/{queue}-small").status == 503:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_client_that_never_reads_is_hung_up_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Defect Q4."""
    monkeypatch.setattr(listening, "UNREAD_TIMEOUT", 0.5)

    async def large(_: Request) -> Answer:
        return Answer(200, b"x" * 30_000_000)

    async def main() -> None:
        listener = Listener(large, body_limit=1000)
        sock = socket.socket()
        sock.bind(("127.0.0.1", 0))
        await listener.start(sock)
        try:
            async with asyncio.timeout(20):
                reader, writer = await asyncio.open_connection(*sock.getsockname(), limit=1000)
                writer.write(b"GET / HTTP/1.1\r\nHost: h\r\n\r\n")
                await reader.readexactly(100)
                while not listener.unsent:
                    await asyncio.sleep(0.01)
                while listener.connections:
                    await asyncio.sleep(0.01)
                assert listener.unsent == 0
                writer.close()
        finally:
            await listener.stop(0.5)

    asyncio.run(main())


def test_a_client_that_reads_slowly_gets_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Defect Q4: slow is not idle."""
    monkeypatch.setattr(listening, "UNREAD_TIMEOUT", 2.0)

    async def large(_: Request) -> Answer:
        return Answer(200, b"x" * 30_000_000)

    async def main() -> None:
        listener = Listener(large, body_limit=1000)
        sock = socket.socket()
        sock.bind(("127.0.0.1", 0))
        await listener.start(sock)
        try:
            async with asyncio.timeout(60):
                reader, writer = await asyncio.open_connection(*sock.getsockname(), limit=2**16)
                writer.write(b"GET / HTTP/1.1\r\nHost: h\r\n\r\n")
                await reader.readuntil(b"\r\n\r\n")
                for _ in range(10):
                    await reader.readexactly(3_000_000)
                    await asyncio.sleep(0.5)  # the client's own pace
                assert listener.unsent == 0
                writer.close()
        finally:
            await listener.stop(0.5)

    asyncio.run(main())
