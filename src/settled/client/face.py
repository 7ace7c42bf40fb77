"""Two faces over one implementation: an `operation` is awaited on the async face, blocks on the sync one."""

from __future__ import annotations

from functools import wraps
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, TypeVar, overload

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from settled.portal import Portal

P = ParamSpec("P")
T = TypeVar("T")


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
