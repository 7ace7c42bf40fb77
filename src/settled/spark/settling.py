"""What a sink is given of each row: its outcome, the dead letter it may become, and what is pushed on."""

from __future__ import annotations

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.types import BinaryType, StringType, StructType

from settled.queue.errors import BadRequest, Conflict
from settled.queue.lanes import NAME_LIMIT
from settled.settlement import LONGEST_DELAY
from settled.signals import ConfigurationError
from settled.spark.attempts import ACK, DEAD, INVALID
from settled.spark.options import Options, check_target, is_nats
from settled.spark.origin import Origin


def sink_options(df: DataFrame, to: str | None) -> dict[str, str]:
    """A sink's options; what cannot be settled is refused."""
    origin = Origin.of(df)
    have = set(df.columns)
    missing = {
        "lane",
        "sequence",
        "batch",
        "message_id",
        "transaction_id",
        "created_at",
        "headers",
        "payload",
    } - have
    if missing:
        raise Conflict(
            f"settle() needs the column {sorted(missing)[0]!r}: keep it, it goes into the dead letter"
        )
    if to is None:
        return origin.options()
    _check_target(to, origin)
    if "result" not in have:
        raise ConfigurationError(
            f"settle(to={to!r}) pushes the column `result`: add one, or attempt() a handler that returns"
        )
    return origin.options() | {"to": to}


def settling(df: DataFrame, to: str | None) -> DataFrame:
    """The rows a sink is given."""
    if to is None:
        return _outcomes(df, None).where(F.col("outcome") != ACK)
    origin = Origin.of(df)
    own = F.lit(None).cast("string") if is_nats(origin.url) else F.col("partition")
    chosen = "to_partition" in df.columns
    partition = F.coalesce(F.col("to_partition").cast("string"), own) if chosen else own
    rows = df.withColumns({"to_partition": partition, "push": _json(df, "result")})
    unfit = (_unfit_subject if is_nats(origin.url) else _unfit)("to_partition") if chosen else None
    rows = _outcomes(rows, unfit, "to_partition", "push")
    return rows.where((F.col("outcome") != ACK) | F.col("push").isNotNull())


def _check_target(to: str, origin: Origin) -> None:
    if not to:
        raise BadRequest("to", to, "must name the queue, or subject, that results go to; None pushes nothing")
    if is_nats(origin.url):
        from settled.spark.jetstream import broker

        broker.check_target(Options.parse(origin.options()), to)
    else:
        check_target(to, origin.queue)


def _unfit(name: str) -> Column:
    """Why a row cannot be pushed to its partition, if so."""
    value = F.col(name)
    wrong = ~F.length(value).between(1, NAME_LIMIT) | value.contains("\0")
    text = F.lit(f"{name}: must be text of 1..{NAME_LIMIT} characters without NUL, got ")
    return F.when(F.col("push").isNotNull() & wrong, F.concat(text, F.substring(value, 1, 100)))


def _unfit_subject(name: str) -> Column:
    """Why a row cannot be published under its part of a subject, if so."""
    value, token = F.col(name), r"[^\s\p{Cntrl}.*>]+"
    text = F.lit(f"{name}: must be tokens of a subject, without blanks, '*' and '>', got ")
    wrong = ~value.rlike(rf"^{token}(\.{token})*\z")
    return F.when(F.col("push").isNotNull() & wrong, F.concat(text, F.substring(value, 1, 100)))


def _outcomes(df: DataFrame, unfit: Column | None, *more: str) -> DataFrame:
    """What a sink is given of each row; of one that is acknowledged little."""
    # Were it plainly `ack`, Spark would see that no row is left and not read the batch at all.
    outcome = F.col("outcome") if "outcome" in df.columns else F.when(F.col("lane").isNull(), F.lit(INVALID))
    outcome = F.coalesce(outcome, F.lit(ACK))
    delay = (F.col("delay") if "delay" in df.columns else F.lit(None)).cast("double")
    error = (F.col("error") if "error" in df.columns else F.lit(None)).cast("string")
    error = F.coalesce(error, F.when(F.isnan(delay), F.lit("delay is NaN; the backoff of the queue holds")))
    delay = (
        F.when(F.isnan(delay), F.lit(None))
        .when(delay > LONGEST_DELAY, F.lit(LONGEST_DELAY))
        .when(delay < 0, F.lit(0.0))
        .otherwise(delay)
    )
    if unfit is not None:
        error = F.when(outcome == ACK, unfit).otherwise(error)
        outcome = F.when((outcome == ACK) & unfit.isNotNull(), F.lit(DEAD)).otherwise(outcome)
    failed = outcome != ACK
    kept = ("message_id", "transaction_id", "created_at", "headers")
    return df.select(
        "lane",
        "sequence",
        "batch",
        outcome.alias("outcome"),
        delay.alias("delay"),
        error.alias("error"),
        *(F.when(failed, F.col(name)).alias(name) for name in kept),
        F.when(failed, raw(df)).alias("payload"),
        *(F.when(~failed, F.col(name)).alias(name) for name in more),
    )


def raw(df: DataFrame) -> Column:
    """The payload's bytes; as JSON if somebody parsed it and the bytes are gone."""
    if "data" in df.columns and isinstance(df.schema["data"].dataType, BinaryType):
        return F.col("data")
    if isinstance(df.schema["payload"].dataType, StringType):
        return F.col("payload").cast("binary")
    return _json(df, "payload")


def _json(df: DataFrame, name: str) -> Column:
    """A column as JSON; bytes are taken to be some already, and null is nothing."""
    value, kind = F.col(name), df.schema[name].dataType
    if isinstance(kind, BinaryType):
        return value
    if isinstance(kind, StructType):
        return F.to_json(value).cast("binary")
    text = F.to_json(F.struct(value.alias("v")))  # Spark makes no JSON of a plain value
    inner = text.substr(F.lit(len('{"v":') + 1), F.length(text) - len('{"v":}'))
    return F.when(value.isNotNull(), inner).cast("binary")
