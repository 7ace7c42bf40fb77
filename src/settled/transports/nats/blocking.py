"""The blocking face of a channel, with acks that do not wait for the loop."""

from __future__ import annotations

import asyncio

from settled.message import Delivery
from settled.transports.faces import BlockingChannel
from settled.transports.nats.channel import NatsChannel
from settled.transports.nats.connection import logger


class NatsBlockingChannel(BlockingChannel):
    """An ack is sent and not answered, so a handler that acks by itself does not wait either."""

    def __init__(self, inner: NatsChannel, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(inner, loop)
        self._channel = inner

    def ack(self, delivery: Delivery) -> None:
        if self._channel.confirms or not self._channel.is_open:
            super().ack(delivery)
        else:
            self.ack_soon(delivery, _not_sent, last=False)


def _not_sent(delivery: Delivery, error: Exception) -> None:
    logger.error("ack not sent, left to the broker message_id=%s cause=%r", delivery.id, str(error))
