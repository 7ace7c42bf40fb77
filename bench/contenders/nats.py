"""NATS JetStream: pull in batches, ack each."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

from nats.js.api import AckPolicy, ConsumerConfig
from tests.nats.servers import server

import nats
from bench.contenders import Meter
from settled.transports.nats import Durable


class Nats:
    client = "nats-py"
    batch = 500
    most = 100_000

    def __init__(self, url: str) -> None:
        self.url = url

    async def make(self, queue: str) -> None:
        client = await nats.connect(self.url)
        await client.jetstream().add_stream(name=queue, subjects=[queue])
        config = ConsumerConfig(
            name="bench", durable_name="bench", ack_policy=AckPolicy.EXPLICIT, max_ack_pending=4 * self.batch
        )
        await client.jetstream().add_consumer(queue, config)
        await client.close()

    def subscription(self, queue: str) -> dict[str, Any]:
        return {"source": Durable(stream=queue, consumer="bench")}

    async def raw(self, queue: str, meter: Meter) -> None:
        client = await nats.connect(self.url)
        subscription = await client.jetstream().pull_subscribe_bind("bench", queue)
        while meter.left:
            for message in await subscription.fetch(self.batch, timeout=5):
                meter(message.data)
                await message.ack()
        await client.flush()
        meter.end()
        await client.close()


@contextlib.asynccontextmanager
async def start() -> AsyncIterator[Nats]:
    with server() as one:
        yield Nats(one.url)
