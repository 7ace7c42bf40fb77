"""Dead letters back to their queue, or to another one: chosen, at a measured pace, and each only once."""

from __future__ import annotations

import logging
import time
import uuid
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

import msgspec

from settled.queue import sealing, segment
from settled.queue.errors import BadRequest, Conflict, NotFound, QueueFull
from settled.queue.lanes import check_name
from settled.queue.manifest import WORKER, Link
from settled.queue.options import QueueOptions
from settled.spark.jobs.checks import check_rate
from settled.spark.jobs.export import EPOCH, SQL, query, table

if TYPE_CHECKING:
    from psycopg import Connection
    from pyspark.sql import SparkSession

log = logging.getLogger("settled.spark")
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


@dataclass(frozen=True, slots=True)
class _Letter:
    """A dead letter, opened."""

    id: uuid.UUID
    queue: str
    partition: str
    headers: dict[str, str]
    payload: bytes
    sealed: bool

    @classmethod
    def of(cls, row: dict[str, Any]) -> _Letter:
        """As the database has it; Conflict if it is encrypted and its key is not here."""
        payload, headers = (sealing.open_value(row[name]) for name in ("payload", "headers"))
        sealed = payload is not row["payload"] or headers is not row["headers"]
        own = msgspec.json.decode(headers or b"{}")
        return cls(row["id"], row["queue"], row["partition"], own, payload, sealed)


def _check_pattern(link: Link, pattern: str) -> None:
    from psycopg import errors

    try:
        query(link, "pattern", error=pattern)
    except errors.InvalidRegularExpression as error:
        why = error.diag.message_primary or "invalid regular expression"
        raise BadRequest("error", pattern, f"must be a pattern: {why}") from error


def redrive(
    url: str,
    choice: Choice,
    *,
    to: str | None = None,
    rate: float | None = None,
    again: bool = False,
    dry_run: bool = False,
    spark: SparkSession | None = None,
    on_progress: Callable[[int], None] = lambda _: None,
    sleep: Callable[[float], None] = time.sleep,
) -> int:
    """Push the chosen dead letters again and answer how many; `rate` is messages a second.

    A dead letter is marked in the transaction that pushes it: no crash and no second run sends it twice. A
    message that was redriven and died again is left out, unless `again`; what dies meanwhile is for the next
    run. Where the target's maxSize leaves no room it ends with Conflict; what fitted was sent.
    """
    check_rate(rate)
    if to is not None:
        check_name("to", to)
    with Link(url) as link:
        [facts] = query(link, "known_queue", queue=choice.queue)
        if choice.queue is not None and not facts["known"]:
            raise NotFound("queue", choice.queue)
        if choice.group is not None and not query(link, "known_group", group=choice.group)[0]["known"]:
            raise NotFound("group", choice.group)
        if choice.error is not None:
            _check_pattern(link, choice.error)
        chosen = {
            "queue": choice.queue,
            "group": choice.group,
            "since": choice.since,
            "until": min(choice.until or facts["now"], facts["now"]),
            "error": choice.error,
            "ids": _by_condition(link, choice, spark) if choice.where else None,
            "limit": CHUNK if rate is None else max(1, min(CHUNK, int(rate))),
        }
        done, twice, after, after_id = 0, 0, EPOCH, uuid.UUID(int=0)
        while rows := query(link, "redrivable", after=after, after_id=after_id, **chosen):
            started = time.monotonic()
            after, after_id = rows[-1]["failed_at"], rows[-1]["id"]
            found = [_Letter.of(row) for row in rows]
            letters = [letter for letter in found if again or HEADER not in letter.headers]
            twice += len(found) - len(letters)
            if dry_run:
                done += len(letters)
                continue
            count, full = _send(link, letters, to)
            done += count
            on_progress(done)
            if full is not None:
                raise Conflict(f"{full}; {done} dead letters were redriven, run it again for the rest")
            if rate is not None:
                sleep(max(0.0, count / rate - (time.monotonic() - started)))
        if twice:
            log.warning(
                "%d dead letters were left out: their messages were redriven before and died again; "
                "--again (again=True) takes them too",
                twice,
            )
        return done


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


def _send(link: Link, letters: list[_Letter], to: str | None) -> tuple[int, QueueFull | None]:
    if not letters:
        return 0, None

    def work(connection: Connection[Any]) -> tuple[int, QueueFull | None]:
        with connection.transaction():
            return _push(connection, letters, to)

    return link.run(work)


def _push(
    connection: Connection[Any], letters: list[_Letter], to: str | None
) -> tuple[int, QueueFull | None]:
    """Push what there is room for; the queue that has none for the rest comes back too."""

    def rows(name: str, **values: Any) -> list[dict[str, Any]]:
        return connection.execute(SQL[name], values).fetchall()

    queues = {row["name"]: row for row in rows("targets", queues=[to or letter.queue for letter in letters])}
    sizes: dict[str, int] = {}
    # Room comes before letters, as in the engine: the other way round the two could wait for each other.
    for name, queue in queues.items():
        if queue["max_size"]:
            rows("hold_room", queue=queue["id"])
            sizes[name] = rows("backlog", queue=queue["id"])[0]["size"]
    taken = {row["id"] for row in rows("take_letters", ids=[letter.id for letter in letters])}
    lanes: dict[tuple[str, str], list[_Letter]] = defaultdict(list)
    counts: Counter[str] = Counter()
    full = None
    for letter in letters:
        target = to or letter.queue
        limit = queues[target]["max_size"] if target in sizes else 0
        if letter.id not in taken:
            continue  # another run has it
        if limit and sizes[target] + counts[target] >= limit:
            full = full or QueueFull(target, sizes[target] + counts[target], limit)
            continue
        counts[target] += 1
        lanes[(target, letter.partition)].append(letter)
    if not lanes:
        return 0, full
    encrypted = {name for name, queue in queues.items() if queue["encrypted"]}
    bodies = {place: _body(some, place[0], place[0] in encrypted) for place, some in lanes.items()}
    sent = [(letter.id, queue) for (queue, _), some in lanes.items() for letter in some]
    connection.execute(SQL["mark_redriven"], {"ids": [i for i, _ in sent], "queues": [q for _, q in sent]})
    _append(connection, lanes, bodies)
    for name in sizes:
        connection.execute(
            SQL["note_size"], {"queue": queues[name]["id"], "size": sizes[name] + counts[name]}
        )
    return len(sent), full


def _append(
    connection: Connection[Any],
    lanes: dict[tuple[str, str], list[_Letter]],
    bodies: dict[tuple[str, str], bytes],
) -> None:
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
            [bodies[(t[2], t[3])] for t in targets],
        ),
    ).fetchall()
    refused = [row for row in answer if row["status"] != "ok"]
    if refused:
        raise Conflict(f"a partition was deleted meanwhile ({refused[0]['status']}): run it again")
    connection.execute("select pg_notify('settled', %s)", (WORKER,))


def _body(letters: list[_Letter], queue: str, encrypted: bool) -> bytes:
    secret = next((letter for letter in letters if letter.sealed), None)
    if secret is not None and not encrypted:
        raise Conflict(
            f"dead letters of queue {secret.queue!r} are encrypted, but queue {queue!r} is not: redrive them "
            "to a queue with encryptionEnabled"
        )
    headers = [msgspec.json.encode({**letter.headers, HEADER: str(letter.id)}) for letter in letters]
    payloads = [letter.payload for letter in letters]
    body = segment.encode(segment.new_base(), [b""] * len(letters), payloads, headers)
    if not encrypted:
        return body
    sealing.check(queue)
    return sealing.seal(body, len(letters))
