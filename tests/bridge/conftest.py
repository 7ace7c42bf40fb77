"""Real brokers for the bridge: a NATS server and a Postgres, once a session."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator

import pytest

from settled.queue.embedded import EmbeddedPostgres
from tests.nats.servers import Server, server


@pytest.fixture(scope="session")
def nats_server() -> Iterator[Server]:
    with server() as one:
        yield one


@pytest.fixture(scope="session")
def dsn() -> Iterator[str]:
    # Not under pytest's own directory: root's Postgres runs as somebody who may not enter that.
    with tempfile.TemporaryDirectory() as directory, EmbeddedPostgres.start(directory) as one:
        yield one.dsn
