"""A stand-in for Azure Service Bus, in a process of its own."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.brokers.processes import Server, serving

LOCK = 2


def _command(port: int, directory: Path) -> list[str]:
    return [
        sys.executable,
        "-m",
        "tests.brokers.servicebus_server",
        str(port),
        str(directory / "data"),
        str(LOCK),
    ]


@contextmanager
def servicebus_server() -> Iterator[Server]:
    with serving(Server(_command)) as server:
        yield server
