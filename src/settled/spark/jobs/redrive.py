"""Dead letters back to their queue, or to another one: chosen, at a measured pace, and each only once."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

import msgspec

from settled.queue import segment
from settled.queue.errors import Conflict
from settled.queue.manifest import WORKER, Link
from settled.queue.options import QueueOptions
from settled.spark.jobs.export import EPOCH, SQL, query, table

if TYPE_CHECKING:
    from psycopg import Connection
    from pyspark.sql import SparkSession

CHUNK = 1_000
HEADER = "redriven-from"
APPEND = "select * from append(%s, %s, %s, %s::bigint[], %s, %s::bytea[], %s)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Which dead letters: all that are given must fit."""

    queue: str | None = None
    group: str | None = None
    since: datetime | None = None
    until: datetime | None = None
    error: str | None = None
    """A regular expression, found anywhere in the error."""
    where: str | None = None
    """A Spark SQL condition on the dead letters' columns; `payload` is text."""


def redrive(
    url: str,
    choice: Choice,
    *,
    to: str | None = None,
    rate: float | None = None,
    dry_run: bool = False,
    spark: SparkSession | None = None,
    on_progress: Callable[[int], None] = lambda _: None,
    sleep: Callable[[float], None] = time.sleep,
) -> int:
    """Push the chosen dead letters again and answer how many; `rate` is messages a second.

    A dead letter is marked in the transaction that pushes it: no crash and no second run sends it twice.
    """
    with Link(url) as link:
        ids = _by_condition(link, choice, spark) if choice.where else None
        chosen = {
            "queue": choice.queue,
            "group": choice.group,
            "since": choice.since,
            "until": choice.until,
            "error": choice.error,
            "ids": ids,
        }
        if dry_run:
            return len(query(link, "redrivable", limit=None, **chosen))
        done, size = 0, CHUNK if rate is None else max(1, min(CHUNK, int(rate)))
        while True:
            started = time.monotonic()

            def push(connection: Connection[Any]) -> int:
                return _push(connection, chosen, size, to)

            count = link.run(push)
            if not count:
                return done
            done += count
            on_progress(done)
            if rate is not None:
                sleep(max(0.0, count / rate - (time.monotonic() - started)))


def _by_condition(link: Link, choice: Choice, spark: SparkSession | None) -> list[Any]:
    if spark is None:
        raise Conflict("a condition is evaluated by Spark: give a session")
    dead = table(
        spark,
        link,
        "dead_letters",
        choice.since or EPOCH,
        choice.until or datetime.max.replace(tzinfo=EPOCH.tzinfo),
        choice.queue,
    )
    dead = dead.withColumn("payload", dead["payload"].cast("string"))
    return [row["id"] for row in dead.where(str(choice.where)).select("id").collect()]


def _push(connection: Connection[Any], chosen: dict[str, Any], limit: int, to: str | None) -> int:
    with connection.transaction():
        rows = connection.execute(
            SQL["redrivable"] + " for update of d skip locked", {**chosen, "limit": limit}
        ).fetchall()
        if not rows:
            return 0
        queues = [to or row["queue"] for row in rows]
        connection.execute(SQL["mark_redriven"], {"ids": [row["id"] for row in rows], "queues": queues})
        lanes: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
        for row, queue in zip(rows, queues, strict=True):
            lanes[(queue, row["partition"])].append(row)
        names = sorted(lanes)
        found = connection.execute(
            "select * from resolve(%s, %s, %s, %s, %s)",
            (
                [q for q, _ in names],
                [p for _, p in names],
                [""] * len(names),
                [""] * len(names),
                QueueOptions().to_json().decode(),
            ),
        ).fetchall()
        targets = sorted({(r["lane_id"], r["queue_id"], r["queue"], r["partition"]) for r in found})
        bodies = [_body(lanes[(queue, partition)]) for _, _, queue, partition in targets]
        none = [None] * len(targets)
        answer = connection.execute(
            APPEND,
            (
                WORKER,
                [t[1] for t in targets],
                [t[0] for t in targets],
                none,
                [len(lanes[(t[2], t[3])]) for t in targets],
                none,
                bodies,
            ),
        ).fetchall()
        refused = [row for row in answer if row["status"] != "ok"]
        if refused:
            raise Conflict(f"a partition was deleted meanwhile ({refused[0]['status']}): run it again")
        connection.execute("select pg_notify('settled', %s)", (WORKER,))
    return len(rows)


def _body(rows: list[dict[str, Any]]) -> bytes:
    headers = []
    for row in rows:
        own = msgspec.json.decode(row["headers"]) if row["headers"] else {}
        headers.append(msgspec.json.encode({**own, HEADER: str(row["id"])}))
    return segment.encode(segment.new_base(), [b""] * len(rows), [row["payload"] for row in rows], headers)
