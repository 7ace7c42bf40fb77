"""A server in a process of its own on a free port, for tests and examples."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
from dataclasses import dataclass, field
from typing import IO, TYPE_CHECKING

from settled.queue.embedded import temporary_directory

if TYPE_CHECKING:
    from collections.abc import Iterator

LISTENING = re.compile(r"listening on (http://\S+)")


@dataclass
class RunningServer:
    """A server that was started with `running_server`."""

    url: str
    data: str | None
    process: subprocess.Popen[str]
    output: list[str] = field(default_factory=list)

    def terminate(self, timeout: float = 30) -> int:
        """Ask it to stop and wait; returns its exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout)


@contextlib.contextmanager
def running_server(
    *,
    dsn: str | None = None,
    data: str | None = None,
    workers: int = 1,
    body_limit: int | None = None,
    pop_limit: int | None = None,
) -> Iterator[RunningServer]:
    """Start a server and stop it at the end; its data goes to a temporary directory unless `data` is given.

    with running_server() as server:
        requests.get(server.url + "/health")
    """
    with contextlib.ExitStack() as stack:
        if dsn is None and data is None:
            data = str(stack.enter_context(temporary_directory()))
        arguments = ["serve", "--port", "0", "--workers", str(workers)]
        arguments += ["--dsn", dsn] if dsn is not None else ["--data", str(data)]
        arguments += ["--body-limit", str(body_limit)] if body_limit is not None else []
        arguments += ["--pop-limit", str(pop_limit)] if pop_limit is not None else []
        process = subprocess.Popen(  # noqa: S603 - our own module
            [sys.executable, "-m", "settled.server.command", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )
        if process.stdout is None:
            raise RuntimeError("the server has no output to read")
        server = RunningServer("", data, process)
        found = threading.Event()
        reader = threading.Thread(target=_read, args=(process.stdout, server, found), daemon=True)
        reader.start()
        try:
            while not found.wait(0.05):
                if process.poll() is not None:
                    reader.join(1)
                    raise RuntimeError("the server did not start:\n" + "".join(server.output))
            yield server
        finally:
            try:
                server.terminate()
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            reader.join(5)
            process.stdout.close()


def _read(lines: IO[str], server: RunningServer, found: threading.Event) -> None:
    for line in lines:
        server.output.append(line)
        if match := LISTENING.search(line):
            server.url = match[1]
        elif server.url and line.startswith("data in"):
            found.set()
