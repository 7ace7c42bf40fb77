"""The queue over HTTP: pop a batch, ack it in one call, with aiohttp and nothing else."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import msgspec

from bench.contenders import Meter
from settled.server.testing import running_server


class _Popped(msgspec.Struct, rename="camel"):
    transaction_id: str
    partition_id: str
    lease_id: str
    data: msgspec.Raw


class _Answer(msgspec.Struct):
    messages: list[_Popped]


class Http:
    client = "aiohttp"
    batch = 500
    most = 100_000

    def __init__(self, url: str) -> None:
        self.url = url

    async def make(self, queue: str) -> None:
        """It is there when something is pushed."""

    def subscription(self, queue: str) -> dict[str, Any]:
        return {}

    async def raw(self, queue: str, meter: Meter) -> None:
        decode = msgspec.json.Decoder(_Answer).decode
        query = {"batch": str(self.batch), "partitions": str(self.batch), "wait": "true", "timeout": "5000"}
        async with aiohttp.ClientSession(self.url) as session:
            while meter.left:
                async with session.get(f"/api/v1/pop/queue/{queue}", params=query) as answer:
                    popped = decode(await answer.read()).messages
                items = []
                for message in popped:
                    meter(bytes(message.data))
                    items.append(
                        {
                            "transactionId": message.transaction_id,
                            "partitionId": message.partition_id,
                            "leaseId": message.lease_id,
                            "status": "completed",
                        }
                    )
                body = msgspec.json.encode({"acknowledgments": items})
                async with session.post("/api/v1/ack/batch", data=body) as settled:
                    settled.raise_for_status()
                    await settled.read()
            meter.end()


@contextlib.asynccontextmanager
async def start() -> AsyncIterator[Http]:
    with running_server() as server:
        yield Http(server.url)
