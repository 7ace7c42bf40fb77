"""A handler's signature, read once: its mode, its decoder and its policy."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from settled import codec
from settled.message import Message
from settled.policy import Policy
from settled.signals import ConfigurationError
from settled.transports.base import Source

Handler = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Subscription:
    """A handler on a channel: everything a pump needs, decided before the first message."""

    name: str
    source: Source
    handler: Handler
    policy: Policy
    decode: codec.Decode
    is_async: bool


def subscribe(
    handler: Handler, source: Source, policy: Policy, names: Mapping[str, Any] | None = None
) -> Subscription:
    """Read the handler's signature; ConfigurationError, with the fix, if it cannot work.

    `names` are those in sight where the handler is defined, for annotations that are still text.

    >>> def handle(order: dict) -> None: ...
    >>> subscribe(handle, Source(channel="orders"), Policy()).policy.explicit
    False
    """
    name = getattr(handler, "__qualname__", None) or type(handler).__qualname__
    annotation = _annotation(handler, name, names or {})
    explicit, type_ = _mode(annotation, name)
    try:
        decode = codec.decoder(type_)
    except (TypeError, ValueError) as error:
        raise ConfigurationError(f"handler {name}: {_show(type_)} cannot be decoded: {error}") from error
    return Subscription(
        name=f"{source.channel}:{name}"
        if source.group is None
        else f"{source.channel}/{source.group}:{name}",
        source=source,
        handler=handler,
        policy=replace(policy, explicit=explicit),
        decode=decode,
        is_async=is_async(handler),
    )


def is_async(handler: Handler) -> bool:
    """Whether calling the handler gives something to await."""
    while isinstance(handler, partial):
        handler = handler.func
    return inspect.iscoroutinefunction(handler) or inspect.iscoroutinefunction(
        getattr(type(handler), "__call__", None)  # noqa: B004
    )


def _annotation(handler: Handler, name: str, names: Mapping[str, Any]) -> Any:
    if not callable(handler):
        raise ConfigurationError(f"handler {handler!r}: not a function; decorate a function or an async one")
    function = (
        handler if inspect.isroutine(handler) or isinstance(handler, partial) else type(handler).__call__
    )
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise ConfigurationError(f"handler {name}: a handler returns, it must not yield")
    try:
        parameters = list(inspect.signature(handler).parameters.values())
    except (TypeError, ValueError) as error:
        raise ConfigurationError(f"handler {name}: its signature cannot be read: {error}") from error
    if not parameters or parameters[0].kind not in _POSITIONAL:
        raise ConfigurationError(
            f"handler {name}: takes no message; write def {name}(order: Order), or (message: Message[Order])"
        )
    first, *rest = parameters
    needed = [p.name for p in rest if p.default is p.empty and p.kind not in _VARIADIC]
    if needed:
        raise ConfigurationError(
            f"handler {name}: takes one parameter, the payload or the message; "
            f"give {', '.join(needed)} a default, or bind it with functools.partial"
        )
    if first.annotation is first.empty:
        raise ConfigurationError(
            f"handler {name}: parameter {first.name!r} has no annotation; write {first.name}: Order "
            f"to be given the payload, or {first.name}: Message[Order] to settle it yourself"
        )
    return _resolved(function, first, name, names)


_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def _resolved(function: Any, parameter: inspect.Parameter, name: str, names: Mapping[str, Any]) -> Any:
    if not isinstance(parameter.annotation, str):
        return parameter.annotation
    while isinstance(function, partial):
        function = function.func
    try:
        hints = typing.get_type_hints(inspect.unwrap(function), localns=dict(names))
    except NameError as error:
        raise ConfigurationError(
            f"handler {name}: the annotation {parameter.annotation!r} cannot be resolved ({error}); "
            "import the type where the handler's module can see it, outside TYPE_CHECKING"
        ) from error
    return hints[parameter.name]


def _mode(annotation: Any, name: str) -> tuple[bool, Any]:
    if annotation is Message:
        raise ConfigurationError(
            f"handler {name}: Message without a type; write Message[Order], or Message[Any] for anything"
        )
    if typing.get_origin(annotation) is Message:
        (type_,) = typing.get_args(annotation)
        if isinstance(type_, typing.TypeVar):
            raise ConfigurationError(f"handler {name}: Message[{type_}] is not a type; write Message[Order]")
        return True, type_
    return False, annotation


def _show(type_: Any) -> str:
    return getattr(type_, "__qualname__", None) or str(type_)
