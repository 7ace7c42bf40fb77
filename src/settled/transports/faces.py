"""The sync and the async face of a channel, from one implementation."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, Protocol, TypeVar

from settled.clock import Bell, Clock
from settled.message import Delivery
from settled.settlement import Reject
from settled.transports.base import AsyncChannel, Buffers, Capabilities

R = TypeVar("R")


class Immediate(Protocol):
    """A channel whose calls never block: the two faces below do the waiting."""

    capabilities: Capabilities
    bell: Bell
    clock: Clock

    def take(self, limit: int) -> Sequence[Delivery]:
        """Up to `limit` messages that are there now."""

    def due(self) -> float | None:
        """When the next delayed message or expired lease will be there; None if nothing is on its way."""

    def ack(self, delivery: Delivery) -> None: ...

    def nack(self, delivery: Delivery) -> None: ...

    def requeue(self, delivery: Delivery, delay: float | None) -> None: ...

    def reject(self, delivery: Delivery, rejection: Reject) -> None: ...

    def extend(self, delivery: Delivery) -> None: ...


class ImmediateChannel:
    """The blocking face of an immediate channel."""

    def __init__(self, inner: Immediate) -> None:
        self._inner = inner
        self.capabilities = inner.capabilities
        self.ack = inner.ack
        self.nack = inner.nack
        self.requeue = inner.requeue
        self.reject = inner.reject
        self.extend = inner.extend
        self.wake = inner.bell.ring

    def receive(self, limit: int, timeout: float) -> Sequence[Delivery]:
        inner = self._inner
        seen = inner.bell.rung
        taken = inner.take(limit)
        if taken or timeout <= 0:
            return taken
        inner.clock.wait(inner.bell, seen, _until_due(inner, timeout))
        return inner.take(limit)

    def close(self) -> None:
        """Nothing is held."""


class AsyncImmediateChannel:
    """The awaitable face of an immediate channel."""

    def __init__(self, inner: Immediate) -> None:
        self._inner = inner
        self.capabilities = inner.capabilities
        self.wake = inner.bell.ring

    async def receive(self, limit: int, timeout: float) -> Sequence[Delivery]:
        inner = self._inner
        seen = inner.bell.rung
        taken = inner.take(limit)
        if taken or timeout <= 0:
            return taken
        await inner.clock.wait_async(inner.bell, seen, _until_due(inner, timeout))
        return inner.take(limit)

    async def ack(self, delivery: Delivery) -> None:
        self._inner.ack(delivery)

    async def nack(self, delivery: Delivery) -> None:
        self._inner.nack(delivery)

    async def requeue(self, delivery: Delivery, delay: float | None) -> None:
        self._inner.requeue(delivery, delay)

    async def reject(self, delivery: Delivery, rejection: Reject) -> None:
        self._inner.reject(delivery, rejection)

    async def extend(self, delivery: Delivery) -> None:
        self._inner.extend(delivery)

    async def close(self) -> None:
        """Nothing is held."""


def _until_due(inner: Immediate, timeout: float) -> float:
    due = inner.due()
    return timeout if due is None else max(0.0, min(timeout, due - inner.clock.now()))


class BlockingChannel:
    """The blocking face of an awaitable channel: every call runs on the app's loop, and is waited for."""

    def __init__(self, inner: AsyncChannel, loop: asyncio.AbstractEventLoop) -> None:
        self._inner = inner
        self._loop = loop
        self.wake = inner.wake

    @property
    def capabilities(self) -> Capabilities:
        return self._inner.capabilities

    def buffered(self) -> Sequence[Delivery]:
        return self._inner.buffered() if isinstance(self._inner, Buffers) else ()

    def _wait(self, call: Coroutine[Any, Any, R]) -> R:
        return asyncio.run_coroutine_threadsafe(call, self._loop).result()

    def receive(self, limit: int, timeout: float) -> Sequence[Delivery]:
        return self._wait(self._inner.receive(limit, timeout))

    def ack(self, delivery: Delivery) -> None:
        self._wait(self._inner.ack(delivery))

    def nack(self, delivery: Delivery) -> None:
        self._wait(self._inner.nack(delivery))

    def requeue(self, delivery: Delivery, delay: float | None) -> None:
        self._wait(self._inner.requeue(delivery, delay))

    def reject(self, delivery: Delivery, rejection: Reject) -> None:
        self._wait(self._inner.reject(delivery, rejection))

    def extend(self, delivery: Delivery) -> None:
        self._wait(self._inner.extend(delivery))

    def close(self) -> None:
        self._wait(self._inner.close())
