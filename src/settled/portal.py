"""An event loop in a thread of its own, for callers that have none."""

from __future__ import annotations

import asyncio
import atexit
import threading
import weakref
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class PortalEnded(RuntimeError):
    """It was closed for good."""


class Portal:
    """Runs coroutines for blocking callers; the thread starts with the first one."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._ended = False
        self._closes_at_exit = False

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` on the loop's thread and wait for it."""
        if threading.current_thread() is self._thread:
            work.close()
            raise RuntimeError(f"a blocking call inside the loop of {self._name}; await it there")
        try:
            loop = self._start()
        except PortalEnded:
            work.close()
            raise
        future = asyncio.run_coroutine_threadsafe(work, loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    @property
    def is_open(self) -> bool:
        """Whether its thread runs."""
        return self._loop is not None

    def _start(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._ended:
                raise PortalEnded(f"{self._name} is closed")
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(
                    target=_serve, args=(self._loop,), name=self._name, daemon=True
                )
                self._thread.start()
                if not self._closes_at_exit:
                    self._closes_at_exit = True
                    atexit.register(_close, weakref.ref(self))
            return self._loop

    def close(self, *, for_good: bool = False) -> None:
        """End the thread and what runs on it; a new one starts with the next use, unless it is `for_good`."""
        with self._lock:
            self._ended = for_good
            loop, thread = self._loop, self._thread
            self._loop = self._thread = None
        if loop is not None and thread is not None:
            loop.call_soon_threadsafe(loop.stop)
            thread.join()


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    """Run a loop until it is stopped, then end what is left on it.

    All of it happens on the loop's own thread: the caller's may run another loop, as a notebook's does.
    """
    try:
        loop.run_forever()
        if tasks := asyncio.all_tasks(loop):
            for task in tasks:
                task.cancel()
            loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.run_until_complete(loop.shutdown_default_executor())
    finally:
        loop.close()


def _close(portal: weakref.ref[Portal]) -> None:
    """What is connected in a portal is disconnected when the program ends, whoever forgot it."""
    found = portal()
    if found is not None:
        found.close()
