"""What a user writes: read a queue, attempt its rows, settle them."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Unpack
from weakref import WeakKeyDictionary

from pyspark.errors import ParseException
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.types import ArrayType, BinaryType, DataType, StringType, StructField, StructType

from settled.handlers.layers import subscribed_policy
from settled.policy import Policy, PolicyOptions
from settled.queue.errors import BadRequest, NotFound
from settled.queue.manifest import Link
from settled.signals import ConfigurationError
from settled.spark.attempts import ACK, INVALID, Job
from settled.spark.options import Options, is_nats
from settled.spark.origin import Origin
from settled.spark.settling import raw, settling, sink_options
from settled.spark.shipping import dumps, flags_of, names_of
from settled.spark.source import new_holder
from settled.spark.types import spark_type
from settled.spark.udfs import attempting, decoded

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.readwriter import DataStreamWriter

Transform = Callable[[DataFrame], DataFrame]
POLICY = ("auto_ack", "on_error", "requeue_count", "requeue_delay", "dont_ack_delay", "backoff")
CRASHED = "Python worker exited unexpectedly"
SETTLE_TRIES = 3
log = logging.getLogger("settled.spark")
WITH_THE_SOURCE = 2**20  # characters of a handler that may go with each task; Spark sends a UDF only once


def read_queue(
    spark: SparkSession,
    queue: str = "",
    group: str = "",
    *,
    url: str | None = None,
    stream: str = "",
    consumer: str = "",
    subject: str = "",
    max_deliver: int | None = None,
    backoff: Sequence[float] = (),
    dead_letter: str = "",
    payload: Any = bytes,
    streaming: bool = True,
    max_rows: int | None = 500_000,
    lease_seconds: int = 60,
    ordering: str = "queue",
    starting: str = "",
    tasks: int | None = None,
) -> DataFrame:
    """The messages of a queue for a group, a batch at a time.

    `payload` is how the column of that name looks: `bytes`, `str`, a Struct, a dataclass or a Spark schema; a
    row that does not parse has the outcome `invalid`. `max_rows` bounds a batch. `starting` is "earliest",
    "latest" or a time, for a new group.

    On NATS (`url="nats://…"`) a `stream` is read as a `consumer`: the filter, `max_deliver` and `backoff` are
    those of the consumer of that name if there is one, else `subject` and the next two, as given here.
    Dead letters go to the subject `dead_letter`, else to a stream of our own.
    """
    url = url or os.environ.get("SETTLED_URL", "")
    nats = {
        "stream": stream,
        "consumer": consumer,
        "subject": subject,
        "maxDeliver": "" if max_deliver is None else str(max_deliver),
        "backoff": ",".join(f"{seconds:g}" for seconds in backoff),
        "deadLetter": dead_letter,
    }
    given = {name: value for name, value in nats.items() if value}
    given["startingPosition"] = starting
    named = Options.parse({"url": url, "queue": queue, "group": group, "ordering": ordering, **given})
    if not named.group:
        raise BadRequest("consumer" if named.on_nats else "group", "", "a pipeline settles for one: name it")
    order = _on_nats(named) if named.on_nats else _ordering(url, queue, ordering)
    origin = Origin(url, named.queue, named.group, new_holder(), order, lease_seconds, subject)
    options = (
        given
        | origin.options()
        | {
            "maxRows": "all" if max_rows is None else str(max_rows),
            "tasks": str(tasks or _parallelism(spark)),
        }
    )
    return _with_payload(Reading(spark, options, origin, streaming).load(), payload)


class Reading(NamedTuple):
    """How rows are read. A DataFrame that nobody has changed since can still be read in another way."""

    spark: SparkSession
    options: dict[str, str]
    origin: Origin
    streaming: bool

    @classmethod
    def of(cls, df: DataFrame) -> Reading | None:
        """How these rows are read; None if something was done to them since."""
        return _unchanged.get(df)

    def _load(self, **options: str) -> DataFrame:
        reader = self.spark.readStream if self.streaming else self.spark.read
        return reader.format("settled").options(**options).load()

    def load(self, **more: str) -> DataFrame:
        """The rows, with what the source left out."""
        options = self.options | more
        df = self._load(**options, lean="true")
        filled = {
            "queue": F.lit(self.origin.queue),
            "transaction_id": F.coalesce("transaction_id", "message_id"),
            "attempt": F.coalesce("attempt", F.lit(1)),
        }
        if "handler" in options:
            filled["outcome"] = F.coalesce("outcome", F.lit(ACK))
        df = df.withColumns(filled).withMetadata("batch", self.origin.mark())
        _unchanged[df] = self._replace(options=options)
        return df

    def staged(self, options: dict[str, str]) -> DataFrame:
        """What came of the rows, staged by the tasks that read them."""
        return self._load(**self.options | options)


_unchanged: WeakKeyDictionary[DataFrame, Reading] = WeakKeyDictionary()


def _on_nats(named: Options) -> str:
    """Look at the stream now, while the user is here; order is kept only where it is asked for."""
    try:
        from settled.spark.jetstream.broker import check
    except ImportError as error:
        raise ConfigurationError(
            f"a stream on NATS needs pip install 'settled[spark,nats]' ({error})"
        ) from error
    check(named)
    return "none" if named.ordering == "queue" else named.ordering


def _ordering(url: str, queue: str, ordering: str) -> str:
    if ordering != "queue":
        return ordering
    query = "select parked from queue where name = %s"
    with Link(url) as link:
        rows = link.run(lambda c: c.execute(query, (queue,)).fetchall(), patience=0)
    if not rows:
        raise NotFound("queue", f"{queue} (push to it or configure it first)")
    return "parked" if rows[0]["parked"] else "in_order"


def _parallelism(spark: SparkSession) -> int:
    try:
        return min(4, int(spark.sparkContext.defaultParallelism))
    except Exception:  # Spark Connect has no context to ask
        return 4


def _with_payload(df: DataFrame, payload: Any) -> DataFrame:
    """The payload as it was asked for; where nobody looks at the parsed one, Spark does not parse."""
    if payload is bytes:
        return df
    if payload is str:
        df = df.withColumnRenamed("payload", "data")
        df = df.withColumn("payload", F.try_validate_utf8(F.col("data").cast("string")))
        wrong = F.col("payload").isNull()
        return df.withColumns(
            {
                "outcome": F.when(wrong, INVALID).otherwise(ACK),
                "delay": F.lit(None).cast("double"),
                "error": F.when(wrong, F.lit("the payload is no UTF-8 text")),
            }
        )
    kind = _payload_type(payload)
    parse = _from_json(kind) if isinstance(payload, (str, DataType)) else decoded(payload, kind)
    df = df.withColumnRenamed("payload", "data")
    df = df.withColumn("_parsed", parse(F.col("data"), F.col("headers")))
    return (
        df.withColumn("payload", F.col("_parsed.value"))
        .withColumn("outcome", F.when(F.col("_parsed.error").isNotNull(), INVALID).otherwise(ACK))
        .withColumn("delay", F.lit(None).cast("double"))
        .withColumn("error", F.col("_parsed.error"))
        .drop("_parsed")
    )


def _payload_type(payload: Any) -> Any:
    try:
        kind = spark_type(payload)
    except (TypeError, ParseException) as error:
        raise BadRequest("payload", payload, f"is no type of payloads: {error}") from error
    if isinstance(payload, (str, DataType)) and not isinstance(kind, StructType):
        raise BadRequest(
            "payload",
            payload,
            f"must have fields, as in 'id bigint, amount double', and {kind.simpleString()} has none; "
            "for plain values give a Python type: list[int], str or bytes",
        )
    return kind


def _from_json(kind: StructType) -> Callable[[Column, Column], Column]:
    # In a list, or Spark would not mind what comes behind the first value.
    wrapped = StructType([StructField("in", ArrayType(kind)), StructField("_corrupt", StringType())])
    options = {
        "columnNameOfCorruptRecord": "_corrupt",
        "allowSingleQuotes": "false",
        "allowNonNumericNumbers": "false",
    }

    def parse(data: Column, headers: Column) -> Column:
        text = F.concat(F.lit('{"in":['), data.cast("string"), F.lit("]}"))
        found = F.from_json(text, wrapped, options)
        value = F.try_element_at(found["in"], F.lit(1))
        wrong = F.coalesce(found["_corrupt"].isNotNull() | (F.size(found["in"]) != 1), F.lit(True))
        unfit = "the payload does not fit the schema"
        error = F.when(wrong | value.isNull(), F.lit(unfit))
        for name, missing in _missing(value, kind):
            error = error.when(missing, F.lit(f"{unfit}: {name} is null"))
        fits = F.when(error.isNull(), value)
        return F.struct(fits.alias("value"), error.alias("error"))

    return parse


def _missing(value: Column, kind: StructType, before: str = "") -> Iterator[tuple[str, Column]]:
    """Of each field that must not be null whether it is; those of a struct that is null itself are not."""
    for field in kind.fields:
        inner, name = value.getField(field.name), f"{before}{field.name}"
        if not field.nullable:
            yield name, inner.isNull()
        if isinstance(field.dataType, StructType):
            for path, missing in _missing(inner, field.dataType, f"{name}."):
                yield path, inner.isNotNull() & missing


def _job(handler: Callable[..., Any], origin: Origin, result: Any, policy: Policy) -> Job:
    kind = None if result is None else spark_type(result).json()
    names, in_order, lease = names_of(handler), origin.in_order, origin.lease_seconds
    flags = flags_of(handler)
    job = Job(handler, policy, names, origin.queue, origin.group, in_order, kind, lease, flags)
    job.subscription()  # what cannot work is said here, not on an executor
    return job


def policy_of(handler: Callable[..., Any], options: PolicyOptions) -> Policy:
    """A subscriber's own policy, changed by keywords; only what has a meaning on Spark counts."""
    strange = [name for name in options if name not in POLICY]
    if strange:
        raise ConfigurationError(
            f"attempt(): {strange[0]} has no meaning on Spark; a policy has {', '.join(POLICY)} here"
        )
    own = subscribed_policy(handler) or Policy()
    chosen: dict[str, Any] = {name: getattr(own, name) for name in POLICY}
    chosen.update(options)
    try:
        return Policy(**chosen)
    except ValueError as error:
        raise ConfigurationError(f"attempt(): {error}") from error


def attempt(handler: Callable[..., Any], *, result: Any = None, **policy: Unpack[PolicyOptions]) -> Transform:
    """A transformation that runs the handler on each row and adds `outcome`, `delay`, `error` and `result`.

    The handler is one that a pump could run: the same signature, signals and decorators. Its policy is that
    of its `@app.subscriber`, if it has one, changed by the keywords. `result` is the type of what it returns
    (a Struct, a dataclass, a Spark schema); without one, results are JSON. A row that has an outcome already
    keeps it and is not attempted.

    On what `read_queue()` gave, unchanged, it runs where the rows are read; else as an Arrow UDF.
    """

    def transform(df: DataFrame) -> DataFrame:
        origin = Origin.of(df)
        job = _job(handler, origin, result, policy_of(handler, policy))
        shipped, reading = dumps(job), Reading.of(df)
        if reading is not None and "handler" not in reading.options and len(shipped) <= WITH_THE_SOURCE:
            return reading.load(handler=shipped)
        kind = BinaryType() if job.result is None else spark_type(result)
        columns: list[Column | str] = ["lane", "sequence", "attempt", "headers", raw(df)]
        # A handler of payloads seldom asks for more, and each column is copied four times on its way.
        again = None if is_nats(origin.url) or job.subscription().policy.explicit else origin.url
        if again is None:
            columns += ["message_id", "partition", "created_at"]
        given = "outcome" in df.columns
        if given:
            columns.insert(0, F.when(F.col("outcome") != ACK, F.col("outcome")))
        own = [name for name in df.columns if name != "result"]
        df = df.select(*own, attempting(shipped, kind, again, given)(*columns).alias("_attempt"))
        return _with_outcomes(df, given)

    return transform


def _with_outcomes(df: DataFrame, given: bool) -> DataFrame:
    """The rows with what came of `_attempt`; a row that had an outcome before keeps it."""
    came = {
        "outcome": F.coalesce("_attempt.outcome", F.lit(ACK)),
        "delay": F.col("_attempt.delay"),
        "error": F.col("_attempt.error"),
    }
    if given:
        kept = F.coalesce(F.col("outcome") != ACK, F.lit(False))
        for name, column in came.items():
            before = F.col(name) if name in df.columns else F.lit(None)
            came[name] = F.when(kept, before).otherwise(column)
    own = [name for name in df.columns if name not in came and name != "_attempt"]
    columns = [column.alias(name) for name, column in came.items()]
    return df.select(*own, *columns, "_attempt.result")


def settle(df: DataFrame, to: str | None = None) -> DataStreamWriter:
    """A stream writer that settles each batch in one transaction; `start()` it.

    A row is settled by its `outcome`; a row that was dropped on the way is acknowledged. With `to`, the
    `result` of each acknowledged row is pushed to that queue, to the partition in `to_partition` or else its
    own, in the same transaction.
    """
    options = sink_options(df, to)
    reading = Reading.of(df)
    if reading is not None and "handler" in reading.options and (to is None or _is_plain(df)):
        options["emit"] = "staged"  # nobody will see the rows
        rows = reading.staged(options)
    else:
        rows = settling(df, to)
    return rows.writeStream.format("settled").outputMode("append").options(**options)


def _is_plain(df: DataFrame) -> bool:
    """Whether results go as they are to their own partition; else Spark makes JSON of them, or chooses."""
    return isinstance(df.schema["result"].dataType, BinaryType) and "to_partition" not in df.columns


def settle_batch(df: DataFrame, batch_id: int | None = None, to: str | None = None) -> None:
    """Settle the rows of one batch: the last thing a `foreachBatch` function does, after its own writing.

    Rows are computed anew for each use: `persist()` the DataFrame first, or the handler runs twice.
    """
    options = sink_options(df, to)
    writer = settling(df, to).write.format("settled").mode("append").options(**options)
    for left in reversed(range(SETTLE_TRIES)):
        try:
            writer.save()
        except Exception as error:
            # Spark tries a task again, but no process beside the driver. To settle twice changes nothing.
            if not left or not process_died(error):
                raise
            log.warning("batch %s: a Python process beside the driver died; it is settled again", batch_id)
        else:
            return


def process_died(error: Exception) -> bool:
    """Whether a Python process beside the driver was killed, and not one that ran a task, four times over."""
    return CRASHED in str(error) and "Job aborted" not in str(error)


def settle_each(
    df: DataFrame, write: Callable[[DataFrame, int], None], to: str | None = None
) -> DataStreamWriter:
    """A stream writer that calls `write(rows, number)` for each batch and then settles it.

    The handler runs once. `number` is the batch's own: it stays the same when a batch is repeated after a
    crash, so write under it (a directory, a key, a Delta transaction) and overwrite. A batch that is settled
    is not repeated.
    """

    def both(rows: DataFrame, batch_id: int) -> None:
        rows.persist()
        try:
            first = rows.select("batch").first()
            if first is not None:
                write(rows, first["batch"])
            settle_batch(rows, batch_id, to)
        finally:
            rows.unpersist()

    return df.writeStream.foreachBatch(both).outputMode("append")
