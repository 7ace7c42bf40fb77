"""MQTT 5: a persistent session, each message acked by hand."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import urlsplit

from paho.mqtt.client import Client
from paho.mqtt.enums import CallbackAPIVersion, MQTTProtocolVersion
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties
from tests.brokers.mosquitto import mosquitto

from bench.contenders import Meter, prepare
from settled.transports.base import Source
from settled.transports.mqtt import MqttTopic

_properties: Any = Properties  # which has no types


class Mqtt:
    client = "paho-mqtt"
    batch = 200
    most = 100_000

    def __init__(self, url: str) -> None:
        self.url = url

    async def make(self, queue: str) -> None:
        await prepare(self.url, Source(channel=queue, settings=MqttTopic(client_id=queue)))
        await self._subscribe(queue)

    def subscription(self, queue: str) -> dict[str, Any]:
        return {"source": MqttTopic(client_id=queue)}

    async def raw(self, queue: str, meter: Meter) -> None:
        loop, done = asyncio.get_running_loop(), asyncio.Event()

        def receive(client: Any, _: Any, message: Any) -> None:
            meter(message.payload)
            client.ack(message.mid, message.qos)
            if not meter.left:
                meter.end()
                loop.call_soon_threadsafe(done.set)

        client = self._client(queue)
        client.on_message = receive
        self._connect(client)
        await done.wait()
        client.disconnect()
        client.loop_stop()

    def _client(self, queue: str) -> Any:
        return Client(
            CallbackAPIVersion.VERSION2,
            client_id=f"raw-{queue}",
            protocol=MQTTProtocolVersion.MQTTv5,
            manual_ack=True,
        )

    def _connect(self, client: Any) -> None:
        properties = _properties(PacketTypes.CONNECT)
        properties.SessionExpiryInterval = 3600
        properties.ReceiveMaximum = self.batch
        parts = urlsplit(self.url)
        client.connect(parts.hostname or "", parts.port or 1883, clean_start=False, properties=properties)
        client.loop_start()

    async def _subscribe(self, queue: str) -> None:
        """Make the bare client's session, which then keeps what comes."""
        loop, done = asyncio.get_running_loop(), asyncio.Event()
        client = self._client(queue)
        client.on_connect = lambda *_: client.subscribe(queue, 1)
        client.on_subscribe = lambda *_: loop.call_soon_threadsafe(done.set)
        self._connect(client)
        await done.wait()
        client.disconnect()
        client.loop_stop()


@contextlib.asynccontextmanager
async def start() -> AsyncIterator[Mqtt]:
    with mosquitto() as server:
        yield Mqtt(server.url)
