"""A server of its own for each test, routers, workers, and a proxy that cuts connections."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from typing import Any

import msgspec
import pytest
from nats.js.api import RawStreamMsg

from settled.router import ExecResult, Router, RouterConfig
from settled.router.simulate import Behaviour, Worker
from tests.nats.conftest import running
from tests.nats.servers import Server, server


@pytest.fixture
def one() -> Iterator[Server]:
    with server() as found:
        yield found


def config(url: str, **settings: Any) -> RouterConfig:
    quick = {"nats_js_backoff_seconds": (0.3, 0.3, 0.3), "caf_max_retries": 3, **settings}
    return msgspec.convert({"url": url, **quick}, RouterConfig)


@contextlib.asynccontextmanager
async def router_on(settings: RouterConfig, **handlers: Any) -> AsyncIterator[Router]:
    """A router, running."""
    router = Router(settings, **handlers)
    await router.open()
    async with running(router.app):
        yield router


@contextlib.asynccontextmanager
async def worker_on(settings: RouterConfig, **behaviour: float) -> AsyncIterator[Worker]:
    """A simulated worker, running."""
    worker = Worker(settings, Behaviour(**behaviour), ack_wait=1)
    async with running(worker.app):
        yield worker


class Seen:
    """Results that were handled, and how often each."""

    def __init__(self, failing: int = 0) -> None:
        self.results: list[ExecResult] = []
        self.calls = 0
        self._failing = failing

    async def __call__(self, result: ExecResult) -> None:
        self.calls += 1
        if self.calls <= self._failing:
            raise RuntimeError("the ledger is locked")
        self.results.append(result)

    @property
    def assignments(self) -> list[str]:
        return sorted(str(result.assignment_id) for result in self.results)


async def dead_letters(router: Router) -> list[RawStreamMsg]:
    jetstream = router.transport.connection.jetstream
    stream = router.config.dead_letter_stream
    count = (await jetstream.stream_info(stream)).state.messages
    return [await jetstream.get_msg(stream, seq=number + 1) for number in range(count)]


async def is_settled(router: Router) -> bool:
    """Whether the server waits for nothing from the routers."""
    jetstream = router.transport.connection.jetstream
    for stream, consumer in (
        (router.config.result_stream, "router-results"),
        (router.config.ack_stream, "router-acks"),
    ):
        info = await jetstream.consumer_info(stream, consumer)
        if info.num_pending or info.num_ack_pending:
            return False
    return True


class Proxy:
    """A TCP proxy in front of a server, which cuts all connections when a client sends certain bytes."""

    def __init__(self, port: int) -> None:
        self._to = port
        self._server: asyncio.Server | None = None
        self._links: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self.cut_at: bytes | None = None
        self.cuts = 0
        self.url = ""

    async def __aenter__(self) -> Proxy:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.url = f"nats://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        self.cut()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def cut(self) -> None:
        for link in self._links:
            link.transport.abort()
        self._links.clear()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there, back = await asyncio.open_connection("127.0.0.1", self._to)
        except OSError:
            writer.transport.abort()
            return
        self._links |= {writer, back}
        for source, target, watched in ((reader, back, True), (there, writer, False)):
            task = asyncio.create_task(self._pass_on(source, target, watched))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _pass_on(
        self, source: asyncio.StreamReader, target: asyncio.StreamWriter, watched: bool
    ) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(65536):
                if watched and self.cut_at is not None and self.cut_at in data:
                    self.cut_at = None
                    self.cuts += 1
                    self.cut()
                    return
                target.write(data)
                await target.drain()
        target.transport.abort()
