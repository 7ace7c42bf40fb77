"""The consume loop: pop, hand to the handler, call back, renew leases meanwhile, until told to stop."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable, Generator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

from .errors import CircuitOpen, ClientError, Refused, Unreachable, Unsettled
from .face import AsyncFace, SyncFace, operation

if TYPE_CHECKING:
    from .api import Api
    from .messages import Message

T = TypeVar("T")
Handler = Callable[[Any], Any]
OnSuccess = Callable[[Any], Any]
OnError = Callable[[Any, Exception], Any]

LOOK = 0.1
"""How often a loop that waits looks whether it is to stop."""

log = logging.getLogger("settled.client")


@dataclass(frozen=True, slots=True)
class Plan(Generic[T]):
    """Everything a consume loop needs to know."""

    pop: Callable[[int], Awaitable[list[Message[T]]]]
    """Takes up to so many messages."""
    batch: int
    auto_ack: bool
    handler: Handler
    each: bool
    workers: int
    limit: int | None
    idle: float | None
    renew_every: float | None
    renew_seconds: float


class Consumption(Generic[T]):
    """A consume loop that is ready to run; `on_success` and `on_error` say what happens after the handler."""

    def __init__(self, api: Api, plan: Plan[T]) -> None:
        self._api = api
        self._plan = plan
        self._on_success: OnSuccess | None = None
        self._on_error: OnError | None = None
        self._stopping = False
        self._tasks: list[asyncio.Task[None]] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._asked = 0
        self._taken = 0

    def on_success(self, callback: OnSuccess) -> Self:
        """Call `callback(message)` when the handler returned; typically it acks.

        A server that is away and a lease that is over do not end the loop: that is logged, and the message
        comes again when its lease ends. Whatever else the callback raises ends the loop.
        """
        self._on_success = callback
        return self

    def on_error(self, callback: OnError) -> Self:
        """Call `callback(message, error)` when the handler raised; typically it nacks. The loop goes on.

        What the callback itself raises is treated as with `on_success`.
        """
        self._on_error = callback
        return self

    def stop(self) -> None:
        """End the loop after the message in hand; may be called from a handler or another thread.

        What was taken with `auto_ack` is handled first: nobody else would get it.
        """
        self._stopping = True
        if self._loop is not None and self._tasks:
            self._loop.call_soon_threadsafe(lambda: None)

    @operation
    async def run(self) -> int:
        """Consume until the limit, the idle time or `stop()`; returns how many messages were handled."""
        return await self._consume()

    async def _consume(self) -> int:
        self._loop = asyncio.get_running_loop()
        self._tasks = [asyncio.create_task(self._worker()) for _ in range(self._plan.workers)]
        try:
            await asyncio.gather(*self._tasks)
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
        return self._taken

    async def _worker(self) -> None:
        plan = self._plan
        loop = asyncio.get_running_loop()
        heard = loop.time()
        while not self._stopping and (plan.limit is None or self._taken < plan.limit):
            size = self._claim()
            if size is None:
                # Other workers have asked for all that is left; what they do not get is ours.
                await asyncio.sleep(LOOK)
                if plan.idle is not None and loop.time() - heard >= plan.idle:
                    return
                continue
            messages: list[Message[T]] = []
            try:
                messages = await self._next(size)
            except CircuitOpen as pause:
                await asyncio.sleep(min(pause.retry_after, 1.0))
                continue
            except (Unreachable, Refused) as error:
                if isinstance(error, Refused) and error.status < 500:
                    raise
                log.warning("consumer waits for the server: %s", error)
                await asyncio.sleep(1.0)
                continue
            finally:
                self._asked -= size - len(messages)
            if messages:
                await self._handle_all(messages)
                heard = loop.time()
            elif plan.idle is not None and loop.time() - heard >= plan.idle:
                return

    def _claim(self) -> int | None:
        """How many to ask for, so that all workers together never take more than the limit; None if none."""
        size, limit = self._plan.batch, self._plan.limit
        if limit is not None:
            if self._asked >= limit:
                return None
            size = min(size, limit - self._asked)
        self._asked += size
        return size

    async def _next(self, size: int) -> list[Message[T]]:
        """A pop that `stop()` can interrupt, unless it settles what it takes."""
        popping = asyncio.ensure_future(self._plan.pop(size))
        try:
            while not popping.done():
                await asyncio.wait({popping}, timeout=LOOK)
                if self._stopping and not self._plan.auto_ack and not popping.done():
                    return []
            return popping.result()
        finally:
            popping.cancel()

    async def _handle_all(self, messages: list[Message[T]]) -> None:
        renewal = self._renew(messages) if self._plan.renew_every else None
        left = list(messages)
        try:
            if not self._plan.each:
                left.clear()
                await self._handle(messages)
                self._taken += len(messages)
                return
            while left and not (self._stopping and not self._plan.auto_ack):
                await self._handle(left.pop(0))
                self._taken += 1
        finally:
            if left and self._plan.auto_ack:
                # A handler or a callback raised, or the loop was cancelled.
                log.error("acknowledged on delivery, but not handled: %s", _names(left))
            if renewal is not None:
                renewal.cancel()
                await asyncio.gather(renewal, return_exceptions=True)

    async def _handle(self, subject: Message[T] | list[Message[T]]) -> None:
        try:
            await _call(self._plan.handler, subject)
        except Exception as error:
            if self._on_error is None:
                raise
            log.debug("handler failed: %s", error)
            await self._call_back("on_error", self._on_error, subject, error)
        else:
            if self._on_success is not None:
                await self._call_back("on_success", self._on_success, subject)

    async def _call_back(
        self, name: str, callback: Callable[..., Any], subject: Message[T] | list[Message[T]], *args: Any
    ) -> None:
        """A server that is away or a lease that is over must not end a consumer: others wait for it."""
        try:
            await _call(callback, subject, *args)
        except (Unreachable, CircuitOpen, Refused) as error:
            if isinstance(error, Refused) and error.status < 500 and not isinstance(error, Unsettled):
                raise
            messages = subject if isinstance(subject, list) else [subject]
            log.error(  # noqa: TRY400 - the line says it, and a traceback of our own calls no more
                "%s failed for %s: %s; what is not settled comes again when its lease ends",
                name,
                _names(messages),
                error,
            )
            if isinstance(error, CircuitOpen):
                await asyncio.sleep(min(error.retry_after, 1.0))

    def _renew(self, messages: list[Message[T]]) -> asyncio.Task[None]:
        leases = {message.lease_id for message in messages if message.lease_id}

        async def renew() -> None:
            while True:
                await asyncio.sleep(self._plan.renew_every or 0)
                for lease in leases:
                    try:
                        await self._api.extend(lease, self._plan.renew_seconds)
                    except ClientError as error:
                        log.warning("lease %s was not renewed: %s", lease, error)

        return asyncio.create_task(renew())


class AsyncConsumption(Consumption[T], AsyncFace):
    """Awaiting it runs it."""

    def __await__(self) -> Generator[Any, None, int]:
        return self._consume().__await__()


class SyncConsumption(Consumption[T], SyncFace):
    """`run()` blocks; handlers and callbacks run in threads, so they may use the sync client."""


def _names(messages: list[Message[T]]) -> str:
    return ", ".join(f"message {m.transaction_id!r} of {m.queue!r}" for m in messages)


async def _call(function: Callable[..., Any], *args: Any) -> Any:
    """Await a coroutine function; run a plain one in a thread, so that it may block."""
    if inspect.iscoroutinefunction(function):
        return await function(*args)
    result = await asyncio.to_thread(function, *args)
    if inspect.isawaitable(result):
        return await result
    return result
