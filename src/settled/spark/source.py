"""`format("settled")`: a queue as a Spark source, batch by batch, each a durable manifest."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import threading
import time
import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import (
    BinaryType,
    DoubleType,
    StringType,
    StructField,
    StructType,
    _parse_datatype_json_string,
)

from settled.queue.errors import BadRequest, Conflict, Fenced, QueueError
from settled.spark import rows
from settled.spark.broker import Reader, broker_of
from settled.spark.options import Options
from settled.spark.shipping import loads

if TYPE_CHECKING:
    from collections.abc import Iterator, MutableMapping, Sequence

    from settled.spark.sink import BatchSink, StreamSink

log = logging.getLogger("settled.spark")
IDLE = 0.1
STAGED = StructType([StructField("staged", BinaryType())])
"""What a task that stages its rows itself has to say."""


class SettledSource(DataSource):
    """Reads a queue for a group and settles it. Without a group it only looks: nothing is claimed.

    Spark starts processes for planning, offsets and commits, so each imports only what it does.
    """

    def __init__(self, options: MutableMapping[str, str]) -> None:
        super().__init__(options)
        self.settings = Options.parse(options)
        spare("source")

    @classmethod
    def name(cls) -> str:
        return "settled"

    def schema(self) -> StructType:
        return schema_of(self.settings)

    def reader(self, schema: StructType) -> DataSourceReader:
        return BatchReader(self.settings)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802
        return StreamReader(self.settings)

    def writer(self, schema: StructType, overwrite: bool) -> BatchSink:
        from settled.spark.sink import BatchSink

        return BatchSink(self.settings)

    def streamWriter(self, schema: StructType, overwrite: bool) -> StreamSink:  # noqa: N802
        from settled.spark.sink import StreamSink

        spare("sink")
        return StreamSink(self.settings)


_spared: set[str] = set()


def spare(what: str) -> None:
    """Keep what is imported by now out of the garbage collection that Spark runs after every task."""
    if what not in _spared and "SPARK_REUSE_WORKER" in os.environ:
        _spared.add(what)
        gc.freeze()


def schema_of(settings: Options) -> StructType:
    """The columns; with a handler, what came of it too."""
    if settings.emit == "staged":
        return STAGED
    fields = list(rows.SPARK.fields)
    if settings.payload == "string":
        fields = [StructField("payload", StringType()) if f.name == "payload" else f for f in fields]
    if settings.handler:
        result = loads(settings.handler).result
        kind = BinaryType() if result is None else _parse_datatype_json_string(result)
        fields += [
            StructField("outcome", StringType()),
            StructField("delay", DoubleType()),
            StructField("error", StringType()),
            StructField("result", kind),
        ]
    return StructType(fields)


@dataclass
class Empty(InputPartition):
    """Nothing to read; Spark wants a task all the same."""

    batch: int = 0


def read_task(settings: Options, task: InputPartition) -> Iterator[pa.RecordBatch]:
    """A task's messages as record batches."""
    if isinstance(task, Empty):
        return
    chunks = broker_of(settings).chunks(task)
    batch: int = task.batch  # type: ignore[attr-defined]
    if settings.handler:
        from settled.spark.fused import read_attempted, read_staged

        read = read_staged if settings.emit == "staged" else read_attempted
        yield from read(chunks, settings, batch)
        spare("attempts")
        return
    schema = rows.ARROW
    for chunk in chunks:
        arrays = chunk.arrays(batch)
        if settings.payload == "string":
            arrays[8] = _texts(arrays[8])
        yield pa.RecordBatch.from_arrays(arrays, names=schema.names)
    spare("rows")


def _texts(data: pa.Array) -> pa.Array:
    try:
        return data.cast(pa.string())
    except pa.ArrowInvalid:  # not all of it is UTF-8
        return pa.array([raw.decode(errors="replace") for raw in data.to_pylist()], pa.string())


class BatchReader(DataSourceReader):
    """One batch: claimed when it is planned, the same one again until it is settled."""

    def __init__(self, settings: Options) -> None:
        self._settings = settings

    def partitions(self) -> Sequence[InputPartition]:
        settings = self._settings
        if not settings.group:
            return broker_of(settings).look() or [Empty()]
        reader = broker_of(settings).reader()
        try:
            reader.hold(streaming=False)
            number = reader.claim(settings.max_rows, None)
            return (reader.plan(number) if number is not None else []) or [Empty(number or 0)]
        finally:
            reader.close()

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        yield from read_task(self._settings, partition)


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Batches one after the other; the offset is the manifest's number.

    Its offsets run in one process beside the driver, which holds the reader and renews its leases. Nothing
    is opened before it is needed there: the object itself is pickled and made more than once.
    """

    def __init__(self, settings: Options) -> None:
        self._settings = settings
        self._held: _Hold | None = None
        self._horizon: Any = None

    def _reader(self) -> Reader:
        if self._held is None:
            if not self._settings.group:  # Spark hides what is said any sooner
                raise BadRequest("option group", "", "a stream settles for a group: name one")
            self._held = _Hold(self._settings)
        return self._held.reader

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        # What fails now and may be tried again at once is for a later run, or this one might never end.
        self._horizon = self._reader().horizon()

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        limit = self._settings.max_rows
        return ReadMaxRows(limit) if limit is not None else ReadAllAvailable()

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802
        number = self._reader().settled_up_to()
        if number:
            log.warning(
                "queue %r, group %r: no checkpoint, but the group has read %d batches; it goes on after them",
                self._settings.queue,
                self._settings.group,
                number,
            )
        return self._offset(number)

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
        reader = self._reader()
        before = self._number(start)
        rows_ = limit.max_rows if isinstance(limit, ReadMaxRows) else None
        number = reader.claim(rows_, self._horizon)
        if number is None:
            if self._horizon is None:
                time.sleep(IDLE)  # Spark asks again at once, a hundred times a second
            return start
        queue, group = self._settings.queue, self._settings.group
        if number < before:
            raise Conflict(
                f"queue {queue!r}, group {group!r}: the checkpoint is at batch {before}, the group only at "
                f"{number}: its state was deleted, or the checkpoint is of another broker; start with a new "
                "checkpoint location"
            )
        if number == before:
            raise Conflict(
                f"queue {queue!r}, group {group!r}: batch {number} was read but not settled; "
                "write the stream with settle(df), or call settle_batch(df, batch_id) at the end of "
                "your foreachBatch"
            )
        return self._offset(number)

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        reader = self._reader()
        tasks: list[InputPartition] = []
        numbers = range(self._number(start) + 1, self._number(end) + 1)
        for number in numbers or (0,):  # Spark may run a batch without messages, which settles nothing
            tasks += reader.plan(number)
        return tasks

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        yield from read_task(self._settings, partition)

    def commit(self, end: dict[str, Any]) -> None:
        """Nothing: it comes a batch late and for the last one never, so the sink settles."""

    def stop(self) -> None:
        if self._held is not None:
            self._held.stop()
            self._held = None

    def _offset(self, number: int) -> dict[str, Any]:
        reader, settings = self._reader(), self._settings
        return {"queue": settings.queue, "group": settings.group, "batch": number, "source": reader.source()}

    def _number(self, offset: dict[str, Any]) -> int:
        """The batch's number; a checkpoint of another query is refused."""
        ours = (self._settings.queue, self._settings.group)
        theirs = (offset.get("queue"), offset.get("group"))
        if theirs != ours:
            raise Conflict(
                f"the checkpoint belongs to group {theirs[1]!r} of queue {theirs[0]!r}, this query reads "
                f"queue {ours[0]!r} as {ours[1]!r}: give it a checkpoint location of its own"
            )
        source = self._reader().source()
        if offset.get("source", source) != source:
            raise Conflict(
                f"queue {ours[0]!r}, group {ours[1]!r}: the queue was deleted and made anew since the "
                "checkpoint was written, or is in another database; start with a new checkpoint location"
            )
        return int(offset["batch"])

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_held": None}


class _Hold:
    """The hold on a reader, renewed by a thread as long as this process lives."""

    def __init__(self, settings: Options) -> None:
        broker = broker_of(settings)
        self.reader, self._renewals = broker.reader(), broker.reader()
        self.reader.hold(streaming=True)
        self._every = settings.lease_seconds / 3
        self._stopped = threading.Event()
        threading.Thread(target=self._renew, name="settled-lease", daemon=True).start()

    def _renew(self) -> None:
        while not self._stopped.wait(self._every):
            try:
                self._renewals.renew()
            except Fenced:
                return  # the next step of the query hears of it and fails
            except (QueueError, OSError) as error:
                log.warning("lease not renewed: %s", error)

    def stop(self) -> None:
        """Let go, so that the next query need not wait."""
        self._stopped.set()
        for reader in (self.reader, self._renewals):
            with contextlib.suppress(Exception):
                reader.close()


def new_holder() -> str:
    """A name for whoever reads: what a former one still tries is told apart by it."""
    return str(uuid.uuid4())
