"""A subscriber's end of a subscription: pulling, and settling by ack id."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Sequence
from typing import Any, Protocol

from google.api_core.exceptions import DeadlineExceeded, GoogleAPICallError
from google.pubsub_v1 import ReceivedMessage
from google.pubsub_v1 import types as pubsub

from settled.message import Delivery, Metadata
from settled.settlement import Reject
from settled.transports.base import (
    Attempts,
    Capabilities,
    LeaseLost,
    Outgoing,
    Published,
    Source,
    retry_delay,
)
from settled.transports.letters import destination, letter
from settled.transports.polling import Poll
from settled.transports.pubsub.settings import Subscription
from settled.transports.together import BatchedDelivery, Together

logger = logging.getLogger("settled")

ID = "settled-id"
_LONGEST_DEADLINE = 600
_HOLD_FOR = 300


class Service(Protocol):
    """What a channel needs of its transport."""

    async def connection(self) -> Any: ...

    async def subscription(self, source: Source) -> pubsub.Subscription: ...

    async def push(self, message: Outgoing) -> Published: ...

    def watching(self) -> contextlib.AbstractContextManager[None]: ...

    def group(self, source: Source) -> str: ...

    def dead_letters(self, source: Source) -> str: ...


class PubSubDelivery(BatchedDelivery):
    """A message under its ack deadline."""

    __slots__ = ("ack_id", "expires", "message_id", "subscription", "time")

    def __init__(self, received: ReceivedMessage, channel: str, found: pubsub.Subscription) -> None:
        message = received.message
        headers = dict(message.attributes)
        super().__init__(
            id=headers.pop(ID, "") or message.message_id,
            subject=channel,
            data=message.data,
            headers=headers,
            attempt=max(1, received.delivery_attempt),
            lane=message.ordering_key or None,
            ordered=bool(message.ordering_key) and found.enable_message_ordering,
        )
        self.batch = None
        self.extending = None
        self.ack_id: str = received.ack_id
        self.time = message.publish_time
        self.subscription = found.name
        self.expires = time.monotonic() + found.ack_deadline_seconds

    def metadata(self) -> Metadata:
        return Metadata(
            timestamp=self.time,
            redelivery_count=self.attempt - 1,
            consumer=self.subscription,
            lane=self.lane,
            lease=self.ack_id,
        )


class PubSubChannel:
    """One subscriber's end of a subscription.

    FR-13 has no nack on Pub/Sub; here it sets the ack deadline to 0, and the message is anyone's at once,
    unless the subscription has a retry policy, which makes everybody wait. Pub/Sub counts a nack as an
    attempt, and counts at all only if the subscription has a dead-letter policy.

    With a buffer of one, or with exactly-once delivery, an ack has reached Pub/Sub when its call returns.
    Else the acks of what one pull brought are sent together, after at most 50 ms; one that fails is logged,
    and comes again.
    """

    def __init__(
        self, transport: Service, source: Source, settings: Subscription, known: pubsub.Subscription | None
    ) -> None:
        self._transport = transport
        self._source = source
        self._settings = settings
        self._poll: Poll[PubSubDelivery] = Poll(self._fetch)
        self._together: Together[PubSubDelivery] = Together(source.channel, self._ack_all)
        self._holding: set[asyncio.Task[None]] = set()
        self.capabilities = capabilities(known)

    async def receive(self, limit: int, timeout: float) -> Sequence[Delivery]:
        return await self._poll.take(limit, timeout)

    async def _fetch(self, limit: int, wait: bool) -> Sequence[PubSubDelivery]:
        clients = await self._transport.connection()
        found = await self._transport.subscription(self._source)
        request = pubsub.PullRequest(subscription=found.name, max_messages=limit)
        with self._transport.watching():
            try:
                answer = await clients.subscriber.pull(
                    request, timeout=self._settings.wait if wait else 1.0, retry=None
                )
            except DeadlineExceeded:
                return ()
        taken = [PubSubDelivery(one, self._source.channel, found) for one in answer.received_messages]
        # With exactly-once delivery every ack is answered for, to the one who asked.
        return taken if found.enable_exactly_once_delivery else self._together.brought(taken)

    async def ack(self, delivery: Delivery) -> None:
        await self._together.ack(self._mine(delivery))

    async def nack(self, delivery: Delivery) -> None:
        mine = self._mine(delivery)
        await mine.be_still()
        await self._deadline(mine, 0)
        await self._together.settled(mine)

    async def requeue(self, delivery: Delivery, delay: float | None) -> None:
        mine = self._mine(delivery)
        wanted = math.ceil(retry_delay(delay, self._settings.backoff, mine.attempt))
        await mine.be_still()
        if wanted > _LONGEST_DEADLINE:
            await self._deadline(mine, _LONGEST_DEADLINE)
            task = asyncio.create_task(self._hold(mine, time.monotonic() + wanted))
            self._holding.add(task)
            task.add_done_callback(self._holding.discard)
        else:
            await self._deadline(mine, wanted)
        await self._together.settled(mine)

    async def _hold(self, mine: PubSubDelivery, until: float) -> None:
        """A longer delay than Pub/Sub has: renewed until the rest is short enough."""
        try:
            while (left := until - time.monotonic()) > _LONGEST_DEADLINE:
                await asyncio.sleep(min(_HOLD_FOR, left - _LONGEST_DEADLINE))
                await self._deadline(mine, _LONGEST_DEADLINE)
            await self._deadline(mine, max(0, math.ceil(left)))
        except Exception as error:
            logger.warning("pubsub: %s: message %s comes sooner: %s", mine.subject, mine.id, error)

    async def reject(self, delivery: Delivery, rejection: Reject) -> None:
        mine = self._mine(delivery)
        to = destination(self._source, rejection) or self._transport.dead_letters(self._source)
        # Stored and confirmed first: if that fails, the message is still the subscription's.
        await self._transport.push(letter(mine, rejection, self._transport.group(self._source), to))
        (why,) = await self._ack_all([mine])
        if why is not None:
            raise why
        await self._together.settled(mine)

    async def extend(self, delivery: Delivery) -> None:
        mine = self._mine(delivery)
        found = await self._transport.subscription(self._source)
        began = time.monotonic()
        await mine.extend(self._deadline(mine, found.ack_deadline_seconds))
        mine.expires = began + found.ack_deadline_seconds

    def buffered(self) -> Sequence[Delivery]:
        return self._poll.buffered()

    def wake(self) -> None:
        self._poll.wake()

    async def close(self) -> None:
        for task in list(self._holding):
            task.cancel()
        for delivery in await self._poll.close():
            with contextlib.suppress(LeaseLost, GoogleAPICallError):
                await self._deadline(delivery, 0)
        await self._together.close()

    def _mine(self, delivery: Delivery) -> PubSubDelivery:
        if not isinstance(delivery, PubSubDelivery):
            raise TypeError(f"message {delivery.id!r} was not received from this transport")
        if time.monotonic() >= delivery.expires:
            # Pub/Sub says nothing of a late ack, so we have to know ourselves.
            raise _lost(delivery, "its ack deadline is over")
        return delivery

    async def _deadline(self, mine: PubSubDelivery, after: int) -> None:
        clients = await self._transport.connection()
        request = pubsub.ModifyAckDeadlineRequest(
            subscription=mine.subscription, ack_ids=[mine.ack_id], ack_deadline_seconds=after
        )
        with self._transport.watching():
            try:
                await clients.subscriber.modify_ack_deadline(request, timeout=30.0)
            except GoogleAPICallError as error:
                if (why := _failures(error).get(mine.ack_id, "")).startswith("PERMANENT"):
                    raise _lost(mine, why) from error
                raise

    async def _ack_all(self, acked: Sequence[PubSubDelivery]) -> list[Exception | None]:
        clients = await self._transport.connection()
        waiting = list(acked)
        lost: dict[str, Exception] = {}
        request = pubsub.AcknowledgeRequest(subscription=acked[0].subscription)
        with self._transport.watching():
            for tries in range(1, 6):
                request.ack_ids = [mine.ack_id for mine in waiting]
                try:
                    await clients.subscriber.acknowledge(request, timeout=30.0)
                    break
                except GoogleAPICallError as error:
                    # Only a subscription with exactly-once delivery answers for each message.
                    failures = _failures(error)
                    if not failures:
                        raise
                    lost |= {
                        mine.ack_id: _lost(mine, failures[mine.ack_id])
                        for mine in waiting
                        if failures.get(mine.ack_id, "").startswith("PERMANENT") or tries == 5
                    }
                    waiting = [m for m in waiting if m.ack_id in failures and m.ack_id not in lost]
                    if not waiting:
                        break
                    await asyncio.sleep(0.1 * 2**tries)
        return [lost.get(mine.ack_id) for mine in acked]


def capabilities(found: pubsub.Subscription | None) -> Capabilities:
    if found is None:
        return Capabilities(wakes=True, lanes=True, counts_untried=True)
    limit = found.dead_letter_policy.max_delivery_attempts or None
    return Capabilities(
        attempts=Attempts.NONE if limit is None else Attempts.BROKER,
        wakes=True,
        lanes=True,
        lease=found.ack_deadline_seconds,
        max_attempts=limit,
        counts_untried=True,
    )


def _failures(error: GoogleAPICallError) -> dict[str, str]:
    """What Pub/Sub says of each ack id, in a subscription with exactly-once delivery."""
    found: dict[str, str] = {}
    for detail in error.details or ():
        found |= {k: v for k, v in getattr(detail, "metadata", {}).items() if "_FAILURE_" in v}
    return found


def _lost(delivery: PubSubDelivery, why: str) -> LeaseLost:
    return LeaseLost(f"subscription {delivery.subscription!r}: message {delivery.id!r}: {why}")
