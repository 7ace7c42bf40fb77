"""A queue on Spark: every row of a batch is settled exactly one way, in one transaction."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from settled.spark.frames import attempt, read_queue, settle, settle_batch, settle_each
    from settled.spark.startup import session
    from settled.spark.tables import to_delta, to_iceberg, to_parquet

__all__ = [
    "session", "read_queue", "attempt",
    "settle", "settle_batch", "settle_each",
    "to_parquet", "to_delta", "to_iceberg",
]  # fmt: skip
_ELSEWHERE = {"session": "startup", "to_parquet": "tables", "to_delta": "tables", "to_iceberg": "tables"}


def __getattr__(name: str) -> Any:
    # The command line imports this package where Spark is not installed.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"settled.spark.{_ELSEWHERE.get(name, 'frames')}"), name)
