"""The queue as a transport: what is the same whether it is reached through HTTP or in-process."""

from __future__ import annotations

import asyncio
import logging
import threading
import zlib
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import replace
from itertools import count
from types import MappingProxyType
from typing import Any, Generic, Protocol, TypeVar

import msgspec

from settled.codec import JSON
from settled.message import Delivery
from settled.settlement import Reject
from settled.transports.base import (
    AsyncChannel,
    Capabilities,
    Channel,
    LeaseLost,
    NackMeans,
    Outgoing,
    Published,
    RejectMeans,
    Source,
)
from settled.transports.faces import BlockingChannel
from settled.transports.letters import destination, letter
from settled.transports.looped import LoopTransport
from settled.transports.rules import Rules

DEFAULT_GROUP = "__QUEUE_MODE__"
SPREAD = 16
"""Over how many lanes messages without one are spread, so that several performers can share the work."""

logger = logging.getLogger("settled")

_SPREAD_LANE = "spread-"
_SEND_AFTER = 0.05
_WAIT_AT_MOST = 1.0


class Verdict(msgspec.Struct, frozen=True):
    """How one delivery is settled, in the queue's words."""

    delivery: QueueDelivery[Any]
    status: str
    error: str | None = None
    delay: float | None = None


class Popped(Protocol):
    """A message as a backend has it."""

    @property
    def transaction_id(self) -> str: ...

    @property
    def partition_id(self) -> str: ...

    @property
    def partition(self) -> str: ...

    @property
    def lease_id(self) -> str | None: ...


P = TypeVar("P", bound=Popped)


class QueueDelivery(Delivery, Generic[P]):
    """A delivery under a lease on its lane; its metadata is worked out of what was popped."""

    __slots__ = ("batch", "popped")

    def __init__(
        self, popped: P, subject: str, data: bytes, headers: Mapping[str, str], attempt: int, ordered: bool
    ) -> None:
        # Not through the base, which takes longer: this runs for every message.
        self.id = popped.transaction_id
        self.subject = subject
        self.data = data
        self.headers = headers
        self.attempt = attempt
        self.lane = popped.partition
        self.ordered = ordered
        self.settled = False
        self.handled = False
        self.popped = popped
        self.batch: Batch | None = None


def headers(content_type: str, others: Mapping[str, str] | None) -> Mapping[str, str]:
    """A message's headers; the many that have nothing but JSON share theirs."""
    return {"content-type": content_type, **(others or {})} if others or content_type != JSON else _PLAIN


_PLAIN = MappingProxyType({"content-type": JSON})


class Backend(Protocol):
    """A way to reach the queue, on one event loop."""

    async def rules(self, queue: str) -> Rules:
        """How the queue leases and retries; the defaults if there is no such queue yet."""

    async def pop(self, source: Source, limit: int, wait: float, ordered: bool) -> list[QueueDelivery[Any]]:
        """Lease up to `limit` messages, of as many lanes."""

    async def settle(self, group: str, verdicts: Sequence[Verdict]) -> list[str | None]:
        """Settle, and answer for each why it could not be, or None; at most the last one is a failure."""

    async def extend(self, delivery: QueueDelivery[Any], seconds: float) -> None:
        """Let the lease last for so long from now; LeaseLost if it is gone."""

    async def push(self, messages: Sequence[Outgoing]) -> list[Published]:
        """Store messages, each in its lane."""

    async def close(self) -> None:
        """Disconnect."""


class Batch:
    """What one receive took: it is settled together, when the last verdict is in.

    A sync handler's thread adds to it, the loop's thread takes from it.
    """

    __slots__ = ("_lock", "_open", "_waiting")

    def __init__(self, size: int) -> None:
        self._open = size
        self._waiting: list[Verdict] = []
        self._lock = threading.Lock()

    def add(self, verdict: Verdict, *, now: bool = False) -> tuple[list[Verdict], bool]:
        """What is to be settled now, all or nothing, and whether this is the first that waits."""
        with self._lock:
            self._open -= 1
            self._waiting.append(verdict)
            if now or self._open <= 0:
                due, self._waiting = self._waiting, []
                return due, False
            return [], len(self._waiting) == 1

    def take(self) -> list[Verdict]:
        """All that waits."""
        with self._lock:
            waiting, self._waiting = self._waiting, []
            return waiting


class QueueChannel:
    """One subscription's end of the queue.

    With a buffer of one, a settlement is on disk when its call returns. With a larger one, acknowledgements,
    releases and rejections wait for the rest of their batch, at most 50 ms; what is sent round again takes
    them along. Only the ack after a handler that returned is not waited for: the pump asks for the next
    message meanwhile.
    """

    capabilities = Capabilities(
        nack=NackMeans.RELEASE, reject=RejectMeans.NATIVE, wakes=True, lanes=True, counts_releases=False
    )

    def __init__(self, transport: QueueTransport, source: Source, rules: Rules | None = None) -> None:
        self._transport = transport
        self._source = source
        self._group = source.group or DEFAULT_GROUP
        self._wakes = 0
        self._rules: Rules | None = None
        if rules is not None:
            self._learn(rules)
        self._late: set[asyncio.Task[None]] = set()
        self._sending: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = 0

    async def receive(self, limit: int, timeout: float) -> Sequence[Delivery]:
        wakes = self._wakes
        self._loop, self._thread = asyncio.get_running_loop(), threading.get_ident()
        backend = await self._transport.connection()
        rules = self._rules or self._learn(await backend.rules(self._source.channel))
        ordered = rules.in_order
        loop = self._loop
        until = loop.time() + timeout
        while True:
            # Short waits, so that a stop does not have to wait for a long one.
            wait = max(0.0, min(_WAIT_AT_MOST, until - loop.time()))
            taken = await backend.pop(self._source, limit, wait, ordered)
            if taken:
                batch = Batch(len(taken)) if len(taken) > 1 else None
                for delivery in taken:
                    delivery.batch = batch
                return taken
            if self._wakes != wakes or loop.time() >= until:
                return ()

    def _learn(self, rules: Rules) -> Rules:
        self._rules = rules
        self.capabilities = replace(self.capabilities, lease=rules.lease, max_attempts=rules.max_attempts)
        return rules

    async def ack(self, delivery: Delivery) -> None:
        mine = _mine(delivery)
        verdict = Verdict(mine, "completed")
        if not mine.handled:  # the handler itself waits for it
            await self._settle_with_batch(verdict)
            return
        due = self.gather(verdict)
        if due:
            if self._sending is not None:
                await asyncio.wait([self._sending])
            self._sending = self._begin(self._send(due))

    async def nack(self, delivery: Delivery) -> None:
        await self._settle_with_batch(Verdict(_mine(delivery), "retry"))

    async def requeue(self, delivery: Delivery, delay: float | None) -> None:
        why = delivery.why() or "sent round again"
        await self._settle_with_batch(Verdict(_mine(delivery), "failed", why, delay), now=True)

    async def reject(self, delivery: Delivery, rejection: Reject) -> None:
        mine = _mine(delivery)
        to = destination(self._source, rejection)
        if to is None:
            await self._settle_with_batch(Verdict(mine, "dlq", rejection.error or rejection.reason.value))
        else:
            # Published and confirmed first: a crash in between repeats the letter's id, not the message.
            await self._transport.push(letter(mine, rejection, self._group, to))
            await self._settle_with_batch(Verdict(mine, "completed"))

    async def extend(self, delivery: Delivery) -> None:
        backend = await self._transport.connection()
        rules = self._rules or Rules()
        await backend.extend(_mine(delivery), rules.lease)

    def wake(self) -> None:
        self._wakes += 1

    async def close(self) -> None:
        for task in list(self._late):
            await task

    async def _settle_with_batch(self, verdict: Verdict, *, now: bool = False) -> None:
        due = self.gather(verdict, now=now)
        if due:
            await self.settle(due)

    def gather(self, verdict: Verdict, *, now: bool = False) -> list[Verdict]:
        """Let a verdict wait for the rest of its batch; what is to be settled now. From any thread."""
        batch = verdict.delivery.batch
        if batch is None:
            return [verdict]
        due, first = batch.add(verdict, now=now)
        if first:
            self._soon(batch)
        return due

    async def settle(self, verdicts: list[Verdict]) -> None:
        """Settle now; the last one's failure is the caller's, the others' callers are gone."""
        backend = await self._transport.connection()
        *late, why = await backend.settle(self._group, verdicts)
        _report(verdicts[:-1], late)
        if why is not None:
            raise lost(verdicts[-1].delivery, why)

    def _soon(self, batch: Batch) -> None:
        if threading.get_ident() == self._thread:
            self._start_flush(batch)
        elif self._loop is not None:
            self._loop.call_soon_threadsafe(self._start_flush, batch)

    def _start_flush(self, batch: Batch) -> None:
        self._begin(self._flush_later(batch))

    def _begin(self, call: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(call)
        self._late.add(task)
        task.add_done_callback(self._late.discard)
        return task

    async def _flush_later(self, batch: Batch) -> None:
        await asyncio.sleep(_SEND_AFTER)
        await self._send(batch.take())

    async def _send(self, waiting: list[Verdict]) -> None:
        if waiting:
            try:
                backend = await self._transport.connection()
                _report(waiting, await backend.settle(self._group, waiting))
            except Exception as error:
                _report(waiting, [str(error)] * len(waiting))


class BlockingQueueChannel(BlockingChannel):
    """The blocking face: a verdict that waits for the rest of its batch costs no trip to the loop."""

    def __init__(self, inner: QueueChannel, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(inner, loop)
        self._queue = inner

    def ack(self, delivery: Delivery) -> None:
        self._settle_with_batch(Verdict(_mine(delivery), "completed"))

    def nack(self, delivery: Delivery) -> None:
        self._settle_with_batch(Verdict(_mine(delivery), "retry"))

    def _settle_with_batch(self, verdict: Verdict) -> None:
        due = self._queue.gather(verdict)
        if due:
            self._wait(self._queue.settle(due))


def _report(verdicts: Sequence[Verdict], failures: Sequence[str | None]) -> None:
    for verdict, why in zip(verdicts, failures, strict=True):
        if why is not None:
            d = verdict.delivery
            logger.error(
                "settle failed, left to the broker message_id=%s channel=%s: %s", d.id, d.subject, why
            )


def _mine(delivery: Delivery) -> QueueDelivery[Any]:
    if not isinstance(delivery, QueueDelivery):
        raise TypeError(f"message {delivery.id!r} was not received from this transport")
    return delivery


def note_given_up(verdict: Verdict, outcome: str) -> None:
    """Tell the pump of a failed message that the queue will not bring it again, whatever the pump thought."""
    if verdict.status == "failed" and outcome in ("failed_dlq", "failed_dropped"):
        verdict.delivery.given_up = True


def was_spread(lane: str) -> bool:
    """Whether the lane was given to a message that had none: its order means nothing.

    >>> was_spread("spread-07"), was_spread("eu")
    (True, False)
    """
    number = lane.removeprefix(_SPREAD_LANE)
    return number != lane and number.isdecimal() and int(number) < SPREAD


def lost(delivery: QueueDelivery[Any], why: str) -> LeaseLost:
    """The error for a delivery that is not the caller's to settle any more."""
    return LeaseLost(f"queue {delivery.subject!r}: message {delivery.id!r}: {why}")


class QueueTransport(LoopTransport[Backend]):
    """The queue, through whatever backend a subclass connects."""

    capabilities = QueueChannel.capabilities

    def __init__(self) -> None:
        super().__init__()
        self._turn = count()
        self._rules: dict[str, Rules] = {}

    async def prepare(self, source: Source) -> None:
        """Learn the queue's rules: an app says what they mean for it before it starts."""
        backend = await self.connection()
        self._rules[source.channel] = await backend.rules(source.channel)

    def async_channel(self, source: Source) -> AsyncChannel:
        return self._channel(source)

    def channel(self, source: Source) -> Channel:
        return BlockingQueueChannel(self._channel(source), asyncio.get_running_loop())

    def _channel(self, source: Source) -> QueueChannel:
        return QueueChannel(self, source, self._rules.get(source.channel))

    async def push(self, message: Outgoing) -> Published:
        (published,) = await self.publish_many([message])
        return published

    async def publish_many(self, messages: Sequence[Outgoing]) -> list[Published]:
        """Store messages, each in its lane, or in one of those that are for messages without a lane."""
        backend = await self.connection()
        return await backend.push([m if m.lane is not None else self._spread(m) for m in messages])

    def _spread(self, message: Outgoing) -> Outgoing:
        # The same id must meet itself in the same lane, or it would not be found to be a duplicate.
        number = next(self._turn) if message.id is None else zlib.crc32(message.id.encode())
        return replace(message, lane=f"{_SPREAD_LANE}{number % SPREAD:02}")
