"""A queue on Spark: every row of a batch is settled exactly one way, in one transaction."""

from settled.spark.frames import attempt, read_queue, settle, settle_batch
from settled.spark.session import session

__all__ = ["session", "read_queue", "attempt", "settle", "settle_batch"]
