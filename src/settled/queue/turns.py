"""When the next shared call to the database starts: few large calls are cheaper than many small ones."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Iterator


class Rounds:
    """Runs work for whoever asks; callers share a round that began after they asked."""

    def __init__(self, work: Callable[[], Awaitable[None]]) -> None:
        self._work = work
        self._running: asyncio.Task[None] | None = None
        self._next: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Wait for a round that begins now or later; its error is the caller's, too."""
        if self._next is None:
            self._next = asyncio.create_task(self._after(self._running))
        await asyncio.shield(self._next)

    async def end(self) -> None:
        """Wait for the rounds that were asked for."""
        rounds = [task for task in (self._running, self._next) if task is not None]
        await asyncio.gather(*rounds, return_exceptions=True)

    async def _after(self, running: asyncio.Task[None] | None) -> None:
        if running is not None:
            await asyncio.wait([running])
        self._running, self._next = self._next, None
        await self._work()


Landed: TypeAlias = Callable[[], Awaitable[None]]
PATIENCE = 0.02  # seconds; a call that takes longer waits for a lock, and those behind it should not


class Turns:
    """Lets a call start when none is out, or when at least as much waits as those that are out have taken.

    A call that is out for long does not count any more.
    """

    def __init__(self) -> None:
        self._event = asyncio.Event()
        self._out = 0

    def may_start(self, waiting: int) -> bool:
        """Whether a call for what waits should start now."""
        return waiting >= self._out

    def ring(self, waiting: int | None = None) -> None:
        """Wake whoever starts calls, if so much waits that one should; without a number in any case."""
        if waiting is None or waiting >= self._out:
            self._event.set()

    async def wait(self) -> None:
        """Wait for the next ring, or for a call that comes back."""
        self._event.clear()
        await self._event.wait()

    @contextmanager
    def out(self, count: int) -> Iterator[Landed]:
        """A call for so many is out. Await what this yields when it is back: the next one then starts, and
        the database works on that while those of this one are answered.
        """

        def back() -> None:
            nonlocal count
            self._out -= count
            count = 0
            self._event.set()

        async def landed() -> None:
            back()
            await asyncio.sleep(0)

        self._out += count
        timer = asyncio.get_running_loop().call_later(PATIENCE, back)
        try:
            yield landed
        finally:
            timer.cancel()
            back()
