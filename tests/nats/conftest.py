"""One server for the tests that do no harm to it, and a stream of its own for each test."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from nats.aio.client import Client
from nats.js import JetStreamContext
from nats.js.api import ConsumerConfig, ConsumerInfo, RawStreamMsg, RetentionPolicy

import nats
from settled import App
from settled.pump import Status
from settled.transports.nats import Durable, NatsTransport
from settled.transports.nats.connection import parse
from tests.nats.servers import Server, server

_numbers = itertools.count()
DEAD = "SETTLED_DEAD_LETTERS"


@pytest.fixture(scope="session")
def nats_server() -> Iterator[Server]:
    with server() as one:
        yield one


async def until(condition: Callable[[], bool | Awaitable[bool]], timeout: float = 15) -> None:
    """Wait for a thing to be so."""
    deadline = asyncio.get_running_loop().time() + timeout
    while True:
        found = condition()
        if isinstance(found, Awaitable):
            found = await found
        if found:
            return
        if asyncio.get_running_loop().time() > deadline:
            raise AssertionError("it did not come to pass")
        await asyncio.sleep(0.02)


async def is_up(nodes: list[Server]) -> None:
    """Wait until a cluster has a leader and all its servers."""
    client = await nats.connect([node.url for node in nodes])

    async def has_all() -> bool:
        with contextlib.suppress(Exception):
            await client.jetstream().add_stream(name="PROBE", subjects=["probe"], num_replicas=len(nodes))
            return await client.jetstream().delete_stream("PROBE")
        return False

    await until(has_all, 30)
    await client.close()


@contextlib.asynccontextmanager
async def running(app: App, *, wait: bool = True) -> AsyncIterator[None]:
    """The app, while it runs."""
    stop = asyncio.Event()
    task = asyncio.create_task(app.serve(stop))
    try:
        if wait:
            await until(
                lambda: task.done() or all(s.status is Status.STARTED for s in app.status().subscriptions)
            )
        if task.done():
            await task
        yield
    finally:
        stop.set()
        await task


@dataclass
class Desk:
    """A stream of a test's own, and a plain client to look at the server with."""

    url: str
    stream: str
    client: Client
    jetstream: JetStreamContext

    def subject(self, name: str = "new") -> str:
        return f"{self.stream}.{name}"

    def durable(self, consumer: str = "worker", **config: Any) -> Durable:
        return Durable(stream=self.stream, consumer=consumer, create=True, config=ConsumerConfig(**config))

    def app(self, **options: Any) -> App:
        return App(transport=NatsTransport(self.url, **options))

    async def put(self, data: bytes = b"{}", name: str = "new", **headers: str) -> int:
        found = await self.jetstream.publish(
            self.subject(name), data, headers={k.replace("_", "-"): v for k, v in headers.items()} or None
        )
        return found.seq

    async def info(self, consumer: str = "worker") -> ConsumerInfo:
        found: ConsumerInfo = await self.jetstream.consumer_info(self.stream, consumer)
        return found

    async def settled(self, consumer: str = "worker") -> bool:
        info = await self.info(consumer)
        return info.num_pending == 0 and info.num_ack_pending == 0

    async def kept(self) -> int:
        return (await self.jetstream.stream_info(self.stream)).state.messages

    async def letters(self, consumer: str = "worker", stream: str = DEAD) -> list[RawStreamMsg]:
        """The dead letters of the test's stream, oldest first."""
        return await self.all_of(stream, f"settled.dead.{self.stream}.{consumer}.>")

    async def all_of(self, stream: str, subject: str) -> list[RawStreamMsg]:
        found, sequence = [], 1
        while True:
            try:
                message = await self.jetstream.get_msg(stream, seq=sequence, subject=subject, next=True)
            except nats.js.errors.NotFoundError:
                return found
            found.append(message)
            sequence = (message.seq or 0) + 1


@contextlib.asynccontextmanager
async def desk_on(
    url: str, *, replicas: int = 1, retention: RetentionPolicy | None = None
) -> AsyncIterator[Desk]:
    client = await nats.connect(parse(url, None)[0])
    try:
        stream = f"T{os.getpid()}-{next(_numbers)}"
        jetstream = client.jetstream()
        await jetstream.add_stream(
            name=stream,
            subjects=[f"{stream}.>"],
            num_replicas=replicas,
            retention=retention or RetentionPolicy.LIMITS,
            duplicate_window=60,
        )
        yield Desk(url, stream, client, jetstream)
    finally:
        await client.close()


@pytest.fixture
def on_desk(nats_server: Server) -> Callable[..., None]:
    """Run an async test with a stream of its own."""

    def run(test: Callable[[Desk], Coroutine[Any, Any, None]], **options: Any) -> None:
        async def main() -> None:
            async with desk_on(nats_server.url, **options) as desk:
                await asyncio.wait_for(test(desk), 60)

        asyncio.run(main())

    return run
