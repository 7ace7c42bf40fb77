"""A partitioned, leased, durable message queue on Postgres: a log, cursors and exceptions."""

from typing import TYPE_CHECKING, Any

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

if TYPE_CHECKING:
    from settled.queue.engine import Engine

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


def __getattr__(name: str) -> Any:
    # Spark starts processes that read the log and need no engine.
    if name != "Engine":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from settled.queue.engine import Engine

    return Engine
