"""One task's rows on their way to the settlement: failures travel to the driver, results to their subject."""

from __future__ import annotations

import math
import sys
import time
import zlib
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import msgspec
import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import WriterCommitMessage

from settled.queue.errors import Conflict
from settled.spark.attempts import ACK, DEAD, INVALID, RELEASE, RETRY
from settled.spark.jetstream import setting
from settled.spark.jetstream.books import Books, Outcome
from settled.spark.jetstream.bucket import Bucket
from settled.spark.jetstream.gets import FETCH, fetch
from settled.spark.jetstream.link import Link
from settled.spark.jetstream.publishing import Outgoing, publish_all
from settled.spark.sink import NO_REASON, OUTCOMES
from settled.transports.nats import Connection
from settled.transports.nats.delivery import MSG_ID

if TYPE_CHECKING:
    from settled.spark.options import Options

ERROR_LIMIT = 2_000
_AT_ONCE = 1_000
_MARGIN = 30.0
Window = tuple[float, float]
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(list[Outcome]).decode


@dataclass
class Staged(WriterCommitMessage):
    """What one run of a task tells the driver."""

    batch: int | None = None
    body: bytes = b""
    pushed: int = 0
    repeated: bool = False
    """Whether Spark ran the task before: results of it may be published."""

    def outcomes(self) -> list[Outcome]:
        """The rows that were not acknowledged."""
        return _decode(zlib.decompress(self.body)) if self.body else []


def stage(batches: Iterator[pa.RecordBatch], settings: Options, link: Link) -> Staged:
    """Take over a task's rows."""
    staging = Staging(settings, link)
    for batch in batches:
        if not batch.num_rows:
            continue
        staging.number(batch.column("batch").unique().to_pylist())
        outcomes = batch.column("outcome")
        unknown = set(outcomes.unique().to_pylist()) - OUTCOMES
        if unknown:
            raise Conflict(f"outcome must be one of {', '.join(sorted(OUTCOMES))}, got {unknown.pop()!r}")
        names = ["sequence", "outcome", "delay", "error", *(("to_partition", "push") if settings.to else ())]
        wanted = batch if settings.to else batch.filter(pa.compute.not_equal(outcomes, ACK))
        for row in wanted.select(names).to_pylist():
            if row["outcome"] != ACK:
                staging.outcome(row)
            elif row["push"] is not None:
                staging.push(row["sequence"], row["to_partition"], row["push"])
    return staging.finish()


class Staging:
    """Gathers one task's rows. Results are published at once, under ids that a repetition has too."""

    def __init__(self, settings: Options, link: Link) -> None:
        self._settings = settings
        self._link = link
        self._in_order = settings.ordering == "in_order"
        self._held = False
        self._batch: int | None = None
        self._outcomes: list[Outcome] = []
        self._pushes: list[Outgoing] = []
        self._pushed = 0
        self._known: set[str] = set()
        # Times in which results of these rows may have been published, and those that were looked at.
        self._windows: set[Window] = set()
        self._looked: set[Window] = set()
        self._doubts: dict[Window, list[tuple[int, int]]] = {}
        # How many results of a message there were: each has an id of its own.
        self._results: dict[int, int] = {}
        self._books: Books | None = None
        self._limit = 0

    def number(self, batches: Sequence[int]) -> None:
        """Note which batch the rows are of; all must be of one."""
        for batch in batches:
            if self._batch is None:
                self._batch = batch
            elif self._batch != batch:
                raise Conflict(
                    f"rows of batches {self._batch} and {batch} came together: settle one stream a query"
                )

    def outcome(self, row: dict[str, Any]) -> None:
        """A row that is not acknowledged."""
        error = row["error"][:ERROR_LIMIT] if row["error"] else None
        if error is None and row["outcome"] in (DEAD, INVALID):
            error = NO_REASON
        outcome = RELEASE if self._held else row["outcome"]
        self._outcomes.append(Outcome(row["sequence"], outcome, row["delay"], error))
        if self._in_order and outcome in (RETRY, RELEASE):
            self._held = True

    def push(self, seq: int, partition: str | None, payload: bytes) -> None:
        """A result for the next subject."""
        if self._held:
            self._once(Outcome(seq, RELEASE, None, None))  # it is attempted again, in its turn
            return
        settings = self._settings
        subject = f"{settings.to}.{partition}" if partition else settings.to
        if self._books is None:
            value = Bucket(self._link).get(f"{settings.queue}.{settings.group}")
            self._books = msgspec.json.decode(value.data, type=Books)
            self._limit = self._link.run(_max_payload)
            for first, end, since, until in sorted(self._books.doubts):
                self._doubts.setdefault((since, until), []).append((first, end))
            if self._books.open is not None:
                self._windows.add((self._books.open.claimed_at, math.inf))
        # Without the batch's number: a message that comes again in a later batch has one result all the same.
        identity = f"settled:{self._books.name}.{settings.queue}.{settings.group}.{seq}"
        number = self._results[seq] = self._results.get(seq, 0) + 1
        if number > 1:
            identity = f"{identity}.{number}"
        result = Outgoing(subject, payload, {MSG_ID: identity})
        if result.size > self._limit:
            error = f"the result has {result.size} bytes, the NATS server takes {self._limit} (max_payload)"
            self._once(Outcome(seq, DEAD, None, error))
            return
        self._pushed += 1
        self._pushes.append(result)
        self._windows.update(window for window, ranges in self._doubts.items() if _within(seq, ranges))
        if len(self._pushes) >= _AT_ONCE:
            self._send()

    def _once(self, outcome: Outcome) -> None:
        """An outcome of a message that may have several results."""
        if not self._outcomes or self._outcomes[-1].sequence != outcome.sequence:
            self._outcomes.append(outcome)

    def _send(self) -> None:
        pushes, self._pushes = self._pushes, []
        subject = pushes[0].subject
        for since, until in self._windows - self._looked:
            found = self._link.run(lambda c, since=since, until=until: _sent(c, subject, since, until))  # type: ignore[misc]
            self._known |= found
        self._looked |= self._windows
        known = self._known
        fresh = [one for one in pushes if one.headers[MSG_ID] not in known] if known else pushes
        self._link.run(lambda connection: publish_all(connection, fresh))

    def finish(self) -> Staged:
        """Send what is left, and tell the driver."""
        if self._pushes:
            self._send()
        body = zlib.compress(_encode(self._outcomes), 1) if self._outcomes else b""
        task = TaskContext.get()
        return Staged(self._batch, body, self._pushed, task is not None and task.attemptNumber() > 0)


def _within(seq: int, ranges: list[tuple[int, int]]) -> bool:
    place = bisect_right(ranges, (seq, sys.maxsize)) - 1
    return place >= 0 and seq < ranges[place][1]


async def _max_payload(connection: Connection) -> int:
    return (await connection.open()).max_payload


async def _sent(connection: Connection, subject: str, since: float, until: float) -> set[str]:
    """The ids in a target from one time to another, if that is longer ago than its stream remembers them.

    Within the stream's duplicate window the server itself drops what it has.
    """
    config = (await setting.target_of(connection, subject, "to")).config
    if time.time() - since < (config.duplicate_window or 0) - _MARGIN or not config.allow_direct:
        return set()
    name, found = config.name or "", set[str]()
    start = datetime.fromtimestamp(since - _MARGIN, UTC).isoformat()
    end = datetime.fromtimestamp(until + _MARGIN, UTC).isoformat() if until < math.inf else "~"
    some = await fetch(connection, name, start_time=start, batch=FETCH)
    while some.messages:
        found.update(m.own_id or "" for m in some.messages)
        if not some.more or some.messages[-1].time > end:
            break
        some = await fetch(connection, name, seq=some.messages[-1].sequence + 1, batch=FETCH)
    return found
