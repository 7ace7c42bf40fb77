"""Pushes that are gathered and sent together; nothing is dropped, a full buffer makes its producers wait."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .errors import CircuitOpen, ClientError, Refused

if TYPE_CHECKING:
    from .api import Api
    from .messages import Outgoing

log = logging.getLogger("settled.client")


@dataclass(frozen=True, slots=True)
class BufferRules:
    """When a buffer is sent: at `count` messages or after `seconds`; at `limit` messages pushes wait."""

    count: int = 100
    seconds: float = 0.05
    limit: int = 10_000


class Buffer:
    """Gathers messages of any queue and sends them in order by a task of its own."""

    def __init__(self, api: Api, rules: BufferRules) -> None:
        self._api = api
        self._rules = rules
        self._items: list[Outgoing] = []
        self._changed = asyncio.Condition()
        self._due = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._failed: list[tuple[Outgoing, Refused]] = []

    async def add(self, items: list[Outgoing]) -> None:
        """Take these messages; waits while the buffer is full."""
        async with self._changed:
            while len(self._items) >= self._rules.limit:
                await self._changed.wait()
            self._items.extend(items)
            if self._task is None or self._task.done():
                self._task = asyncio.create_task(self._run())
            if len(self._items) >= self._rules.count:
                self._due.set()

    async def flush(self) -> None:
        """Wait until everything taken so far was sent; raises for messages the server refused for good."""
        self._due.set()
        async with self._changed:
            while self._items:
                self._due.set()
                await self._changed.wait()
        failed, self._failed = self._failed, []
        if failed:
            item, refused = failed[0]
            error = f"{len(failed)} buffered messages refused, first {item.transaction_id!r}: {refused.error}"
            raise Refused(refused.status, error, [(i.transaction_id, r.error) for i, r in failed])

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
                self._changed.notify_all()

    async def _send(self, batch: list[Outgoing]) -> None:
        """Send until it is through; a batch that is refused is sent one by one, so a bad one stands alone."""
        while True:
            try:
                await self._api.push(batch)
            except Refused as refused:
                if refused.status >= 500 or refused.status == 429:
                    await asyncio.sleep(0.5)
                    continue
                if len(batch) > 1:
                    for item in batch:
                        await self._send([item])
                else:
                    log.warning("buffered message %r was refused: %s", batch[0].transaction_id, refused)
                    self._failed.append((batch[0], refused))
            except CircuitOpen as pause:
                await asyncio.sleep(min(pause.retry_after, 1.0))
                continue
            except ClientError as error:
                log.warning("buffered pushes wait: %s", error)
                await asyncio.sleep(0.5)
                continue
            return

    async def close(self) -> None:
        """Flush, then end the task."""
        try:
            await self.flush()
        finally:
            if self._task is not None:
                self._task.cancel()
                await asyncio.gather(self._task, return_exceptions=True)
