"""The command `settled queues`."""

from __future__ import annotations

from typing import Annotated

import msgspec
import typer

from settled.commands.dead_letters import AsJson, Where, run
from settled.commands.queue_admin import Queue

_COLUMNS = ("queue", "partitions", "waiting", "in hand", "done", "dead", "group", "lag", "behind")


def queues(
    url: Where = None,
    name: Annotated[str | None, typer.Option("--queue", help="Only this queue.")] = None,
    as_json: AsJson = False,
) -> None:
    """List the queues with their counts, and how far each group is behind; with --json, a line for each."""
    found = run(url, lambda admin: admin.queues())
    shown = [queue for queue in found if name is None or queue.name == name]
    if as_json:
        for queue in shown:
            typer.echo(msgspec.json.encode(queue).decode())
        return
    rows = [_COLUMNS, *(row for queue in shown for row in _rows(queue))]
    widths = [max(len(row[i]) for row in rows) for i in range(len(_COLUMNS))]
    for row in rows:
        cells = (
            cell.rjust(width) if i in (1, 2, 3, 4, 5, 7, 8) else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        typer.echo("  ".join(cells).rstrip())


def _rows(queue: Queue) -> list[tuple[str, ...]]:
    """One row for each group of a queue; the counts of the queue stand in the first."""
    counts = [queue.partitions, queue.pending, queue.processing, queue.completed, queue.dead]
    first = (queue.name, *map(str, counts))
    groups = [(group.name, str(group.lag), _ago(group.seconds_behind)) for group in queue.groups]
    blank = ("",) * len(first)
    return [(*(blank if i else first), *group) for i, group in enumerate(groups or [("", "", "")])]


def _ago(seconds: float) -> str:
    """A time in its largest unit.

    >>> _ago(0), _ago(75), _ago(7300)
    ('0 s', '1 min', '2 h')
    """
    for size, unit in ((86_400, "d"), (3_600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"
