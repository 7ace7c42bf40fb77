"""A task's messages: ranges of the log, read in slices and laid out as Arrow."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np
import pyarrow as pa
from pyspark.sql.types import (
    BinaryType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from settled.queue.columns import Columns, decode, id_texts
from settled.queue.segment import TYPE_KEY

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from settled.queue.manifest import Link, Range

SLICE = 20_000
CONTENT_TYPE = "content-type"
ARROW = pa.schema(
    [
        ("queue", pa.string()),
        ("partition", pa.string()),
        ("sequence", pa.int64()),
        ("message_id", pa.string()),
        ("transaction_id", pa.string()),
        ("attempt", pa.int32()),
        ("created_at", pa.timestamp("us", "UTC")),
        ("headers", pa.map_(pa.string(), pa.string())),
        ("payload", pa.binary()),
        ("lane", pa.int64()),
        ("batch", pa.int64()),
    ]
)
SPARK = StructType(
    [
        StructField("queue", StringType()),
        StructField("partition", StringType()),
        StructField("sequence", LongType()),
        StructField("message_id", StringType()),
        StructField("transaction_id", StringType()),
        StructField("attempt", IntegerType()),
        StructField("created_at", TimestampType()),
        StructField("headers", MapType(StringType(), StringType())),
        StructField("payload", BinaryType()),
        StructField("lane", LongType()),
        StructField("batch", LongType()),
    ]
)


class Slice(NamedTuple):
    """Some messages of one lane, in order."""

    range: Range
    columns: Columns
    attempts: NDArray[np.int32] | None
    """Which attempt this is, or None where it is everybody's first."""

    def __len__(self) -> int:
        return len(self.columns.seqs)


def slices(link: Link, ranges: list[Range]) -> Iterator[Slice]:
    """Read ranges: of each lane what was parked, then what comes next."""
    for range_ in ranges:
        if range_.parked:
            rows = link.rows("segments_of", lane=range_.lane, seqs=list(range_.parked))
            wanted = np.array(sorted(range_.parked))
            for at in range(0, len(rows), 100):
                columns = decode(map(_fields, rows[at : at + 100]))
                yield _slice(range_, columns, np.isin(columns.seqs, wanted))
        at = range_.first
        while at < range_.end:
            stop = min(range_.end, at + SLICE)
            rows = link.rows("segments", lane=range_.lane, first=at, stop=stop)
            columns = decode(map(_fields, rows))
            if len(columns.seqs):
                # A segment is read whole: its end may be past the slice, and then is not read again.
                end = min(range_.end, int(columns.seqs[-1]) + 1)
                keep = (columns.seqs >= at) & (columns.seqs < end)
                if "1" in range_.skip:
                    settled = np.frombuffer(range_.skip.encode(), np.uint8) == ord("1")
                    keep[keep] = ~settled[columns.seqs[keep] - range_.first]
                yield _slice(range_, columns, keep)
                stop = max(stop, end)
            at = stop


def _fields(row: dict[str, Any]) -> tuple[int, int, int, bytes]:
    return row["first_seq"], row["n"], row["created"], row["body"]


def _slice(range_: Range, columns: Columns, keep: NDArray[np.bool_]) -> Slice:
    if not keep.all():
        columns = _take(columns, keep)
    attempts = None
    if range_.attempts:
        failed = range_.attempts
        attempts = np.array([failed.get(seq, 0) + 1 for seq in columns.seqs.tolist()], np.int32)
    return Slice(range_, columns, attempts)


def only(slice_: Slice, places: list[int]) -> Slice:
    """Some messages of a slice."""
    keep = np.zeros(len(slice_), np.bool_)
    keep[places] = True
    attempts = slice_.attempts[keep] if slice_.attempts is not None else None
    return Slice(slice_.range, _take(slice_.columns, keep), attempts)


def _take(columns: Columns, keep: NDArray[np.bool_]) -> Columns:
    places = np.flatnonzero(keep)
    if not len(places) or places[-1] - places[0] == len(places) - 1:  # a run: no byte is copied
        a, b = (int(places[0]), int(places[-1]) + 1) if len(places) else (0, 0)
        return Columns(
            columns.seqs[a:b],
            columns.created[a:b],
            columns.ids[a:b],
            columns.tx[a:b] if columns.tx is not None else None,
            columns.headers[a:b] if columns.headers is not None else None,
            columns.payload,
            columns.offsets[a : b + 1],
        )
    starts, ends = columns.offsets[:-1][keep].tolist(), columns.offsets[1:][keep].tolist()
    payload = b"".join([columns.payload[a:b] for a, b in zip(starts, ends, strict=True)])
    offsets = np.zeros(len(places) + 1, np.int32)
    np.cumsum(np.diff(columns.offsets)[keep], out=offsets[1:])
    return Columns(
        columns.seqs[keep],
        columns.created[keep],
        columns.ids[keep],
        [columns.tx[i] for i in places] if columns.tx is not None else None,
        [columns.headers[i] for i in places] if columns.headers is not None else None,
        payload,
        offsets,
    )


def arrays(slice_: Slice, queue: str | None, batch: int) -> list[pa.Array]:
    """A slice as the columns of `ARROW`.

    Without a queue's name what can be filled in again is null: Spark copies each column of each row.
    """
    n, columns = len(slice_), slice_.columns
    ids = fixed_texts(id_texts(columns.ids), 36)
    offsets = np.ascontiguousarray(columns.offsets)
    return [
        pa.repeat(pa.scalar(queue), n) if queue is not None else pa.nulls(n, pa.string()),
        pa.repeat(pa.scalar(slice_.range.partition), n),
        pa.array(columns.seqs),
        ids,
        _transaction_ids(columns.tx, ids if queue is not None else pa.nulls(n, pa.string())),
        pa.array(slice_.attempts)
        if slice_.attempts is not None
        else pa.repeat(pa.scalar(1 if queue is not None else None, pa.int32()), n),
        pa.array(columns.created).cast(pa.timestamp("us", "UTC")),
        _headers(columns.headers, n),
        pa.Array.from_buffers(pa.binary(), n, [None, pa.py_buffer(offsets), pa.py_buffer(columns.payload)]),
        pa.repeat(pa.scalar(slice_.range.lane), n),
        pa.repeat(pa.scalar(batch), n),
    ]


def fixed_texts(texts: NDArray[np.uint8], width: int) -> pa.Array:
    """Rows of characters as strings."""
    n = len(texts)
    offsets = np.arange(0, width * (n + 1), width, dtype=np.int32)
    return pa.Array.from_buffers(
        pa.string(), n, [None, pa.py_buffer(offsets), pa.py_buffer(np.ascontiguousarray(texts))]
    )


def _transaction_ids(own: list[bytes] | None, ids: pa.Array) -> pa.Array:
    if own is None:
        return ids
    texts = pa.array(own, pa.binary()).cast(pa.string())
    return texts if all(own) else pa.compute.if_else(pa.compute.equal(texts, ""), ids, texts)


def _headers(raw: list[bytes] | None, n: int) -> pa.Array:
    kind = ARROW.field("headers").type
    if raw is None:
        return pa.nulls(n, kind)
    decode = msgspec.json.Decoder(dict[str, str]).decode
    return pa.array([list(shown(decode(h)).items()) if h else None for h in raw], kind)


def shown(stored: dict[str, str]) -> dict[str, str]:
    """Headers as they are shown: the content type has its usual name."""
    if TYPE_KEY in stored:
        stored[CONTENT_TYPE] = stored.pop(TYPE_KEY)
    return stored


def stored(shown: dict[str, str]) -> dict[str, str]:
    """Headers as the queue stores them."""
    if CONTENT_TYPE in shown:
        shown[TYPE_KEY] = shown.pop(CONTENT_TYPE)
    return shown
