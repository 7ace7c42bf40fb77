"""Pushes that are gathered and sent together; nothing is dropped, a full buffer makes its producers wait."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from .errors import CircuitOpen, ClientError, Closed, Refused

if TYPE_CHECKING:
    from .api import Api
    from .messages import Outgoing

SHOWN = 10
"""How many refused messages an error's text names."""

log = logging.getLogger("settled.client")


@dataclass(frozen=True, slots=True)
class BufferRules:
    """When a buffer is sent: at `count` messages or after `seconds`; at `limit` messages pushes wait."""

    count: int = 100
    seconds: float = 0.05
    limit: int = 10_000


Failed: TypeAlias = "tuple[Outgoing, Exception]"


class Buffer:
    """Gathers messages of any queue and sends them in order by a task of its own."""

    def __init__(self, api: Api, rules: BufferRules) -> None:
        self._api = api
        self._rules = rules
        self._items: list[Outgoing] = []
        self._sent = 0
        self._changed = asyncio.Condition()
        self._due = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._failed: list[Failed] = []
        self._closed = False

    async def add(self, items: list[Outgoing]) -> None:
        """Take these messages; waits while the buffer is full."""
        async with self._changed:
            while len(self._items) >= self._rules.limit and not self._closed:
                await self._changed.wait()
            if self._closed:
                raise Closed
            self._items.extend(items)
            if self._task is None or self._task.done():
                self._task = asyncio.create_task(self._run())
            if len(self._items) >= self._rules.count:
                self._due.set()

    async def flush(self) -> list[Failed]:
        """Wait until everything taken so far was sent; returns what could not be, and why."""
        async with self._changed:
            all_of_it = self._sent + len(self._items)
            while self._sent < all_of_it:
                self._due.set()
                await self._changed.wait()
        failed, self._failed = self._failed, []
        return failed

    async def _run(self) -> None:
        while self._items:
            if len(self._items) < self._rules.count:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._due.wait(), self._rules.seconds)
            self._due.clear()
            batch = self._items[: self._rules.count]
            await self._send(batch)
            async with self._changed:
                del self._items[: len(batch)]
                self._sent += len(batch)
                self._changed.notify_all()

    async def _send(self, batch: list[Outgoing]) -> None:
        """Send until it is through; a batch that is refused is sent in parts, so a bad one stands alone.

        Of a batch that does not fit into its queue, what fits is sent; the next one waits for room.
        """
        while True:
            try:
                await self._api.push(batch, until_room=len(batch) == 1)
            except CircuitOpen as pause:
                await asyncio.sleep(min(pause.retry_after, 1.0))
                continue
            except Exception as error:
                full = isinstance(error, Refused) and error.status == 429
                if not full and _may_pass(error):
                    log.warning("buffered pushes wait: %s", error)
                    await asyncio.sleep(0.5)
                    continue
                if len(batch) > 1:
                    size = len(batch) // 2 if full else 1
                    for start in range(0, len(batch), size):
                        await self._send(batch[start : start + size])
                elif full:
                    await asyncio.sleep(0.5)
                    continue
                else:
                    log.warning("buffered message %r was refused: %s", batch[0].transaction_id, error)
                    self._failed.append((batch[0], error))
            return

    async def close(self) -> list[Failed]:
        """Flush, then end the task; returns what could not be sent, and why."""
        self._closed = True
        try:
            return await self.flush()
        finally:
            if self._items:
                ids = ", ".join(repr(item.transaction_id) for item in self._items)
                log.error("%d buffered messages were not sent: %s", len(self._items), ids)
            if self._task is not None:
                self._task.cancel()
                await asyncio.gather(self._task, return_exceptions=True)
            async with self._changed:
                self._changed.notify_all()


class Buffers:
    """The buffers of one client, one for each set of rules."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self._buffers: dict[BufferRules, Buffer] = {}
        self._closed = False

    def of(self, rules: BufferRules) -> Buffer:
        """The buffer with these rules."""
        if self._closed:
            raise Closed
        if rules not in self._buffers:
            self._buffers[rules] = Buffer(self._api, rules)
        return self._buffers[rules]

    async def flush(self) -> None:
        """Send everything that is gathered; Refused names every message that the server refused."""
        _raise_for(await asyncio.gather(*(buffer.flush() for buffer in self._buffers.values())))

    async def close(self) -> None:
        """Send everything and end; Refused names every message that the server refused."""
        self._closed = True
        _raise_for(await asyncio.gather(*(buffer.close() for buffer in self._buffers.values())))


def _may_pass(error: Exception) -> bool:
    """Whether the same push may go through later."""
    if isinstance(error, Refused):
        return error.status >= 500
    return isinstance(error, ClientError)


def _raise_for(failures: list[list[Failed]]) -> None:
    failed = [each for failures_of_one in failures for each in failures_of_one]
    if not failed:
        return
    shown = "; ".join(f"{item.transaction_id!r} of {item.queue!r}: {_said(e)}" for item, e in failed[:SHOWN])
    more = f"; and {len(failed) - SHOWN} more, all of them in `body`" if len(failed) > SHOWN else ""
    status = next((error.status for _, error in failed if isinstance(error, Refused)), 400)
    body = [(item.transaction_id, _said(error)) for item, error in failed]
    raise Refused(status, f"{len(failed)} buffered messages refused: {shown}{more}", body)


def _said(error: Exception) -> str:
    return error.error if isinstance(error, Refused) else f"{type(error).__name__}: {error}"
