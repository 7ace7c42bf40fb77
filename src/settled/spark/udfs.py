"""Arrow functions that Spark calls on columns: decode payloads, attempt rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pyarrow as pa
from pyspark.sql.pandas.functions import arrow_udf
from pyspark.sql.types import DoubleType, StringType, StructField, StructType

from settled import codec
from settled.settlement import describe
from settled.spark.attempts import Attempts, Rows, outcome_arrays
from settled.spark.fused import arrow_type
from settled.spark.shipping import dumps, loads
from settled.spark.types import to_plain

if TYPE_CHECKING:
    from pyspark.sql import Column


def decoded(type_: Any, kind: Any) -> Callable[[Column], Column]:
    """A function of a column of bytes that decodes them as a pump does."""
    shipped = dumps(type_)
    value = arrow_type(kind.json())

    def parse(data: pa.Array) -> pa.Array:
        decode = codec.decoder(loads(shipped))
        values: list[Any] = []
        errors: list[str | None] = []
        for raw in data.to_pylist():
            try:
                values.append(to_plain(decode(raw, {})))
                errors.append(None)
            except Exception as error:  # a bad payload is the message's fault, whatever it raises
                values.append(None)
                errors.append(describe(error))
        arrays = [pa.array(values, value), pa.array(errors, pa.string())]
        return pa.StructArray.from_arrays(arrays, names=["value", "error"])

    parse.__annotations__ = {"data": pa.Array, "return": pa.Array}
    returns = StructType([StructField("value", kind), StructField("error", StringType())])
    make: Any = arrow_udf
    return cast("Callable[[Column], Column]", make(parse, returns))


def attempting(shipped: str, kind: Any) -> Any:
    """A function of columns that attempts rows; a row that is acknowledged without a result is null."""

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
            arrays = outcome_arrays(attempts.run(_rows(*columns)), result)
            nothing = pa.compute.and_(arrays[0].is_null(), arrays[3].is_null())
            yield pa.StructArray.from_arrays(arrays, names=returns.names, mask=nothing)

    run.__annotations__ = {"batches": Iterator[tuple[pa.Array, ...]], "return": Iterator[pa.Array]}
    make: Any = arrow_udf
    return make(run, returns).asNondeterministic()


def _rows(
    lanes: pa.Array,
    seqs: pa.Array,
    attempts: pa.Array,
    headers: pa.Array,
    ids: pa.Array,
    partitions: pa.Array,
    created: pa.Array,
    data: pa.Array,
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
        headers=None
        if headers.null_count == len(headers)
        else [dict(h) if h else None for h in headers.to_pylist()],
        ids=lambda i: ids[i].as_py(),
        created=lambda i: created[i].as_py(),
        partition=lambda i: partitions[i].as_py(),
    )
