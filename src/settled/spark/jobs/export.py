"""Settlements, dead letters and messages as files: by day, a little more each time, and safe to run again."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import msgspec
import pyarrow as pa

from settled.queue.errors import BadRequest, Conflict, NotFound
from settled.queue.manifest import Link
from settled.spark.jobs.checks import check_format

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
STATE = "_export.json"
TABLES = ("settlements", "dead_letters", "waits")
SNAPSHOTS = ("lag", "failing")
_LONGEST_NAME = 200
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
    # How long messages were in the queue, from push to settlement: so many waited up to `seconds`.
    "waits": pa.schema(
        [
            ("at", _UTC),
            ("queue", pa.string()),
            ("consumer_group", pa.string()),
            ("seconds", pa.float64()),
            ("messages", pa.float64()),
        ]
    ),
    # As it was at `at`, the end of a run: what groups had before them, and which messages were to come again.
    "lag": pa.schema(
        [
            ("at", _UTC),
            ("queue", pa.string()),
            ("consumer_group", pa.string()),
            ("partitions", pa.int64()),
            ("waiting", pa.int64()),
            ("failing", pa.int64()),
        ]
    ),
    "failing": pa.schema(
        [
            ("at", _UTC),
            ("queue", pa.string()),
            ("consumer_group", pa.string()),
            ("lane_id", pa.int64()),
            ("sequence", pa.int64()),
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


def snapshot(spark: SparkSession, link: Link, name: str, at: datetime, queue: str | None) -> DataFrame:
    """`lag` or `failing` as it is now, noted for a time."""
    rows = link.rows("lag", queue=queue, group=None) if name == "lag" else query(link, name, queue=queue)
    return spark.createDataFrame(pa.Table.from_pylist([{**row, "at": at} for row in rows], SCHEMAS[name]))


@dataclass(frozen=True, slots=True)
class Exported:
    """What one run added."""

    number: int
    until: datetime
    rows: dict[str, int]


class Plan(msgspec.Struct):
    """What a run exports: what happened before `until`, and of each lane's messages those before its head."""

    until: datetime
    heads: dict[str, int]


class State(msgspec.Struct):
    """How far an export is; it lies beside the files."""

    queue: str | None
    format: str
    run: int = 0
    until: datetime = EPOCH
    heads: dict[str, int] = {}
    """Where each lane's messages go on, by the lane's id."""
    plan: Plan | None = None
    """The run that is under way, or was when it was interrupted."""
    database: str = ""
    """Which one it is of: lanes have other numbers in another."""

    def save(self, folder: Path) -> None:
        """Write it down, whole or not at all."""
        fresh = folder / f"{STATE}.new"
        fresh.write_bytes(msgspec.json.encode(self))
        fresh.replace(folder / STATE)


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
    check_format(kind)
    state = _state(folder, queue, kind)
    number, counts = state.run + 1, {}
    with Link(url) as link:
        database = query(link, "database")[0]["database"]
        if state.database not in ("", database):
            raise Conflict(f"{folder} holds an export of another database: go on elsewhere")
        state.database = database
        # One that was exported before may be gone; what is left of it is exported all the same.
        if queue is not None and number == 1 and not query(link, "known_queue", queue=queue)[0]["known"]:
            raise NotFound("queue", queue)
        folder.mkdir(parents=True, exist_ok=True)
        plan = state.plan
        if plan is None:
            # Nothing that is still being committed lies before the oldest open transaction.
            until = query(link, "horizon")[0]["at"]
            heads = {str(r["lane_id"]): r["head"] for r in query(link, "heads", queue=queue)}
            # A run that is done again must add exactly this, whatever happens meanwhile.
            plan = state.plan = Plan(until, heads)
            state.save(folder)
        for name in TABLES:
            rows = table(spark, link, name, state.until, plan.until, queue)
            counts[name] = _write(rows, folder / name, number, kind)
        for name in SNAPSHOTS:
            _write(snapshot(spark, link, name, plan.until, queue), folder / name, number, kind)
        if messages:
            counts["messages"] = _messages(spark, link, url, folder, number, state, plan)
            state.heads = plan.heads
    state.run, state.until, state.plan = number, plan.until, None
    state.save(folder)
    return Exported(number, plan.until, counts)


def _state(folder: Path, queue: str | None, kind: str) -> State:
    if not (folder / STATE).exists():
        return State(queue, kind)
    state = msgspec.json.decode((folder / STATE).read_bytes(), type=State)
    if (state.queue, state.format) != (queue, kind):
        of = f"queue {state.queue!r}" if state.queue else "all queues"
        raise Conflict(f"{folder} holds an export of {of} as {state.format}: go on like that, or elsewhere")
    return state


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
    spark: SparkSession, link: Link, url: str, folder: Path, number: int, state: State, plan: Plan
) -> int:
    fresh = {lane: (state.heads.get(lane, 0), head) for lane, head in plan.heads.items()}
    fresh = {lane: span for lane, span in fresh.items() if span[1] > span[0]}
    total = 0
    for row in query(link, "queues", lanes=[int(lane) for lane in fresh]):
        window = {lane: fresh[str(lane)] for lane in row["lanes"]}
        options = {"url": url, "queue": row["queue"], "window": msgspec.json.encode(window).decode()}
        df = spark.read.format("settled").options(**options).load().withColumnRenamed("created_at", "at")
        where = folder / "messages" / f"queue_name={_folder_name(row['queue'], state.format)}"
        total += _write(df.drop("batch", "attempt"), where, number, state.format)
    return total


def _folder_name(queue: str, kind: str) -> str:
    """A queue's name as that of a folder, which has room for 255 bytes.

    >>> _folder_name("my orders", "parquet"), _folder_name("my orders", "delta")
    ('my%20orders', 'my~20orders')
    """
    name = quote(queue, safe="").replace("~", "%7E")
    if len(name) > _LONGEST_NAME:
        short = re.sub("%.?$", "", name[:150])
        name = f"{short}~{hashlib.sha256(queue.encode()).hexdigest()[:16]}"
    # Spark knows %20 for a blank. Delta's library takes it for one too, and then does not find the folder.
    return name.replace("%", "~") if kind == "delta" else name


def exported(spark: SparkSession, folder: Path, name: str) -> DataFrame:
    """One of the tables of an export; of a snapshot, the newest."""
    df = _stored(spark, folder, name)
    if name not in SNAPSHOTS:
        return df
    state = msgspec.json.decode((folder / STATE).read_bytes(), type=State)
    return df.where(df["run"] == state.run) if "run" in df.columns else df


def _stored(spark: SparkSession, folder: Path, name: str) -> DataFrame:
    where = folder / name
    if (where / "_delta_log").exists():
        import deltalake

        return spark.createDataFrame(deltalake.DeltaTable(str(where)).to_pyarrow_table())
    if where.exists():
        return spark.read.parquet(str(where))
    if not (folder / STATE).exists():
        raise BadRequest("export", str(folder), "must be the folder of an export")
    return spark.createDataFrame(SCHEMAS[name].empty_table())  # nothing of the kind happened
