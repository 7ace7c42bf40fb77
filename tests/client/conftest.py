"""One real server for the client's tests."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import pytest

from settled.client import SyncClient
from settled.server.testing import RunningServer, running_server


@pytest.fixture(scope="session")
def server() -> Iterator[RunningServer]:
    with running_server() as running:
        yield running


@pytest.fixture
def sync(server: RunningServer) -> Iterator[SyncClient]:
    with SyncClient(server.url) as client:
        yield client


@pytest.fixture
def queue() -> str:
    """A queue nobody else uses."""
    return f"q-{uuid.uuid4().hex[:12]}"
