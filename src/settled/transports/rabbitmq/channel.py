"""A subscription's end of a queue: receiving, giving back in order, and settling."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from bisect import insort
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from itertools import count
from typing import Protocol

from aiormq.abc import AbstractChannel, DeliveredMessage
from aiormq.exceptions import AMQPError, ChannelNotFoundEntity

from settled.message import Delivery
from settled.settlement import Reason, Reject
from settled.transports.base import (
    Attempts,
    Capabilities,
    DelayMeans,
    LeaseLost,
    NackMeans,
    RejectMeans,
    Source,
    retry_delay,
)
from settled.transports.letters import destination, letter
from settled.transports.rabbitmq.delivery import RabbitDelivery
from settled.transports.rabbitmq.link import Link
from settled.transports.rabbitmq.queues import Facts

logger = logging.getLogger("settled")

# How long a message given back waits for one before it that is still in hand.
_IN_ORDER_WITHIN = 0.05
# How long what came from the queue waits for a message that was given back and belongs before it.
_BACK_WITHIN = 5.0
# The same, where another consumer may have taken it.
_BACK_OR_ELSEWHERE_WITHIN = 0.3


class Reader(Protocol):
    """What a channel needs of its transport."""

    async def connection(self) -> Link: ...

    async def facts(self, source: Source) -> Facts: ...

    def forget(self, source: Source) -> None: ...


def capabilities(facts: Facts | None) -> Capabilities:
    """What can be said of a queue before the first message."""
    counts = facts is None or facts.counts
    native = facts is not None and facts.settings.native_dead_letters
    return Capabilities(
        nack=NackMeans.RELEASE,
        attempts=Attempts.BROKER if counts else Attempts.HEADER,
        reject=RejectMeans.NATIVE if native else RejectMeans.PUBLISH,
        delay=DelayMeans.PARKED,
        extends=False,
        wakes=True,
        max_attempts=facts.limit + 1 if facts is not None and facts.limit is not None else None,
        counts_untried=facts is not None and facts.counts_releases,
        saves=True,
    )


class RabbitChannel:
    """The awaitable channel.

    A nack is `basic.nack` with requeue: what came behind the message goes back with it, oldest first, and
    this consumer asks for more only at its next receive, so anybody may have them in between. Where giving
    back counts as a delivery, what came behind it stays, and is handed out meanwhile.
    """

    def __init__(self, reader: Reader, source: Source, facts: Facts | None) -> None:
        self.capabilities = capabilities(facts)
        self._reader = reader
        self._source = source
        self._facts = facts
        self._stale = False
        self._amqp: AbstractChannel | None = None
        self._consumer: str | None = None
        self._prefetch = 0
        self._inbox: list[RabbitDelivery] = []
        self._out: dict[int, RabbitDelivery] = {}
        self._returning: dict[int, RabbitDelivery] = {}
        self._places = count()
        self._missing: dict[str, int] = {}
        self._missing_until = 0.0
        self._timers: set[asyncio.TimerHandle] = set()
        self._late: set[asyncio.Task[None]] = set()
        self._turn = asyncio.Lock()
        self._bell = asyncio.Event()
        self._wakes = 0
        self._loop: asyncio.AbstractEventLoop | None = None

    async def receive(self, limit: int, timeout: float) -> Sequence[Delivery]:
        self._loop = loop = asyncio.get_running_loop()
        wakes, until = self._wakes, loop.time() + timeout
        while True:
            self._bell.clear()
            async with self._turn:
                await self._consume(limit)
            if taken := self._take(limit):
                return taken
            left = until - loop.time()
            if self._wakes != wakes or left <= 0:
                return ()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._bell.wait(), min(left, 1.0))

    def _take(self, limit: int) -> list[RabbitDelivery]:
        """The next of what has come, but nothing before a message that was given back and came before it.

        What was on its way to us when we stopped the flow is returned by the broker itself, and so was in the
        queue again before what we returned.
        """
        if self._missing and asyncio.get_running_loop().time() >= self._missing_until:
            self._missing.clear()
        first = min(self._missing.values(), default=None)
        taken = self._inbox[:limit]
        if first is not None:
            taken = [delivery for delivery in taken if delivery.place < first]
        del self._inbox[: len(taken)]
        self._out.update((delivery.tag, delivery) for delivery in taken)
        return taken

    async def _consume(self, limit: int) -> None:
        """See to it that messages come: a channel, room for them, and a consumer."""
        await self._give_back()
        amqp = self._amqp
        if amqp is None or amqp.is_closed:
            amqp = await self._open()
        if self._facts is None or self._stale:
            self._facts = await self._reader.facts(self._source)
            self.capabilities = capabilities(self._facts)
            self._stale = False
        if self._consumer is None and self._inbox and self._queue.counts_releases and not self._missing:
            # They stayed when the flow was stopped; with more behind them, what waits here would only grow.
            return
        room = self._room(limit)
        if self._consumer is not None and room == self._prefetch:
            return
        if self._consumer is not None:
            await self._stop(amqp)
        await amqp.basic_qos(prefetch_count=room)
        self._prefetch = room
        try:
            started = await amqp.basic_consume(self._queue.name, self._arrived)
        except ChannelNotFoundEntity:
            self._look_again()
            raise
        self._consumer = started.consumer_tag

    async def _open(self) -> AbstractChannel:
        # What came through the old one is the broker's again.
        self._inbox.clear()
        self._out.clear()
        self._returning.clear()
        self._missing.clear()
        self._consumer = None
        link = await self._reader.connection()
        self._amqp = amqp = await link.channel()
        amqp.closing.add_done_callback(lambda _: self._bell.set())
        amqp.on_consumer_cancel_callbacks.add(lambda _: self._look_again())
        return amqp

    def _look_again(self) -> None:
        """The broker has taken the queue away, or moves it."""
        self._consumer, self._stale = None, True
        self._reader.forget(self._source)
        self._bell.set()

    def _room(self, limit: int) -> int:
        """How many messages may be unsettled: those in hand leave room for what is asked for."""
        asked = self._queue.settings.prefetch
        if asked is not None:
            return asked
        in_hand = len(self._out)
        if self._prefetch >= max(limit, in_hand + 1):
            return self._prefetch
        return limit + 2 * in_hand

    async def _arrived(self, message: DeliveredMessage) -> None:
        if message.channel is self._amqp:
            delivery = RabbitDelivery(message, self._source.channel)
            place = self._missing.pop(delivery.id, None)
            delivery.place = next(self._places) if place is None else place
            insort(self._inbox, delivery, key=_place)
            self._bell.set()

    async def ack(self, delivery: Delivery) -> None:
        mine = self._mine(delivery)
        # No answer is sent to an ack, so there is none to wait for.
        await mine.amqp.basic_ack(mine.tag, wait=False)
        self._out.pop(mine.tag, None)

    async def nack(self, delivery: Delivery) -> None:
        mine = self._mine(delivery)
        self._returning[mine.tag] = self._out.pop(mine.tag)
        if all(one.place > mine.place for one in self._out.values()):
            async with self._turn:
                await self._give_back()
        else:
            self._soon(_IN_ORDER_WITHIN, self._give_back_in_turn)

    async def requeue(self, delivery: Delivery, delay: float | None) -> None:
        mine, queue = self._mine(delivery), self._queue
        wait = retry_delay(delay, queue.backoff, mine.attempt)
        native = delay is None if queue.retries else wait <= 0
        if queue.counts and native and not queue.gives_up(mine.counted):
            await mine.amqp.basic_reject(mine.tag, requeue=True)
            self._out.pop(mine.tag, None)
            return
        async with self._or_later(mine):
            await self._copy(mine, failures=mine.attempt, delay=wait)

    async def reject(self, delivery: Delivery, rejection: Reject) -> None:
        mine, queue = self._mine(delivery), self._queue
        to = destination(self._source, rejection)
        if to is None and queue.settings.native_dead_letters:
            await mine.amqp.basic_reject(mine.tag, requeue=False)
            self._out.pop(mine.tag, None)
            return
        to = to or dead_letters_of(queue.name)
        async with self._or_later(mine):
            link = await self._reader.connection()
            dead = letter(mine, rejection, self._source.group or "", to)
            added = {name: text for name, text in dead.headers.items() if mine.headers.get(name) != text}
            await link.publish_letter(dead, mine.properties, added)
            await self._finish(mine)

    async def extend(self, delivery: Delivery) -> None:
        """There is nothing to extend: a delivery is its consumer's as long as the channel is open."""
        self._mine(delivery)

    def wake(self) -> None:
        self._wakes += 1
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._bell.set)

    async def close(self) -> None:
        for timer in self._timers:
            timer.cancel()
        if self._late:
            await asyncio.wait(self._late)
        amqp = self._amqp
        if amqp is None or amqp.is_closed:
            return
        try:
            async with self._turn:
                await self._stop(amqp)
                await self._return(untried=True)
            await amqp.close()
        except (AMQPError, OSError) as error:
            logger.debug("rabbitmq: %s: closing: %s", self._source.channel, error)

    @property
    def _queue(self) -> Facts:
        assert self._facts is not None  # noqa: S101
        return self._facts

    def _mine(self, delivery: Delivery) -> RabbitDelivery:
        if not isinstance(delivery, RabbitDelivery):
            raise TypeError(f"message {delivery.id!r} was not received from this transport")
        if self._out.get(delivery.tag) is not delivery or delivery.amqp.is_closed:
            raise LeaseLost(
                f"queue {self._source.channel!r}: message {delivery.id!r} is not this consumer's any more: "
                "it is settled, or the connection it came through is lost and the broker delivers it again"
            )
        return delivery

    async def _finish(self, mine: RabbitDelivery) -> None:
        await mine.amqp.basic_ack(mine.tag)
        self._out.pop(mine.tag, None)

    async def _copy(self, mine: RabbitDelivery, *, failures: int, delay: float = 0.0) -> None:
        """Put a copy into the queue, or into one where it waits, and be done with the original."""
        link, queue = await self._reader.connection(), self._queue
        await link.publish_again(
            mine.data, mine.properties, queue.name, failures, delay, queue.type or "classic"
        )
        await self._finish(mine)

    async def _stop(self, amqp: AbstractChannel) -> None:
        consumer, self._consumer = self._consumer, None
        if consumer is not None:
            await amqp.basic_cancel(consumer)

    async def _give_back_in_turn(self) -> None:
        async with self._turn:
            await self._give_back()

    async def _give_back(self) -> None:
        """Stop the flow, so that nothing comes back to us at once, and return what waits for that."""
        amqp = self._amqp
        if self._returning and amqp is not None and not amqp.is_closed:
            declared = await amqp.queue_declare(self._queue.name, passive=True)
            await self._stop(amqp)
            back = await self._return(untried=not self._queue.counts_releases)
            if self._queue.type != "classic" and not self._inbox:
                self._missing |= {one.id: one.place for one in back if one.properties.message_id}
                wait = _BACK_WITHIN if (declared.consumer_count or 0) <= 1 else _BACK_OR_ELSEWHERE_WITHIN
                self._missing_until = asyncio.get_running_loop().time() + wait
            self._bell.set()

    async def _return(self, *, untried: bool) -> list[RabbitDelivery]:
        """Oldest first: a quorum queue hands out what it got back in the order it came."""
        back = sorted(self._returning.values(), key=_place)
        self._returning.clear()
        if untried:
            back = sorted([*self._inbox, *back], key=_place)
            self._inbox.clear()
        queue = self._queue
        failed: Exception | None = None
        given: list[RabbitDelivery] = []
        for delivery in back:
            if not queue.counts_releases or not queue.gives_up(delivery.counted):
                await delivery.amqp.basic_nack(delivery.tag, requeue=True)
                given.append(delivery)
                continue
            # The broker would count this as the failure too many, and might drop it.
            self._out[delivery.tag] = delivery
            try:
                await self._save(delivery)
            except Exception as error:
                failed = error
        if failed is not None:
            raise failed
        return given

    async def _save(self, mine: RabbitDelivery) -> None:
        if mine.handled:
            error = f"released on delivery {mine.attempt}; the queue's delivery limit is {self._queue.limit}"
            await self.reject(mine, Reject(Reason.DELIVERY_ERROR, error))
        else:
            async with self._or_later(mine):
                await self._copy(mine, failures=mine.attempt - 1)

    @contextlib.asynccontextmanager
    async def _or_later(self, mine: RabbitDelivery) -> AsyncIterator[None]:
        """If it fails, the message is back after the backoff: here no lease runs out that would see to it."""
        try:
            yield
        except Exception:
            wait = retry_delay(None, self._queue.backoff, mine.attempt)
            self._soon(wait, lambda: self._abandon(mine))
            raise

    async def _abandon(self, mine: RabbitDelivery) -> None:
        if self._out.get(mine.tag) is mine and not mine.settled:
            self._returning[mine.tag] = self._out.pop(mine.tag)
            await self._give_back_in_turn()

    def _soon(self, seconds: float, call: Callable[[], Awaitable[None]]) -> None:
        async def now() -> None:
            try:
                await call()
            except Exception as error:
                logger.warning("rabbitmq: %s: %s: %s", self._source.channel, type(error).__name__, error)

        def due() -> None:
            self._timers.discard(timer)
            task = asyncio.create_task(now())
            self._late.add(task)
            task.add_done_callback(self._late.discard)

        timer = asyncio.get_running_loop().call_later(seconds, due)
        self._timers.add(timer)


def dead_letters_of(queue: str) -> str:
    """Where dead letters go that a subscription named no channel for."""
    return f"{queue}.dead"


def _place(delivery: RabbitDelivery) -> int:
    return delivery.place
