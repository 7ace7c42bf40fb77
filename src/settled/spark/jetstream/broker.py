"""JetStream as one query uses it."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, cast

import pyarrow as pa
from pyspark.sql.datasource import InputPartition

from settled.queue.errors import Conflict
from settled.queue.manifest import Settled
from settled.spark.jetstream import books as ledger
from settled.spark.jetstream import setting
from settled.spark.jetstream.link import Link, link_to
from settled.spark.jetstream.messages import Messages, PieceReader
from settled.spark.jetstream.reader import Reader, Task
from settled.spark.jetstream.staging import Staged, stage
from settled.transports.nats import Connection

if TYPE_CHECKING:
    from settled.spark.options import Options

log = logging.getLogger("settled.spark")
_SOON = 3.0


class JetStream:
    """A stream, read in batches whose books are in a key-value bucket beside it."""

    def __init__(self, settings: Options) -> None:
        self._settings = settings

    def reader(self) -> Reader:
        return Reader(self._settings)

    def source(self) -> str:
        return Reader(self._settings, link_to(self._settings.url)).source()

    def look(self) -> list[Task]:
        settings = self._settings
        subjects = (settings.subject,) if settings.subject else ()

        async def work(connection: Connection) -> ledger.Span:
            info = await setting.stream_of(connection, settings.queue)
            return await setting.span_of(connection, info, 1, subjects)

        span = link_to(settings.url).run(work)
        pieces = ledger.cut(span.first, span.last + 1, [], settings.tasks)
        return [Task(0, place, piece, subjects, {}) for place, piece in enumerate(pieces)]

    def chunks(self, task: InputPartition) -> Iterator[Messages]:
        settings, link, task = self._settings, link_to(self._settings.url), cast(Task, task)
        piece = PieceReader(link, settings.queue, task.subjects, task.piece, task.attempts)
        yield from piece
        if task.batch:
            Reader(settings, link).note_read(task, piece.found, piece.removed)

    def stage(self, batches: Iterator[pa.RecordBatch]) -> Staged:
        return stage(batches, self._settings, link_to(self._settings.url))

    def settle(self, messages: Sequence[Any]) -> Settled:
        staged = [m for m in messages if m is not None]
        numbers = {m.batch for m in staged if m.batch is not None}
        if len(numbers) > 1:
            raise Conflict(f"rows of batches {sorted(numbers)} came together: settle one stream a query")
        told = [(m.repeated, m.outcomes()) for m in staged]
        outcomes = [outcome for _, some in told for outcome in some]
        repeated = {outcome.sequence for again, some in told if again for outcome in some}
        reader = Reader(self._settings, link_to(self._settings.url))
        pushed = sum(m.pushed for m in staged)
        return reader.settle(numbers.pop() if numbers else None, outcomes, pushed, repeated)


def check(settings: Options) -> None:
    """Say now, beside the user's code, what cannot be read."""
    link = Link(settings.url)
    try:
        link.run(lambda connection: setting.look_up(connection, settings), patience=_SOON)
    finally:
        link.close()


def check_target(settings: Options, to: str) -> None:
    """Say now what cannot be pushed to."""
    link = Link(settings.url)
    try:
        config = link.run(lambda connection: setting.check_target(connection, settings, to), patience=_SOON)
    finally:
        link.close()
    if not config.allow_direct:
        log.warning(
            "stream %r remembers message ids for %g s and does not allow direct gets: a batch repeated later "
            "than that pushes its results again; set allow_direct, or raise its duplicate_window",
            config.name, config.duplicate_window or 0,
        )  # fmt: skip
