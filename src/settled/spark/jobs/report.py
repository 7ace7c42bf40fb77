"""What happened to the messages: figures computed on Spark, as a page for people and as JSON."""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pyarrow as pa
from pyspark.sql import functions as F  # noqa: N812

from settled.queue.errors import NotFound
from settled.queue.janitor import journal_seconds
from settled.queue.manifest import Link
from settled.spark.jobs import alerts
from settled.spark.jobs.checks import check_report
from settled.spark.jobs.export import EPOCH, SCHEMAS, TABLES, exported, query, snapshot, table
from settled.spark.jobs.owners import owners
from settled.spark.jobs.page import render
from settled.spark.options import is_nats

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

BUCKETS = 60
_KEY = ["lane_id", "consumer_group", "sequence"]


def write_report(
    spark: SparkSession,
    source: str | Path,
    target: Path,
    *,
    queue: str | None = None,
    hours: float | None = None,
    dead_letters: Sequence[str] = (),
) -> dict[str, Any]:
    """Write `target` (HTML) and its figures beside it (.json), of a broker's address or an export.

    On NATS, `dead_letters` names more streams of dead letters, such as the router's.
    """
    check_report(target, hours)
    if isinstance(source, str) and is_nats(source):
        figures = of_streams(spark, source, queue, hours, dead_letters)
    else:
        figures = compute(spark, source, queue, hours)
    target.with_suffix(".json").write_bytes(msgspec.json.format(msgspec.json.encode(figures), indent=1))
    target.write_text(render(figures), encoding="utf-8")
    return figures


def of_streams(
    spark: SparkSession, url: str, queue: str | None, hours: float | None, dead_letters: Sequence[str]
) -> dict[str, Any]:
    """All figures of a report on streams."""
    from settled.spark.jetstream.history import Watch, lane_of, tables

    now = datetime.now(UTC)
    since = EPOCH if hours is None else now - timedelta(hours=hours)
    with Watch(url) as watch:
        found = tables(watch, queue, since, dead_letters)
        groups = set(watch.groups(queue))
        others = sorted({(d["queue"], d["consumer_group"]) for d in found["dead_letters"]} - groups)
        settlements, dead, waits = (
            spark.createDataFrame(pa.Table.from_pylist(found.get(name, []), SCHEMAS[name])) for name in TABLES
        )
        failing = [
            {"lane_id": lane_of(stream), "consumer_group": group, "sequence": sequence}
            for stream, group in watch.groups(queue)
            if (books := watch.books(stream, group)) is not None
            for sequence in books.retries
        ]
        again = spark.createDataFrame(pa.Table.from_pylist(failing, SCHEMAS["failing"]))
        figures = _figures(
            settlements, dead, waits, again, lag=watch.lag(queue), lag_at=now, now=now, queue=queue
        )
        if others or not groups:
            _mark_unknown(figures, any_books=bool(groups))
        for alert, rule in zip(figures["alerts"], alerts.RULES, strict=True):
            alert["router_alert"] = rule.router
        return {
            **figures,
            "streams": True,
            "only_dead_letters": [{"queue": one, "consumer_group": group} for one, group in others],
            "owners": owners(spark, watch, found["dead_letters"], queue, since),
        }


def _mark_unknown(figures: dict[str, Any], *, any_books: bool) -> None:
    """Of consumers that keep no books only dead letters are known: say so rather than 0, or quiet."""
    if not any_books:
        figures["totals"].update(acked=None, retried=None, released=None)
    for alert in figures["alerts"]:
        happened = alert["fired"] or alert["pending_since"]
        alert["known"] = bool(happened) or alert["name"] not in alerts.OF_REDELIVERIES


def compute(
    spark: SparkSession, source: str | Path, queue: str | None, hours: float | None
) -> dict[str, Any]:
    """All figures of a report."""
    now = datetime.now(UTC)
    since = EPOCH if hours is None else now - timedelta(hours=hours)
    if isinstance(source, str) and "://" in source:
        with Link(source) as link:
            until = query(link, "horizon")[0]["at"]
            if queue is not None and not query(link, "known_queue", queue=queue)[0]["known"]:
                raise NotFound("queue", queue)
            tables = [table(spark, link, name, since, until, queue) for name in TABLES]
            lag, failing = (snapshot(spark, link, name, now, queue) for name in ("lag", "failing"))
            pushed = (
                query(link, "pushed", queue=queue, days=journal_seconds() // 86_400) if hours is None else []
            )
    else:
        folder, pushed = Path(source), []
        everything = {name: _exported(spark, folder, name, queue) for name in (*TABLES, "lag")}
        if queue is not None and all(one.isEmpty() for one in everything.values()):
            raise NotFound("queue", queue)
        tables = [everything[name].where(F.col("at") >= F.lit(since)) for name in TABLES]
        lag, failing = everything["lag"], _exported(spark, folder, "failing", queue)
    tables = [one.persist() for one in (*tables, failing)]
    order = ["queue", "consumer_group"]
    found = [row.asDict() for row in lag.select(*SCHEMAS["lag"].names).orderBy(*order).collect()]
    lag_at = found[0]["at"] if found else now
    rows = [{name: value for name, value in row.items() if name != "at"} for row in found]
    try:
        figures = _figures(*tables, lag=rows, lag_at=lag_at, now=now, queue=queue)
        return {**figures, "books": _books(pushed, tables[0], rows)}
    finally:
        for one in tables:
            one.unpersist()


def _exported(spark: SparkSession, folder: Path, name: str, queue: str | None) -> DataFrame:
    df = exported(spark, folder, name)
    return df.where(F.col("queue") == queue) if queue else df


def _figures(
    settlements: DataFrame,
    dead: DataFrame,
    waits: DataFrame,
    failing: DataFrame,
    *,
    lag: list[dict[str, Any]],
    lag_at: datetime,
    now: datetime,
    queue: str | None,
) -> dict[str, Any]:
    span = settlements.agg(
        F.min("at"), F.max("at"), F.sum(F.when(F.col("kind") != "seek", F.col("messages")))
    ).first()
    first, last = (span[0], span[1]) if span is not None else (None, None)
    seconds = max((last - first).total_seconds(), 1.0) if first is not None and last is not None else 1.0
    width = _nice(seconds / BUCKETS)
    kinds = {
        r["kind"]: r["n"] for r in settlements.groupBy("kind").agg(F.sum("messages").alias("n")).collect()
    }
    errors = _classes(dead)
    throughput = _throughput(settlements, width)
    # What waits, or is to come again, may still bring a rule to fire.
    at_rest = bool(lag) and not any(row["waiting"] or row["failing"] for row in lag)
    return {
        "made_at": now.isoformat(timespec="seconds"),
        "queue": queue,
        "from": _iso(first),
        "to": _iso(last),
        "totals": {
            "acked": kinds.get("settled", 0) + kinds.get("auto_ack", 0),
            "retried": kinds.get("failed", 0),
            "released": kinds.get("released", 0),
            "dead": kinds.get("dead", 0),
        },
        "bucket_seconds": width,
        "throughput": throughput,
        "rate": _rate(throughput, width, first, last),
        "latency": _percentiles(waits, width),
        "in_hand": _percentiles(settlements.where("kind = 'settled' and seconds is not null"), width),
        "redeliveries": _redeliveries(settlements),
        "retries_to_success": _retries(settlements, failing),
        "dead_letters": {"errors": errors, "total": sum(e["count"] for e in errors)},
        "lag": lag,
        "lag_at": _iso(lag_at),
        "alerts": alerts.evaluate(settlements, now, at_rest=at_rest),
    }


def _rate(
    throughput: list[dict[str, Any]], width: float, first: datetime | None, last: datetime | None
) -> dict[str, float | None]:
    """Messages acknowledged or dead in a second: on average over the time, and at most."""
    done = [row["acked"] + row["dead"] for row in throughput]
    seconds = (last - first).total_seconds() if first is not None and last is not None else 0.0
    return {
        "average": sum(done) / seconds if seconds >= 1 else None,
        "peak": max(done, default=0) / width,
        "seconds": seconds,
    }


def _books(
    pushed: list[dict[str, Any]], settlements: DataFrame, lag: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """What became of all that was pushed, group by group; what is lost is None where it cannot be known."""
    sums = settlements.groupBy("queue", "consumer_group", "kind").agg(F.sum("messages").alias("n")).collect()
    kinds = {(r["queue"], r["consumer_group"], r["kind"]): r["n"] for r in sums}
    waits = {(r["queue"], r["consumer_group"]): (r["waiting"], r["failing"]) for r in lag}
    found = []
    for row in pushed:
        key = (row["queue"], row["consumer_group"])
        acked, dead = (
            sum(kinds.get((*key, kind), 0) for kind in some)
            for some in (("settled", "auto_ack"), ("dead", "dropped"))
        )
        waiting, failing = waits.get(key, (0, 0))
        rest = row["pushed"] - acked - dead - waiting - failing - row["removed"]
        # A dead letter that was sent again is settled twice, and a group that was moved reads twice.
        whole = row["whole"] and rest >= 0 and (*key, "seek") not in kinds
        found.append(
            {
                "queue": key[0], "consumer_group": key[1], "pushed": row["pushed"], "acked": acked,
                "dead": dead, "waiting": waiting, "failing": failing, "removed": row["removed"],
                "lost": rest if whole else None,
            }
        )  # fmt: skip
    return found


def _iso(at: datetime | None) -> str | None:
    """A time of Spark's, which is naive and local, in UTC."""
    return at.astimezone(UTC).isoformat(timespec="seconds") if at is not None else None


def _nice(seconds: float) -> float:
    steps = (
        1,
        2,
        5,
        10,
        15,
        30,
        60,
        120,
        300,
        600,
        900,
        1800,
        3600,
        7200,
        14400,
        43200,
        86400,
    )
    return next((step for step in steps if step >= seconds), math.ceil(seconds / 86400) * 86400.0)


def _bucket(width: float) -> Any:
    return (F.floor(F.col("at").cast("double") / width) * width).alias("t")


def _throughput(settlements: DataFrame, width: float) -> list[dict[str, Any]]:
    rows = settlements.groupBy(_bucket(width)).pivot(
        "kind", ["settled", "auto_ack", "failed", "released", "dead"]
    )
    return [
        {
            "t": r["t"],
            "acked": (r["settled"] or 0) + (r["auto_ack"] or 0),
            "retried": r["failed"] or 0,
            "released": r["released"] or 0,
            "dead": r["dead"] or 0,
        }
        for r in rows.sum("messages").orderBy("t").collect()
    ]


def _percentiles(timed: DataFrame, width: float) -> list[dict[str, Any]]:
    times = timed.withColumn("messages", F.ceil("messages")).where("messages > 0")
    cut = F.expr("percentile(seconds, array(0.5, 0.9, 0.99), messages)")
    rows = times.groupBy(_bucket(width)).agg(cut.alias("p")).orderBy("t").collect()
    return [{"t": r["t"], "p50": r["p"][0], "p90": r["p"][1], "p99": r["p"][2]} for r in rows]


def normalised(error: Any) -> Any:
    """An error without what differs from message to message."""
    text = F.coalesce(error, F.lit("no error given"))
    for pattern, to in (
        (r"[0-9a-fA-F]{8}-[0-9a-fA-F-]{27}", "<id>"),
        (r"'[^']*'|\"[^\"]*\"", "'…'"),
        (r"\b\w*\d\w*\b", "#"),
    ):
        text = F.regexp_replace(text, pattern, to)
    return F.substring(text, 1, 200)


def _redeliveries(settlements: DataFrame) -> list[dict[str, Any]]:
    again = settlements.where("kind in ('failed', 'released')")
    reason = F.when(F.col("kind") == "released", F.coalesce(normalised(F.col("error")), F.lit("held back")))
    reason = F.when(
        (F.col("kind") == "released") & F.col("error").isNull(), F.lit("released: held back behind another")
    ).otherwise(F.coalesce(reason, normalised(F.col("error"))))
    rows = again.groupBy(
        reason.alias("reason"), F.concat_ws("/", "queue", "consumer_group").alias("source")
    ).agg(F.sum("messages").alias("count"))
    return [r.asDict() for r in rows.orderBy(F.desc("count")).limit(20).collect()]


def _retries(settlements: DataFrame, failing: DataFrame) -> list[dict[str, Any]]:
    """What failed, did not die and is not to come again: it was acknowledged in the end."""
    one = settlements.withColumn("sequence", F.col("first_sequence"))
    failed = one.where("kind = 'failed'").groupBy(*_KEY).agg(F.max("attempts").alias("attempts"))
    gone = one.where("kind in ('dead', 'dropped')").select(*_KEY).union(failing.select(*_KEY))
    done = failed.join(gone, _KEY, "left_anti")
    return [r.asDict() for r in done.groupBy("attempts").count().orderBy("attempts").collect()]


def _classes(dead: DataFrame) -> list[dict[str, Any]]:
    rows = dead.groupBy(normalised(F.col("error")).alias("error"), "queue", "consumer_group").agg(
        F.count("*").alias("count"),
        F.max("at").alias("last"),
        F.first("error").alias("example"),
        F.min_by("id", F.struct("at", "id")).alias("first_id"),
        F.max_by("id", F.struct("at", "id")).alias("last_id"),
        F.max("attempts").alias("attempts"),
    )
    found = [r.asDict() for r in rows.orderBy(F.desc("count")).limit(50).collect()]
    return [
        {**row, "last": _iso(row["last"]), "ids": sorted({row.pop("first_id"), row.pop("last_id")})}
        for row in found
    ]
