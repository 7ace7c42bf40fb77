"""Real NATS servers for tests: one, with whatever configuration, or a cluster, on free loopback ports."""

from __future__ import annotations

import contextlib
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

BINARY = Path(sys.executable).with_name("nats-server")


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


class Server:
    """A nats-server process that can be stopped, killed and started again on the same port and data."""

    def __init__(self, config: str = "", port: int | None = None) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="settled-nats-"))
        self.port = port or free_ports(1)[0]
        self._config = self.directory / "server.conf"
        data = self.directory / "data"
        self._config.write_text(
            f"listen: 127.0.0.1:{self.port}\njetstream {{ store_dir: '{data}' }}\n{config}\n"
        )
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"nats://127.0.0.1:{self.port}"

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> Server:
        with (self.directory / "log").open("ab") as log:
            self._process = subprocess.Popen([BINARY, "-c", self._config], stdout=log, stderr=log)
        self.wait_until_up()
        return self

    def wait_until_up(self, timeout: float = 15) -> None:
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            if self._process is not None and self._process.poll() is not None:
                raise RuntimeError(f"nats-server ended: {self.log()}")
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 0.2) as one:
                if one.recv(4):
                    return
            time.sleep(0.02)
        raise TimeoutError(f"nats-server did not come up: {self.log()}")

    def log(self) -> str:
        return (self.directory / "log").read_text()[-2000:]

    def stop(self, *, kill: bool = False) -> None:
        process, self._process = self._process, None
        if process is not None and process.poll() is None:
            process.kill() if kill else process.terminate()
            process.wait(15)

    def freeze(self) -> None:
        """Let it stand still, with all its connections open."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)
        state = Path(f"/proc/{self._process.pid}/task")
        deadline = time.monotonic() + 5
        while not all(" T " in (task / "stat").read_text() for task in state.iterdir()):
            if time.monotonic() > deadline:
                raise TimeoutError("nats-server goes on after SIGSTOP")
            time.sleep(0.005)

    def thaw(self) -> None:
        """Let it go on."""
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def remove(self) -> None:
        self.stop(kill=True)
        shutil.rmtree(self.directory, ignore_errors=True)


@contextlib.contextmanager
def server(config: str = "") -> Iterator[Server]:
    one = Server(config)
    try:
        yield one.start()
    finally:
        one.remove()


@contextlib.contextmanager
def cluster(size: int = 3) -> Iterator[list[Server]]:
    ports = free_ports(2 * size)
    clients, routes = ports[:size], ports[size:]
    urls = ", ".join(f"nats-route://127.0.0.1:{port}" for port in routes)
    servers = [
        Server(
            f"server_name: n{number}\n"
            f"cluster {{ name: c, listen: 127.0.0.1:{routes[number]}, routes: [{urls}] }}",
            port=clients[number],
        )
        for number in range(size)
    ]
    try:
        for one in servers:
            one.start()
        yield servers
    finally:
        for one in servers:
            one.remove()
