"""The commands `settled router run` and `settled router simulate`."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from prometheus_client import start_http_server

from settled.observe import logging as observe_logging
from settled.router.assignments import PublishError
from settled.router.config import RouterConfig
from settled.router.service import Router
from settled.router.simulate import Behaviour, Worker, new_assignment
from settled.signals import ConfigurationError

app = typer.Typer(no_args_is_help=True, help="Assignments out, acknowledgements and results back, on NATS.")

Config = Annotated[Path | None, typer.Option(help="A TOML file with the router's settings.")]
Url = Annotated[str | None, typer.Option(help="The NATS server, e.g. nats://127.0.0.1:4222.")]

WATCHED = {
    "published": "router_assignment_published_total",
    "retries": "router_assignment_retry_total",
    "given up": "router_retry_exhausted_total",
    "acks": "router_acks_total",
    "results": "router_results_total",
    "duplicates": "router_results_duplicate_total",
    "redeliveries": "router_jetstream_redelivery_total",
    "exhausted": "router_jetstream_maxdeliver_exhausted_total",
    "dead letters": "router_dlq_total",
}


def _config(path: Path | None, url: str | None) -> RouterConfig:
    try:
        found = RouterConfig() if path is None else RouterConfig.load(path)
    except ConfigurationError as error:
        observe_logging.tell(f"settled: {error}", logging.ERROR)
        raise typer.Exit(2) from error
    return found if url is None else msgspec.structs.replace(found, url=url)


def _stop_on_signals() -> asyncio.Event:
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    return stop


@app.command()
def run(
    config: Config = None,
    url: Url = None,
    metrics_port: Annotated[int | None, typer.Option(help="Serve Prometheus metrics on this port.")] = None,
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error.")] = "info",
    log_json: Annotated[
        bool, typer.Option("--log-json", envvar="SETTLED_LOG_JSON", help="Log as JSON, a line each.")
    ] = False,
) -> None:
    """Consume results and acknowledgements until SIGINT or SIGTERM."""
    try:
        observe_logging.configure(log_level, as_json=log_json)
        settings = _config(config, url)
        port = metrics_port if metrics_port is not None else settings.metrics_port
        router = Router(settings)
        with _metrics(router, port):
            healthy = asyncio.run(_serve(router))
    except (ConfigurationError, ConnectionError) as error:
        observe_logging.tell(f"settled: {error}", logging.ERROR)
        raise typer.Exit(2) from error
    if not healthy:
        raise typer.Exit(1)


async def _serve(router: Router) -> bool:
    return (await router.serve(_stop_on_signals())).healthy


@contextlib.contextmanager
def _metrics(router: Router, port: int | None) -> Iterator[None]:
    if port is None:
        yield
        return
    try:
        server, _ = start_http_server(port, "127.0.0.1", router.metrics.registry)
    except (OSError, OverflowError) as error:
        raise ConfigurationError(f"metrics_port: cannot listen on port {port}: {error}") from error
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()


@app.command()
def simulate(
    config: Config = None,
    url: Url = None,
    seconds: Annotated[float, typer.Option(min=1, help="How long to run.")] = 20,
    rate: Annotated[float, typer.Option(min=0, help="Assignments a second; 0 for a worker alone.")] = 20,
    slow: Annotated[float, typer.Option(min=0, max=1, help="Share of slow work.")] = 0,
    reject: Annotated[float, typer.Option(min=0, max=1, help="Share of rejected assignments.")] = 0,
    fail: Annotated[float, typer.Option(min=0, max=1, help="Share of error results.")] = 0,
    crash: Annotated[float, typer.Option(min=0, max=1, help="Share of crashes.")] = 0,
    duplicate: Annotated[float, typer.Option(min=0, max=1, help="Share of duplicate results.")] = 0,
    late: Annotated[float, typer.Option(min=0, max=1, help="Share of late answers.")] = 0,
    poison: Annotated[float, typer.Option(min=0, max=1, help="Share of broken results.")] = 0,
    impostor: Annotated[float, typer.Option(min=0, max=1, help="Share of results of a wrong tenant.")] = 0,
) -> None:
    """Run a simulated worker; with a rate also a router, and print its counters every second."""
    settings = _config(config, url)
    given = {**locals()}
    behaviour = Behaviour(**{f.name: given[f.name] for f in fields(Behaviour) if f.name in given})
    observe_logging.configure("error")
    try:
        asyncio.run(_simulate(settings, behaviour, seconds, rate))
    except (ConfigurationError, ConnectionError) as error:
        observe_logging.tell(f"settled: {error}", logging.ERROR)
        raise typer.Exit(2) from error


async def _simulate(config: RouterConfig, behaviour: Behaviour, seconds: float, rate: float) -> None:
    stop = _stop_on_signals()
    worker = Worker(config, behaviour)
    router = Router(config)
    await router.open()
    tasks = [asyncio.create_task(worker.serve(stop))]
    if rate > 0:
        tasks += [
            asyncio.create_task(router.app.serve(stop)),
        ]
        publishing = asyncio.create_task(_publish(router, rate, stop))
        watching = asyncio.create_task(watch(router, stop))
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(stop.wait(), seconds)
    stop.set()
    if rate > 0:
        await publishing
        await watching
    await asyncio.gather(*tasks)
    await router.transport.close()
    done = ", ".join(f"{name} {count}" for name, count in sorted(worker.done.items()) if count)
    typer.echo(f"worker: {done or 'no misdeeds'}")


async def _publish(router: Router, rate: float, stop: asyncio.Event) -> None:
    """Assignments at a rate, each on its own, so that a slow one holds up no other."""
    busy: set[asyncio.Task[None]] = set()

    async def one() -> None:
        with contextlib.suppress(PublishError):
            await router.assignments.publish(new_assignment())

    while not stop.is_set():
        task = asyncio.create_task(one())
        busy.add(task)
        task.add_done_callback(busy.discard)
        await asyncio.sleep(1 / rate)
    if busy:
        await asyncio.wait(busy)


async def watch(router: Router, stop: asyncio.Event) -> None:
    """A line a second: what each counter gained in it."""
    typer.echo(" ".join(f"{label:>13}" for label in WATCHED) + "   (a second)")
    before = router.metrics.snapshot()
    while not stop.is_set():
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), 1)
        now = router.metrics.snapshot()
        typer.echo(" ".join(f"{now[name] - before[name]:13.0f}" for name in WATCHED.values()))
        before = now
