"""The queue on Postgres as a broker behind the source."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

from pyspark.sql.datasource import InputPartition

from settled.queue import manifest
from settled.queue.errors import NotFound
from settled.queue.manifest import Link, Range, Settled, log_ranges
from settled.spark import rows, sink
from settled.spark.fused import as_rows

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from datetime import datetime

    import pyarrow as pa

    from settled.spark.attempts import Rows
    from settled.spark.options import Options

ROWS_A_TASK = 5_000
_links: dict[tuple[int, str], Link] = {}


def link_to(url: str) -> Link:
    """This process's connection; Spark reuses its worker processes, and so do we."""
    return _links.setdefault((os.getpid(), url), Link(url))


@dataclass
class Task(InputPartition):
    """What one task reads."""

    ranges: list[Range]
    batch: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """A slice of a lane."""

    slice: rows.Slice
    queue: str | None

    def rows(self) -> Rows:
        return as_rows(self.slice)

    def only(self, places: list[int]) -> Chunk:
        return Chunk(rows.only(self.slice, places), self.queue)

    def arrays(self, batch: int) -> list[pa.Array]:
        return rows.arrays(self.slice, self.queue, batch)


class Reader(manifest.Reader):
    """A hold whose batches are spread over tasks."""

    def __init__(self, settings: Options) -> None:
        super().__init__(
            settings.url, settings.queue, settings.group, settings.holder, settings.lease_seconds,
            settings.starting,
        )  # fmt: skip
        self._settings = settings
        self._source: str | None = None

    def hold(self, *, streaming: bool) -> None:
        super().hold(streaming=streaming)
        if streaming:
            self.tidy()

    def renew(self) -> None:
        super().renew()
        self.lock()  # free only if the database was away and the first lock went with it
        self.tidy()

    def horizon(self) -> datetime:
        found = self.link.run(lambda c: c.execute("select clock_timestamp() as now").fetchall())
        return cast("datetime", found[0]["now"])

    def source(self) -> str:
        if self._source is None:
            found = self.link.rows("source", queue=self.queue, group=self.group)
            self._source = str(found[0]["source"]) if found else ""
        return self._source

    def plan(self, number: int) -> list[Task]:
        return spread(self.serve(number), self._settings, number)

    def close(self) -> None:
        self.link.close()


class Postgres:
    """The queue's database."""

    def __init__(self, settings: Options) -> None:
        self._settings = settings

    def reader(self) -> Reader:
        return Reader(self._settings)

    def source(self) -> str:
        settings = self._settings
        with Link(settings.url) as link:
            return str(link.rows("source", queue=settings.queue, group=settings.group)[0]["source"])

    def look(self) -> list[Task]:
        settings = self._settings
        with Link(settings.url) as link:
            ranges = log_ranges(link, settings.queue)
            if not ranges and not link.rows("known", queue=settings.queue):
                raise NotFound("queue", settings.queue)
        if settings.window:
            ranges = within(ranges, settings.window)
        return spread(ranges, settings, 0)

    def chunks(self, task: InputPartition) -> Iterator[Chunk]:
        link = link_to(self._settings.url)
        queue = None if self._settings.lean else self._settings.queue
        for slice_ in rows.slices(link, cast(Task, task).ranges):
            yield Chunk(slice_, queue)

    def stage(self, batches: Iterator[pa.RecordBatch]) -> sink.Staged:
        return sink.stage(batches, self._settings, link_to(self._settings.url))

    def settle(self, messages: Sequence[Any]) -> Settled:
        return sink.settle_staged(self._settings, messages, kept_reader(self._settings))


_kept: dict[int, tuple[Options, Reader]] = {}


def kept_reader(settings: Options) -> Reader:
    """This process's reader: the batches of a stream are settled over one connection."""
    found = _kept.get(os.getpid())
    if found is None or found[0] != settings:
        if found is not None:
            found[1].close()
        found = _kept[os.getpid()] = (settings, Reader(settings))
    return found[1]


def within(ranges: list[Range], window: dict[int, tuple[int, int]]) -> list[Range]:
    """Of each lane what lies between two sequence numbers; the window names all lanes it lets through."""
    found = []
    for r in ranges:
        low, high = window.get(r.lane, (0, 0))
        first, end = max(r.first, low), min(r.end, high)
        if first < end:
            found.append(replace(r, first=first, end=end, count=end - first))
    return found


def spread(ranges: list[Range], settings: Options, batch: int) -> list[Task]:
    """Lanes over tasks, evenly; a lane stays in one task unless order was given up."""
    total = sum(r.count for r in ranges)
    wanted = max(1, min(settings.tasks, math.ceil(total / ROWS_A_TASK)))
    if settings.ordering == "none":
        ranges = [part for r in ranges for part in _cut(r, math.ceil(total / wanted))]
    tasks: list[tuple[int, list[Range]]] = [(0, []) for _ in range(min(wanted, len(ranges)))]
    for range_ in sorted(ranges, key=lambda r: -r.count):
        at = min(range(len(tasks)), key=lambda i: tasks[i][0])
        tasks[at] = (tasks[at][0] + range_.count, [*tasks[at][1], range_])
    return [Task(part, batch) for _, part in tasks]


def _cut(range_: Range, size: int) -> list[Range]:
    if range_.skip or range_.end - range_.first <= size:
        return [range_]
    parts = []
    for first in range(range_.first, range_.end, size):
        end = min(first + size, range_.end)
        parked = range_.parked if first == range_.first else ()
        count = end - first + len(parked)
        parts.append(Range(range_.lane, range_.partition, first, end, count, "", parked, range_.attempts))
    return parts
