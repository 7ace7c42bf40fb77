"""The commands `settled dlq …`."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from datetime import datetime
from typing import Annotated, TypeVar

import msgspec
import typer

from settled.app import URL
from settled.commands.addresses import fail, with_url
from settled.commands.queue_admin import Away, Filter, Letter, QueueAdmin, Work, queue_admin
from settled.signals import ConfigurationError

app = typer.Typer(help="List, show, send again or drop the dead letters of the queue.", no_args_is_help=True)
T = TypeVar("T")

Where = Annotated[
    str | None,
    typer.Argument(
        metavar="URL", envvar=URL, help="The queue: http://… or postgresql://….", show_default=False
    ),
]
OfQueue = Annotated[str | None, typer.Option("--queue", help="Only of this queue.")]
OfPartition = Annotated[str | None, typer.Option("--partition", help="Only of this partition.")]
OfGroup = Annotated[str | None, typer.Option("--group", help="Only of this consumer group.")]
Error = Annotated[str | None, typer.Option(help="Only those with this text in their error, in any case.")]
Since = Annotated[str | None, typer.Option(help="Only those that died from then on, e.g. 2026-01-31T12:00Z.")]
Until = Annotated[str | None, typer.Option(help="Only those that died before, e.g. 2026-02-01.")]
Ids = Annotated[list[str] | None, typer.Option("--id", help="Only this one; may be given several times.")]
All = Annotated[bool, typer.Option("--all", help="All of them: needed where no filter is given.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only count.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command("list")
def list_command(
    url: Where = None,
    queue: OfQueue = None,
    partition: OfPartition = None,
    group: OfGroup = None,
    error: Error = None,
    since: Since = None,
    until: Until = None,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="At most so many, the newest.")] = 50,
    as_json: AsJson = False,
) -> None:
    """List dead letters, the newest first; with --json, a line of JSON for each."""
    chosen = _filter(queue, partition, group, error, since, until, None)
    letters, total = run(url, lambda admin: admin.letters(chosen, limit))
    for letter in letters:
        typer.echo(msgspec.json.encode(letter).decode() if as_json else _line(letter))
    if not as_json:
        typer.echo(f"{len(letters)} of {total} dead letters", err=True)


@app.command("show")
def show_command(
    words: Annotated[list[str], typer.Argument(metavar="[URL] ID", show_default=False)],
    as_json: AsJson = False,
) -> None:
    """Show one dead letter with its headers and its payload."""
    try:
        url, letter_id = with_url(words, 1, "[URL] ID")
    except ConfigurationError as error:
        fail(str(error))
    letter = run(url, lambda admin: admin.letter(letter_id))
    encoded = msgspec.json.encode(letter)
    typer.echo(encoded.decode() if as_json else msgspec.json.format(encoded, indent=2).decode())


@app.command("retry")
def retry_command(
    url: Where = None,
    queue: OfQueue = None,
    partition: OfPartition = None,
    group: OfGroup = None,
    error: Error = None,
    since: Since = None,
    until: Until = None,
    ids: Ids = None,
    everything: All = False,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Send dead letters again: the group that gave a message up gets it once more, with all its attempts.

    Exit code 1: some were refused, and stay; each is named.
    """
    chosen = _filter(queue, partition, group, error, since, until, ids)
    _bulk("retry", url, chosen, everything, dry_run, as_json)


@app.command("purge")
def purge_command(
    url: Where = None,
    queue: OfQueue = None,
    partition: OfPartition = None,
    group: OfGroup = None,
    error: Error = None,
    since: Since = None,
    until: Until = None,
    ids: Ids = None,
    everything: All = False,
    dry_run: DryRun = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    as_json: AsJson = False,
) -> None:
    """Drop dead letters for good; it asks first, unless --yes is given."""
    chosen = _filter(queue, partition, group, error, since, until, ids)
    if not dry_run and not yes:
        matched = _bulk("purge", url, chosen, everything, True, as_json=None)
        if not matched:
            typer.echo("purged=0")
            return
        if not sys.stdin.isatty():
            fail(f"{matched} dead letters would be dropped for good; add --yes")
        typer.confirm(f"Drop {matched} dead letters for good?", abort=True)
    _bulk("purge", url, chosen, everything, dry_run, as_json)


def _filter(
    queue: str | None,
    partition: str | None,
    group: str | None,
    error: str | None,
    since: str | None,
    until: str | None,
    ids: list[str] | None,
) -> Filter:
    for option, value in (("--since", since), ("--until", until)):
        if value is not None:
            try:
                datetime.fromisoformat(value)
            except ValueError:
                fail(f"{option} must be a time like 2026-01-31T12:00Z, got {value!r}")
    return Filter(
        queue=queue, partition=partition, group=group, error=error, since=since, until=until, ids=ids or None
    )


def _bulk(
    what: Work, url: str | None, chosen: Filter, everything: bool, dry_run: bool, as_json: bool | None
) -> int:
    """Do it in parts, say how far it is, and return how many were chosen; `as_json=None` prints nothing."""
    if chosen == Filter() and not everything:
        fail(f"{what}: name --queue, --group, --error, --since or another filter, or --all")
    done, refused = 0, []

    async def work(admin: QueueAdmin) -> int:
        nonlocal done
        part = await admin.work(what, chosen, None, dry_run=dry_run)
        matched = part.matched or 0
        while True:
            done += part.done
            refused.extend(part.refused)
            if part.next is None:
                return matched
            _progress(what, done, matched)
            part = await admin.work(what, chosen, part.next, dry_run=dry_run)

    matched = run(url, work)
    for each in refused:
        typer.echo(f"settled: {each['id']} stays: {each['error']}", err=True)
    word = {"retry": "retried", "purge": "purged"}[what]
    if as_json:
        counts = {"matched": matched, word: done, "refused": refused, "dryRun": dry_run}
        typer.echo(msgspec.json.encode(counts).decode())
    elif as_json is not None:
        typer.echo(f"would {what}={matched}" if dry_run else f"{word}={done} refused={len(refused)}")
    if refused:
        raise typer.Exit(1)
    return matched


def _progress(what: Work, done: int, matched: int) -> None:
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\x1b[K{what}: {done:,} of {matched:,}")
        sys.stderr.flush()
        if done >= matched:
            sys.stderr.write("\r\x1b[K")
    else:
        typer.echo(f"{what}: {done} of {matched}", err=True)


def run(url: str | None, work: Callable[[QueueAdmin], Awaitable[T]]) -> T:
    """Ask the queue at a URL, and say in one line what is wrong."""

    async def main() -> T:
        (address,) = with_url([url] if url else [], 0, "URL")
        async with queue_admin(address) as admin:
            return await work(admin)

    try:
        return asyncio.run(main())
    except ConfigurationError as error:
        fail(str(error))
    except Away as error:
        fail(str(error), 1)


def _line(letter: Letter) -> str:
    when = letter.failed_at.isoformat(sep=" ", timespec="seconds").removesuffix("+00:00")
    error = " ".join((letter.error or "").split())
    return (
        f"{letter.id}  {when}  {letter.queue}/{letter.partition}  {letter.group}  x{letter.attempts}  {error}"
    )
