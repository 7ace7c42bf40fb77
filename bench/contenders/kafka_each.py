"""Kafka: a classic group on one partition, each record's offset stored when it is handled."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

from confluent_kafka import Consumer
from tests.brokers.kafka import cluster

from bench.contenders import Meter
from bench.contenders.kafka import Kafka


class Each(Kafka):
    client = "confluent-kafka: poll(), store_offsets(record), commits by itself every 5 s"

    def _read(self, queue: str, meter: Meter) -> None:
        consumer = Consumer(
            {**self.config(queue), "auto.offset.reset": "earliest", "enable.auto.offset.store": False}
        )
        consumer.subscribe([queue])
        while meter.left:
            record = consumer.poll(0.5)
            if record is not None and record.error() is None:
                meter(record.value() or b"")
                consumer.store_offsets(record)
        consumer.commit(asynchronous=False)
        meter.end()
        consumer.close()


@contextlib.asynccontextmanager
async def start() -> AsyncIterator[Each]:
    with cluster() as brokers:
        yield Each(brokers)
