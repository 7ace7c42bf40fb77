"""Arrow functions that Spark calls on columns: decode payloads, attempt rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import datetime
from functools import partial
from itertools import repeat
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pyarrow as pa
from pyspark.sql.pandas.functions import arrow_udf
from pyspark.sql.types import DoubleType, StringType, StructField, StructType

from settled import codec
from settled.queue.manifest import Range
from settled.settlement import describe
from settled.spark.attempts import Attempts, Rows, outcome_arrays
from settled.spark.fused import as_rows
from settled.spark.rows import slices
from settled.spark.shipping import dumps, loads
from settled.spark.types import arrow_type, fitting, to_plain

if TYPE_CHECKING:
    from pyspark.sql import Column

Fact = Callable[[int], Any]


def decoded(type_: Any, kind: Any) -> Callable[[Column, Column], Column]:
    """A function of payloads and headers that decodes them as a pump does."""
    shipped = dumps(type_)
    value = arrow_type(kind.json())

    def parse(data: pa.Array, headers: pa.Array) -> pa.Array:
        decode = codec.decoder(loads(shipped))
        values: list[Any] = []
        errors: list[str | None] = []
        for raw, own in zip(data.to_pylist(), _dicts(headers) or repeat(None), strict=False):
            try:
                values.append(to_plain(decode(raw, own or {})))
                errors.append(None)
            except Exception as error:  # a bad payload is the message's fault, whatever it raises
                values.append(None)
                errors.append(describe(error))
        found, misfits = fitting(values, value)
        for place, misfit in misfits.items():
            errors[place] = describe(misfit)
        arrays = [found, pa.array(errors, pa.string())]
        return pa.StructArray.from_arrays(arrays, names=["value", "error"])

    parse.__annotations__ = {"data": pa.Array, "headers": pa.Array, "return": pa.Array}
    returns = StructType([StructField("value", kind), StructField("error", StringType())])
    make: Any = arrow_udf
    return cast("Callable[[Column, Column], Column]", make(parse, returns))


def attempting(shipped: str, kind: Any, again: str | None, given: bool) -> Any:
    """A function of columns that attempts rows; a row that is acknowledged without a result is null.

    The first column is of outcomes that rows have already, if any are `given`. Message ids, partitions and
    times are columns too, or are read `again` from the queue of that address.
    """

    returns = StructType(
        [
            StructField("outcome", StringType()),
            StructField("delay", DoubleType()),
            StructField("error", StringType()),
            StructField("result", kind),
        ]
    )

    def run(batches: Any) -> Any:
        attempts = Attempts(loads(shipped))
        result = arrow_type(loads(shipped).result)
        for columns in batches:
            outcomes, *columns = columns if given else (None, *columns)
            rows = _rows(*columns[:5], *(columns[5:] or Facts(again, *columns[:2]).columns()))
            if outcomes is not None and outcomes.null_count < len(outcomes):
                rows.given = outcomes.to_pylist()
            arrays = outcome_arrays(attempts.run(rows), result)
            nothing = pa.compute.and_(arrays[0].is_null(), arrays[3].is_null())
            yield pa.StructArray.from_arrays(arrays, names=returns.names, mask=nothing)

    run.__annotations__ = {"batches": Iterator[tuple[pa.Array, ...]], "return": Iterator[pa.Array]}
    make: Any = arrow_udf
    return make(run, returns).asNondeterministic()


class Facts:
    """What a handler may ask of its message and seldom does: read from the log again, many at a time."""

    def __init__(self, url: str | None, lanes: pa.Array, seqs: pa.Array) -> None:
        self._url = url
        self._lanes, self._seqs = lanes.to_numpy(), seqs.to_numpy()
        self._found: dict[tuple[int, int], tuple[str, str, datetime]] | None = None

    def columns(self) -> tuple[Fact, Fact, Fact]:
        """Message ids, partitions and times, by place."""
        return partial(self._fact, 0), partial(self._fact, 1), partial(self._fact, 2)

    def _fact(self, which: int, place: int) -> Any:
        if self._found is None:
            self._found = dict(self._read())
        return self._found[(int(self._lanes[place]), int(self._seqs[place]))][which]

    def _read(self) -> Iterator[tuple[tuple[int, int], tuple[str, str, datetime]]]:
        from settled.spark.postgres import link_to

        link = link_to(self._url or "")
        lanes = np.unique(self._lanes).tolist()
        for row in link.rows("partitions", lanes=lanes):
            lane, name = row["id"], row["name"]
            seqs = tuple(self._seqs[self._lanes == lane].tolist())
            for part in slices(link, [Range(lane, name, 0, 0, len(seqs), "", seqs, {})]):
                rows = as_rows(part)
                for i, seq in enumerate(part.columns.seqs.tolist()):
                    yield (lane, seq), (rows.ids(i), name, rows.created(i))  # type: ignore[misc]


def _rows(
    lanes: pa.Array,
    seqs: pa.Array,
    attempts: pa.Array,
    headers: pa.Array,
    data: pa.Array,
    ids: pa.Array | Fact,
    partitions: pa.Array | Fact,
    created: pa.Array | Fact,
) -> Rows:
    buffers = data.buffers()
    offsets = np.frombuffer(buffers[1], np.int32, len(data) + 1, 4 * data.offset)
    counts = attempts.to_numpy()
    return Rows(
        lanes=lanes.to_numpy().tolist(),
        blob=buffers[2].to_pybytes() if buffers[2] is not None else b"",
        offsets=offsets.tolist(),
        seqs=seqs.to_numpy(),
        attempts=counts.tolist() if len(counts) and counts.max() > 1 else None,
        headers=_dicts(headers),
        ids=_by_place(ids),
        created=_by_place(created),
        partition=_by_place(partitions),
    )


def _dicts(headers: pa.Array) -> list[dict[str, str] | None] | None:
    if headers.null_count == len(headers):
        return None
    return [dict(h) if h else None for h in headers.to_pylist()]


def _by_place(column: pa.Array | Fact) -> Fact:
    return (lambda i: column[i].as_py()) if isinstance(column, pa.Array) else column
