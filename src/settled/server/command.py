"""The command `settled serve`."""

import logging
from pathlib import Path
from typing import Annotated

import typer

from settled.observe import logging as observe_logging
from settled.signals import ConfigurationError

from .config import BODY_LIMIT, HOST, POP_LIMIT, PORT


def serve(
    host: Annotated[str, typer.Option(envvar="SETTLED_HOST", help="Address to listen on.")] = HOST,
    port: Annotated[
        int,
        typer.Option(envvar="SETTLED_PORT", help="Port to listen on; 0 takes a free one.", min=0, max=65535),
    ] = PORT,
    workers: Annotated[
        int | None,
        typer.Option(
            envvar="SETTLED_WORKERS", help="Server processes; by default a quarter of the cores.", min=1
        ),
    ] = None,
    dsn: Annotated[
        str | None,
        typer.Option(
            envvar="SETTLED_DSN",
            help="Use this Postgres instead of an embedded one; with a password, set the variable.",
        ),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(
            envvar=["SETTLED_DATA", "SETTLED_HOME"],
            help="The embedded Postgres's directory; by default the user's data directory.",
        ),
    ] = None,
    body_limit: Annotated[
        int, typer.Option(envvar="SETTLED_BODY_LIMIT", help="Largest request body, in bytes.", min=1024)
    ] = BODY_LIMIT,
    pop_limit: Annotated[
        int,
        typer.Option(
            envvar="SETTLED_POP_LIMIT",
            help="Bytes that a pop hands out at most; one message it always does.",
            min=1024,
        ),
    ] = POP_LIMIT,
    log_level: Annotated[
        str, typer.Option(envvar="SETTLED_LOG_LEVEL", help="debug, info, warning or error.")
    ] = "info",
    log_json: Annotated[
        bool, typer.Option("--log-json", envvar="SETTLED_LOG_JSON", help="Log as JSON, a line each.")
    ] = False,
) -> None:
    """Run the queue's HTTP server."""
    from settled.queue.embedded import EmbeddedError
    from settled.queue.errors import QueueError

    from .process import Terminated, WorkerFailed
    from .process import serve as run_server

    try:
        observe_logging.configure(log_level, as_json=log_json)
        if dsn is not None:
            from settled.queue.db import check_dsn

            check_dsn(dsn)
        run_server(
            host,
            port,
            workers,
            dsn,
            data,
            body_limit=body_limit,
            pop_limit=pop_limit,
            announce=_announce,
            log_level=log_level,
            log_json=log_json,
        )
    except (OSError, QueueError, EmbeddedError, WorkerFailed, ConfigurationError) as error:
        observe_logging.tell(f"settled: {error}", logging.ERROR)
        raise typer.Exit(1) from None
    except KeyboardInterrupt as told:
        observe_logging.tell("settled: stopped before it listened")
        raise typer.Exit(143 if isinstance(told, Terminated) else 130) from None


def _announce(line: str) -> None:
    # Whoever started us through a pipe waits for these lines; echo flushes them.
    typer.echo(line)


app = typer.Typer(help="The queue server.", no_args_is_help=True)
app.command("serve")(serve)


@app.callback()
def _group() -> None:
    """Keeps `serve` a subcommand of this app."""


if __name__ == "__main__":
    app()
