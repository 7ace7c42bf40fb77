"""What every decorator round a handler has: a sync and an async form, and an order that makes sense."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from settled.policy import Policy
from settled.signals import ConfigurationError

H = TypeVar("H", bound=Callable[..., Any])

_LAYERS = "__settled_layers__"
_SUBSCRIBED = "__settled_subscribed__"


@dataclass(frozen=True, slots=True)
class Layer:
    """A decorator on a handler, as the next one and the app see it."""

    name: str
    on_error: bool = False
    releases: bool = False
    """It may release a message instead of acknowledging it."""
    check: Callable[[], None] | None = None
    """Run when the app starts; raises ConfigurationError if the decorator cannot work."""
    feature: str = ""
    """The flag in `features` that it looks up."""


def layers(handler: Callable[..., Any]) -> tuple[Layer, ...]:
    """The decorators on a handler, outermost first."""
    found: tuple[Layer, ...] = getattr(handler, _LAYERS, ())
    return found


def mark_subscribed(handler: Callable[..., Any], policy: Policy) -> None:
    """Remember that an app has this handler, so that a decorator put on later can say it has no effect."""
    try:
        setattr(handler, _SUBSCRIBED, policy)
    except AttributeError:
        return  # a bound method or a builtin takes no attributes, and cannot be decorated by name either


def subscribed_policy(handler: Callable[..., Any]) -> Policy | None:
    """The policy an app has this handler with, the outermost `@app.subscriber`'s; None if it has none."""
    found: Policy | None = getattr(handler, _SUBSCRIBED, None)
    return found


def wrap(handler: H, layer: Layer, sync: Callable[..., Any], async_: Callable[..., Any]) -> H:
    """The handler inside `sync(handler, *args)` or `async_(handler, *args)`, whichever it is."""
    name = getattr(handler, "__qualname__", repr(handler))
    if subscribed_policy(handler) is not None:
        raise ConfigurationError(f"{layer.name} on {name}: put @app.subscriber on top, above {layer.name}")
    inside = layers(handler)
    _refuse_nonsense(layer, inside, name)
    if inspect.iscoroutinefunction(handler):

        @functools.wraps(handler)
        async def wrapped_async(*args: Any, **kwargs: Any) -> Any:
            return await async_(handler, *args, **kwargs)

        wrapped: Any = wrapped_async
    else:

        @functools.wraps(handler)
        def wrapped_sync(*args: Any, **kwargs: Any) -> Any:
            return sync(handler, *args, **kwargs)

        wrapped = wrapped_sync
    setattr(wrapped, _LAYERS, (layer, *inside))
    return wrapped  # type: ignore[no-any-return]


def _refuse_nonsense(layer: Layer, inside: tuple[Layer, ...], name: str) -> None:
    for inner in inside:
        if inner.name == layer.name:
            raise ConfigurationError(f"{layer.name} on {name}: it is there already; use it once")
        if layer.name == "retry" and inner.on_error:
            raise ConfigurationError(
                f"retry on {name}: {inner.name} inside it turns every error into a signal, so nothing is "
                f"ever retried; put {inner.name} above retry"
            )
        if layer.on_error and inner.on_error:
            raise ConfigurationError(
                f"{layer.name} on {name}: {inner.name} inside it leaves no error for it; use one of them"
            )
