"""NATS JetStream does what every transport must do."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest
from nats.js.api import ConsumerConfig

from settled.transports.base import AsyncChannel, Channel, Outgoing, Published, Source
from settled.transports.nats import Durable, NatsTransport
from tests.nats.conftest import Desk, desk_on
from tests.nats.servers import Server
from tests.transports.conformance import Conformance, Extends

LEASE = 1.0


class NatsBroker:
    """A stream and a durable consumer of their own, on a loop in a thread as an app's would be."""

    lane = None
    counts_attempts = False

    def __init__(self, url: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._desk_context = desk_on(url)
        self._desk: Desk = self._run(self._desk_context.__aenter__())
        self.queue = self._desk.subject()
        self._transport = NatsTransport(url)
        config = ConsumerConfig(ack_wait=LEASE, max_deliver=20)
        self._source = Source(
            channel=self.queue,
            settings=Durable(stream=self._desk.stream, consumer="worker", create=True, config=config),
        )
        self._channels: list[Channel] = []
        self._run(self._transport.open())
        self._run(self._transport.prepare(self._source))

    def _run(self, call: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(call, self._loop).result(30)

    def publish(self, message: Outgoing) -> Published:
        return self._transport.publish(message).result()

    def channel(self) -> Channel:
        async def make() -> Channel:
            return self._transport.channel(self._source)

        channel: Channel = self._run(make())
        self._channels.append(channel)
        return channel

    def wait(self, seconds: float) -> None:
        time.sleep(seconds)

    def lease(self) -> float:
        return LEASE

    def dead_letters(self) -> list[tuple[bytes, str]]:
        found = self._run(self._desk.letters())
        return [(letter.data or b"", letter.headers["settled-error"]) for letter in found]

    def run_async(self, use: Callable[[AsyncChannel], Any]) -> None:
        async def main() -> None:
            channel = self._transport.async_channel(self._source)
            try:
                await use(channel)
            finally:
                await channel.close()

        self._run(main())

    def close(self) -> None:
        for channel in self._channels:
            channel.close()
        self._run(self._transport.close())
        self._run(self._desk_context.__aexit__(None, None, None))
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class TestNats(Extends, Conformance):
    @pytest.fixture
    def broker(self, nats_server: Server) -> Iterator[NatsBroker]:
        broker = NatsBroker(nats_server.url)
        yield broker
        broker.close()
