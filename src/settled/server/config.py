"""Where a server listens, which database it uses and where that keeps its data."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import msgspec

CONFIG = "SETTLED_WORKER"
HOST = "127.0.0.1"
PORT = 6632
BACKLOG = 2048
BODY_LIMIT = 16 * 1024 * 1024
GRACE = 10.0
POP_LIMIT = 16 * 1024 * 1024
UNSENT_LIMIT = 8
"""How many answers of that size may wait for their readers, before pops are refused."""


class Config(msgspec.Struct, frozen=True):
    """Everything one worker process needs to know; `spool` is a directory for pushes that must wait."""

    dsn: str
    body_limit: int = BODY_LIMIT
    grace: float = GRACE
    board: str | None = None
    spool: str = ""
    index: int = 0
    log_level: str = "info"
    log_json: bool = False
    pop_limit: int = POP_LIMIT


def default_workers() -> int:
    """One process for each four cores: Postgres wants the others."""
    return max(1, (os.cpu_count() or 1) // 4)


def data_directory(given: str | os.PathLike[str] | None) -> Path:
    """`given`, or SETTLED_HOME, or the user's data directory.

    Postgres does not run as root, and the account it runs as then cannot look into root's home.
    """
    chosen = given or os.environ.get("SETTLED_HOME")
    if chosen:
        return Path(chosen).expanduser().resolve()
    if os.name == "posix" and os.geteuid() == 0:
        return Path("/var/lib/settled")
    from platformdirs import user_data_path

    with contextlib.suppress(RuntimeError):
        found = user_data_path("settled", appauthor=False)
        if found.is_absolute():
            return found
    raise OSError(f"user id {os.geteuid()} has no home directory: name a data directory with --data")
