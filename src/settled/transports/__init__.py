"""Brokers, one file each, behind one protocol."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from urllib.parse import urlsplit

from settled.clock import Clock
from settled.signals import ConfigurationError
from settled.transports.base import Transport
from settled.transports.memory import MemoryTransport


@dataclass(frozen=True, slots=True)
class Kind:
    """Where a transport's class is, and which extra installs what it needs."""

    module: str
    name: str
    extra: str


_POSTGRES = Kind("settled.transports.postgres", "PostgresTransport", "queue")
_HTTP = Kind("settled.transports.http", "HttpTransport", "client")
_NATS = Kind("settled.transports.nats", "NatsTransport", "nats")
_SQS = Kind("settled.transports.sqs", "SqsTransport", "sqs")
_SERVICEBUS = Kind("settled.transports.servicebus", "ServiceBusTransport", "servicebus")
_PUBSUB = Kind("settled.transports.pubsub", "PubSubTransport", "pubsub")

KINDS = {
    "postgresql": _POSTGRES,
    "http": _HTTP,
    "https": _HTTP,
    "nats": _NATS,
    "tls": _NATS,
    "sqs": _SQS,
    "servicebus": _SERVICEBUS,
    "pubsub": _PUBSUB,
}
"""The transports that have a broker, by the scheme of their URL."""


def connect(url: str, clock: Clock) -> Transport:
    """The transport for a URL; nothing is opened yet."""
    scheme = urlsplit(url).scheme
    if scheme == "memory":
        return MemoryTransport(clock=clock)
    if scheme not in KINDS:
        known = ", ".join(f"{name}://" for name in sorted(["memory", *KINDS]))
        raise ConfigurationError(f"app: no transport for {url!r}; use one of {known}")
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
