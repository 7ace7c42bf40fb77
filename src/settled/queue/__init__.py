"""A partitioned, leased, durable message queue on Postgres: a log, cursors and exceptions."""

from settled.queue.engine import Engine
from settled.queue.types import (
    DEFAULT_PARTITION,
    QUEUE_MODE,
    AckItem,
    AckResult,
    BadRequest,
    Conflict,
    Fenced,
    NotFound,
    Popped,
    PoppedMessage,
    PushItem,
    PushResult,
    QueueError,
    QueueFull,
    QueueOptions,
    Unavailable,
)

__all__ = [
    "Engine",
    "PushItem",
    "PushResult",
    "Popped",
    "PoppedMessage",
    "AckItem",
    "AckResult",
    "QueueOptions",
    "QueueError",
    "BadRequest",
    "NotFound",
    "Conflict",
    "QueueFull",
    "Unavailable",
    "Fenced",
    "QUEUE_MODE",
    "DEFAULT_PARTITION",
]
