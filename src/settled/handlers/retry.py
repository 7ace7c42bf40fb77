"""Retry in place, before anybody settles anything."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, TypeVar

from settled.backoff import Backoff
from settled.handlers.layers import Layer, wrap
from settled.handlers.on_error import is_signal
from settled.message import current_message
from settled.signals import ConfigurationError

H = TypeVar("H", bound=Callable[..., Any])

_EXTEND_EVERY = 5.0


def retry(
    attempts: int = 3,
    backoff: Backoff | None = None,
    *,
    on: type[Exception] | tuple[type[Exception], ...] = Exception,
    sleep: Callable[[float], None] = time.sleep,
    sleep_async: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> Callable[[H], H]:
    """Call the handler up to `attempts` times; signals are not retried.

    While it waits, the message's lease is extended, so that nobody else is given the message meanwhile.
    """
    if not isinstance(attempts, int) or attempts < 1:
        raise ConfigurationError(f"retry: attempts must be at least 1, got {attempts!r}")
    curve = backoff or Backoff()

    def sync(inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        for attempt in range(1, attempts + 1):
            try:
                return inner(*args, **kwargs)
            except on as error:
                if is_signal(error) or attempt == attempts:
                    raise
            for wait in _slices(curve.wait(attempt)):
                _extend_now()
                sleep(wait)
        return None

    async def async_(inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        for attempt in range(1, attempts + 1):
            try:
                return await inner(*args, **kwargs)
            except on as error:
                if is_signal(error) or attempt == attempts:
                    raise
            for wait in _slices(curve.wait(attempt)):
                message = current_message()
                if message is not None and not message.settled:
                    with contextlib.suppress(Exception):
                        await message.in_progress()
                await sleep_async(wait)
        return None

    return lambda handler: wrap(handler, Layer("retry"), sync, async_)


def _slices(seconds: float) -> Iterator[float]:
    """A wait, cut so that a lease can be extended in between."""
    while seconds > _EXTEND_EVERY:
        yield _EXTEND_EVERY
        seconds -= _EXTEND_EVERY
    yield seconds


def _extend_now() -> None:
    message = current_message()
    if message is not None and not message.settled:
        # The broker is the authority: if the lease is gone, settling will say so.
        with contextlib.suppress(Exception):
            message.in_progress()
