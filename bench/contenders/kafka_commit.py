"""Kafka: a classic group on one partition, a commit for each record before the next is read."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

from confluent_kafka import Consumer
from tests.brokers.kafka import cluster

from bench.contenders import Meter
from bench.contenders.kafka import Kafka


class Commit(Kafka):
    client = "confluent-kafka: poll(), commit(record) and wait"
    batch = 1
    most = 2_000

    def _read(self, queue: str, meter: Meter) -> None:
        consumer = Consumer(
            {**self.config(queue), "auto.offset.reset": "earliest", "enable.auto.commit": False}
        )
        consumer.subscribe([queue])
        while meter.left:
            record = consumer.poll(0.5)
            if record is not None and record.error() is None:
                meter(record.value() or b"")
                consumer.commit(message=record, asynchronous=False)
        meter.end()
        consumer.close()


@contextlib.asynccontextmanager
async def start() -> AsyncIterator[Commit]:
    with cluster() as brokers:
        yield Commit(brokers)
