"""Decorators that turn an error which leaves a handler into a signal; signals go through untouched."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeVar

from settled.backoff import Backoff
from settled.handlers.layers import Layer, wrap
from settled.message import current_message
from settled.settlement import describe
from settled.signals import ConfigurationError, Defer, DontAck, Reject, Signal

H = TypeVar("H", bound=Callable[..., Any])


def dont_ack_on_error(handler: H) -> H:
    """Block on a message whose handler fails: `DontAck`, with the error as its cause.

    >>> @dont_ack_on_error
    ... def handle(order: dict) -> None:
    ...     raise OSError("disk full")
    >>> handle({})
    Traceback (most recent call last):
    settled.signals.DontAck: OSError: disk full
    """
    return _convert(handler, Layer("dont_ack_on_error", on_error=True, releases=True), _dont_ack)


def reject_on_error(handler: H) -> H:
    """Send a message whose handler fails to the dead letters: `Reject`, with the error as its cause."""
    return _convert(handler, Layer("reject_on_error", on_error=True), _reject)


def defer_on_error(delay: float | Backoff | None = None) -> Callable[[H], H]:
    """Try a message whose handler fails again later: `Defer`, after a delay or along a backoff.

    The backoff is indexed by the message's attempt, as the broker counts it.
    """
    if callable(delay):
        raise ConfigurationError("defer_on_error: call it, as @defer_on_error() or @defer_on_error(5)")
    if isinstance(delay, (int, float)) and not 0 <= delay < math.inf:
        raise ConfigurationError(f"defer_on_error: delay must be 0 or more seconds, got {delay!r}")

    def defer(error: Exception) -> Signal:
        if isinstance(delay, Backoff):
            message = current_message()
            return Defer(delay.wait(message.attempt if message else 1), describe(error), cause=error)
        return Defer(delay, describe(error), cause=error)

    return lambda handler: _convert(handler, Layer("defer_on_error", on_error=True), defer)


def _dont_ack(error: Exception) -> Signal:
    return DontAck(describe(error), cause=error)


def _reject(error: Exception) -> Signal:
    return Reject(describe(error), cause=error)


def _convert(handler: H, layer: Layer, convert: Callable[[Exception], Signal]) -> H:
    def sync(inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        try:
            return inner(*args, **kwargs)
        except Exception as error:
            if is_signal(error):
                raise
            raise convert(error) from error

    async def async_(inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        try:
            return await inner(*args, **kwargs)
        except Exception as error:
            if is_signal(error):
                raise
            raise convert(error) from error

    return wrap(handler, layer, sync, async_)


def is_signal(error: BaseException) -> bool:
    """Whether an error, or any leaf of a group, has a meaning of its own to the pump."""
    if isinstance(error, BaseExceptionGroup):
        return any(is_signal(inner) for inner in error.exceptions)
    return isinstance(error, (Signal, ConfigurationError))
