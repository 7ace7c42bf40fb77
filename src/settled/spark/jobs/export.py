"""Settlements, dead letters and messages as files: by day, a little more each time, and safe to run again."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from settled.queue.errors import BadRequest
from settled.queue.manifest import Link

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
STATE = "_export.json"
TABLES = ("settlements", "dead_letters")
_UTC = pa.timestamp("us", "UTC")
SCHEMAS = {
    "settlements": pa.schema(
        [
            ("at", _UTC),
            ("kind", pa.string()),
            ("worker", pa.string()),
            ("queue", pa.string()),
            ("partition", pa.string()),
            ("consumer_group", pa.string()),
            ("lane_id", pa.int64()),
            ("first_sequence", pa.int64()),
            ("last_sequence", pa.int64()),
            ("messages", pa.int64()),
            ("seconds", pa.float64()),
            ("attempts", pa.int64()),
            ("error", pa.string()),
        ]
    ),
    "dead_letters": pa.schema(
        [
            ("at", _UTC),
            ("id", pa.string()),
            ("queue", pa.string()),
            ("partition", pa.string()),
            ("consumer_group", pa.string()),
            ("lane_id", pa.int64()),
            ("sequence", pa.int64()),
            ("message_id", pa.string()),
            ("transaction_id", pa.string()),
            ("error", pa.string()),
            ("attempts", pa.int64()),
            ("headers", pa.binary()),
            ("payload", pa.binary()),
            ("created_at", _UTC),
        ]
    ),
}


def _load() -> dict[str, str]:
    text = resources.files("settled.spark.jobs").joinpath("export.sql").read_text()
    parts = re.split(r"^-- name: (\w+)\n", text, flags=re.M)[1:]
    return {name: body.strip() for name, body in zip(parts[::2], parts[1::2], strict=True)}


SQL = _load()


def query(link: Link, name: str, **values: Any) -> list[dict[str, Any]]:
    """Run a statement of export.sql."""
    return link.run(lambda connection: connection.execute(SQL[name], values).fetchall())


def table(
    spark: SparkSession, link: Link, name: str, since: datetime, until: datetime, queue: str | None
) -> DataFrame:
    """One of the tables between two times, as a DataFrame."""
    rows = query(link, name, since=since, until=until, queue=queue)
    return spark.createDataFrame(pa.Table.from_pylist(rows, SCHEMAS[name]))


@dataclass(frozen=True, slots=True)
class Exported:
    """What one run added."""

    number: int
    until: datetime
    rows: dict[str, int]


def export(
    spark: SparkSession,
    url: str,
    folder: Path,
    *,
    queue: str | None = None,
    messages: bool = False,
    kind: str = "parquet",
) -> Exported:
    """Add what happened since the last run; a run that was interrupted is done again in its place."""
    if kind not in ("parquet", "delta"):
        raise BadRequest("format", kind, "must be parquet or delta")
    folder.mkdir(parents=True, exist_ok=True)
    state_file = folder / STATE
    state: dict[str, Any] = (
        json.loads(state_file.read_text())
        if state_file.exists()
        else {"run": 0, "until": EPOCH.isoformat(), "heads": {}}
    )
    number, since = state["run"] + 1, datetime.fromisoformat(state["until"])
    counts: dict[str, int] = {}
    with Link(url) as link:
        # Nothing that is still being committed lies before the oldest open transaction.
        until = query(link, "horizon")[0]["at"]
        for name in TABLES:
            counts[name] = _write(table(spark, link, name, since, until, queue), folder / name, number, kind)
        heads = state["heads"]
        if messages:
            heads, counts["messages"] = _messages(spark, link, url, folder, number, kind, queue, heads)
    fresh = state_file.with_suffix(".new")
    fresh.write_text(json.dumps({"run": number, "until": until.isoformat(), "heads": heads}))
    fresh.replace(state_file)
    return Exported(number, until, counts)


def _write(df: DataFrame, folder: Path, number: int, kind: str) -> int:
    from pyspark.sql import functions as F  # noqa: N812

    df = df.withColumn("day", F.to_date("at")).withColumn("run", F.lit(number)).persist()
    try:
        count = df.count()
        if count and kind == "delta":
            _delta(df, folder, number)
        elif count:
            writer = df.write.mode("overwrite").option("partitionOverwriteMode", "dynamic")
            writer.partitionBy("day", "run").parquet(str(folder))
    finally:
        df.unpersist()
    return count


def _delta(df: DataFrame, folder: Path, number: int) -> None:
    import deltalake

    # The transaction's version is the run's number: a run that is done again is seen by it.
    known = deltalake.DeltaTable.is_deltatable(str(folder))
    if known and deltalake.DeltaTable(str(folder)).transaction_version("settled-export") == number:
        return
    properties = deltalake.CommitProperties(
        app_transactions=[deltalake.Transaction("settled-export", number)]
    )
    deltalake.write_deltalake(
        str(folder), df.toArrow(), mode="append", partition_by=["day"], commit_properties=properties
    )


def _messages(
    spark: SparkSession,
    link: Link,
    url: str,
    folder: Path,
    number: int,
    kind: str,
    queue: str | None,
    heads: dict[str, int],
) -> tuple[dict[str, int], int]:
    # The heads are read first: what is pushed meanwhile is for the next run.
    lanes = query(link, "heads", queue=queue)
    bounds = [(r["lane_id"], int(heads.get(str(r["lane_id"]), 0)), r["head"]) for r in lanes]
    total = 0
    for name in sorted({r["queue"] for r in lanes}):
        df = (
            spark.read.format("settled")
            .options(url=url, queue=name)
            .load()
            .withColumnRenamed("created_at", "at")
        )
        limits = spark.createDataFrame(bounds, "lane bigint, low bigint, high bigint")
        fresh = df.join(limits, "lane").where("sequence >= low and sequence < high")
        fresh = fresh.drop("batch", "attempt", "low", "high")
        total += _write(fresh, folder / "messages" / f"queue_name={name}", number, kind)
    return {str(lane): high for lane, _, high in bounds}, total
