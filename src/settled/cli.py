"""The command line."""

from __future__ import annotations

import logging
import os
import shlex
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Annotated, NoReturn

import typer

from settled._version import __version__
from settled.app import AppStatus
from settled.loading import CannotLoad, load
from settled.observe import logging as observe_logging
from settled.pump import Status
from settled.signals import ConfigurationError

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


@app.callback(invoke_without_command=True)
def _main(
    version: Annotated[bool, typer.Option("--version", help="Print the version and leave.")] = False,
) -> None:
    """Settled: every message is settled exactly one way."""
    if version:
        typer.echo(f"settled {__version__}")
        raise typer.Exit


@app.command()
def run(
    target: Annotated[
        str, typer.Argument(metavar="MODULE:APP", help="Where the app is, e.g. shop.orders:app.")
    ],
    performers: Annotated[
        int | None,
        typer.Option(
            envvar="SETTLED_PERFORMERS",
            min=1,
            help="How many pumps run each subscription; default: as it says.",
        ),
    ] = None,
    reload: Annotated[
        bool, typer.Option("--reload", envvar="SETTLED_RELOAD", help="Start anew when a Python file changes.")
    ] = False,
    log_level: Annotated[
        str, typer.Option(envvar="SETTLED_LOG_LEVEL", help="debug, info, warning or error.")
    ] = "info",
    log_json: Annotated[
        bool, typer.Option("--log-json", envvar="SETTLED_LOG_JSON", help="Log as JSON, a line each.")
    ] = False,
) -> None:
    """Run an app until SIGINT or SIGTERM; then settle what is in hand and release the rest."""
    try:
        observe_logging.configure(log_level, as_json=log_json)
        if reload:
            _run_reloading()
            return
        found = load(target)
        if performers is not None:
            found.subscriptions = [
                replace(s, policy=replace(s.policy, performers=performers)) for s in found.subscriptions
            ]
        for subscription in found.subscriptions:
            observe_logging.tell(f"settled: {subscription.name} x {subscription.policy.performers}")
        status = found.run()
    except (CannotLoad, ConfigurationError, ConnectionError) as error:
        _fail(str(error))
    _summary(status)
    if not status.healthy:
        raise typer.Exit(1)


def _add(name: str, extra: str, load: Callable[[], None]) -> None:
    """A command of an extra; where that is not installed, the command says how to get it."""
    try:
        load()
    except ModuleNotFoundError as error:
        missing = error

        def say() -> None:
            raise missing

        app.command(
            name,
            help=f"Needs the extra {extra!r}, which is not installed.",
            context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
        )(say)


def _serve() -> None:
    from settled.server.command import serve

    app.command()(serve)


def _router() -> None:
    from settled.router.command import app as router

    app.add_typer(router, name="router")


def _pipeline() -> None:
    from settled.spark.command import app as pipeline

    app.add_typer(pipeline, name="pipeline")


def _publish() -> None:
    from settled.commands.publish import publish

    app.command()(publish)


def _queues() -> None:
    from settled.commands.dead_letters import app as dead_letters
    from settled.commands.queues import queues

    app.command()(queues)
    app.add_typer(dead_letters, name="dlq")


def _bridge() -> None:
    from settled.bridge.command import bridge

    app.command()(bridge)


_publish()
_queues()
_add("serve", "server", _serve)
_add("bridge", "cli", _bridge)
_add("pipeline", "spark", _pipeline)
_add("router", "router", _router)


def _run_reloading() -> None:
    from watchfiles import PythonFilter, run_process

    arguments = [argument for argument in sys.argv[1:] if argument != "--reload"]
    os.environ.pop("SETTLED_RELOAD", None)  # the process that is started anew watches nothing itself
    command = shlex.join([sys.executable, "-m", "settled", *arguments])
    observe_logging.tell("settled: watching for changes")
    run_process(".", target=command, target_type="command", watch_filter=PythonFilter(), sigint_timeout=15)


def _summary(status: AppStatus) -> None:
    for s in status.subscriptions:
        c = s.counts
        observe_logging.tell(
            f"settled: {s.name}: {s.status}{f' ({s.why})' if s.why else ''}: received={c.received} "
            f"acked={c.acked} requeued={c.requeued} released={c.nacked} rejected={c.rejected} left={c.left}",
            logging.ERROR if s.status in (Status.LIMIT_EXCEEDED, Status.ERROR) else logging.INFO,
            subscription=s.name,
            **asdict(c),
        )


def _fail(text: str) -> NoReturn:
    observe_logging.tell(f"settled: {text}", logging.ERROR)
    raise typer.Exit(2)
