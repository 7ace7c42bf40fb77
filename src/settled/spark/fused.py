"""The fast path: read, decode and attempt in one Python process, without a detour through the JVM."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING

import msgspec
import pyarrow as pa

from settled.queue.segment import uuid_text
from settled.spark import rows
from settled.spark.attempts import ACK, Attempted, Attempts, Rows, outcome_arrays
from settled.spark.broker import broker_of
from settled.spark.shipping import loads
from settled.spark.sink import carry
from settled.spark.types import arrow_type

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from settled.spark.broker import Chunk
    from settled.spark.options import Options
    from settled.spark.rows import Slice

NAMES = [*rows.ARROW.names, "outcome", "delay", "error", "result"]
_headers = msgspec.json.Decoder(dict[str, str]).decode


def as_rows(slice_: Slice) -> Rows:
    """A slice as a handler's rows."""
    columns = slice_.columns
    partition = slice_.range.partition
    return Rows(
        lanes=slice_.range.lane,
        blob=columns.payload,
        offsets=columns.offsets.tolist(),
        seqs=columns.seqs,
        attempts=slice_.attempts.tolist() if slice_.attempts is not None else None,
        headers=[_headers(h) if h else None for h in columns.headers]
        if columns.headers is not None
        else None,
        ids=lambda i: uuid_text(columns.ids[i].tobytes()),
        created=lambda i: datetime.fromtimestamp(int(columns.created[i]) / 1e6, UTC),
        partition=lambda _: partition,
    )


def read_attempted(chunks: Iterable[Chunk], settings: Options, batch: int) -> Iterator[pa.RecordBatch]:
    """Messages with what came of them."""
    job = loads(settings.handler)
    attempts = Attempts(job)
    result = arrow_type(job.result)
    for chunk in chunks:
        done = attempts.run(chunk.rows())
        yield pa.RecordBatch.from_arrays(chunk.arrays(batch) + outcome_arrays(done, result), names=NAMES)


def read_staged(chunks: Iterable[Chunk], settings: Options, batch: int) -> Iterator[pa.RecordBatch]:
    """Messages are attempted and what came of them is staged at once: the JVM hears of the task only."""
    attempts = Attempts(loads(settings.handler))

    def came() -> Iterator[pa.RecordBatch]:
        for chunk in chunks:
            rows_ = chunk.rows()
            done = attempts.run(rows_)
            for place in done.failed:  # one that is not acknowledged is not pushed, whatever it returned
                done.results[place] = None
            # In order, nothing behind a failure has a result: so results may go first.
            if settings.to and done.results.count(None) < len(done.results):
                yield _results(rows_, done, settings, batch)
            if done.failed:
                failed = done.only_failed()
                arrays = chunk.only(sorted(done.failed)).arrays(batch) + outcome_arrays(failed, pa.binary())
                arrays[-1:] = [pa.nulls(len(failed.results), kind) for kind in (pa.string(), pa.binary())]
                yield pa.RecordBatch.from_arrays(arrays, names=[*NAMES[:-1], "to_partition", "push"])

    yield carry(broker_of(settings).stage(came()))


def _results(rows_: Rows, done: Attempted, settings: Options, batch: int) -> pa.RecordBatch:
    n = len(done.results)
    own = None if settings.on_nats or rows_.partition is None else rows_.partition(0)
    columns = {
        "lane": pa.repeat(pa.scalar(rows_.lanes, pa.int64()), n),
        "sequence": pa.array(rows_.seqs),
        "batch": pa.repeat(pa.scalar(batch, pa.int64()), n),
        "outcome": pa.repeat(pa.scalar(ACK), n),
        "delay": pa.nulls(n, pa.float64()),
        "error": pa.nulls(n, pa.string()),
        "to_partition": pa.repeat(pa.scalar(own, pa.string()), n),
        "push": pa.array(done.results, pa.binary()),
    }
    return pa.RecordBatch.from_pydict(columns)
