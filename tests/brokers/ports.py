"""Free ports on the loopback interface, and servers that come up on them."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def wait_for(port: int, alive: Callable[[], bool], timeout: float = 240) -> bool:
    """Whether somebody listens on the port before the time is over or the server has ended."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline and alive():
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return True
        time.sleep(0.05)
    return False


def wait_until_free(port: int, timeout: float = 30) -> None:
    """Wait until nobody listens on the port any more."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
        except OSError:
            return
        time.sleep(0.02)
    raise TimeoutError(f"port {port} is still in use")
