"""One embedded Postgres for the test session, a fresh database for each test."""

from __future__ import annotations

import asyncio
import itertools
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import asyncpg
import pytest

from settled.queue.db import migrate
from settled.queue.embedded import EmbeddedPostgres

if TYPE_CHECKING:
    from collections.abc import Iterator

_numbers = itertools.count()


def _database(dsn: str, name: str) -> str:
    return dsn.replace("/settled?", f"/{name}?")


def reachable_directory() -> Path:
    """A directory that Postgres' own account can reach, should the tests run as root."""
    directory = Path(tempfile.mkdtemp(prefix="settled-test-", dir=tempfile.gettempdir()))
    directory.chmod(0o755)
    return directory


async def _execute(dsn: str, *statements: str) -> None:
    connection = await asyncpg.connect(dsn)
    try:
        for statement in statements:
            await connection.execute(statement)
    finally:
        await connection.close()


@pytest.fixture(scope="session")
def postgres() -> Iterator[EmbeddedPostgres]:
    """The server of this test session, with a template database that has the schema."""
    directory = reachable_directory()
    server = EmbeddedPostgres.start(directory)
    asyncio.run(_execute(server.dsn, "create database template_queue"))
    asyncio.run(migrate(_database(server.dsn, "template_queue")))
    yield server
    server.stop()
    shutil.rmtree(directory)


@pytest.fixture
def dsn(postgres: EmbeddedPostgres) -> Iterator[str]:
    """A fresh database with the queue's schema."""
    name = f"test_{next(_numbers)}"
    asyncio.run(_execute(postgres.dsn, f"create database {name} template template_queue"))
    yield _database(postgres.dsn, name)
    asyncio.run(_execute(postgres.dsn, f"drop database {name} with (force)"))
