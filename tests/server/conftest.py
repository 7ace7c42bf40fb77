"""One real server, on an embedded Postgres, for all tests of the HTTP API."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import pytest

from settled.server.testing import RunningServer, running_server
from tests.server.http import Http


@pytest.fixture(scope="session")
def server() -> Iterator[RunningServer]:
    with running_server() as running:
        yield running


@pytest.fixture(scope="session")
def http(server: RunningServer) -> Http:
    return Http(server.url)


@pytest.fixture
def queue() -> str:
    """A queue nobody else uses."""
    return f"q-{uuid.uuid4().hex[:12]}"
