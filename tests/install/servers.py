"""The server that a page of the docs needs, from the dev environment: only the client side is under test."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from settled.server.testing import running_server
from tests.brokers.kafka import cluster
from tests.brokers.mosquitto import mosquitto
from tests.brokers.ports import free_ports
from tests.brokers.pubsub import pubsub_server
from tests.brokers.rabbitmq import rabbitmq
from tests.brokers.redis import Server as RedisServer
from tests.brokers.servicebus import servicebus_server
from tests.brokers.sqs import CREDENTIALS, sqs_server
from tests.commands.conftest import database_of
from tests.nats.servers import server as nats_server

DATA = "/home/you/.local/share/settled"
"""The data directory that the docs show."""
DATABASE = f"postgresql://settled@/settled?host={DATA}/socket"


@dataclass
class Place:
    """Real addresses for those of the docs, and variables that the page takes for granted."""

    replaced: dict[str, str] = field(default_factory=dict)
    variables: dict[str, str] = field(default_factory=dict)


Serve = Callable[[], contextlib.AbstractContextManager[Place]]


@contextlib.contextmanager
def nothing() -> Iterator[Place]:
    """The page starts the queue's server itself, or needs none: a free port, and data outside of the home."""
    (port,) = free_ports(1)
    yield Place(
        {"127.0.0.1:6632": f"127.0.0.1:{port}", "localhost:6632": f"127.0.0.1:{port}"},
        {"SETTLED_PORT": str(port)},
    )


@contextlib.contextmanager
def nats() -> Iterator[Place]:
    (port,) = free_ports(1)
    with nats_server() as one:
        yield Place({"nats://127.0.0.1:4222": one.url, "--metrics-port 9100": f"--metrics-port {port}"})


@contextlib.contextmanager
def queue() -> Iterator[Place]:
    with running_server() as one:
        address = one.url.removeprefix("http://")
        yield Place({"127.0.0.1:6632": address, "localhost:6632": address, DATABASE: database_of(one)})


@contextlib.contextmanager
def both() -> Iterator[Place]:
    with nats() as broker, queue() as served:
        yield Place({**broker.replaced, **served.replaced})


@contextlib.contextmanager
def rabbit() -> Iterator[Place]:
    with rabbitmq() as one:
        yield Place({"amqp://guest:guest@127.0.0.1:5672": one.url})


@contextlib.contextmanager
def mqtt() -> Iterator[Place]:
    with mosquitto() as one:
        yield Place({"mqtt://127.0.0.1:1883": one.url})


@contextlib.contextmanager
def redis() -> Iterator[Place]:
    one = RedisServer("valkey").start()
    try:
        yield Place({"redis://127.0.0.1:6379/0": one.url})
    finally:
        one.stop()


@contextlib.contextmanager
def kafka() -> Iterator[Place]:
    with cluster() as one:
        for topic in ("orders", "orders.dead"):
            one.create(topic, 1)
        yield Place({"kafka://127.0.0.1:9092": f"kafka://{one.address}"})


@contextlib.contextmanager
def sqs() -> Iterator[Place]:
    with sqs_server() as one:
        url = f"sqs://127.0.0.1:{one.port}?region=eu-west-1&wait=1"
        yield Place(
            {"publish sqs://eu-west-1": f"publish '{url}'", "sqs://eu-west-1": url}, dict(CREDENTIALS)
        )


@contextlib.contextmanager
def pubsub() -> Iterator[Place]:
    with pubsub_server() as one:
        yield Place({"pubsub://my-project": f"pubsub://my-project?emulator=127.0.0.1:{one.port}"})


@contextlib.contextmanager
def servicebus() -> Iterator[Place]:
    shown = "servicebus://RootManageSharedAccessKey:c2V0dGxlZA%3D%3D@shop.servicebus.windows.net"
    with servicebus_server() as one:
        yield Place({shown: f"servicebus://a:Yg%3D%3D@127.0.0.1:{one.port}?emulator=true"})


SERVERS: dict[str, Serve] = {
    "docs/brokers/kafka.md": kafka,
    "docs/brokers/mqtt.md": mqtt,
    "docs/brokers/pubsub.md": pubsub,
    "docs/brokers/rabbitmq.md": rabbit,
    "docs/brokers/redis.md": redis,
    "docs/brokers/servicebus.md": servicebus,
    "docs/brokers/sqs.md": sqs,
    "docs/nats.md": nats,
    "docs/router.md": nats,
    "docs/spark.md": both,
}
"""By page; the others start their server themselves, or need none."""


def server_of(page: str, commands: list[str]) -> Serve:
    """What a block of a page needs."""
    if page == "docs/queue.md" and not any("settled serve" in command for command in commands):
        return queue
    return SERVERS.get(page, nothing)
