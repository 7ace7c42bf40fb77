"""Kafka: a classic group on one partition, the offset committed after each batch."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

from confluent_kafka import Consumer
from tests.brokers.kafka import Cluster, cluster

from bench.contenders import Meter


class Kafka:
    client = "confluent-kafka: consume(500), then one commit"
    batch = 500
    most = 20_000
    """The mock cluster keeps 5 MB of a partition."""

    def __init__(self, brokers: Cluster) -> None:
        self._brokers = brokers
        self.url = f"kafka://{brokers.address}"

    async def make(self, queue: str) -> None:
        self._brokers.create(queue)

    def subscription(self, queue: str) -> dict[str, Any]:
        return {"group": f"settled-{queue}"}

    async def raw(self, queue: str, meter: Meter) -> None:
        await asyncio.to_thread(self._read, queue, meter)

    def config(self, queue: str) -> dict[str, Any]:
        return {"bootstrap.servers": self._brokers.address, "group.id": f"raw-{queue}"}

    def _read(self, queue: str, meter: Meter) -> None:
        consumer = Consumer(
            {**self.config(queue), "auto.offset.reset": "earliest", "enable.auto.commit": False}
        )
        consumer.subscribe([queue])
        while meter.left:
            records = consumer.consume(self.batch, 0.5)
            for record in records:
                meter(record.value() or b"")
            if records:
                consumer.commit(asynchronous=False)
        meter.end()
        consumer.close()


@contextlib.asynccontextmanager
async def start() -> AsyncIterator[Kafka]:
    with cluster() as brokers:
        yield Kafka(brokers)
