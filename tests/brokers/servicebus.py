"""A stand-in for Azure Service Bus, in a process of its own."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.brokers.processes import Server, serving

LOCK = 2


@contextmanager
def servicebus_server(lock: float = LOCK) -> Iterator[Server]:
    def command(port: int, directory: Path) -> list[str]:
        data = str(directory / "data")
        return [sys.executable, "-m", "tests.brokers.servicebus_server", str(port), data, str(lock)]

    with serving(Server(command)) as server:
        yield server
