"""One worker process: an engine, an app and a listener on a socket it was given."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from settled.observe import logging as observe_logging
from settled.queue.engine import Engine
from settled.queue.errors import QueueError

from .app import App
from .config import CONFIG, UNSENT_LIMIT, Config
from .listener import Listener
from .metrics import Board
from .spool import Spool

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

log = logging.getLogger("settled.server")


async def work(config: Config, sock: socket.socket, ready: Callable[[], object], stop: asyncio.Event) -> None:
    """Serve until `stop` is set, then answer what is in flight."""
    engine = await Engine.open(config.dsn, maintain=config.index == 0, pop_bytes=config.pop_limit)
    try:
        board = Board(config.board)
        room = UNSENT_LIMIT * config.pop_limit
        spool = Spool(Path(config.spool), engine)
        app = App(engine, board, spool, lambda: listener.connections, lambda: listener.unsent < room)
        listener = Listener(app, body_limit=config.body_limit, soon=app.soon, close=app.close)
        await listener.start(sock)
        board.write(app.system.snapshot())
        spool.start()
        reporter = asyncio.create_task(_report(app, board))
        _calm_collector()
        ready()
        await stop.wait()
        app.stop()
        await listener.stop(config.grace)
        reporter.cancel()
        await asyncio.gather(reporter, return_exceptions=True)
        await spool.close()
    finally:
        await engine.close()


async def _report(app: App, board: Board) -> None:
    while True:
        await asyncio.sleep(1.0)
        board.write(app.system.snapshot())


def _calm_collector() -> None:
    """Requests make many objects and few cycles: look for those seldom, never among what stays."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)


def run(main: Coroutine[object, object, None]) -> None:
    """Run on uvloop where it is installed."""
    try:
        import uvloop
    except ImportError:
        asyncio.run(main)
    else:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(main)


def stop_on_signals(stop: asyncio.Event) -> None:
    """SIGTERM and SIGINT ask for a graceful stop."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)


async def _main(config: Config, listening: int, telling: int, lifeline: int) -> None:
    stop = asyncio.Event()
    stop_on_signals(stop)
    sock = socket.socket(fileno=listening)
    sock.setblocking(False)
    loop = asyncio.get_running_loop()

    def orphaned() -> None:
        loop.remove_reader(lifeline)
        stop.set()

    # The supervisor never writes here; it becomes readable when the supervisor is gone.
    loop.add_reader(lifeline, orphaned)
    await work(config, sock, lambda: os.write(telling, b"."), stop)


if __name__ == "__main__":
    given = msgspec.json.decode(os.environ.pop(CONFIG), type=Config)
    observe_logging.configure(given.log_level, as_json=given.log_json)
    try:
        run(_main(given, *map(int, sys.argv[1:4])))
    except QueueError as error:
        observe_logging.tell(f"settled: {error}", logging.ERROR)
        sys.exit(1)
