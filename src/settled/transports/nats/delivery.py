"""A JetStream message as it is handed out."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime

from nats.aio.msg import Msg

from settled.message import Delivery, Metadata

MSG_ID = "Nats-Msg-Id"
_NO_HEADERS: Mapping[str, str] = {}
_SHORT = 9


class NatsDelivery(Delivery):
    """Everything the server says of a delivery is in the subject its ack goes to."""

    __slots__ = ("_at", "_tokens", "reply")

    def __init__(self, message: Msg) -> None:
        reply = message.reply
        # $JS.ACK[.domain.account].stream.consumer.delivered.stream_seq.consumer_seq.time.pending[.random]
        tokens = reply.split(".")
        at = 2 if len(tokens) == _SHORT else 4
        headers = message.headers or _NO_HEADERS
        self.id = headers.get(MSG_ID) or f"{tokens[at]}:{tokens[at + 3]}"
        self.subject = message.subject
        self.data = message.data
        self.headers = headers
        self.attempt = int(tokens[at + 2])
        self.lane = None
        self.ordered = False
        self.settled = False
        self.handled = False
        self.reply = reply
        self._tokens = tokens
        self._at = at

    @property
    def stream(self) -> str:
        return self._tokens[self._at]

    @property
    def consumer(self) -> str:
        return self._tokens[self._at + 1]

    @property
    def sequence(self) -> int:
        """In the stream."""
        return int(self._tokens[self._at + 3])

    @property
    def stored_ns(self) -> int:
        """When the stream took it, in nanoseconds since the epoch."""
        return int(self._tokens[self._at + 5])

    def metadata(self) -> Metadata:
        return Metadata(
            stream_sequence=self.sequence,
            consumer_sequence=int(self._tokens[self._at + 4]),
            timestamp=datetime.fromtimestamp(self.stored_ns / 1e9, UTC),
            pending=int(self._tokens[self._at + 6]),
            redelivery_count=self.attempt - 1,
            consumer=self.consumer,
            lease=self.reply,
        )
