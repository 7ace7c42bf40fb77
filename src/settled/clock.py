"""Time, and being woken before it is up; both come in as arguments."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Protocol


class Bell:
    """Rung from any thread; wakes every thread and task that waits on it."""

    __slots__ = ("_condition", "_tasks", "_threads", "rung")

    def __init__(self) -> None:
        self.rung = 0
        self._condition = threading.Condition()
        self._threads = 0
        self._tasks: list[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = []

    def ring(self) -> None:
        """Wake whoever waits."""
        with self._condition:
            self.rung += 1
            if self._threads:
                self._condition.notify_all()
            tasks, self._tasks = self._tasks, []
        for loop, future in tasks:
            if not loop.is_closed():
                loop.call_soon_threadsafe(_finish, future)

    def wait(self, seen: int, seconds: float) -> None:
        """Block until it has rung since it had rung `seen` times, or until the seconds are up."""
        with self._condition:
            self._threads += 1
            try:
                self._condition.wait_for(lambda: self.rung != seen, seconds)
            finally:
                self._threads -= 1

    async def wait_async(self, seen: int, seconds: float) -> None:
        """The same, for a task."""
        loop = asyncio.get_running_loop()
        with self._condition:
            if self.rung != seen:
                return
            future: asyncio.Future[None] = loop.create_future()
            entry = (loop, future)
            self._tasks.append(entry)
        timer = loop.call_later(seconds, _finish, future)
        try:
            await future
        finally:
            timer.cancel()
            with self._condition:
                if entry in self._tasks:
                    self._tasks.remove(entry)


def _finish(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


class Clock(Protocol):
    """What the pump and the in-memory transport know of time."""

    def now(self) -> float:
        """Seconds since the epoch."""

    def wait(self, bell: Bell, seen: int, seconds: float) -> None:
        """Let the seconds pass, or less if the bell rings after it had rung `seen` times."""

    async def wait_async(self, bell: Bell, seen: int, seconds: float) -> None:
        """The same, for a task."""


class SystemClock:
    """The machine's own time."""

    def now(self) -> float:
        return time.time()

    def wait(self, bell: Bell, seen: int, seconds: float) -> None:
        bell.wait(seen, seconds)

    async def wait_async(self, bell: Bell, seen: int, seconds: float) -> None:
        await bell.wait_async(seen, seconds)


class VirtualClock:
    """Time that passes only when somebody waits, and then at once: for tests.

    >>> clock = VirtualClock()
    >>> clock.wait(Bell(), 0, seconds=90)
    >>> clock.now()
    90.0
    """

    def __init__(self, start: float = 0.0) -> None:
        self._now = start

    def now(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        if seconds < 0:
            raise ValueError(f"clock: time does not go back, got {seconds!r}")
        self._now += seconds

    def wait(self, bell: Bell, seen: int, seconds: float) -> None:
        if bell.rung == seen:
            self.advance(max(0.0, seconds))

    async def wait_async(self, bell: Bell, seen: int, seconds: float) -> None:
        self.wait(bell, seen, seconds)
        await asyncio.sleep(0)
