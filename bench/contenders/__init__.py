"""One module a broker: its server, and the bare client that Settled is measured against."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any, Protocol

import msgspec

from settled.clock import SystemClock
from settled.transports import connect
from settled.transports.base import Prepares, Source


class Order(msgspec.Struct):
    id: int
    customer: str
    amount: float
    items: list[str]


_decode = msgspec.json.Decoder(Order).decode


class Meter:
    """Decodes and counts what a bare client received; it runs from the first message to the last."""

    def __init__(self, count: int) -> None:
        self.left = count
        self.span = Span()

    def __call__(self, data: bytes) -> None:
        if not self.span.began:
            self.span.begin()
        _decode(data)
        self.left -= 1

    def end(self) -> None:
        """All is acknowledged."""
        self.span.end()


class Span:
    """From the first message to the last: seconds, and this process's own processor seconds."""

    def __init__(self) -> None:
        self.began = self.ended = 0.0
        self._cpu_began = self._cpu_ended = 0.0

    def begin(self) -> None:
        self.began, self._cpu_began = time.perf_counter(), time.process_time()

    def end(self) -> None:
        self.ended, self._cpu_ended = time.perf_counter(), time.process_time()

    @property
    def seconds(self) -> float:
        return self.ended - self.began

    @property
    def cpu(self) -> float:
        return self._cpu_ended - self._cpu_began


class Contender(Protocol):
    """A broker that is running. Its queues are new each time."""

    url: str
    client: str
    """The bare client's name."""
    batch: int
    """How many messages one receive may take, on either side."""
    most: int
    """How many messages a run may have: some stand-ins are slow."""

    async def make(self, queue: str) -> None:
        """Have an empty queue."""

    def subscription(self, queue: str) -> dict[str, Any]:
        """What to tell `app.subscriber` beside the channel and the buffer."""

    async def raw(self, queue: str, meter: Meter) -> None:
        """The client alone: receive, decode and acknowledge until nothing is left, then `meter.end()`."""


Start = Callable[[], contextlib.AbstractAsyncContextManager[Contender]]

NAMES = {
    "nats": "NATS JetStream",
    "postgresql": "the queue, in process",
    "http": "the queue, over HTTP",
    "rabbitmq": "RabbitMQ",
    "redis": "Redis streams",
    "kafka_commit": "Kafka (mock)",
    "kafka_aio": "Kafka (mock), asyncio",
    "sqs": "SQS (moto)",
    "mqtt": "MQTT (mosquitto)",
    "pubsub": "Pub/Sub (stand-in)",
    "servicebus": "Service Bus (stand-in)",
    "kafka": "a batch",
    "kafka_each": "each record",
    "kafka_share": "share group",
}
"""Every module here, each with a function `start`."""

C_LOOPS = ("kafka", "kafka_each", "kafka_share")
"""Those whose bare client settles in C, or settles no message by itself."""


async def prepare(url: str, source: Source) -> None:
    """Let Settled make what a subscription needs; the bare client then reads the same."""
    transport = connect(url, SystemClock())
    await transport.open()
    if isinstance(transport, Prepares):
        await transport.prepare(source)
    await transport.close()
