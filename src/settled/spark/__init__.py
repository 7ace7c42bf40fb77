"""A queue on Spark: every row of a batch is settled exactly one way, in one transaction."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from settled.spark.frames import attempt, read_queue, settle, settle_batch, settle_each
    from settled.spark.startup import session

__all__ = ["session", "read_queue", "attempt", "settle", "settle_batch", "settle_each"]


def __getattr__(name: str) -> Any:
    # The command line imports this package where Spark is not installed.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(
        import_module("settled.spark.startup" if name == "session" else "settled.spark.frames"), name
    )
