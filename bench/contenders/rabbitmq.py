"""RabbitMQ: a quorum queue, consumed with a prefetch, each message acked."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import aio_pika
from tests.brokers.rabbitmq import rabbitmq

from bench.contenders import Meter, prepare
from settled.transports.base import Source


class RabbitMQ:
    client = "aio-pika"
    batch = 200
    most = 100_000

    def __init__(self, url: str) -> None:
        self._address = url
        self.url = f"{url}?create=true"

    async def make(self, queue: str) -> None:
        await prepare(self.url, Source(channel=queue))

    def subscription(self, queue: str) -> dict[str, Any]:
        return {}

    async def raw(self, queue: str, meter: Meter) -> None:
        connection = await aio_pika.connect(self._address)
        channel = await connection.channel()
        await channel.set_qos(prefetch_count=self.batch)
        found = await channel.get_queue(queue)
        done = asyncio.Event()

        async def receive(message: Any) -> None:
            meter(message.body)
            await message.ack()
            if not meter.left:
                done.set()

        await found.consume(receive)
        await done.wait()
        meter.end()
        await connection.close()


@contextlib.asynccontextmanager
async def start() -> AsyncIterator[RabbitMQ]:
    with rabbitmq() as server:
        yield RabbitMQ(server.url)
