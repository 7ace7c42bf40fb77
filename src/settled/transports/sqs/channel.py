"""A subscription's end of a queue: receiving, and settling by receipt."""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, Protocol

from botocore.exceptions import BotoCoreError, ClientError

from settled.message import Delivery, Metadata
from settled.settlement import Reject
from settled.transports.base import Capabilities, LeaseLost, Outgoing, Published, Source, retry_delay
from settled.transports.letters import destination, letter
from settled.transports.polling import Poll
from settled.transports.sqs.queues import LONGEST_VISIBILITY, Found, Queue
from settled.transports.sqs.wire import data_of, headers_of
from settled.transports.together import BatchedDelivery, Together

logger = logging.getLogger("settled")

_AT_ONCE = 10
"""How many messages one request may have."""
_ANOTHER = {
    "AWS.SimpleQueueService.MessageNotInflight",
    "AWS.SimpleQueueService.ReceiptHandleIsInvalid",
    "MessageNotInflight",
    "ReceiptHandleIsInvalid",
}
"""What SQS says of a receipt that is not good any more."""


class Api(Protocol):
    """What a channel needs of its transport."""

    async def call(self, operation: str, **arguments: Any) -> Any: ...

    async def queue(self, name: str, settings: Queue | None = None) -> Found: ...

    async def push(self, message: Outgoing) -> Published: ...


class SqsDelivery(BatchedDelivery):
    """A message under its visibility timeout."""

    __slots__ = ("expires", "receipt", "received", "sent")

    def __init__(self, raw: Mapping[str, Any], queue: Found, visibility: int) -> None:
        facts = raw["Attributes"]
        headers = headers_of(raw.get("MessageAttributes", {}))
        super().__init__(
            id=headers.pop("settled-id", "") or raw["MessageId"],
            subject=queue.name,
            data=data_of(raw["Body"], headers.pop("settled-encoding", "")),
            headers=headers,
            attempt=int(facts["ApproximateReceiveCount"]),
            lane=facts.get("MessageGroupId"),
            ordered=queue.fifo,
        )
        self.receipt: str = raw["ReceiptHandle"]
        self.sent = int(facts["SentTimestamp"]) / 1000
        self.received = time.monotonic()
        self.expires = self.received + visibility
        self.batch = None
        self.extending = None

    def longest(self) -> int:
        """How long it can be hidden from now on: SQS counts from when it was received."""
        return int(LONGEST_VISIBILITY - (time.monotonic() - self.received)) - 1

    def metadata(self) -> Metadata:
        return Metadata(
            timestamp=datetime.fromtimestamp(self.sent, UTC),
            redelivery_count=self.attempt - 1,
            lane=self.lane,
            lease=self.receipt,
        )


CAPABILITIES = Capabilities(wakes=True, counts_untried=True)


class SqsChannel:
    """One subscription's end of a queue.

    Nack sets the visibility timeout to 0, as FR-13 asks. SQS counts every receive as an attempt, so a message
    that was given back has one more too.

    With a buffer of one, an ack has reached SQS when its call returns. With a larger one, the acks of what
    one request brought are sent together, after at most 50 ms; one that fails is logged, and comes again.
    """

    def __init__(self, transport: Api, source: Source, settings: Queue, known: Found | None) -> None:
        self._transport = transport
        self._source = source
        self._settings = settings
        self._poll: Poll[SqsDelivery] = Poll(self._fetch)
        self._together: Together[SqsDelivery] = Together(source.channel, self._delete_all)
        self.capabilities = CAPABILITIES
        if known is not None:
            lease = float(settings.visibility or known.visibility)
            self.capabilities = replace(CAPABILITIES, lease=lease, max_attempts=known.max_attempts)

    async def receive(self, limit: int, timeout: float) -> Sequence[Delivery]:
        return await self._poll.take(limit, timeout)

    async def _fetch(self, limit: int, wait: bool) -> Sequence[SqsDelivery]:
        queue = await self._transport.queue(self._source.channel, self._settings)
        visibility = self._settings.visibility or queue.visibility
        answer = await self._transport.call(
            "receive_message",
            QueueUrl=queue.url,
            MaxNumberOfMessages=min(limit, _AT_ONCE),
            WaitTimeSeconds=self._settings.wait if wait else 0,
            VisibilityTimeout=visibility,
            MessageAttributeNames=["All"],
            MessageSystemAttributeNames=["All"],
        )
        taken = [SqsDelivery(raw, queue, visibility) for raw in answer.get("Messages", ())]
        return self._together.brought(taken)

    async def ack(self, delivery: Delivery) -> None:
        await self._together.ack(self._mine(delivery))

    async def nack(self, delivery: Delivery) -> None:
        mine = self._mine(delivery)
        await mine.be_still()
        await self._show_after(mine, 0)
        await self._together.settled(mine)

    async def requeue(self, delivery: Delivery, delay: float | None) -> None:
        mine = self._mine(delivery)
        wanted = math.ceil(retry_delay(delay, self._settings.backoff, mine.attempt))
        longest = mine.longest()
        if wanted > longest:
            logger.warning(
                "sqs: %s: message %s asks for a delay of %d s; SQS hides a message for 12 h at most, so it "
                "comes again then",
                mine.subject,
                mine.id,
                wanted,
            )
        await mine.be_still()
        await self._show_after(mine, max(0, min(wanted, longest)))
        await self._together.settled(mine)

    async def reject(self, delivery: Delivery, rejection: Reject) -> None:
        mine = self._mine(delivery)
        queue = await self._transport.queue(self._source.channel, self._settings)
        to = destination(self._source, rejection) or queue.dead_letters
        # Stored and confirmed first: if that fails, the message is still the queue's.
        await self._transport.push(letter(mine, rejection, "", to))
        await self._delete(mine)
        await self._together.settled(mine)

    async def extend(self, delivery: Delivery) -> None:
        mine = self._mine(delivery)
        queue = await self._transport.queue(self._source.channel, self._settings)
        visibility = min(self._settings.visibility or queue.visibility, mine.longest())
        if visibility <= 0:
            raise _lost(mine, "SQS hides a message for 12 h at most, and these are over")
        began = time.monotonic()
        await mine.extend(self._show_after(mine, visibility))
        mine.expires = began + visibility

    def buffered(self) -> Sequence[Delivery]:
        return self._poll.buffered()

    def wake(self) -> None:
        self._poll.wake()

    async def close(self) -> None:
        for delivery in await self._poll.close():
            with contextlib.suppress(LeaseLost, ClientError, BotoCoreError):
                await self._show_after(delivery, 0)
        await self._together.close()

    def _mine(self, delivery: Delivery) -> SqsDelivery:
        if not isinstance(delivery, SqsDelivery):
            raise TypeError(f"message {delivery.id!r} was not received from this transport")
        if time.monotonic() >= delivery.expires:
            # SQS takes a late delete and may not carry it out, so we have to know ourselves.
            raise _lost(delivery, "its visibility timeout is over")
        return delivery

    async def _show_after(self, mine: SqsDelivery, delay: int) -> None:
        await self._on_receipt("change_message_visibility", mine, VisibilityTimeout=delay)

    async def _delete(self, mine: SqsDelivery) -> None:
        await self._on_receipt("delete_message", mine)

    async def _on_receipt(self, what: str, mine: SqsDelivery, **arguments: Any) -> None:
        queue = await self._transport.queue(self._source.channel, self._settings)
        try:
            await self._transport.call(what, QueueUrl=queue.url, ReceiptHandle=mine.receipt, **arguments)
        except ClientError as error:
            code, why = error.response["Error"]["Code"], error.response["Error"].get("Message", "")
            if code in _ANOTHER or "receipt handle has expired" in why:
                raise _lost(mine, why) from error
            raise

    async def _delete_all(self, acked: Sequence[SqsDelivery]) -> list[Exception | None]:
        if len(acked) == 1:
            await self._delete(acked[0])
            return [None]
        queue = await self._transport.queue(self._source.channel, self._settings)
        entries = [{"Id": str(n), "ReceiptHandle": mine.receipt} for n, mine in enumerate(acked)]
        answer = await self._transport.call("delete_message_batch", QueueUrl=queue.url, Entries=entries)
        failed = {int(one["Id"]): one for one in answer.get("Failed", ())}
        return [
            _lost(mine, failed[n].get("Message") or failed[n]["Code"]) if n in failed else None
            for n, mine in enumerate(acked)
        ]


def _lost(delivery: SqsDelivery, why: str) -> LeaseLost:
    return LeaseLost(f"queue {delivery.subject!r}: message {delivery.id!r}: {why}")
