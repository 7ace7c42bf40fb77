"""A broker for the conformance suite, over a transport that lives on an event loop."""

from __future__ import annotations

import asyncio
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from settled.portal import Portal
from settled.transports.base import AsyncChannel, Channel, Outgoing, Published, Source
from settled.transports.looped import LoopTransport


class LoopedBroker(ABC):
    """One subscription on a loop in a thread, as an app's would be."""

    lane: str | None = None
    counts_attempts = False

    def __init__(self, transport: LoopTransport[Any], source: Source) -> None:
        self.transport = transport
        self.source = source
        self.queue = source.channel
        self.portal = Portal("test")
        self._channels: list[Channel] = []
        self.portal.run(self._open())

    async def _open(self) -> None:
        await self.transport.open()
        await self.transport.prepare(self.source)  # type: ignore[attr-defined]

    def publish(self, message: Outgoing) -> Published:
        return self.portal.run(self.transport.push(message))

    def channel(self) -> Channel:
        async def make() -> Channel:
            return self.transport.channel(self.source)

        channel = self.portal.run(make())
        self._channels.append(channel)
        return channel

    def wait(self, seconds: float) -> None:
        time.sleep(seconds)

    @abstractmethod
    def dead_letters(self) -> list[tuple[bytes, str]]:
        """Body and error of what was rejected."""

    def read(self, source: Source) -> list[tuple[bytes, str]]:
        """Body and error of what is on another queue, which are settled by that."""

        async def take() -> list[tuple[bytes, str]]:
            channel = self.transport.async_channel(source)
            found = []
            try:
                for delivery in await channel.receive(10, 10):
                    found.append((delivery.data, delivery.headers["settled-error"]))
                    await channel.ack(delivery)
            finally:
                await channel.close()
            return found

        return self.portal.run(take())

    def run_async(self, use: Callable[[AsyncChannel], Any]) -> None:
        async def main() -> None:
            channel = self.transport.async_channel(self.source)
            try:
                await use(channel)
            finally:
                await channel.close()

        self.portal.run(main())

    def close(self) -> None:
        for channel in self._channels:
            channel.close()
        self.portal.run(self.transport.close())
        self.portal.run(asyncio.sleep(0))
        self.portal.close()


def name() -> str:
    return f"orders-{uuid.uuid4().hex[:8]}"
