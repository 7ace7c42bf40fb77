"""A real server, and the command line in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator

import pytest

from settled.server.testing import RunningServer, running_server
from tests.server.http import Http


def settled(*arguments: str, stdin: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    """Run `settled` to its end."""
    return subprocess.run(
        [sys.executable, "-m", "settled", *arguments],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, **environment},
    )


def database_of(server: RunningServer) -> str:
    """The DSN of the server's database, which the server prints last when it starts."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        for line in server.output:
            if line.startswith("database "):
                return line.split()[1]
        time.sleep(0.02)
    raise TimeoutError(f"no database is told: {server.output}")


@pytest.fixture(scope="session")
def server() -> Iterator[RunningServer]:
    with running_server() as running:
        yield running


@pytest.fixture(scope="session")
def database(server: RunningServer) -> str:
    return database_of(server)


@pytest.fixture
def http(server: RunningServer) -> Http:
    return Http(server.url)


@pytest.fixture
def queue() -> str:
    """A queue nobody else uses."""
    return f"q-{uuid.uuid4().hex[:12]}"
