"""NATS JetStream: durable and ephemeral consumers, pulled or pushed, with dead letters."""

from settled.transports.nats.connection import Connection, Login, PublishFailed
from settled.transports.nats.letters import DeadLetters, Letter
from settled.transports.nats.sources import Durable, Ephemeral
from settled.transports.nats.transport import NatsTransport

__all__ = [
    "Connection",
    "DeadLetters",
    "Durable",
    "Ephemeral",
    "Letter",
    "Login",
    "NatsTransport",
    "PublishFailed",
]
