"""Run one handler over a queue on Spark until it is told to stop, or until nothing is left."""

from __future__ import annotations

import logging
import re
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from pyspark.errors import StreamingQueryException

from settled.queue.manifest import Link, begin_group
from settled.spark.frames import attempt, process_died, read_queue, settle, settle_each
from settled.spark.options import is_nats

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

    from settled.policy import PolicyOptions


log = logging.getLogger("settled.spark")
STARTS = 5
_TOO_SLOW = "Python worker failed to connect back"
_WORDLESS = re.compile(r"terminated with exception:\s+SQLSTATE")


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a run is: what its batches came to, what waits, and how fast it goes."""

    batches: int
    messages: int
    acked: int
    retried: int
    dead: int
    released: int
    pushed: int
    waiting: int
    failing: int
    removed: int = 0
    """Messages that were there, or came, and are gone unsettled: the stream or queue was purged, or its
    limits are too tight. Of a queue it is counted at the end of the run."""
    seconds: float = 0.0
    """From claim to settlement, over all batches: Spark's start and idle times are not counted."""

    def line(self) -> str:
        """All of it in a line."""
        speed = self.messages / self.seconds if self.seconds else 0
        return (
            f"{speed:,.0f} msg/s  acked {self.acked:,}  retried {self.retried:,}  dead {self.dead:,}  "
            f"released {self.released:,}  lag {self.waiting:,} + {self.failing:,} to be retried"
        )


def live(stream: TextIO) -> Callable[[Progress], None]:
    """Show progress: one line that is written over on a terminal, elsewhere a line a settled batch."""
    terminal, shown = stream.isatty(), 0

    def show(progress: Progress) -> None:
        nonlocal shown
        if terminal:
            text = progress.line() if progress.batches else f"lag {progress.waiting:,}, no batch settled yet"
            stream.write(f"\r  {text:110}")
        elif progress.batches != shown:
            stream.write(f"  {progress.line()}\n")
        shown = progress.batches
        stream.flush()

    return show


def run(
    spark: SparkSession,
    handler: Callable[..., Any],
    queue: str,
    group: str,
    checkpoint: str,
    *,
    url: str,
    to: str | None = None,
    write: Callable[[DataFrame, int], None] | None = None,
    until_empty: bool = False,
    on_progress: Callable[[Progress], None] = lambda _: None,
    every: float = 1.0,
    stop: threading.Event | None = None,
    result: Any = None,
    policy: PolicyOptions | None = None,
    **options: Any,
) -> Progress:
    """Attempt and settle; with `write`, each batch is also given to that function before it is settled.

    `result` and `policy` are as `attempt()` takes them, other options as `read_queue()` does.

    Ends when the query is stopped, when `stop` is set, on Ctrl-C, or with `until_empty` when nothing waits
    and nothing is to be retried. The query is started again, a few times, when a Python process of it does
    not start within Spark's ten seconds, or one beside the driver is killed: its batch is repeated.
    """
    with _watch(url) as link:
        df = read_queue(spark, queue, group, url=url, **options)
        df = df.transform(attempt(handler, result=result, **(policy or {})))
        after = _settled(link, queue, group)
        if isinstance(link, Link):
            begin_group(link, queue, group, options.get("starting", ""))
        before = _standing(link, queue, group)
        started = time.monotonic()
        if isinstance(after, int) and after and ":/" not in checkpoint and not Path(checkpoint).exists():
            log.warning(
                "queue %r, group %r: no checkpoint at %s, but the group has read %d batches; it goes on "
                "after them",
                queue,
                group,
                checkpoint,
                after,
            )
        writer = settle(df, to) if write is None else settle_each(df, write, to)
        writer = writer.option("checkpointLocation", checkpoint)

        def progress() -> Progress:
            return _progress(link, queue, group, after, time.monotonic() - started)

        query: StreamingQuery = writer.start()
        starts, batches = 1, 0
        try:
            while True:
                try:
                    ended = query.awaitTermination(every)  # type: ignore[arg-type]
                except StreamingQueryException as error:
                    why = passing(error)
                    if starts == STARTS or why is None or (stop is not None and stop.is_set()):
                        raise
                    starts += 1
                    log.warning(
                        "queue %r, group %r: a Python process %s; the query is started again (%d of %d)",
                        queue,
                        group,
                        why,
                        starts,
                        STARTS,
                    )
                    query, ended = writer.start(), False
                now = progress()
                on_progress(now)
                if now.batches > batches:
                    starts, batches = 1, now.batches
                empty = until_empty and not now.waiting and not now.failing
                if ended or empty or (stop is not None and stop.is_set()):
                    break
        except KeyboardInterrupt:
            pass  # as if we were told to stop
        except Exception:
            # Who told us told Spark's processes too; what was settled is in the books.
            if stop is None or not stop.is_set():
                raise
        finally:
            end(query, stop)
        return _with_removed(progress(), link, queue, group, before)


def end(what: StreamingQuery | SparkSession, told: threading.Event | None) -> None:
    """Stop it; once we were told to stop, Spark may be gone already."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Unable to cleanly shutdown")
            what.stop()
    except Exception:
        if told is None or not told.is_set():
            raise


def passing(error: Exception) -> str | None:
    """Why a query failed, if only a process of it did: nothing of its batch was settled, or all of it."""
    text = str(error)
    if _TOO_SLOW in text:
        return "did not start within Spark's 10 s, the machine is too busy"
    # Of a process for the offsets that is gone Spark has nothing to say.
    return "beside the driver was killed" if process_died(error) or _WORDLESS.search(text) else None


def _watch(url: str) -> Any:
    """What tells how far a group is."""
    if not is_nats(url):
        return Link(url)
    from settled.spark.jetstream.history import Watch

    return Watch(url)


def _settled(link: Any, queue: str, group: str) -> Any:
    """How far the group is; a batch that another run left open is for this one to settle."""
    if not isinstance(link, Link):
        return link.totals(queue, group)
    rows = link.rows("find_reader", queue=queue, group=group)
    return link.rows("last_settled", reader=rows[0]["id"])[0]["number"] if rows else 0


def _standing(link: Any, queue: str, group: str) -> dict[str, Any] | None:
    """What a group has before it on a queue, and how far the queue is."""
    if not isinstance(link, Link):
        return None
    rows = link.rows("lag", queue=queue, group=group)
    return rows[0] if rows else None


def _with_removed(
    came: Progress, link: Any, queue: str, group: str, before: dict[str, Any] | None
) -> Progress:
    """With what is gone unsettled: was there or came, and is neither settled nor there."""
    after = _standing(link, queue, group)
    if before is None or after is None:
        return came
    left = after["waiting"] + after["failing"]
    gone = before["waiting"] + before["failing"] + after["head"] - before["head"] - left
    if gone <= came.acked + came.dead:
        return came
    # Somebody else may have settled for the group too.
    settled = link.rows("settled_since", queue=queue, group=group, at=before["at"])[0]["messages"]
    return replace(came, removed=max(gone - settled, 0))


def _progress(link: Any, queue: str, group: str, after: Any, elapsed: float) -> Progress:
    if not isinstance(link, Link):
        return Progress(**link.progress(queue, group, after), seconds=elapsed)
    # What is left comes first: when nothing is, the totals have all of it.
    lag = link.rows("lag", queue=queue, group=group) or [{"waiting": 1, "failing": 0}]
    totals = link.rows("totals", queue=queue, group=group, after=after)[0]
    seconds = link.rows("busy", queue=queue, group=group, after=after)[0]["seconds"]
    return Progress(**totals, waiting=lag[0]["waiting"], failing=lag[0]["failing"], seconds=seconds)
