"""Pub/Sub: pull a batch, acknowledge each."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import grpc
from google.pubsub_v1 import SubscriberAsyncClient
from google.pubsub_v1.services.subscriber.transports import SubscriberGrpcAsyncIOTransport
from tests.brokers.pubsub import pubsub_server

from bench.contenders import Meter, prepare
from settled.transports.base import Source

GROUP = "bench"


class PubSub:
    client = "google-cloud-pubsub"
    batch = 200
    most = 100_000

    def __init__(self, port: int) -> None:
        self._address = f"127.0.0.1:{port}"
        self.url = f"pubsub://settled-bench?emulator={self._address}&create=true"

    async def make(self, queue: str) -> None:
        await prepare(self.url, Source(channel=queue, group=f"{GROUP}-{queue}"))

    def subscription(self, queue: str) -> dict[str, Any]:
        return {"group": f"{GROUP}-{queue}"}

    async def raw(self, queue: str, meter: Meter) -> None:
        channel = grpc.aio.insecure_channel(self._address)
        client = SubscriberAsyncClient(transport=SubscriberGrpcAsyncIOTransport(channel=channel))
        name = f"projects/settled-bench/subscriptions/{GROUP}-{queue}"
        while meter.left:
            answer = await client.pull(subscription=name, max_messages=self.batch)
            for received in answer.received_messages:
                meter(received.message.data)
                await client.acknowledge(subscription=name, ack_ids=[received.ack_id])
        meter.end()
        await channel.close()


@contextlib.asynccontextmanager
async def start() -> AsyncIterator[PubSub]:
    with pubsub_server() as server:
        yield PubSub(server.port)
