"""Acks of what one request brought, sent in one request too."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, Generic, TypeVar

from settled.message import Delivery

logger = logging.getLogger("settled")

_SEND_AFTER = 0.05


class Batch:
    """What one request brought, and which of it waits to be acked."""

    __slots__ = ("open", "waiting")

    def __init__(self, size: int) -> None:
        self.open = size
        self.waiting: list[BatchedDelivery] = []


class BatchedDelivery(Delivery):
    """A delivery that came with others."""

    __slots__ = ("batch", "extending")

    batch: Batch | None
    extending: asyncio.Future[None] | None
    """A call under way that starts its lease anew, which must not reach the broker after one that ends it."""

    async def extend(self, call: Coroutine[Any, Any, None]) -> None:
        """Start its lease anew with this call."""
        self.extending = asyncio.ensure_future(call)
        try:
            await self.extending
        finally:
            self.extending = None

    async def be_still(self) -> None:
        """Wait until its lease is not being extended."""
        if self.extending is not None:
            await asyncio.wait([self.extending])


D = TypeVar("D", bound=BatchedDelivery)


class Together(Generic[D]):
    """Sends acks when the last of their batch is settled, or after 50 ms.

    The ack of a message that came alone, or is the last of its batch, is sent before its call returns. What
    fails of the others is logged, and comes again.
    """

    def __init__(
        self, channel: str, send: Callable[[Sequence[D]], Awaitable[Sequence[Exception | None]]]
    ) -> None:
        """`send` acks, and answers for each why it could not."""
        self._channel = channel
        self._send = send
        self._late: set[asyncio.Task[None]] = set()

    @staticmethod
    def brought(deliveries: Sequence[D]) -> Sequence[D]:
        """These came together."""
        batch = Batch(len(deliveries)) if len(deliveries) > 1 else None
        for delivery in deliveries:
            delivery.batch = batch
        return deliveries

    async def ack(self, delivery: D) -> None:
        waiting: list[D] = []
        batch, delivery.batch = delivery.batch, None
        if batch is not None:
            batch.open -= 1
            if batch.open > 0:
                batch.waiting.append(delivery)
                if len(batch.waiting) == 1:
                    task = asyncio.create_task(self._send_later(batch))
                    self._late.add(task)
                    task.add_done_callback(self._late.discard)
                return
            waiting = self._waiting(batch)
        *late, why = await self._send([*waiting, delivery])
        self._report(waiting, late)
        if why is not None:
            raise why

    async def settled(self, delivery: D) -> None:
        """It was settled another way, so its batch need not wait for it."""
        batch, delivery.batch = delivery.batch, None
        if batch is not None:
            batch.open -= 1
            if batch.open <= 0:
                await self._send_waiting(batch)

    async def close(self) -> None:
        """Send what waits."""
        for task in list(self._late):
            await task

    @staticmethod
    def _waiting(batch: Batch) -> list[D]:
        waiting, batch.waiting = batch.waiting, []
        return waiting  # type: ignore[return-value]

    async def _send_later(self, batch: Batch) -> None:
        await asyncio.sleep(_SEND_AFTER)
        await self._send_waiting(batch)

    async def _send_waiting(self, batch: Batch) -> None:
        waiting: list[D] = self._waiting(batch)
        if waiting:
            try:
                self._report(waiting, await self._send(waiting))
            except Exception as error:
                self._report(waiting, [error] * len(waiting))

    def _report(self, deliveries: Sequence[D], failures: Sequence[Exception | None]) -> None:
        for delivery, why in zip(deliveries, failures, strict=True):
            if why is not None:
                logger.error(
                    "settle failed, left to the broker message_id=%s channel=%s: %s",
                    delivery.id,
                    self._channel,
                    why,
                )
