"""Kafka: a share group, each record accepted when it is handled; the client tells with its next poll."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import AsyncIterator
from typing import Any

from confluent_kafka import AcknowledgeType, ShareConsumer
from tests.brokers.kafka import Cluster, cluster

from bench.contenders import Meter
from bench.contenders.kafka import Kafka
from settled.transports.kafka import KafkaTopic


class Share(Kafka):
    client = "confluent-kafka: poll() of 500, acknowledge(record)"

    def __init__(self, brokers: Cluster) -> None:
        super().__init__(brokers)
        self.url = f"{self.url}?max.poll.records={self.batch}"

    def subscription(self, queue: str) -> dict[str, Any]:
        return {"group": f"settled-{queue}", "source": KafkaTopic(share=True)}

    def _read(self, queue: str, meter: Meter) -> None:
        consumer = ShareConsumer(
            {
                **self.config(queue),
                "share.acknowledgement.mode": "explicit",
                "max.poll.records": self.batch,
            }
        )
        consumer.subscribe([queue])
        while meter.left:
            for record in consumer.poll(0.5):
                if record.error() is None:
                    meter(record.value() or b"")
                    consumer.acknowledge(record, AcknowledgeType.ACCEPT)
        consumer.commit_sync(10)
        meter.end()
        # On the mock cluster its close may not return.
        leaving = threading.Thread(target=consumer.close, daemon=True)
        leaving.start()
        leaving.join(5)


@contextlib.asynccontextmanager
async def start() -> AsyncIterator[Share]:
    with cluster() as brokers:
        yield Share(brokers)
