"""Redis streams: read a batch as a group, ack each."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

from redis.asyncio import Redis as Client
from tests.brokers.redis import server

from bench.contenders import Meter, prepare
from settled.transports.base import Source


class Redis:
    client = "redis-py"
    batch = 200
    most = 100_000

    def __init__(self, url: str) -> None:
        self._address = url
        self.url = f"{url}?create=true"

    async def make(self, queue: str) -> None:
        await prepare(self.url, Source(channel=queue, group="bench"))

    def subscription(self, queue: str) -> dict[str, Any]:
        return {"group": "bench"}

    async def raw(self, queue: str, meter: Meter) -> None:
        client = Client.from_url(self._address)
        while meter.left:
            answer: Any = await client.xreadgroup("bench", "raw", {queue: ">"}, count=self.batch, block=1000)
            for _, entries in answer:
                for entry, fields in entries:
                    meter(fields[b"data"])
                    await client.xack(queue, "bench", entry)
        meter.end()
        await client.aclose()


@contextlib.asynccontextmanager
async def start() -> AsyncIterator[Redis]:
    with server("valkey") as one:
        yield Redis(one.url)
