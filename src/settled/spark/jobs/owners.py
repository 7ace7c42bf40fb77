"""Whose messages came again or were given up: by tenant, provider and reason, of streams on NATS."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from datetime import datetime
from html import escape
from typing import TYPE_CHECKING, Any

import msgspec
import pyarrow as pa
from pyspark.sql import functions as F  # noqa: N812

from settled.settlement import Reason
from settled.spark.attempts import RETRY

if TYPE_CHECKING:
    from pyspark.sql import Column, SparkSession

    from settled.spark.jetstream.history import Watch

EXHAUSTED = "max deliveries exhausted: "
_EVENTS = pa.schema(
    [
        ("queue", pa.string()),
        ("consumer_group", pa.string()),
        ("kind", pa.string()),
        ("count", pa.int64()),
        ("error", pa.string()),
        ("headers", pa.map_(pa.string(), pa.string())),
        ("payload", pa.binary()),
    ]
)
_KINDS = ("redelivered", "exhausted", "rejected")


def owners(
    spark: SparkSession, watch: Watch, letters: Sequence[dict[str, Any]], queue: str | None, since: datetime
) -> list[dict[str, Any]]:
    """Redeliveries, exhaustions and rejections by tenant, provider and reason, the most first.

    A group of a pipeline has each of its redeliveries in its books; of any other consumer those are known
    that came before a dead letter.
    """
    from settled.spark.jobs.report import normalised

    events = [*_redelivered(watch, queue, since), *_dead(watch, letters)]
    if not events:
        return []
    text = F.col("payload").cast("string")
    df = spark.createDataFrame(pa.Table.from_pylist(events, _EVENTS))
    named = df.select(
        "queue",
        "consumer_group",
        "kind",
        "count",
        _first(_header("tenant_id"), F.get_json_object(text, "$.tenant_id")).alias("tenant"),
        _first(
            _header("provider_id"),
            F.get_json_object(text, "$.provider_id"),
            F.get_json_object(text, "$.executor.provider_id"),
        ).alias("provider"),
        normalised(F.col("error")).alias("reason"),
    )
    keys = ["queue", "consumer_group", "tenant", "provider", "reason"]
    rows = named.groupBy(*keys).pivot("kind", list(_KINDS)).sum("count").na.fill(0)
    order = [F.desc(kind) for kind in ("exhausted", "redelivered", "rejected")]
    return [row.asDict() for row in rows.orderBy(*order, *keys).limit(100).collect()]


def _first(*columns: Column) -> Column:
    return F.coalesce(*columns, F.lit(""))


def _header(name: str) -> Column:
    return F.coalesce(*(F.col("headers")[one] for one in (name, name.replace("_", "-"))))


def _redelivered(watch: Watch, queue: str | None, since: datetime) -> Iterator[dict[str, Any]]:
    again: dict[tuple[str, str], list[tuple[int, str]]] = defaultdict(list)
    for stream, group, one in watch.settlements(queue, since):
        again[(stream, group)] += [
            (f.sequence, one.errors[f.error]) for f in one.failures if f.outcome == RETRY
        ]
    for (stream, group), failures in again.items():
        found = watch.originals(stream, sorted({sequence for sequence, _ in failures}))
        for sequence, error in failures:
            message = found.get(sequence)
            yield {
                "queue": stream,
                "consumer_group": group,
                "kind": "redelivered",
                "count": 1,
                "error": error,
                "headers": list(message.headers.items()) if message is not None else [],
                "payload": message.data if message is not None else b"",
            }


def _dead(watch: Watch, letters: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    ours = set(watch.groups(None))
    limits: dict[tuple[str, str], int | None] = {}
    for letter in letters:
        key = (letter["queue"], letter["consumer_group"])
        if key not in limits:
            limits[key] = watch.limit(*key)
        headers = msgspec.json.decode(letter["headers"], type=dict[str, str])
        error, attempts = letter["error"] or "", letter["attempts"]
        last = limits[key] is not None and attempts >= (limits[key] or 0)
        unfit = headers.get("settled-reason") == Reason.UNACCEPTABLE.value
        exhausted = not unfit and (last or error.startswith(EXHAUSTED))
        event = {
            "queue": key[0],
            "consumer_group": key[1],
            "error": error.removeprefix(EXHAUSTED).partition(";")[0],
            "headers": list(headers.items()),
            "payload": letter["payload"],
        }
        yield {**event, "kind": "exhausted" if exhausted else "rejected", "count": 1}
        if key not in ours and attempts > 1:
            yield {**event, "kind": "redelivered", "count": attempts - 1}


def section(rows: list[dict[str, Any]]) -> str:
    """A section of the report's page; nothing if there is nothing to tell."""
    if not rows:
        return ""
    names = ("tenant", "provider", "reason", "stream, consumer", *_KINDS)
    body = "".join(
        "<tr>"
        + "".join(
            f'<td{" class=n" * (name in _KINDS)} data-name="{name}">{cell}</td>'
            for name, cell in zip(names, _cells(r), strict=True)
        )
        + "</tr>"
        for r in rows
    )
    head = "".join(f"<th{' class=n' * (name in _KINDS)}>{name}</th>" for name in names)
    return (
        "<section><h2>By tenant, provider and reason</h2><p>Messages that came again, that ran out of "
        f"deliveries, and that were refused at once.</p><table><tr>{head}</tr>{body}</table></section>"
    )


def _cells(row: dict[str, Any]) -> list[str]:
    names = [escape(row["tenant"] or "-"), escape(row["provider"] or "-"), escape(row["reason"])]
    source = f"{escape(row['queue'])}<br><small>{escape(row['consumer_group'])}</small>"
    return [*names, source, *(f"{row[kind]:,}" for kind in _KINDS)]
