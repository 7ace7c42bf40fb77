"""A request for messages that outlives the receive that began it, so that no answer is thrown away."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

from settled.clock import Bell

T = TypeVar("T")


class Poll(Generic[T]):
    """Takes from a broker that is asked with a long poll.

    A broker that answered a request has handed its messages out, so a request must not be given up because
    the receive that made it was over sooner: the next receive goes on waiting for the same one.
    """

    def __init__(self, fetch: Callable[[int, bool], Awaitable[Sequence[T]]]) -> None:
        """`fetch` takes how many at most, and whether to wait for the first."""
        self._fetch = fetch
        self._asked: asyncio.Future[Sequence[T]] | None = None
        self._ready: deque[T] = deque()
        self._bell = Bell()
        self._woken = 0

    async def take(self, limit: int, timeout: float) -> list[T]:
        """Up to `limit`; waits at most `timeout` seconds, and raises what the broker did."""
        loop = asyncio.get_running_loop()
        until, woken = loop.time() + timeout, self._woken
        while not self._ready:
            seen = self._bell.rung
            if self._asked is None:
                self._asked = asyncio.ensure_future(self._fetch(limit, timeout > 0))
                self._asked.add_done_callback(self._answered)
                if timeout <= 0:
                    await asyncio.wait([self._asked])
            left = until - loop.time()
            if not self._asked.done() and left > 0 and self._woken == woken:
                await self._bell.wait_async(seen, left)
            if self._asked.done():
                asked, self._asked = self._asked, None
                self._ready.extend(asked.result())
            if self._woken != woken or loop.time() >= until:
                break
        return [self._ready.popleft() for _ in range(min(limit, len(self._ready)))]

    def buffered(self) -> list[T]:
        """What came and nobody has taken yet."""
        return list(self._ready)

    def _answered(self, asked: asyncio.Future[Sequence[T]]) -> None:
        if not asked.cancelled():
            asked.exception()
        self._bell.ring()

    def wake(self) -> None:
        """End a take that is waiting; from any thread."""
        self._woken += 1
        self._bell.ring()

    async def close(self) -> list[T]:
        """Ask no more; what came and nobody took is the caller's to give back."""
        asked, self._asked = self._asked, None
        if asked is not None:
            # What the broker has answered by now is not lost; what it answers later waits for its lease.
            if not asked.done():
                asked.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                self._ready.extend(await asked)
        rest, self._ready = list(self._ready), deque()
        return rest
