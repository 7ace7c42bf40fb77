"""Kafka: a classic group on one partition, by the client's asyncio face; a commit for each record."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

from confluent_kafka.aio import AIOConsumer
from tests.brokers.kafka import cluster

from bench.contenders import Meter
from bench.contenders.kafka import Kafka


class Aio(Kafka):
    client = "confluent-kafka: await poll(), await commit(record)"
    batch = 1
    most = 2_000

    async def raw(self, queue: str, meter: Meter) -> None:
        consumer = AIOConsumer(
            {**self.config(queue), "auto.offset.reset": "earliest", "enable.auto.commit": False}
        )
        await consumer.subscribe([queue])
        while meter.left:
            record = await consumer.poll(0.5)
            if record is not None and record.error() is None:
                meter(record.value() or b"")
                await consumer.commit(message=record, asynchronous=False)
        meter.end()
        await consumer.close()


@contextlib.asynccontextmanager
async def start() -> AsyncIterator[Aio]:
    with cluster() as brokers:
        yield Aio(brokers)
