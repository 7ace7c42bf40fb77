"""Finds out whether messages can be stored now: a database that answers may be full or read-only."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

import asyncpg

from settled.queue.db import sql
from settled.queue.errors import Unavailable

if TYPE_CHECKING:
    from settled.queue.db import Pool

FRESH = 5.0  # seconds for which something that was stored proves that more can be


class _Undone(Exception):
    """Ends the transaction of a probe, which leaves nothing."""


class Probe:
    """Writes something as large as messages are, and undoes it, unless something was stored just now."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._turn = asyncio.Lock()
        self._stored_at = -FRESH

    def stored(self) -> None:
        """Note that something was stored now."""
        self._stored_at = time.monotonic()

    async def check(self) -> None:
        """Unavailable if nothing can be stored."""
        async with self._turn:
            if time.monotonic() - self._stored_at < FRESH:
                return
            try:
                async with self._pool.transaction() as connection:
                    await connection.execute(sql("probe"))
                    raise _Undone
            except _Undone:
                self.stored()
            except asyncpg.InsufficientPrivilegeError:
                # A role that may not make a table can still push; whether it can is seen by its pushes only.
                await self._pool.fetch("select 1")
            except asyncpg.PostgresError as error:
                raise Unavailable(str(error)) from error
