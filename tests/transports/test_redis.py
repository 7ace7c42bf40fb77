"""Redis as a transport, streams and lists, on real servers: conformance, claims, recovery, dead letters."""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import redis
import trustme
from redis.exceptions import RedisError, ResponseError

from settled import App, ConfigurationError, Message
from settled.portal import Portal
from settled.settlement import Reject
from settled.transports.base import (
    AsyncChannel,
    Channel,
    LeaseLost,
    NackMeans,
    Outgoing,
    Published,
    RejectMeans,
    Source,
)
from settled.transports.faces import BlockingChannel
from settled.transports.redis import RedisList, RedisStream, RedisTransport
from settled.transports.redis.lists import unwrap
from tests.brokers.redis import Server, server
from tests.conftest import Order
from tests.transports.conformance import Conformance, Queue
from tests.transports.crashing import MESSAGES, consume_with_crashes

LEASE = 1.5


@pytest.fixture(scope="module")
def valkey() -> Iterator[Server]:
    with server("valkey") as one:
        yield one


class RedisBroker:
    lane = None
    ordered_lanes = False
    counts_attempts = True
    restarts = True

    def __init__(self, one: Server, settings: RedisStream | RedisList) -> None:
        self.server = one
        self.settings = settings
        self.queue = f"orders-{uuid.uuid4().hex[:8]}"
        self.transport = RedisTransport(one.url)
        self.portal = Portal("test")
        self.client = redis.Redis(port=one.port)
        self.channels: list[Channel] = []
        self.portal.run(self.transport.prepare(self.source()))

    def source(self, **given: Any) -> Source:
        return Source(channel=self.queue, settings=self.settings, **given)

    def publish(self, message: Outgoing) -> Published:
        # A server that was restarted a moment ago may have taken a pooled connection with it.
        self.portal.run(self._list_or_stream())
        return self.portal.run(self.transport.push(message))

    async def _list_or_stream(self) -> None:
        self.transport.async_channel(self.source())

    def channel(self, **given: Any) -> Channel:
        self.channels.append(self.portal.run(self._channel(self.source(**given))))
        return self.channels[-1]

    async def _channel(self, source: Source) -> Channel:
        return BlockingChannel(self.transport.async_channel(source), asyncio.get_running_loop())

    def wait(self, seconds: float) -> None:
        time.sleep(seconds)

    def lease(self) -> float:
        return LEASE

    def restart(self) -> None:
        self.server.stop()
        self.server.start()

    def dead_letters(self) -> list[tuple[bytes, str]]:
        return [(data, headers["settled-error"]) for data, headers in self.letters(f"{self.queue}.dead")]

    def letters(self, key: str) -> list[tuple[bytes, dict[str, str]]]:
        found: list[tuple[bytes, dict[str, str]]] = []
        if isinstance(self.settings, RedisList):
            elements: Any = self.client.lrange(key, 0, -1)
            for head, data in filter(None, map(unwrap, reversed(elements))):
                found.append((data, head.headers))
        else:
            entries: Any = self.client.xrange(key)
            for _, fields in entries:
                found.append((fields[b"data"], msgspec.json.decode(fields[b"headers"])))
        return found

    def run_async(self, use: Callable[[AsyncChannel], Any]) -> None:
        async def main() -> None:
            channel = self.transport.async_channel(self.source())
            try:
                await use(channel)
            finally:
                await channel.close()

        self.portal.run(main())

    def close(self) -> None:
        for channel in self.channels:
            channel.close()
        self.client.close()
        self.portal.run(self.transport.close())
        self.portal.close()


@contextlib.contextmanager
def broker_of(one: Server, settings: RedisStream | RedisList) -> Iterator[RedisBroker]:
    found = RedisBroker(one, settings)
    try:
        yield found
    finally:
        found.close()


@pytest.fixture
def stream(valkey: Server) -> Iterator[RedisBroker]:
    with broker_of(valkey, RedisStream(lease=LEASE, create=True)) as found:
        yield found


@pytest.fixture
def queue_list(valkey: Server) -> Iterator[RedisBroker]:
    with broker_of(valkey, RedisList(lease=LEASE)) as found:
        yield found


class TestStream(Conformance):
    @pytest.fixture
    def broker(self, stream: RedisBroker) -> RedisBroker:
        return stream


class TestList(Conformance):
    @pytest.fixture
    def broker(self, queue_list: RedisBroker) -> RedisBroker:
        return queue_list
