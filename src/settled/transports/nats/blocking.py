"""The blocking face of a channel, with acks that do not wait for the loop."""

from __future__ import annotations

import asyncio
from collections import deque

from settled.message import Delivery
from settled.transports.faces import BlockingChannel
from settled.transports.nats.channel import NatsChannel
from settled.transports.nats.connection import logger


class NatsBlockingChannel(BlockingChannel):
    """An ack is sent and not answered, so the handler's thread only leaves it for the loop to send."""

    def __init__(self, inner: NatsChannel, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(inner, loop)
        self._channel = inner
        self._acks: deque[Delivery] = deque()
        self._sending = False

    def ack(self, delivery: Delivery) -> None:
        if self._channel.confirms or not self._channel.is_open:
            super().ack(delivery)
            return
        self._acks.append(delivery)
        if not self._sending:
            self._sending = True
            self._loop.call_soon_threadsafe(self._send)

    def _send(self) -> None:
        asyncio.ensure_future(self._send_acks())  # noqa: RUF006 - it ends by itself, and close() sends the rest

    async def _send_acks(self) -> None:
        # First: an ack that comes from now on is scheduled anew, so none is overlooked.
        self._sending = False
        while self._acks:
            delivery = self._acks.popleft()
            try:
                await self._channel.ack(delivery)
            except Exception as error:
                logger.error(
                    "ack not sent, left to the broker message_id=%s cause=%r", delivery.id, str(error)
                )

    def close(self) -> None:
        self._wait(self._send_acks())
        super().close()
