"""Brokers, one file each, behind one protocol."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from urllib.parse import parse_qsl

from settled.clock import Clock
from settled.signals import ConfigurationError
from settled.transports.base import Transport
from settled.transports.memory import MemoryTransport
from settled.transports.urls import masked, split


@dataclass(frozen=True, slots=True)
class Kind:
    """Where a transport's class is, and which extra installs what it needs."""

    module: str
    name: str
    extra: str
    creates: bool = False
    """Whether `?create=true` in its URL makes what is missing on the broker."""


_POSTGRES = Kind("settled.transports.postgres", "PostgresTransport", "queue")
_HTTP = Kind("settled.transports.http", "HttpTransport", "client")
_NATS = Kind("settled.transports.nats", "NatsTransport", "nats", creates=True)
_KAFKA = Kind("settled.transports.kafka", "KafkaTransport", "kafka", creates=True)
_REDIS = Kind("settled.transports.redis", "RedisTransport", "redis", creates=True)
_RABBITMQ = Kind("settled.transports.rabbitmq", "RabbitTransport", "rabbitmq", creates=True)
_MQTT = Kind("settled.transports.mqtt", "MqttTransport", "mqtt")
_SQS = Kind("settled.transports.sqs", "SqsTransport", "sqs", creates=True)
_SERVICEBUS = Kind("settled.transports.servicebus", "ServiceBusTransport", "servicebus")
_PUBSUB = Kind("settled.transports.pubsub", "PubSubTransport", "pubsub", creates=True)

KINDS = {
    "postgresql": _POSTGRES,
    "http": _HTTP,
    "https": _HTTP,
    "nats": _NATS,
    "tls": _NATS,
    "kafka": _KAFKA,
    "redis": _REDIS,
    "rediss": _REDIS,
    "unix": _REDIS,
    "amqp": _RABBITMQ,
    "amqps": _RABBITMQ,
    "mqtt": _MQTT,
    "mqtts": _MQTT,
    "sqs": _SQS,
    "servicebus": _SERVICEBUS,
    "pubsub": _PUBSUB,
}
"""The transports that have a broker, by the scheme of their URL."""


def creating(url: str) -> str:
    """The URL, asking for what is missing to be made where that can be asked.

    >>> creating("nats://127.0.0.1:4222"), creating("postgresql://localhost/db")
    ('nats://127.0.0.1:4222?create=true', 'postgresql://localhost/db')
    """
    parts = split(url)
    kind = KINDS.get(parts.scheme)
    if kind is None or not kind.creates or "create" in dict(parse_qsl(parts.query)):
        return url
    return f"{url}{'&' if parts.query else '?'}create=true"


def connect(url: str, clock: Clock) -> Transport:
    """The transport for a URL; nothing is opened yet."""
    scheme = split(url).scheme
    if scheme == "memory":
        return MemoryTransport(clock=clock)
    if scheme not in KINDS:
        known = ", ".join(f"{name}://" for name in sorted(["memory", *KINDS]))
        raise ConfigurationError(f"app: no transport for {masked(url)!r}; use one of {known}")
    kind = KINDS[scheme]
    try:
        found: Transport = getattr(import_module(kind.module), kind.name)(url)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("settled"):
            raise
        raise ConfigurationError(
            f"app: {scheme}:// needs {error.name}; run: pip install 'settled[{kind.extra}]'"
        ) from error
    return found
