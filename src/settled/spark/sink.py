"""Settling a batch: tasks stage what was not acknowledged and what is pushed on, the driver commits it."""

from __future__ import annotations

import uuid
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec
import pyarrow as pa
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage

from settled.queue import segment
from settled.queue.errors import Conflict
from settled.queue.manifest import SQL, Link, Settled
from settled.spark.attempts import ACK, DEAD, INVALID, RELEASE, RETRY

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from psycopg import Connection

    from settled.spark.options import Options

OUTCOMES = {ACK, RETRY, RELEASE, DEAD, INVALID}
SEGMENT_MESSAGES, SEGMENT_BYTES = 1_000, 1_000_000
ERROR_LIMIT = 10_000
_OUTCOME_TYPES = [
    "uuid",
    "int8",
    "int8",
    "int8",
    "text",
    "float8",
    "text",
    "uuid",
    "text",
    "timestamptz",
    "bytea",
    "bytea",
]
_SEGMENT_TYPES = ["uuid", "text", "text", "int4", "bytea", "int8", "int8", "int8"]


@dataclass
class Staged(WriterCommitMessage):
    """What one run of a task left for the driver."""

    write: uuid.UUID | None = None
    batch: int | None = None
    outcomes: int = 0
    segments: int = 0


@dataclass
class _Open:
    """A segment to be, of results of one lane for one partition."""

    payloads: list[bytes] = field(default_factory=list)
    size: int = 0
    first: int = 0
    last: int = 0


class Staging:
    """Gathers one task's rows and hands them to the database."""

    def __init__(self, to: str, in_order: bool) -> None:
        self.staged = Staged()
        self._to = to
        self._in_order = in_order
        self._held: set[int] = set()
        self._runs: dict[int, tuple[int, int]] = {}
        self._outcomes: list[tuple[Any, ...]] = []
        self._segments: list[tuple[Any, ...]] = []
        self._open: dict[tuple[int, str], _Open] = defaultdict(_Open)
        self._write = uuid.uuid4()

    def number(self, batches: Sequence[int]) -> None:
        """Note which batch the rows are of; all must be of one."""
        for batch in batches:
            if self.staged.batch is None:
                self.staged.batch = batch
            elif self.staged.batch != batch:
                raise Conflict(
                    f"rows of batches {self.staged.batch} and {batch} came together: settle one queue a query"
                )

    def outcome(self, row: dict[str, Any]) -> None:
        """A row that is not acknowledged."""
        lane, seq, outcome = row["lane"], row["sequence"], row["outcome"]
        if lane in self._held or (outcome == RELEASE and row["error"] is None and row["delay"] is None):
            self._release(lane, seq)
        else:
            error = row["error"][:ERROR_LIMIT].replace("\0", "") if row["error"] else row["error"]
            headers = msgspec.json.encode(dict(row["headers"])) if row["headers"] else b""
            payload = row["payload"] if isinstance(row["payload"], bytes) else (row["payload"] or "").encode()
            kept = outcome != RELEASE
            self._outcomes.append(
                (
                    self._write,
                    lane,
                    seq,
                    seq + 1,
                    outcome,
                    row["delay"],
                    error,
                    uuid.UUID(row["message_id"]) if kept else None,
                    row["transaction_id"] if kept else None,
                    row["created_at"] if kept else None,
                    headers if kept else None,
                    payload if kept else None,
                )
            )
        if self._in_order and outcome in (RETRY, RELEASE):
            self._held.add(lane)

    def push(self, lane: int, seq: int, partition: str, payload: bytes) -> None:
        """A result for the next queue."""
        if lane in self._held:
            self._release(lane, seq)  # it is attempted again, in its turn
            return
        part = self._open[(lane, partition)]
        if not part.payloads:
            part.first = seq
        part.payloads.append(payload)
        part.size += len(payload)
        part.last = max(part.last, seq)
        if len(part.payloads) >= SEGMENT_MESSAGES or part.size >= SEGMENT_BYTES:
            self._close(lane, partition, self._open.pop((lane, partition)))

    def _release(self, lane: int, seq: int) -> None:
        run = self._runs.get(lane)
        if run is not None and run[1] == seq:
            self._runs[lane] = (run[0], seq + 1)
            return
        if run is not None:
            self._end_run(lane, run)
        self._runs[lane] = (seq, seq + 1)

    def _end_run(self, lane: int, run: tuple[int, int]) -> None:
        self._outcomes.append((self._write, lane, *run, RELEASE, *[None] * 7))

    def _close(self, lane: int, partition: str, part: _Open) -> None:
        n = len(part.payloads)
        body = segment.encode(segment.new_base(), [b""] * n, part.payloads)
        self._segments.append((self._write, self._to, partition, n, body, lane, part.first, part.last))

    def finish(self, link: Link) -> Staged:
        """Hand everything over; nothing of it counts before the driver says so."""
        for lane, run in self._runs.items():
            self._end_run(lane, run)
        for (lane, partition), part in self._open.items():
            self._close(lane, partition, part)
        if not self._outcomes and not self._segments:
            return self.staged
        self.staged.write = self._write
        self.staged.outcomes, self.staged.segments = len(self._outcomes), len(self._segments)
        link.run(self._copy)
        return self.staged

    def _copy(self, connection: Connection[Any]) -> None:
        with connection.transaction(), connection.cursor() as cursor:
            for name, types, rows in (
                ("copy_outcomes", _OUTCOME_TYPES, self._outcomes),
                ("copy_segments", _SEGMENT_TYPES, self._segments),
            ):
                if rows:
                    with cursor.copy(SQL[name]) as copy:
                        copy.set_types(types)
                        for row in rows:
                            copy.write_row(row)


def stage(batches: Iterator[pa.RecordBatch], settings: Options, link: Link) -> Staged:
    """Take over a task's rows."""
    staging = Staging(settings.to, settings.ordering == "in_order")
    for batch in batches:
        if not batch.num_rows:
            continue
        staging.number(batch.column("batch").unique().to_pylist())
        outcomes = batch.column("outcome")
        unknown = set(outcomes.unique().to_pylist()) - OUTCOMES
        if unknown:
            raise Conflict(f"outcome must be one of {', '.join(sorted(OUTCOMES))}, got {unknown.pop()!r}")
        failed = pa.compute.not_equal(outcomes, ACK)
        if not settings.to:
            for row in batch.filter(failed).to_pylist():
                staging.outcome(row)
            continue
        _stage_both(batch, failed.to_pylist(), staging)
    return staging.finish(link)


def _stage_both(batch: pa.RecordBatch, failed: list[bool], staging: Staging) -> None:
    """Failures and pushes, in the order of the rows: in order, nothing behind a failure is pushed."""
    lanes, seqs = batch.column("lane").to_pylist(), batch.column("sequence").to_pylist()
    partitions, pushes = batch.column("to_partition").to_pylist(), batch.column("push").to_pylist()
    for i, bad in enumerate(failed):
        if bad:
            staging.outcome(batch.slice(i, 1).to_pylist()[0])
        elif pushes[i] is not None:
            staging.push(lanes[i], seqs[i], partitions[i], pushes[i])


def settle_staged(settings: Options, messages: Sequence[Any]) -> Settled:
    """The one transaction."""
    staged = [m for m in messages if m is not None]
    numbers = {m.batch for m in staged if m.batch is not None}
    if len(numbers) > 1:
        raise Conflict(f"rows of batches {sorted(numbers)} came together: settle one queue a query")
    reader = settings.reader()
    with reader.link:
        return reader.settle(
            numbers.pop() if numbers else None,
            [m.write for m in staged if m.write is not None],
            sum(m.outcomes for m in staged),
            sum(m.segments for m in staged),
            None if settings.ordering == "queue" else settings.ordering != "in_order",
        )


class StreamSink(DataSourceStreamArrowWriter):
    """Settles each batch of a stream."""

    def __init__(self, settings: Options) -> None:
        self._settings = settings

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Staged:
        from settled.spark.source import link_to

        return stage(iterator, self._settings, link_to(self._settings.url))

    def commit(self, messages: list[Any], batchId: int) -> None:  # noqa: N803
        settle_staged(self._settings, messages)

    def abort(self, messages: list[Any], batchId: int) -> None:  # noqa: N803
        """Nothing was applied; what was staged is swept up later."""


class BatchSink(DataSourceArrowWriter):
    """Settles the batch that is being read."""

    def __init__(self, settings: Options) -> None:
        self._settings = settings

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Staged:
        from settled.spark.source import link_to

        return stage(iterator, self._settings, link_to(self._settings.url))

    def commit(self, messages: list[Any]) -> None:
        settle_staged(self._settings, messages)

    def abort(self, messages: list[Any]) -> None:
        """Nothing was applied; what was staged is swept up later."""
