"""Settling a batch: tasks stage what was not acknowledged and what is pushed on, the driver commits it."""

from __future__ import annotations

import logging
import pickle
import time
import uuid
from collections import defaultdict
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pyarrow as pa
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage

from settled.queue import sealing, segment
from settled.queue.errors import Conflict, QueueFull
from settled.queue.manifest import SQL, Link, Reader, Settled
from settled.settlement import storable
from settled.spark.attempts import ACK, DEAD, INVALID, RELEASE, RETRY
from settled.spark.broker import Broker, broker_of
from settled.spark.rows import stored
from settled.spark.source import STAGED, spare

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray
    from psycopg import Connection

    from settled.spark.options import Options

logger = logging.getLogger("settled.spark")
OUTCOMES = {ACK, RETRY, RELEASE, DEAD, INVALID}
SEGMENT_MESSAGES, SEGMENT_BYTES = 1_000, 1_000_000
ROOM_WITHIN = 30.0
"""Seconds a batch waits for room in the queue that its results go to."""
NO_REASON = "rejected, without an error"
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

    lengths: list[NDArray[np.uint32]] = field(default_factory=list)
    payloads: list[bytes] = field(default_factory=list)
    n: int = 0
    size: int = 0
    first: int = 0
    last: int = 0


class Staging:
    """Gathers one task's rows and hands them to the database."""

    def __init__(self, queue: str, to: str, in_order: bool) -> None:
        self.staged = Staged()
        self._queue = queue
        self._to = to
        self.in_order = in_order
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
            error = None if row["error"] is None else storable(row["error"])
            if error is None and outcome in (DEAD, INVALID):
                error = NO_REASON
            headers = msgspec.json.encode(stored(dict(row["headers"]))) if row["headers"] else b""
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
                    row["payload"] or b"" if kept else None,
                )
            )
        if self.in_order and outcome in (RETRY, RELEASE):
            self._held.add(lane)

    @property
    def holds(self) -> bool:
        """Whether a lane is held back: what comes after it then depends on its order."""
        return bool(self._held)

    def push(self, lane: int, partition: str, seqs: NDArray[np.int64], results: pa.Array) -> None:
        """Results of one lane for one partition of the next queue, in order."""
        if lane in self._held:
            for seq in seqs.tolist():
                self._release(lane, seq)  # it is attempted again, in its turn
            return
        buffers = results.buffers()
        data = memoryview(buffers[2]) if buffers[2] is not None else memoryview(b"")
        offsets = np.frombuffer(buffers[1], np.int32, len(results) + 1, 4 * results.offset)
        at = 0
        while at < len(seqs):
            part = self._open[(lane, partition)]
            # So many more that neither the count nor, but for the last one, the size goes over.
            room = int(np.searchsorted(offsets[at + 1 :], offsets[at] + SEGMENT_BYTES - part.size)) + 1
            end = min(len(seqs), at + SEGMENT_MESSAGES - part.n, at + room)
            low, high = int(offsets[at]), int(offsets[end])
            if not part.n:
                part.first = int(seqs[at])
            part.lengths.append(np.diff(offsets[at : end + 1]).astype(np.uint32))
            part.payloads.append(bytes(data[low:high]))
            part.n += end - at
            part.size += high - low
            part.last = max(part.last, int(seqs[at:end].max()))
            if part.n >= SEGMENT_MESSAGES or part.size >= SEGMENT_BYTES:
                self._close(lane, partition, self._open.pop((lane, partition)))
            at = end

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
        lengths = np.concatenate(part.lengths).astype("<u4").tobytes()
        body = segment.encode_plain(segment.new_base(), part.n, lengths, b"".join(part.payloads))
        self._segments.append((self._write, self._to, partition, part.n, body, lane, part.first, part.last))

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
        queues = {"queues": [self._queue, self._to]}
        with connection.transaction(), connection.cursor() as cursor:
            encrypted = {row["name"] for row in connection.execute(SQL["encrypted"], queues)}
            for queue in encrypted:
                sealing.check(queue)
            outcomes, segments = self._outcomes, self._segments
            if self._queue in encrypted:
                outcomes = [(*row[:-2], *map(_sealed, row[-2:])) for row in outcomes]
            if self._to in encrypted:
                segments = [(*row[:4], sealing.seal(row[4], row[3]), *row[5:]) for row in segments]
            for name, types, rows in (
                ("copy_outcomes", _OUTCOME_TYPES, outcomes),
                ("copy_segments", _SEGMENT_TYPES, segments),
            ):
                if rows:
                    with cursor.copy(SQL[name]) as copy:
                        copy.set_types(types)
                        for row in rows:
                            copy.write_row(row)


def _sealed(value: bytes | None) -> bytes | None:
    return None if value is None else sealing.seal_value(value)


def carry(staged: WriterCommitMessage) -> pa.RecordBatch:
    """What a task staged where its rows were read, as the one row that comes to the sink."""
    return pa.RecordBatch.from_arrays([pa.array([pickle.dumps(staged)])], names=STAGED.names)


def carried(batches: Iterator[pa.RecordBatch], broker: Broker) -> WriterCommitMessage:
    """What was carried here; nothing if the task had nothing to read."""
    found = [row for batch in batches for row in batch.column(0).to_pylist()]
    if not found:
        return broker.stage(iter(()))
    (one,) = found  # of several, the others would be acknowledged
    staged: WriterCommitMessage = pickle.loads(one)  # noqa: S301 - this very task's own
    return staged


def stage(batches: Iterator[pa.RecordBatch], settings: Options, link: Link) -> Staged:
    """Take over a task's rows."""
    staging = Staging(settings.queue, settings.to, settings.ordering == "in_order")
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
        bad = np.flatnonzero(failed.to_numpy(zero_copy_only=False)).tolist()
        if staging.in_order and (bad or staging.holds):
            # In order, nothing behind a failure is pushed.
            after = 0
            for place in bad:
                _push(batch.slice(after, place - after), staging)
                staging.outcome(batch.slice(place, 1).to_pylist()[0])
                after = place + 1
            _push(batch.slice(after), staging)
            continue
        for row in batch.filter(failed).to_pylist():
            staging.outcome(row)
        _push(batch.filter(pa.compute.invert(failed)) if bad else batch, staging)
    return staging.finish(link)


def _push(batch: pa.RecordBatch, staging: Staging) -> None:
    """Hand on results, as many at a time as are of one lane and go to one partition."""
    if batch.column("push").null_count:
        batch = batch.filter(batch.column("push").is_valid())
    if not batch.num_rows:
        return
    lanes, seqs = batch.column("lane").to_numpy(), batch.column("sequence").to_numpy()
    partitions, results = batch.column("to_partition").dictionary_encode(), batch.column("push")
    names, places = partitions.dictionary.to_pylist(), partitions.indices.to_numpy()
    starts = np.flatnonzero((np.diff(lanes) != 0) | (np.diff(places) != 0)) + 1
    for a, b in pairwise([0, *starts.tolist(), batch.num_rows]):
        staging.push(int(lanes[a]), names[places[a]], seqs[a:b], results.slice(a, b - a))


def settle_staged(settings: Options, messages: Sequence[Any], reader: Reader) -> Settled:
    """The one transaction."""
    staged = [m for m in messages if m is not None]
    numbers = {m.batch for m in staged if m.batch is not None}
    if len(numbers) > 1:
        raise Conflict(f"rows of batches {sorted(numbers)} came together: settle one queue a query")
    if any(m.segments for m in staged):
        wait_for_room(reader.link, settings.to)
    return reader.settle(
        numbers.pop() if numbers else None,
        [m.write for m in staged if m.write is not None],
        sum(m.outcomes for m in staged),
        sum(m.segments for m in staged),
        None if settings.ordering == "queue" else settings.ordering != "in_order",
    )


def wait_for_room(link: Link, queue: str) -> None:
    """Wait while a queue has as many messages as its maxSize lets in; QueueFull if it stays so."""
    until, told = time.monotonic() + ROOM_WITHIN, False
    while (found := link.rows("room", queue=queue)) and found[0]["size"] >= found[0]["max_size"]:
        full = QueueFull(queue, found[0]["size"], found[0]["max_size"])
        if time.monotonic() >= until:
            raise full
        if not told:
            logger.warning("%s; results wait for at most %g s", full, ROOM_WITHIN)
            told = True
        time.sleep(0.2)


class StreamSink(DataSourceStreamArrowWriter):
    """Settles each batch of a stream."""

    def __init__(self, settings: Options) -> None:
        self._settings = settings

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        broker = broker_of(self._settings)
        staged = carried(iterator, broker) if self._settings.emit == "staged" else broker.stage(iterator)
        spare("write")
        return staged

    def commit(self, messages: list[Any], batchId: int) -> None:  # noqa: N803
        broker_of(self._settings).settle(messages)
        spare("commit")

    def abort(self, messages: list[Any], batchId: int) -> None:  # noqa: N803
        """Nothing was applied; what was staged is swept up later."""


class BatchSink(DataSourceArrowWriter):
    """Settles the batch that is being read."""

    def __init__(self, settings: Options) -> None:
        self._settings = settings

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        staged = broker_of(self._settings).stage(iterator)
        spare("write")
        return staged

    def commit(self, messages: list[Any]) -> None:
        broker_of(self._settings).settle(messages)

    def abort(self, messages: list[Any]) -> None:
        """Nothing was applied; what was staged is swept up later."""
