"""Service Bus: receive a batch, complete each."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

from azure.servicebus.aio import ServiceBusClient
from tests.brokers.servicebus import servicebus_server

from bench.contenders import Meter

_CONNECTION = (
    "Endpoint=sb://127.0.0.1:{port};SharedAccessKeyName=settled;SharedAccessKey=c2V0dGxlZA==;"
    "UseDevelopmentEmulator=true"
)


class ServiceBus:
    client = "azure-servicebus"
    batch = 100
    most = 400

    def __init__(self, port: int) -> None:
        self._connection = _CONNECTION.format(port=port)
        self.url = f"servicebus://settled:c2V0dGxlZA%3D%3D@127.0.0.1:{port}?emulator=true"

    async def make(self, queue: str) -> None:
        """The stand-in has every queue."""

    def subscription(self, queue: str) -> dict[str, Any]:
        return {}

    async def raw(self, queue: str, meter: Meter) -> None:
        async with (
            ServiceBusClient.from_connection_string(self._connection) as client,
            client.get_queue_receiver(queue) as receiver,
        ):
            while meter.left:
                for message in await receiver.receive_messages(self.batch, max_wait_time=5):
                    meter(b"".join(message.body))
                    await receiver.complete_message(message)
            meter.end()


@contextlib.asynccontextmanager
async def start() -> AsyncIterator[ServiceBus]:
    # As long as a queue's lock is unless it is changed: the tests' is shorter than a batch takes here.
    with servicebus_server(lock=60) as server:
        yield ServiceBus(server.port)
