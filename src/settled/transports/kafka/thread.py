"""A thread for calls that block; the way there and back takes two thirds of what an executor's does."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")
_Call = tuple[asyncio.Future[Any], Callable[..., Any], tuple[Any, ...]]


class Thread:
    """Does one call after the other. It does not keep the process from ending.

    >>> async def example() -> int:
    ...     thread = Thread("example")
    ...     try:
    ...         return await thread.run(max, 1, 2)
    ...     finally:
    ...         thread.end()
    >>> asyncio.run(example())
    2
    """

    def __init__(self, name: str) -> None:
        self._calls: SimpleQueue[_Call | None] = SimpleQueue()
        threading.Thread(target=self._work, name=name, daemon=True).start()

    def run(self, call: Callable[..., T], *arguments: Any) -> asyncio.Future[T]:
        """The call's result; it is made also if the future is cancelled."""
        done = asyncio.get_running_loop().create_future()
        self._calls.put((done, call, arguments))
        return done

    def end(self) -> None:
        """End after the calls that were asked for."""
        self._calls.put(None)

    def _work(self) -> None:
        while (asked := self._calls.get()) is not None:
            done, call, arguments = asked
            result, trouble = None, None
            try:
                result = call(*arguments)
            except Exception as error:  # the caller's, whatever it is
                trouble = error
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
                done.get_loop().call_soon_threadsafe(_tell, done, result, trouble)


def _tell(done: asyncio.Future[Any], result: Any, trouble: Exception | None) -> None:
    if done.done():
        return
    if trouble is None:
        done.set_result(result)
    else:
        done.set_exception(trouble)
