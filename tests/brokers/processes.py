"""Private servers in processes of their own, on free loopback ports."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


class Server:
    """A server that can be stopped, killed and started again, on the same port and with the same data."""

    def __init__(
        self, command: Callable[[int, Path], Sequence[str]], environment: Mapping[str, str] | None = None
    ) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="settled-broker-")
        self.directory = Path(self._directory.name)
        self.port = free_port()
        self._command = command
        self._environment = {**os.environ, **(environment or {})}
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with (self.directory / "log").open("ab") as log:
            self._process = subprocess.Popen(
                self._command(self.port, self.directory), stdout=log, stderr=log, env=self._environment
            )
        deadline = time.monotonic() + 60
        while True:
            if self._process.poll() is not None:
                raise RuntimeError(f"the server ended: {self.log()}")
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1):
                return
            if time.monotonic() > deadline:
                raise TimeoutError(f"the server did not come up: {self.log()}")
            time.sleep(0.05)

    def stop(self, how: signal.Signals = signal.SIGTERM) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.send_signal(how)
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def restart(self) -> None:
        self.stop(signal.SIGKILL)
        self.start()

    def log(self) -> str:
        return (self.directory / "log").read_text()[-3000:]

    def remove(self) -> None:
        self.stop(signal.SIGKILL)
        self._directory.cleanup()


@contextlib.contextmanager
def serving(server: Server) -> Iterator[Server]:
    try:
        server.start()
        yield server
    finally:
        server.remove()
