"""The queue's engine in this process: pop a batch, ack it in one call."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import AsyncIterator
from typing import Any

from bench.contenders import Meter
from settled.queue.embedded import EmbeddedPostgres
from settled.queue.engine import Engine
from settled.queue.types import AckItem, PopRequest


class Postgres:
    client = "the engine"
    batch = 500
    most = 100_000

    def __init__(self, dsn: str) -> None:
        self.url = dsn

    async def make(self, queue: str) -> None:
        """It is there when something is pushed."""

    def subscription(self, queue: str) -> dict[str, Any]:
        return {}

    async def raw(self, queue: str, meter: Meter) -> None:
        async with await Engine.open(self.url) as engine:
            request = PopRequest(queue=queue, batch=self.batch, partitions=self.batch, wait=5)
            while meter.left:
                items = []
                for message in (await engine.pop(request)).messages():
                    meter(message.payload)
                    items.append(
                        AckItem(message.transaction_id, message.partition_id, lease_id=message.lease_id)
                    )
                await engine.ack(items, atomic=False)
            meter.end()


@contextlib.asynccontextmanager
async def start() -> AsyncIterator[Postgres]:
    with tempfile.TemporaryDirectory() as directory, EmbeddedPostgres.start(directory) as one:
        yield Postgres(one.dsn)
