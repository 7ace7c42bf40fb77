"""Two faces over one implementation: an `operation` is awaited on the async face, blocks on the sync one."""

from __future__ import annotations

import asyncio
import threading
from functools import wraps
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, TypeVar, overload

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

P = ParamSpec("P")
T = TypeVar("T")


class Portal:
    """An event loop in a thread of its own, for callers that have none."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` on the loop's thread and wait for it."""
        if threading.current_thread() is self._thread:
            work.close()
            raise RuntimeError("a blocking call inside the client's own loop; use the async Client there")
        future = asyncio.run_coroutine_threadsafe(work, self._start())
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def _start(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(
                    target=self._loop.run_forever, name="settled-client", daemon=True
                )
                self._thread.start()
            return self._loop

    def close(self) -> None:
        """End the thread; the portal starts a new one if it is used again."""
        with self._lock:
            loop, thread = self._loop, self._thread
            self._loop = self._thread = None
        if loop is not None and thread is not None:
            loop.call_soon_threadsafe(loop.stop)
            thread.join()
            loop.run_until_complete(loop.shutdown_asyncgens())
            loop.run_until_complete(loop.shutdown_default_executor())
            loop.close()


class AsyncFace:
    """Operations of this object are coroutines."""


class SyncFace:
    """Operations of this object block."""

    _portal: Portal


class operation(Generic[P, T]):  # noqa: N801 - it is used as a decorator
    """Marks an `async def` method as an operation of both faces."""

    def __init__(self, function: Callable[Concatenate[Any, P], Coroutine[Any, Any, T]]) -> None:
        self._function = function
        self.__doc__ = function.__doc__

    @overload
    def __get__(self, instance: None, owner: type) -> operation[P, T]: ...
    @overload
    def __get__(self, instance: SyncFace, owner: type) -> Callable[P, T]: ...
    @overload
    def __get__(self, instance: AsyncFace, owner: type) -> Callable[P, Coroutine[Any, Any, T]]: ...

    def __get__(self, instance: object, owner: type) -> object:
        if instance is None:
            return self
        function = self._function
        if isinstance(instance, SyncFace):
            portal = instance._portal

            @wraps(function)
            def blocking(*args: P.args, **kwargs: P.kwargs) -> T:
                return portal.run(function(instance, *args, **kwargs))

            return blocking
        return function.__get__(instance, owner)
