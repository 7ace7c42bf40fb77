"""MQTT 5 as a transport, on a real mosquitto."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from settled import App, ConfigurationError, DontAck, Message, Reject
from settled.message import Delivery
from settled.portal import Portal
from settled.settlement import Reject as Rejection
from settled.transports.base import AsyncChannel, Channel, LeaseLost, Outgoing, Published, Source
from settled.transports.faces import BlockingChannel
from settled.transports.mqtt import MqttTopic, MqttTransport, PublishFailed
from tests.brokers.mosquitto import Mosquitto, mosquitto
from tests.conftest import Order
from tests.transports.conformance import Conformance, Queue
from tests.transports.crashing import MESSAGES, consume_with_crashes


@pytest.fixture(scope="module")
def server() -> Iterator[Mosquitto]:
    with mosquitto() as one:
        yield one


class MqttBroker:
    lane = None
    ordered_lanes = False
    counts_attempts = True
    restarts = True

    def __init__(self, server: Mosquitto) -> None:
        self.server = server
        self.queue = f"orders/{uuid.uuid4().hex[:8]}"
        self.url = f"{server.url}?client_id={uuid.uuid4().hex[:8]}&backoff=1"
        self.portal = Portal("test")
        self.transport = MqttTransport(self.url)
        self.source = Source(channel=self.queue)
        self.letters = self.reader(f"dead/{self.queue}", "letters")
        self.portal.run(self.transport.prepare(self.source))

    def reader(self, topic: str, name: str) -> Channel:
        """A session of its own on a topic, there from now on."""
        source = Source(channel=topic, settings=MqttTopic(client_id=f"{name}-{self.queue[-8:]}"))
        self.portal.run(self.transport.prepare(source))
        return self.channel(source)

    def publish(self, message: Outgoing) -> Published:
        return self.portal.run(self.transport.push(message))

    def channel(self, source: Source | None = None) -> Channel:
        async def make() -> Channel:
            return BlockingChannel(
                self.transport.async_channel(source or self.source), asyncio.get_running_loop()
            )

        return self.portal.run(make())

    def wait(self, seconds: float) -> None:
        time.sleep(seconds)

    def lease(self) -> float:
        return 0.0

    def restart(self) -> None:
        self.server.stop()
        self.server.start()

    def dead_letters(self) -> list[tuple[bytes, str]]:
        found = []
        while received := self.letters.receive(100, 0.5):
            for delivery in received:
                self.letters.ack(delivery)
                found.append((delivery.data, delivery.headers["settled-error"]))
        return found

    def run_async(self, use: Callable[[AsyncChannel], Any]) -> None:
        async def main() -> None:
            channel = self.transport.async_channel(self.source)
            await use(channel)
            await channel.close()

        self.portal.run(main())

    def close(self) -> None:
        self.portal.run(self.transport.close())
        self.portal.close()


@pytest.fixture
def broker(server: Mosquitto) -> Iterator[MqttBroker]:
    found = MqttBroker(server)
    yield found
    found.close()


class TestMqtt(Conformance):
    def test_an_unsettled_message_comes_again_when_its_lease_is_over(self, queue: Queue) -> None:
        """There is no lease that runs out: the session has it until it is acknowledged."""
        queue.publish(b"1")
        queue.one()
        assert queue.empty()
        queue.channel.close()
        again = Queue(queue.broker, queue.broker.channel())
        delivery = again.one()
        # Somebody had it before; more is not known.
        assert delivery.attempt == 2
        again.channel.ack(delivery)
        assert again.empty()
