"""Two faces over one implementation: an `operation` is awaited on the async face, blocks on the sync one."""

from __future__ import annotations

from concurrent.futures import CancelledError
from functools import wraps
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, TypeVar, overload

from settled.portal import Portal, PortalEnded

from .errors import Closed

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

P = ParamSpec("P")
T = TypeVar("T")


class ClientPortal(Portal):
    """The thread of one blocking client; when it has ended, no other one starts."""

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        try:
            return super().run(work)
        except PortalEnded:
            raise Closed from None
        except CancelledError:
            if self._ended:
                raise Closed from None
            raise

    def close_after(self, work: Coroutine[Any, Any, None]) -> None:
        """Run the last work, then end the thread, whatever becomes of it."""
        try:
            if self.is_open:
                self.run(work)
        finally:
            work.close()
            self.close(for_good=True)


class AsyncFace:
    """Operations of this object are coroutines."""


class SyncFace:
    """Operations of this object block."""

    _portal: ClientPortal


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
