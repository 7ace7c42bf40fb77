"""The Python client of a settled server: `Client` for asyncio, `SyncClient` for everything else."""

from .client import Client, SyncClient
from .errors import (
    CircuitOpen,
    ClientError,
    Closed,
    InvalidPayload,
    Refused,
    Uncertain,
    Unreachable,
    Unsettled,
)
from .messages import DeadLetter, DeadLetters, Message, Pushed, Settled
from .resilience import Resilience

__all__ = [
    "Client",
    "SyncClient",
    "Message",
    "Pushed",
    "Settled",
    "DeadLetter",
    "DeadLetters",
    "Resilience",
    "ClientError",
    "Unreachable",
    "Refused",
    "Unsettled",
    "Uncertain",
    "CircuitOpen",
    "Closed",
    "InvalidPayload",
]
