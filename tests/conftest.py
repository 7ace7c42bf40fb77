"""What every test may use."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest

from settled import App, ConfigurationError, Message
from settled.testing import Rehearsal
from settled.transports.lanes import QueueOptions


class Order(msgspec.Struct):
    id: int
    kind: str = "good"


class Stage:
    """An app whose handlers are written once and run by the Reactor or by the Proactor."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.app = App()
        self.calls: list[Any] = []
        self._rehearsal: Rehearsal | None = None
        self.options: QueueOptions | None = None

    def implicit(
        self, behave: Callable[[Order], Any], *decorators: Any, channel: str = "orders", **options: Any
    ) -> None:
        """Subscribe a handler that takes the payload; `behave` is its body."""
        if self.kind == "proactor":

            async def handle_async(order: Order) -> None:
                self.calls.append(order)
                behave(order)

            handler: Any = handle_async
        else:

            def handle(order: Order) -> None:
                self.calls.append(order)
                behave(order)

            handler = handle
        for decorate in reversed(decorators):
            handler = decorate(handler)
        self.app.subscriber(channel, **options)(handler)

    def explicit(
        self, behave: Callable[[Message[Order]], Any], channel: str = "orders", **options: Any
    ) -> None:
        """Subscribe a handler that takes the message; what `behave` returns is awaited by an async one."""
        if self.kind == "proactor":

            async def handle_async(message: Message[Order]) -> None:
                self.calls.append(message)
                for awaitable in _several(behave(message)):
                    await awaitable

            self.app.subscriber(channel, **options)(handle_async)
        else:

            def handle(message: Message[Order]) -> None:
                self.calls.append(message)
                behave(message)

            self.app.subscriber(channel, **options)(handle)

    @property
    def rehearsal(self) -> Rehearsal:
        if self._rehearsal is None:
            self._rehearsal = Rehearsal(self.app, self.options)
        return self._rehearsal

    def publish(self, *ids: int, lane: str | None = None, channel: str = "orders") -> list[str]:
        return [
            self.rehearsal.publish(channel, Order(number), id=f"m{number}", lane=lane).id for number in ids
        ]

    def run(self, limit: int = 1_000) -> None:
        """Until idle, or until a configuration error stops it, which the log tells."""
        with contextlib.suppress(ConfigurationError):
            self.rehearsal.run_until_idle(limit)


def _several(result: Any) -> list[Any]:
    if result is None:
        return []
    return list(result) if isinstance(result, (list, tuple)) else [result]


@pytest.fixture(params=["reactor", "proactor"])
def stage(request: pytest.FixtureRequest) -> Stage:
    """The same suite runs on both drivers."""
    return Stage(request.param)


def raising(error: BaseException | Callable[[], BaseException]) -> Callable[[Any], None]:
    """A handler's body that raises."""

    def behave(_: Any) -> None:
        raise error() if callable(error) else error

    return behave


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """All that Settled logs, from debug on."""
    with caplog.at_level(logging.DEBUG, logger="settled"):
        yield caplog
