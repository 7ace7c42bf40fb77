"""Which worker process a connection is on, and sessions that stay on one."""

from __future__ import annotations

from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING

import aiohttp

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

CONNECTIONS = 200


async def worker_of(session: aiohttp.ClientSession) -> int:
    """The process that answers a session of one connection."""
    async with session.get("/health") as answer:
        return int((await answer.json())["worker_id"])


def one_connection(url: str) -> aiohttp.ClientSession:
    """A session whose requests go one after the other over the connection it has."""
    return aiohttp.ClientSession(url, connector=aiohttp.TCPConnector(limit=1, keepalive_timeout=110))


@asynccontextmanager
async def on_each_worker(url: str, workers: int) -> AsyncIterator[list[aiohttp.ClientSession]]:
    """A session on each of so many workers."""
    async with AsyncExitStack() as stack:
        yield [own[0] for own in await pinned(stack, url, workers, 1)]


async def pinned(
    stack: AsyncExitStack, url: str, workers: int, each: int
) -> list[list[aiohttp.ClientSession]]:
    """So many sessions of one connection on each worker."""
    found: dict[int, list[aiohttp.ClientSession]] = {}
    for _ in range(CONNECTIONS * each):
        session = await stack.enter_async_context(one_connection(url))
        own = found.setdefault(await worker_of(session), [])
        if len(own) < each:
            own.append(session)
        if len(found) == workers and all(len(own) == each for own in found.values()):
            return [found[pid] for pid in sorted(found)]
    raise AssertionError(f"connections reached {len(found)} of {workers} workers")
