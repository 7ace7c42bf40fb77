"""The commands `settled pipeline …`."""

from __future__ import annotations

import atexit
import importlib
import logging
import os
import re
import signal
import sys
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, NoReturn, TypeVar

import typer

T = TypeVar("T")
app = typer.Typer(help="Run a queue's pipeline on Spark.", no_args_is_help=True)

Url = Annotated[
    str,
    typer.Option(
        envvar="SETTLED_URL", help="The queue's database, postgresql://…; `settled serve` prints it."
    ),
]
Queue = Annotated[str | None, typer.Option(help="Only this queue.")]
_NOTHING = dict.fromkeys(
    ("batches", "acked", "retried", "dead", "released", "pushed", "waiting", "failing", "removed"), 0
)
Master = Annotated[
    str | None,
    typer.Option(
        help="Spark's master; without it, that of spark-defaults.conf, else all cores of this machine."
    ),
]
Conf = Annotated[
    list[str] | None,
    typer.Option("--conf", metavar="NAME=VALUE", help="A setting of Spark; may be given several times."),
]
Packages = Annotated[
    str | None, typer.Option(help="Java packages that Spark fetches, as group:artifact:version, by commas.")
]


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
        str | None,
        typer.Option(help="Spark's checkpoint, a folder or hdfs://…; without it, ./checkpoints/QUEUE-GROUP."),
    ] = None,
    max_rows: Annotated[int, typer.Option(min=1, help="Messages a batch.")] = 500_000,
    until_empty: Annotated[bool, typer.Option("--until-empty", help="Leave when nothing is left.")] = False,
    master: Master = None,
    conf: Conf = None,
    packages: Packages = None,
    py_files: Annotated[
        list[str] | None,
        typer.Option(help="A .py, .zip, .egg or .whl that executors need beside the handler's own modules."),
    ] = None,
) -> None:
    """Run one handler over a queue until SIGINT or SIGTERM; a line says how far it is, a summary ends it.

    On a cluster the handler's module, or package, and what it imports from beside it are sent to executors.
    """
    told = threading.Event()
    _listen(told)
    _checked(lambda checks: checks.check_url(url, nats=True))
    queue, group = _named(url, queue, group, stream, consumer)
    settings, files = _settings(conf, packages), _files(py_files)
    function = _load(handler, files)
    _checked(lambda checks: checks.check_run(function, url, queue, group, to))
    where = _place(checkpoint, queue, group)

    def work() -> Any:
        spark = _session(master, settings)
        from settled.spark.jobs.run import end, live, run

        try:
            if told.is_set():
                return None
            _send(spark, handler.partition(":")[0], files)
            return run(
                spark,
                function,
                queue,
                group,
                where,
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

    came = None if told.is_set() else _apart(work)
    if came is not None and sys.stderr.isatty():
        typer.echo(err=True)
    if came is not None and came.removed:
        typer.echo(
            f"settled: {came.removed:,} messages are gone unsettled: somebody purged {queue!r}, or its "
            "limits removed them before they were read",
            err=True,
        )
    _summary(_NOTHING if came is None else {name: getattr(came, name) for name in _NOTHING})


@app.command("export")
def export_command(
    folder: Annotated[Path, typer.Argument(help="Where the files go; run it again to add what is new.")],
    url: Url,
    queue: Queue = None,
    messages: Annotated[bool, typer.Option("--messages", help="The messages too.")] = False,
    kind: Annotated[str, typer.Option("--format", help="parquet or delta.")] = "parquet",
    master: Master = None,
    conf: Conf = None,
    packages: Packages = None,
) -> None:
    """Write settlements and dead letters to files, by day."""
    _checked(lambda checks: checks.check_format(kind))
    _checked(lambda checks: checks.check_url(url, nats=False))
    spark = _session(master, _settings(conf, packages))
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
    conf: Conf = None,
    packages: Packages = None,
) -> None:
    """Write a page on what happened to the messages."""
    source: str | Path | None = export or url
    if source is None:
        typer.echo("settled: a report needs --url or --export", err=True)
        raise typer.Exit(2)
    _checked(lambda checks: checks.check_report(target, hours))
    if isinstance(source, str):
        _checked(lambda checks: checks.check_url(source, nats=True))
    spark = _session(master, _settings(conf, packages))
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
    others = figures.get("only_dead_letters", [])
    if others:
        names = ", ".join(f"{one['consumer_group'] or '-'} of {one['queue']}" for one in others)
        typer.echo(f"of {names} only dead letters are known", err=True)
    totals = {name: "unknown" if count is None else count for name, count in figures["totals"].items()}
    typer.echo(f"{target}: " + " ".join(f"{name}={count}" for name, count in totals.items()))


@app.command("redrive")
def redrive_command(
    url: Url,
    queue: Queue = None,
    group: Annotated[str | None, typer.Option(help="Only of this group.")] = None,
    since: Annotated[
        str | None, typer.Option(help="Only those that died from then on, e.g. 2026-01-31T12:00 (UTC).")
    ] = None,
    until: Annotated[
        str | None, typer.Option(help="Only those that died before, e.g. 2026-01-31T12:00+01:00.")
    ] = None,
    error: Annotated[str | None, typer.Option(help="A pattern found in the error.")] = None,
    where: Annotated[str | None, typer.Option(help='A Spark SQL condition, e.g. "attempts > 2".')] = None,
    to: Annotated[str | None, typer.Option(help="Another queue than their own.")] = None,
    rate: Annotated[float | None, typer.Option(min=0.1, help="Messages a second.")] = None,
    again: Annotated[
        bool, typer.Option("--again", help="Also messages that were redriven before and died again.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only count.")] = False,
    master: Master = None,
    conf: Conf = None,
    packages: Packages = None,
) -> None:
    """Send dead letters round again, each once."""
    from settled.spark.jobs.redrive import Choice, redrive

    _checked(lambda checks: checks.check_url(url, nats=False))
    _checked(lambda checks: checks.check_rate(rate))
    choice = Choice(
        queue=queue,
        group=group,
        since=_moment("--since", since),
        until=_moment("--until", until),
        error=error,
        where=where,
    )
    settings = _settings(conf, packages)
    spark = _session(master, settings) if where else None

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


def _summary(counts: dict[str, int]) -> None:
    typer.echo(" ".join(f"{name}={count}" for name, count in counts.items()))


def _place(checkpoint: str | None, queue: str, group: str) -> str:
    """Where the checkpoint is; what has a scheme is Spark's to find."""
    if checkpoint and re.match("[A-Za-z][A-Za-z0-9+.-]+:/", checkpoint):
        return checkpoint
    # A name is one folder's, whatever is in it.
    own = f"{queue}-{group}".replace("%", "%25").replace("/", "%2F")
    return str((Path(checkpoint) if checkpoint else Path("checkpoints") / own).resolve())


def _moment(name: str, text: str | None) -> datetime | None:
    """A time as somebody writes it; without an offset it is UTC."""
    if text is None:
        return None
    try:
        at = datetime.fromisoformat(text)
        return at.astimezone(UTC) if at.tzinfo else at.replace(tzinfo=UTC)
    except (ValueError, OverflowError):
        typer.echo(f"settled: {name}: must be a time like 2026-01-31T12:00+01:00, got {text!r}", err=True)
        raise typer.Exit(2) from None


def _checked(check: Callable[[Any], None]) -> None:
    """Say what is wrong before Spark is started for it."""
    try:
        from settled.spark.jobs import checks
    except ImportError:
        return  # what is missing is said where it is needed
    try:
        check(checks)
    except Exception as error:
        _fail(error)


def _listen(told: threading.Event) -> None:
    """Let Ctrl-C and SIGTERM set it; the second one interrupts.

    An interrupt in the midst of a call to Spark would leave its connection broken, with tracebacks.
    """

    def tell(*_: object) -> None:
        told.set()
        logging.disable()  # Spark may be told too, and be gone
        for one in (signal.SIGINT, signal.SIGTERM):
            signal.signal(one, signal.default_int_handler)

    for one in (signal.SIGINT, signal.SIGTERM):
        signal.signal(one, signal.default_int_handler if told.is_set() else tell)


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


def _settings(conf: list[str] | None, packages: str | None) -> dict[str, str]:
    """Settings of Spark as somebody writes them."""
    settings = {}
    for one in conf or ():
        name, equals, value = one.partition("=")
        if not equals or not name.startswith("spark."):
            typer.echo(f"settled: --conf: must be spark.NAME=VALUE, got {one!r}", err=True)
            raise typer.Exit(2)
        settings[name] = value
    return settings | ({"spark.jars.packages": packages} if packages else {})


def _files(given: list[str] | None) -> list[str]:
    """The files of --py-files, which may also be given by commas, as spark-submit takes them."""
    files = [str(Path(one).resolve()) for many in given or () for one in many.split(",") if one]
    for file in files:
        kinds = (".py", ".zip", ".egg", ".whl")
        if not file.endswith(kinds) or not Path(file).is_file():
            typer.echo(
                f"settled: --py-files: must be a file that is there, {', '.join(kinds)}, got {file!r}",
                err=True,
            )
            raise typer.Exit(2)
    return files


def _send(spark: Any, module: str, files: list[str]) -> None:
    from settled.spark.packing import send

    sent = send(spark, module, files)
    if sent:
        typer.echo(f"sent to the executors: {', '.join(sent)}", err=True)


def _load(target: str, files: list[str]) -> Any:
    module, _, name = target.partition(":")
    if not module or not name:
        typer.echo(f"settled: {target!r} does not name a handler; write module:function", err=True)
        raise typer.Exit(2)
    sys.path[:0] = [str(Path.cwd()), *(str(Path(f).parent) if f.endswith(".py") else f for f in files)]
    try:
        return getattr(importlib.import_module(module), name)
    except Exception as error:
        plain = isinstance(error, (ImportError, AttributeError))
        why = str(error) if plain else f"{type(error).__name__}: {error}"
        typer.echo(f"settled: {target} cannot be loaded: {why}", err=True)
        raise typer.Exit(2) from None


def _session(master: str | None, conf: dict[str, str]) -> Any:
    try:
        from pyspark.logger import PySparkLogger

        from settled.spark.startup import keep_quiet, session
    except ImportError as error:
        typer.echo(f"settled: this needs Spark ({error}): pip install 'settled[spark]'", err=True)
        raise typer.Exit(2) from None
    log = _log()
    typer.echo(f"starting Spark, which logs to {log}", err=True)
    for name in ("DataFrameQueryContextLogger", "SQLQueryContextLogger"):
        PySparkLogger.getLogger(name).setLevel(logging.CRITICAL)  # an error is told once, in our words
    try:
        spark = session("settled pipeline", master, conf, log=log, quick=True)
    except Exception as error:
        _fail(error)
    keep_quiet(spark)
    return spark


def _log() -> Path:
    """A new file that only this user can read; one that stays empty is removed at the end."""
    number, name = tempfile.mkstemp(prefix=f"settled-spark-{datetime.now(UTC):%Y%m%d-%H%M%S}-", suffix=".log")
    os.close(number)
    path = Path(name)

    def tidy() -> None:
        with suppress(OSError):
            if not path.stat().st_size:
                path.unlink()

    atexit.register(tidy)
    return path


def _apart(work: Callable[[], T]) -> T:
    """Do all that Spark has to do in a thread of its own, and listen to signals meanwhile.

    In the main one Spark would take SIGINT for itself, and an interrupt in the midst of a call to it leaves
    its connection broken, with tracebacks.
    """
    came: Future[T] = Future()

    def do() -> None:
        try:
            came.set_result(work())
        except BaseException as error:
            came.set_exception(error)

    threading.Thread(target=do, name="settled-spark", daemon=True).start()
    while True:
        try:
            return came.result(timeout=0.2)  # a signal is heard between two looks
        except FutureTimeout:
            if came.done():
                raise


def _fail(error: Exception) -> NoReturn:
    """The one line that says it, out of whatever Spark wrapped round it."""
    typer.echo(f"settled: {told_by(str(error)) or type(error).__name__}", err=True)
    raise typer.Exit(1) from None


def told_by(text: str) -> str:
    """Of an error's text the line that says it: ours, or the end of a traceback, or Java's.

    >>> told_by("failed: Traceback (most recent call last):\\n  File 1\\n    f()\\nOSError: disk is full\\n")
    'OSError: disk is full'
    """
    lines = [line.rstrip() for line in text.splitlines() if line.strip()]
    ours = next((line.partition(": ")[2] for line in lines if line.lstrip().startswith("settled.")), None)
    if ours or not lines:
        return ours or ""
    starts = [i for i, line in enumerate(lines) if line.endswith("Traceback (most recent call last):")]
    for line in lines[starts[-1] + 1 :] if starts else ():
        if not line.startswith(" "):
            return line
    if lines[0].startswith("An error occurred while calling") and len(lines) > 1:
        return lines[1].removeprefix(": ")
    return lines[0].strip()
