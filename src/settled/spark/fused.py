"""The fast path: read, decode and attempt in one Python process, without a detour through the JVM."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING

import msgspec
import pyarrow as pa

from settled.queue.segment import uuid_text
from settled.spark import rows
from settled.spark.attempts import Attempts, Rows, outcome_arrays
from settled.spark.shipping import loads
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
        if settings.emit == "failures":
            if not done.failed:
                continue
            chunk, done = chunk.only(sorted(done.failed)), done.only_failed()
        yield pa.RecordBatch.from_arrays(chunk.arrays(batch) + outcome_arrays(done, result), names=NAMES)
