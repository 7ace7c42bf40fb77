"""The blocking face of a classic group's channel, which asks the loop for nothing that is in memory."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from settled.message import Delivery
from settled.transports.base import AckFailed
from settled.transports.faces import BlockingChannel
from settled.transports.kafka.channel import KafkaChannel


class KafkaBlockingChannel(BlockingChannel):
    """Records that came with others are handed out, and noted as acked, in the handler's own thread."""

    def __init__(self, inner: KafkaChannel, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(inner, loop)
        self._channel = inner

    def receive(self, limit: int, timeout: float) -> Sequence[Delivery]:
        return self._channel.at_hand(limit) or super().receive(limit, timeout)

    def ack_soon(self, delivery: Delivery, failed: AckFailed, *, last: bool) -> None:
        within = self._channel.settled(delivery)
        if not self._channel.commits.due(within):
            self._loop.call_soon_threadsafe(self._channel.commits.within, within)
