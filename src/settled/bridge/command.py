"""The command `settled bridge`."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import sys
import time
from collections.abc import Iterator
from typing import Annotated, NoReturn

import typer

from settled.bridge.bridge import Bridge
from settled.observe import logging as observe_logging
from settled.signals import ConfigurationError
from settled.transports import creating
from settled.transports.urls import split

_LIVE = 0.5
_SPARSE = 10.0


def bridge(
    source: Annotated[str, typer.Argument(metavar="FROM_URL", help="Where to read, e.g. amqp://host.")],
    target: Annotated[
        str, typer.Argument(metavar="TO_URL", help="Where to write, e.g. postgresql://host/db.")
    ],
    channel: Annotated[str, typer.Option("--from", help="The channel to read.")],
    to: Annotated[str | None, typer.Option("--to", help="The channel to write (default: the same).")] = None,
    group: Annotated[str | None, typer.Option(help="Read as this consumer group.")] = None,
    dead_letter: Annotated[
        str | None, typer.Option(help="Where the source puts what the target refuses (default: its own).")
    ] = None,
    content_type: Annotated[
        str | None, typer.Option(help="The content type of messages that come without one.")
    ] = None,
    buffer: Annotated[
        int, typer.Option(min=1, help="Messages read at a time; twice as many are on their way.")
    ] = 500,
    create: Annotated[
        bool, typer.Option("--create", help="Make what is missing on either broker, where that can be.")
    ] = False,
    limit: Annotated[int | None, typer.Option(min=1, help="Leave after so many messages.")] = None,
    idle_exit: Annotated[
        float | None, typer.Option(min=0, help="Leave when nothing has come for so many seconds.")
    ] = None,
    grace: Annotated[float, typer.Option(min=0, help="How long a stop waits for the target.")] = 10.0,
    metrics_port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="Serve Prometheus metrics on this port.")
    ] = None,
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error.")] = "warning",
    log_json: Annotated[
        bool, typer.Option("--log-json", envvar="SETTLED_LOG_JSON", help="Log as JSON, a line each.")
    ] = False,
) -> None:
    """Carry messages from one broker to another until SIGINT or SIGTERM: at least once, once into the queue.

    Each is written under its own id, then acknowledged.
    """
    try:
        observe_logging.configure(log_level, as_json=log_json)
        for url in (source, target):
            if split(url).scheme == "memory":
                raise ConfigurationError(f"bridge: {url} lives in one process; a bridge is one of its own")
        found = Bridge(
            creating(source) if create else source,
            creating(target) if create else target,
            channel=channel,
            to=to,
            group=group,
            dead_letter=dead_letter,
            content_type=content_type,
            buffer=buffer,
            limit=limit,
            idle_exit=idle_exit,
            grace=grace,
        )
        with _metrics(found, metrics_port):
            asyncio.run(_run(found, live=sys.stderr.isatty() and not log_json))
    except (ConfigurationError, ConnectionError) as error:
        _fail(str(error))
    typer.echo(str(found.totals))


async def _run(found: Bridge, *, live: bool) -> None:
    stop = asyncio.Event()

    def on_signal() -> None:
        if stop.is_set():
            found.hurry()
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, on_signal)
    showing = asyncio.create_task(_show(found, live=live))
    try:
        await found.run(stop)
    finally:
        showing.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await showing


async def _show(found: Bridge, *, live: bool) -> None:
    """How far it is: one line that changes on a terminal, a line now and then through a pipe."""
    began, shown, last = time.monotonic(), 0, ""
    try:
        while True:
            await asyncio.sleep(_LIVE if live else _SPARSE)
            totals, target = found.totals, found.target_status
            speed = (totals.read - shown) / (time.monotonic() - began)
            began, shown = time.monotonic(), totals.read
            line = f"{totals}  {speed:,.0f} msg/s  {found.in_flight} on their way"
            if not target.connected:
                line += f"  waiting for the target: {target.detail}"
            if live:
                sys.stderr.write(f"\r\x1b[K{line[:150]}")
                sys.stderr.flush()
            elif line != last:
                observe_logging.tell(line)
            last = line
    finally:
        if live and last:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()


@contextlib.contextmanager
def _metrics(found: Bridge, port: int | None) -> Iterator[None]:
    if port is None:
        yield
        return
    try:
        from settled.bridge.metrics import serve
    except ModuleNotFoundError as error:
        raise ConfigurationError(
            f"--metrics-port needs {error.name}; run: pip install 'settled[observe]'"
        ) from error
    try:
        serving = serve(found, port)
    except OSError as error:
        raise ConfigurationError(f"--metrics-port: cannot listen on port {port}: {error}") from error
    with serving as address:
        observe_logging.tell(f"metrics on {address}")
        yield


def _fail(text: str) -> NoReturn:
    observe_logging.tell(f"settled: {' '.join(text.split())}", logging.ERROR)
    raise typer.Exit(2)
