"""The sync and the async face of a channel, from one implementation."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Coroutine, Sequence
from queue import SimpleQueue
from typing import Any, Protocol, TypeVar

from settled.clock import Bell, Clock
from settled.message import Delivery
from settled.settlement import Reject, describe
from settled.transports.base import AckFailed, AsyncChannel, Buffers, Capabilities, LeaseLost

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
    """The blocking face of an awaitable channel: every call runs on the app's loop, and is waited for.

    Only the acks of handlers that returned are left for the loop to send, many at a time. Whatever is asked
    for later finds them sent. Until then their leases are kept as those of messages in hand.
    """

    def __init__(self, inner: AsyncChannel, loop: asyncio.AbstractEventLoop) -> None:
        self._inner = inner
        self._loop = loop
        self._wakes = 0
        self._acks: deque[tuple[Delivery, AckFailed]] = deque()
        self._sending = False
        self._turn = asyncio.Lock()
        self._working: set[asyncio.Task[None]] = set()

    @property
    def capabilities(self) -> Capabilities:
        return self._inner.capabilities

    def buffered(self) -> Sequence[Delivery]:
        inner = self._inner.buffered() if isinstance(self._inner, Buffers) else ()
        return [*inner, *(delivery for delivery, _ in self._acks.copy())]

    def wake(self) -> None:
        self._wakes += 1
        self._inner.wake()

    def _wait(self, call: Coroutine[Any, Any, R]) -> R:
        # Every message of a handler with a buffer of one takes this way: a concurrent future is a longer one.
        answer: SimpleQueue[tuple[R, None] | tuple[None, Exception]] = SimpleQueue()
        self._loop.call_soon_threadsafe(self._begin, self._answer(call, answer))
        result, error = answer.get()
        if error is not None:
            raise error
        return result  # type: ignore[return-value]

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._working.add(task)
        task.add_done_callback(self._working.discard)

    async def _answer(
        self, call: Coroutine[Any, Any, R], answer: SimpleQueue[tuple[R, None] | tuple[None, Exception]]
    ) -> None:
        try:
            if self._acks or self._turn.locked():
                await self._send_acks()
            result = await call
        except Exception as error:
            answer.put((None, error))
        except BaseException as error:
            call.close()
            answer.put((None, ConnectionError(f"the app's loop is ending: {describe(error)}")))
            raise
        else:
            answer.put((result, None))

    def receive(self, limit: int, timeout: float) -> Sequence[Delivery]:
        return self._wait(self._receive(limit, timeout, self._wakes))

    async def _receive(self, limit: int, timeout: float, wakes: int) -> Sequence[Delivery]:
        # It may have been woken while it waited for acks to be sent.
        return await self._inner.receive(limit, timeout if self._wakes == wakes else 0.0)

    def ack(self, delivery: Delivery) -> None:
        self._wait(self._inner.ack(delivery))

    def ack_soon(self, delivery: Delivery, failed: AckFailed, *, last: bool) -> None:
        self._acks.append((delivery, failed))
        if not last:
            self.send_acks()

    def send_acks(self) -> None:
        if not self._sending:
            self._sending = True
            self._loop.call_soon_threadsafe(self._send)

    def nack(self, delivery: Delivery) -> None:
        self._wait(self._inner.nack(delivery))

    def requeue(self, delivery: Delivery, delay: float | None) -> None:
        self._wait(self._inner.requeue(delivery, delay))

    def reject(self, delivery: Delivery, rejection: Reject) -> None:
        self._wait(self._inner.reject(delivery, rejection))

    def extend(self, delivery: Delivery) -> None:
        asyncio.run_coroutine_threadsafe(self._inner.extend(delivery), self._loop).result()

    def close(self) -> None:
        self._wait(self._inner.close())

    def _send(self) -> None:
        self._begin(self._send_acks())

    async def _send_acks(self) -> None:
        # First: an ack that comes from now on is scheduled anew, so none is overlooked.
        self._sending = False
        async with self._turn:
            while self._acks:
                delivery, failed = self._acks.popleft()
                try:
                    await self._inner.ack(delivery)
                except Exception as error:
                    failed(delivery, error)
                    if self._wakes and not isinstance(error, LeaseLost):
                        self._give_up(error)
                except asyncio.CancelledError as error:
                    failed(delivery, ConnectionError(f"the ack was given up: {describe(error)}"))
                    task = asyncio.current_task()
                    if task is not None and task.cancelling():
                        raise

    def _give_up(self, error: Exception) -> None:
        """The broker is away, and the pump is to stop: it does not wait for each ack to fail by itself."""
        while self._acks:
            delivery, failed = self._acks.popleft()
            failed(delivery, error)
