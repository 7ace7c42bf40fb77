"""The commands `settled pipeline …`."""

from __future__ import annotations

import importlib
import logging
import signal
import sys
import tempfile
import threading
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

app = typer.Typer(help="Run a queue's pipeline on Spark.", no_args_is_help=True)

Url = Annotated[
    str,
    typer.Option(
        envvar="SETTLED_URL", help="The queue's database, postgresql://…; `settled serve` prints it."
    ),
]
Queue = Annotated[str | None, typer.Option(help="Only this queue.")]
Master = Annotated[str | None, typer.Option(help="Spark's master; without it, all cores of this machine.")]


@app.command("run")
def run_command(
    handler: Annotated[
        str, typer.Argument(metavar="MODULE:HANDLER", help="The function, e.g. shop.billing:charge.")
    ],
    url: Annotated[
        str, typer.Option(envvar="SETTLED_URL", help="The queue's database, postgresql://…, or nats://….")
    ],
    queue: Annotated[str | None, typer.Option(help="The queue to read.")] = None,
    group: Annotated[str | None, typer.Option(help="The consumer group.")] = None,
    stream: Annotated[str | None, typer.Option(help="On NATS: the stream to read.")] = None,
    consumer: Annotated[str | None, typer.Option(help="On NATS: the consumer to read it as.")] = None,
    subject: Annotated[str, typer.Option(help="On NATS: only this subject, wildcards allowed.")] = "",
    to: Annotated[
        str | None, typer.Option(help="Push what the handler returns to this queue, or subject.")
    ] = None,
    checkpoint: Annotated[
        Path | None, typer.Option(help="Spark's checkpoint; without it, ./checkpoints/QUEUE-GROUP.")
    ] = None,
    max_rows: Annotated[int, typer.Option(min=1, help="Messages a batch.")] = 500_000,
    until_empty: Annotated[bool, typer.Option("--until-empty", help="Leave when nothing is left.")] = False,
    master: Master = None,
) -> None:
    """Run one handler over a queue until SIGINT or SIGTERM; a line says how far it is, a summary ends it."""
    queue, group = _named(url, queue, group, stream, consumer)
    function = _load(handler)
    spark = _session(master)
    from settled.spark.jobs.run import end, live, run

    where = checkpoint or Path("checkpoints") / f"{queue}-{group}"
    told = _stop()
    try:
        came = run(
            spark,
            function,
            queue,
            group,
            str(where.resolve()),
            url=url,
            to=to,
            until_empty=until_empty,
            max_rows=max_rows,
            on_progress=live(sys.stderr),
            subject=subject,
            stop=told,
        )
    except Exception as error:
        _fail(error)
    finally:
        end(spark, told)
    if sys.stderr.isatty():
        typer.echo(err=True)
    typer.echo(
        f"batches={came.batches} acked={came.acked} retried={came.retried} dead={came.dead} "
        f"released={came.released} pushed={came.pushed} waiting={came.waiting} failing={came.failing}"
    )


@app.command("export")
def export_command(
    folder: Annotated[Path, typer.Argument(help="Where the files go; run it again to add what is new.")],
    url: Url,
    queue: Queue = None,
    messages: Annotated[bool, typer.Option("--messages", help="The messages too.")] = False,
    kind: Annotated[str, typer.Option("--format", help="parquet or delta.")] = "parquet",
    master: Master = None,
) -> None:
    """Write settlements and dead letters to files, by day."""
    spark = _session(master)
    from settled.spark.jobs.export import export

    try:
        done = export(spark, url, folder, queue=queue, messages=messages, kind=kind)
    except Exception as error:
        _fail(error)
    finally:
        spark.stop()
    typer.echo(f"run={done.number} " + " ".join(f"{name}={count}" for name, count in done.rows.items()))


@app.command("report")
def report_command(
    target: Annotated[Path, typer.Argument(help="The HTML file; the figures go beside it as JSON.")],
    url: Annotated[
        str | None, typer.Option(envvar="SETTLED_URL", help="A live queue's database, or nats://….")
    ] = None,
    export: Annotated[Path | None, typer.Option(help="Or the folder of an export.")] = None,
    queue: Queue = None,
    hours: Annotated[float | None, typer.Option(help="Only so many last hours.")] = None,
    dead_letters: Annotated[
        list[str] | None, typer.Option(help="On NATS: one more stream of dead letters, e.g. CAF_DLQ.")
    ] = None,
    master: Master = None,
) -> None:
    """Write a page on what happened to the messages."""
    source: str | Path | None = export or url
    if source is None:
        typer.echo("settled: a report needs --url or --export", err=True)
        raise typer.Exit(2)
    spark = _session(master)
    from settled.spark.jobs.report import write_report

    try:
        figures = write_report(
            spark, source, target, queue=queue, hours=hours, dead_letters=dead_letters or ()
        )
    except Exception as error:
        _fail(error)
    finally:
        spark.stop()
    if figures["from"] is None:
        typer.echo("nothing was settled in this time: the page is nearly empty", err=True)
    typer.echo(f"{target}: " + " ".join(f"{name}={count}" for name, count in figures["totals"].items()))


@app.command("redrive")
def redrive_command(
    url: Url,
    queue: Queue = None,
    group: Annotated[str | None, typer.Option(help="Only of this group.")] = None,
    since: Annotated[datetime | None, typer.Option(help="Only those that died from then on (UTC).")] = None,
    until: Annotated[datetime | None, typer.Option(help="Only those that died before (UTC).")] = None,
    error: Annotated[str | None, typer.Option(help="A pattern found in the error.")] = None,
    where: Annotated[str | None, typer.Option(help='A Spark SQL condition, e.g. "attempts > 2".')] = None,
    to: Annotated[str | None, typer.Option(help="Another queue than their own.")] = None,
    rate: Annotated[float | None, typer.Option(min=0.1, help="Messages a second.")] = None,
    again: Annotated[
        bool, typer.Option("--again", help="Also messages that were redriven before and died again.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only count.")] = False,
    master: Master = None,
) -> None:
    """Send dead letters round again, each once."""
    from datetime import UTC

    from settled.spark.jobs.redrive import Choice, redrive

    spark = _session(master) if where else None
    choice = Choice(
        queue=queue,
        group=group,
        since=since and since.replace(tzinfo=UTC),
        until=until and until.replace(tzinfo=UTC),
        error=error,
        where=where,
    )

    def sent(so_far: int) -> None:
        if sys.stderr.isatty():
            typer.echo(f"\r  {so_far:,} sent ", err=True, nl=False)

    try:
        count = redrive(
            url, choice, to=to, rate=rate, again=again, dry_run=dry_run, spark=spark, on_progress=sent
        )
    except Exception as failure:
        _fail(failure)
    finally:
        if spark is not None:
            spark.stop()
    if count and not dry_run and sys.stderr.isatty():
        typer.echo(err=True)
    typer.echo(f"{'would redrive' if dry_run else 'redriven'}={count}")


def _stop() -> threading.Event:
    """What Ctrl-C and SIGTERM set; the second one interrupts.

    An interrupt in the midst of a call to Spark would leave its connection broken, with tracebacks.
    """
    told = threading.Event()

    def tell(*_: object) -> None:
        told.set()
        logging.getLogger("py4j").setLevel(logging.CRITICAL)  # Spark may be told too, and be gone
        for one in (signal.SIGINT, signal.SIGTERM):
            signal.signal(one, signal.default_int_handler)

    for one in (signal.SIGINT, signal.SIGTERM):
        signal.signal(one, tell)
    return told


def _named(
    url: str, queue: str | None, group: str | None, stream: str | None, consumer: str | None
) -> tuple[str, str]:
    """What is read, and as whom; a queue has groups, a stream on NATS has consumers."""
    nats = url.startswith(("nats://", "tls://"))
    wanted = {"--stream": stream, "--consumer": consumer} if nats else {"--queue": queue, "--group": group}
    others = {"--queue": queue, "--group": group} if nats else {"--stream": stream, "--consumer": consumer}
    wrong = next((name for name, value in others.items() if value), None)
    missing = next((name for name, value in wanted.items() if not value), None)
    if wrong or missing:
        what = f"{wrong} does not go with" if wrong else f"{missing} is missing for"
        scheme = url.partition("://")[0]
        typer.echo(f"settled: {what} a {scheme}:// address; give {' and '.join(wanted)}", err=True)
        raise typer.Exit(2)
    first, second = wanted.values()
    return str(first), str(second)


def _load(target: str) -> Any:
    module, _, name = target.partition(":")
    if not module or not name:
        typer.echo(f"settled: {target!r} does not name a handler; write module:function", err=True)
        raise typer.Exit(2)
    sys.path.insert(0, str(Path.cwd()))
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        typer.echo(f"settled: {target} cannot be loaded: {error}", err=True)
        raise typer.Exit(2) from None


def _session(master: str | None) -> Any:
    try:
        from pyspark.logger import PySparkLogger

        from settled.spark.startup import session
    except ImportError as error:
        typer.echo(f"settled: this needs Spark ({error}): pip install 'settled[spark]'", err=True)
        raise typer.Exit(2) from None
    log = Path(tempfile.gettempdir()) / "settled-spark.log"
    typer.echo(f"starting Spark, which logs to {log}", err=True)
    for name in ("DataFrameQueryContextLogger", "SQLQueryContextLogger"):
        PySparkLogger.getLogger(name).setLevel(logging.CRITICAL)  # an error is told once, in our words
    return session("settled pipeline", master, log=log, quick=True)


def _fail(error: Exception) -> NoReturn:
    """The one line that says it, out of whatever Spark wrapped round it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    ours = next((line.partition(": ")[2] for line in lines if line.startswith("settled.")), None)
    typer.echo(f"settled: {ours or lines[0]}", err=True)
    raise typer.Exit(1) from None
