"""`serve`: the embedded Postgres, the listening socket and the worker processes of one server."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from typing import TYPE_CHECKING

import msgspec

from settled.queue import sealing
from settled.queue.embedded import EmbeddedError, EmbeddedPostgres

from .config import (
    BACKLOG,
    BODY_LIMIT,
    CONFIG,
    GRACE,
    HOST,
    POP_LIMIT,
    PORT,
    Config,
    data_directory,
    default_workers,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

log = logging.getLogger("settled.server")

WATCH_EVERY = 1.0
TELL_AGAIN = 30.0
START_WITHIN = 120.0


class Terminated(KeyboardInterrupt):
    """SIGTERM came before the server listened."""


def serve(
    host: str = HOST,
    port: int = PORT,
    workers: int | None = None,
    dsn: str | None = None,
    data: str | os.PathLike[str] | None = None,
    *,
    body_limit: int = BODY_LIMIT,
    grace: float = GRACE,
    announce: Callable[[str], object] = print,
    log_level: str = "info",
    log_json: bool = False,
    pop_limit: int = POP_LIMIT,
) -> None:
    """Run a server until it is told to stop (SIGTERM or SIGINT).

    Without `dsn` an embedded Postgres is started in `data`. Port 0 takes a free one. `announce` is given the
    lines that say where the server listens and where the data is. Told to stop before it listens, it raises
    KeyboardInterrupt, and leaves no Postgres behind.
    """
    sealing.keys()  # a key that is none is refused now, not when a message comes
    home = data_directory(data)
    sock = listen(host, port)
    with contextlib.ExitStack() as stack:
        stack.callback(sock.close)
        embedded = None
        if dsn is None:
            announce(f"starting Postgres in {home}")
            # Until the loop has handlers of its own: Postgres is to be stopped whenever a signal comes.
            stack.enter_context(_terminable())
            embedded = EmbeddedPostgres.start(home)
            stack.callback(embedded.stop)
        from .worker import run  # takes a while, and there is something to read now

        count = workers or default_workers()
        board = stack.enter_context(tempfile.TemporaryDirectory(prefix="settled-")) if count > 1 else None
        config = Config(
            dsn or embedded_dsn(embedded),
            body_limit,
            grace,
            board,
            str(home / "spool"),
            log_level=log_level,
            log_json=log_json,
            pop_limit=pop_limit,
        )
        where = f"data in {home}" if embedded else "data in the Postgres of --dsn"

        def ready() -> None:
            shown = f"[{host}]" if ":" in host else host
            announce(f"settled is listening on http://{shown}:{sock.getsockname()[1]}")
            announce(where)
            if embedded:
                announce(f"database {embedded.dsn}")

        run(_supervise(config, count, sock, embedded, ready))


@contextlib.contextmanager
def _terminable() -> Iterator[None]:
    """Let SIGTERM end what is under way as Ctrl-C does."""

    def end(*_: object) -> None:
        raise Terminated

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def embedded_dsn(embedded: EmbeddedPostgres | None) -> str:
    """The DSN of a Postgres that was just started."""
    if embedded is None:
        raise ValueError("dsn is required without an embedded Postgres")
    return embedded.dsn


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; a port that is taken is named."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
    except OSError as error:
        sock.close()
        raise OSError(
            f"cannot listen on {host}:{port}: {error.strerror}; choose another --host or --port"
        ) from error
    sock.setblocking(False)
    return sock


def share(sock: socket.socket) -> Callable[[], socket.socket]:
    """How workers get the port of a bound socket: each call returns another socket for it.

    On Linux the kernel then spreads new connections over the workers; with one socket for all, the first that
    wakes up takes whatever waits. A worker's socket is its own, so it is closed when the worker dies.
    """
    if not sys.platform.startswith("linux"):  # elsewhere only the last of them would be served
        sock.listen(BACKLOG)
        return sock.dup
    # Set after bind(), which therefore refused a port that was taken. This socket only keeps the port.
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)

    def another() -> socket.socket:
        own = socket.socket(sock.family, socket.SOCK_STREAM)
        own.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        own.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        own.bind(sock.getsockname())
        return own

    return another


async def _supervise(
    config: Config,
    count: int,
    sock: socket.socket,
    embedded: EmbeddedPostgres | None,
    ready: Callable[[], None],
) -> None:
    from .worker import stop_on_signals, work

    stop = asyncio.Event()
    stop_on_signals(stop)
    keeper = asyncio.create_task(_keep_postgres(embedded)) if embedded is not None else None
    try:
        if count == 1:
            await work(config, sock, ready, stop)
        else:
            await _run_workers(config, count, share(sock), ready, stop)
    finally:
        if keeper is not None:
            keeper.cancel()
            await asyncio.gather(keeper, return_exceptions=True)


async def _keep_postgres(embedded: EmbeddedPostgres) -> None:
    """Start the embedded Postgres again if it dies or hangs; nothing that goes wrong here ends the watch."""
    told, since = "", 0.0
    while True:
        await asyncio.sleep(WATCH_EVERY)
        try:
            await asyncio.to_thread(embedded.keep)
        except (OSError, EmbeddedError) as error:
            now = time.monotonic()
            if str(error) != told or now - since > TELL_AGAIN:
                told, since = str(error), now
                log.warning("cannot look after the embedded Postgres in %s: %s", embedded.home, error)


class WorkerFailed(Exception):
    """A child process ended before it listened."""


class _Worker:
    """One child process, and how it says that it is ready."""

    def __init__(self, config: Config, sock: socket.socket, lifeline: int) -> None:
        self.ready, telling = os.pipe()
        self.process = subprocess.Popen(  # noqa: S603 - our own module
            [sys.executable, "-m", "settled.server.worker", str(sock.fileno()), str(telling), str(lifeline)],
            pass_fds=(sock.fileno(), telling, lifeline),
            env={**os.environ, CONFIG: msgspec.json.encode(config).decode()},
        )
        os.close(telling)

    def wait_ready(self) -> bool:
        """Blocks until the child listens, or died."""
        try:
            return os.read(self.ready, 1) == b"."
        finally:
            os.close(self.ready)


async def _run_workers(
    config: Config,
    count: int,
    another: Callable[[], socket.socket],
    ready: Callable[[], None],
    stop: asyncio.Event,
) -> None:
    lifeline, held = os.pipe()
    children: dict[int, _Worker] = {}

    async def launch(index: int) -> None:
        with another() as sock:
            children[index] = child = _Worker(msgspec.structs.replace(config, index=index), sock, lifeline)
        try:
            started = await asyncio.wait_for(asyncio.to_thread(child.wait_ready), START_WITHIN)
        except TimeoutError:
            child.process.kill()
            started = False
        if not started:
            raise WorkerFailed(f"worker {index} did not start; its error is above")

    async def launch_later(index: int) -> None:
        """Launch beside one that serves already: if it fails, it is tried again below."""
        try:
            await launch(index)
        except WorkerFailed as error:
            log.warning("%s; trying again", error)

    try:
        # The first one brings the schema up to date; the others find it done.
        await launch(0)
        await asyncio.gather(*(launch_later(index) for index in range(1, count)))
        ready()
        while not stop.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), 0.5)
            for index, child in list(children.items()):
                if child.process.poll() is not None and not stop.is_set():
                    log.warning("worker %d ended with %s; starting another", index, child.process.returncode)
                    await launch_later(index)
                    if children[index].process.poll() is not None:
                        await asyncio.sleep(1.0)
    finally:
        for child in children.values():
            if child.process.poll() is None:
                child.process.terminate()
        for child in children.values():
            await asyncio.to_thread(_reap, child.process, config.grace + 5)
        os.close(held)
        os.close(lifeline)


def _reap(process: subprocess.Popen[bytes], timeout: float) -> None:
    try:
        process.wait(timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
