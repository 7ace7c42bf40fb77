"""The HTTP/1.1 connection, spoken to in raw bytes over a real socket."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import TYPE_CHECKING

from settled.server.exchange import Answer, HttpError, Request, ok
from settled.server.listener import Listener

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from settled.server.protocol import Soon

LIMIT = 10_000
WRITERS: list[asyncio.StreamWriter] = []


async def echo(request: Request) -> Answer:
    match request.path:
        case b"/fail":
            raise RuntimeError("boom")
        case b"/refuse":
            raise HttpError(418, "no coffee")
        case b"/slow":
            await asyncio.sleep(0.2)
    return ok({"method": request.method, "path": request.path.decode(), "query": request.query.decode(),
               "body": request.body.decode("latin-1")})  # fmt: skip


def with_server(talk: Callable[[Listener, int], Awaitable[None]], soon: Soon | None = None) -> None:
    async def main() -> None:
        listener = Listener(echo, body_limit=LIMIT, soon=soon)
        sock = socket.socket()
        sock.bind(("127.0.0.1", 0))
        await listener.start(sock)
        try:
            async with asyncio.timeout(10):
                await talk(listener, sock.getsockname()[1])
        finally:
            await listener.stop(0.5)
            for writer in WRITERS:
                writer.close()
                await asyncio.gather(writer.wait_closed(), return_exceptions=True)
            WRITERS.clear()

    asyncio.run(main())


async def answer(reader: asyncio.StreamReader) -> tuple[int, dict[str, str], bytes]:
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    first, *lines = head.split("\r\n")
    headers = {k.lower(): v for k, v in (line.split(": ", 1) for line in lines if line)}
    return int(first.split()[1]), headers, await reader.readexactly(int(headers.get("content-length", 0)))


async def say(port: int, *parts: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    WRITERS.append(writer)
    for part in parts:
        writer.write(part)
        await writer.drain()
        await asyncio.sleep(0.01)
    return reader, writer


def test_a_request_in_pieces_is_put_together() -> None:
    async def talk(_: Listener, port: int) -> None:
        reader, writer = await say(
            port, b"POST /a?x=1 HT", b"TP/1.1\r\nHost: h\r\nContent-Le", b"ngth: 6\r\n\r\nab", b"cd", b"ef"
        )
        status, headers, body = await answer(reader)
        assert status == 200
        assert headers["content-type"] == "application/json"
        assert headers["access-control-allow-origin"] == "*"
        assert json.loads(body) == {"method": "POST", "path": "/a", "query": "x=1", "body": "abcdef"}
        writer.close()

    with_server(talk)


def test_pipelined_requests_are_answered_in_order() -> None:
    async def talk(_: Listener, port: int) -> None:
        wanted = [b"/slow", *(b"/%d" % i for i in range(60))]
        reader, writer = await say(
            port, b"".join(b"GET %s HTTP/1.1\r\nHost: h\r\n\r\n" % path for path in wanted)
        )
        seen = [json.loads((await answer(reader))[2])["path"].encode() for _ in wanted]
        assert seen == wanted
        writer.close()

    with_server(talk)


def test_a_head_that_came_before_is_recognised_and_its_body_is_its_own() -> None:
    async def talk(_: Listener, port: int) -> None:
        head = b"POST /a?x=1 HTTP/1.1\r\nHost: h\r\nContent-Length: 6\r\n\r\n"
        reader, writer = await say(port, head + b"first!")
        assert json.loads((await answer(reader))[2])["body"] == "first!"
        for parts in ([head + b"second"], [head + b"th", b"ird!"], [head[:30], head[30:] + b"fourth"]):
            for part in parts:
                writer.write(part)
                await writer.drain()
                await asyncio.sleep(0.01)
            seen = json.loads((await answer(reader))[2])
            assert (seen["path"], seen["query"]) == ("/a", "x=1")
            assert seen["body"].encode() == b"".join(parts)[-6:]
        writer.write((head + b"fifth!") + b"GET /b HTTP/1.1\r\nHost: h\r\n\r\n")
        assert json.loads((await answer(reader))[2])["body"] == "fifth!"
        assert json.loads((await answer(reader))[2])["path"] == "/b"
        writer.close()

    with_server(talk)


def test_a_request_whose_head_was_cut_is_not_carried_out_though_its_head_is_known() -> None:
    """Defect Q7."""

    async def talk(listener: Listener, port: int) -> None:
        asked: list[str] = []
        listener._shared.soon = lambda request, _: bool(asked.append(request.method))
        head = b"DELETE /a HTTP/1.1\r\nHost: a"
        reader, writer = await say(port, head + b"\r\n\r\n")
        assert (await answer(reader))[0] == 200
        writer.write(head)
        writer.write_eof()
        assert await reader.read() == b""
        assert asked == ["DELETE"]
        reader, writer = await say(port, head, b"bc\r\n\r\n")
        assert (await answer(reader))[0] == 200
        assert asked == ["DELETE", "DELETE"]
        writer.close()

    with_server(talk)


def test_a_request_that_needs_no_coroutine_is_answered_when_its_reply_comes() -> None:
    replies: list[tuple[Request, Callable[[Answer | None], None]]] = []

    def soon(request: Request, reply: Callable[[Answer | None], None]) -> bool:
        if request.path == b"/refuse":
            return False
        replies.append((request, reply))
        return True

    async def talk(_: Listener, port: int) -> None:
        wanted = [b"/1", b"/refuse", b"/2", b"/again"]
        reader, writer = await say(port, b"".join(b"GET %s HTTP/1.1\r\n\r\n" % path for path in wanted))
        statuses = []
        for path in wanted:
            if path != b"/refuse":
                while not replies:
                    await asyncio.sleep(0.001)
                request, reply = replies.pop()
                assert request.path == path
                reply(None if path == b"/again" else ok({"path": path.decode()}, 202))
            status, _headers, body = await answer(reader)
            statuses.append(status)
            if path != b"/refuse":
                assert json.loads(body)["path"] == path.decode()
        assert statuses == [202, 418, 202, 200]
        writer.close()

    with_server(talk, soon)


def test_a_chunked_body_is_read() -> None:
    async def talk(_: Listener, port: int) -> None:
        head = b"POST / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n"
        reader, writer = await say(port, head, b"3\r\nabc\r\n", b"2\r\nde\r\n0\r\n\r\n")
        assert json.loads((await answer(reader))[2])["body"] == "abcde"
        writer.close()

    with_server(talk)


def test_a_body_over_the_limit_is_413_before_it_is_read() -> None:
    async def talk(_: Listener, port: int) -> None:
        reader, _writer = await say(
            port, b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: %d\r\n\r\n" % (LIMIT + 1)
        )
        status, headers, body = await answer(reader)
        assert status == 413
        assert json.loads(body)["limit"] == LIMIT
        assert headers["connection"] == "close"
        assert await reader.read() == b""

    with_server(talk)


def test_a_chunked_body_over_the_limit_is_413() -> None:
    async def talk(_: Listener, port: int) -> None:
        head = b"POST / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n"
        chunk = b"1000\r\n" + b"x" * 4096 + b"\r\n"
        reader, _writer = await say(port, head + chunk * 3)
        assert (await answer(reader))[0] == 413

    with_server(talk)


def test_a_body_at_the_limit_is_taken() -> None:
    async def talk(_: Listener, port: int) -> None:
        body = b"x" * LIMIT
        reader, writer = await say(
            port, b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: %d\r\n\r\n" % LIMIT + body
        )
        assert (await answer(reader))[0] == 200
        writer.close()

    with_server(talk)


def test_what_is_not_http_is_400() -> None:
    async def talk(_: Listener, port: int) -> None:
        for nonsense in (
            b"\x00\x01\x02\r\n\r\n",
            b"GET / HTTP/9.9\r\n\r\n",
            b"POST / HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
        ):
            reader, _writer = await say(port, nonsense)
            status, _headers, body = await answer(reader)
            assert status == 400
            assert "malformed" in json.loads(body)["error"]
            assert await reader.read() == b""

    with_server(talk)


def test_endless_headers_are_431() -> None:
    async def talk(_: Listener, port: int) -> None:
        reader, _writer = await say(port, b"GET / HTTP/1.1\r\n" + b"x-a: " + b"y" * 300_000)
        assert (await answer(reader))[0] == 431

    with_server(talk)


def test_head_answers_without_a_body_and_keeps_the_connection() -> None:
    async def talk(_: Listener, port: int) -> None:
        reader, writer = await say(port, b"HEAD /x HTTP/1.1\r\nHost: h\r\n\r\n")
        head = await reader.readuntil(b"\r\n\r\n")
        assert b"200 OK" in head
        writer.write(b"GET /y HTTP/1.1\r\nHost: h\r\n\r\n")
        assert json.loads((await answer(reader))[2])["path"] == "/y"
        writer.close()

    with_server(talk)


def test_expect_continue_is_told_to_go_on() -> None:
    async def talk(_: Listener, port: int) -> None:
        reader, writer = await say(
            port, b"POST / HTTP/1.1\r\nHost: h\r\nExpect: 100-continue\r\nContent-Length: 2\r\n\r\n"
        )
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 100")
        writer.write(b"ok")
        assert json.loads((await answer(reader))[2])["body"] == "ok"
        writer.close()

    with_server(talk)


def test_connection_close_and_http_1_0_end_the_connection() -> None:
    async def talk(_: Listener, port: int) -> None:
        for request in (b"GET / HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n", b"GET / HTTP/1.0\r\n\r\n"):
            reader, _writer = await say(port, request)
            status, headers, _body = await answer(reader)
            assert (status, headers["connection"]) == (200, "close")
            assert await reader.read() == b""

    with_server(talk)


def test_a_handler_that_fails_answers_500_and_one_that_refuses_its_status() -> None:
    async def talk(_: Listener, port: int) -> None:
        reader, writer = await say(
            port, b"GET /fail HTTP/1.1\r\nHost: h\r\n\r\nGET /refuse HTTP/1.1\r\nHost: h\r\n\r\n"
        )
        assert (await answer(reader))[0] == 500
        status, _headers, body = await answer(reader)
        assert (status, json.loads(body)["error"]) == (418, "no coffee")
        writer.close()

    with_server(talk)


def test_stopping_answers_what_is_in_flight() -> None:
    async def talk(listener: Listener, port: int) -> None:
        reader, _writer = await say(port, b"GET /slow HTTP/1.1\r\nHost: h\r\n\r\n")
        idle_reader, _idle = await say(port)
        stopping = asyncio.create_task(listener.stop(5))
        assert (await answer(reader))[0] == 200
        assert await idle_reader.read() == b""
        await stopping
        assert listener.connections == 0

    with_server(talk)


def test_a_client_that_hangs_up_leaves_nothing_behind() -> None:
    async def talk(listener: Listener, port: int) -> None:
        _reader, writer = await say(port, b"GET /slow HTTP/1.1\r\nHost: h\r\n\r\n")
        writer.close()
        while listener.connections:
            await asyncio.sleep(0.01)

    with_server(talk)
