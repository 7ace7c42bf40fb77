"""A subscription's end of a list: what is taken is on a list of the consumer's own until it is settled."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec
from redis.exceptions import RedisError

from settled.message import Delivery
from settled.settlement import Reject
from settled.transports.base import (
    Abandoned,
    Attempts,
    Capabilities,
    LeaseLost,
    Outgoing,
    RejectMeans,
    Source,
    retry_delay,
)
from settled.transports.letters import destination, letter
from settled.transports.redis.settings import DEFAULT_GROUP, Reading
from settled.transports.redis.streams import SLICE, new_mark

if TYPE_CHECKING:
    from settled.transports.redis.transport import RedisTransport

logger = logging.getLogger("settled")

_MARK = b"settled1\n"


class Head(msgspec.Struct, frozen=True, repr_omit_defaults=True):
    """What a message has beside its body, on the line before it."""

    id: str
    headers: dict[str, str] = {}
    attempts: int = 0
    mark: str = ""
    """Its own, where it waits: those that wait are a set, in which two that are alike would be one."""


def wrap(head: Head, data: bytes) -> bytes:
    """A message as an element of a list."""
    return b"%b%b\n%b" % (_MARK, msgspec.json.encode(head), data)


def unwrap(element: bytes) -> tuple[Head, bytes] | None:
    """A message back from its element; None if somebody else has written it.

    >>> unwrap(wrap(Head("m-1", {"tenant": "acme"}), b"body"))
    (Head(id='m-1', headers={'tenant': 'acme'}), b'body')
    >>> unwrap(b"hello")
    """
    if not element.startswith(_MARK):
        return None
    line, _, data = element[len(_MARK) :].partition(b"\n")
    try:
        return msgspec.json.decode(line, type=Head), data
    except msgspec.MsgspecError:
        return None


def element(message: Outgoing, id_: str) -> bytes:
    """A message that is published."""
    return wrap(Head(id_, dict(message.headers), mark=new_mark() if message.delay > 0 else ""), message.data)


class ListDelivery(Delivery):
    """An element on the consumer's own list."""

    __slots__ = ("deadline", "element")

    def __init__(self, raw: bytes, head: Head, data: bytes, channel: str, deadline: float) -> None:
        super().__init__(
            id=head.id, subject=channel, data=data, headers=head.headers, attempt=head.attempts + 1
        )
        self.element = raw
        self.deadline = deadline

    def failed(self) -> bytes:
        """The element with one more attempt."""
        headers: Mapping[str, str] = self.headers
        return wrap(Head(self.id, dict(headers), self.attempt, new_mark()), self.data)


class ListChannel:
    """One consumer of a list.

    A nack puts the message back to where it is taken next. Where others do nothing, because a pop cannot be
    undone, here it is moved to a list of the consumer's own first. A consumer gives a sign of life three
    times a lease; what one has that gave none goes back to the queue. That is not counted as an attempt.
    """

    capabilities = Capabilities(attempts=Attempts.HEADER, reject=RejectMeans.TOGETHER, wakes=True)

    def __init__(self, transport: RedisTransport, source: Source, settings: Reading) -> None:
        self._transport = transport
        self._source = source
        self._settings = settings
        self.capabilities = replace(self.capabilities, lease=settings.lease)
        self._name = uuid.uuid4().hex
        self._queue = source.channel
        self._own = f"{self._queue}:processing:{self._name}"
        self._out: dict[ListDelivery, None] = {}
        self._look_at = 0.0
        self._wakes = 0
        self._doubtful = False
        self._living: asyncio.Task[None] | None = None

    async def receive(self, limit: int, timeout: float) -> Sequence[Delivery]:
        wakes = self._wakes
        loop = asyncio.get_running_loop()
        until = loop.time() + timeout
        redis = (await self._transport.connection()).redis
        if self._living is None:
            await self._live()
            self._living = asyncio.create_task(self._keep_living(), name="redis-alive")
        doubtful, self._doubtful = self._doubtful, True
        if doubtful:
            # An earlier answer never arrived: what it brought is on our list, and nobody has it.
            await self._restore()
        while True:
            await self._look()
            due, elements = await self._run("list_take", [self._queue, self._own, self._scheduled], [limit])
            if not elements:
                wait = max(0.0, min(SLICE, until - loop.time(), SLICE if due < 0 else due / 1000))
                if wait > 0:
                    found = await redis.blmove(self._queue, self._own, wait, "RIGHT", "LEFT")  # type: ignore[arg-type]
                    elements = [] if found is None else [found]
            if elements or self._wakes != wakes or loop.time() >= until:
                taken = [await self._taken(raw) for raw in elements]
                self._doubtful = False
                return taken
            await asyncio.sleep(0)

    async def _taken(self, raw: bytes) -> ListDelivery:
        known = unwrap(raw)
        if known is None:
            # Two that look alike are two, and keep their ids from now on.
            known = Head(uuid.uuid4().hex), raw
            wrapped = wrap(*known)
            await self._write(raw, "wrap", wrapped)
            raw = wrapped
        head, data = known
        delivery = ListDelivery(raw, head, data, self._queue, time.monotonic() + self._settings.lease)
        self._out[delivery] = None
        return delivery

    async def _restore(self) -> None:
        redis = (await self._transport.connection()).redis
        found: list[Any] = await redis.lrange(self._own, 0, -1)
        missed = Counter(found) - Counter(delivery.element for delivery in self._out)
        for raw in missed.elements():
            await self._write(raw, "nack", raw)

    async def abandoned(self) -> Abandoned:
        """What consumers have in hand, after giving back what those had that are gone."""
        await self._recover("")
        redis = (await self._transport.connection()).redis
        names: Any = await redis.smembers(f"{self._queue}:consumers")
        lists = [f"{self._queue}:processing:{name.decode()}" for name in names]
        held = [int(await redis.llen(name)) for name in lists if name != self._own]
        return Abandoned(sum(held), self._settings.lease)

    async def _look(self) -> None:
        """Now and then, give back what was out for too long, here and with consumers that are gone."""
        now = time.monotonic()
        if now < self._look_at:
            return
        self._look_at = now + min(1.0, self._settings.lease / 4)
        for delivery in [one for one in self._out if one.deadline <= now]:
            del self._out[delivery]
            await self._write(delivery.element, "requeue", delivery.failed(), 0)
        back = await self._recover("")
        if back:
            logger.warning("%s: %d messages of consumers that are gone", self._queue, back)

    async def ack(self, delivery: Delivery) -> None:
        await self._settle(delivery, "ack", b"")

    async def nack(self, delivery: Delivery) -> None:
        mine = self._mine(delivery)
        await self._settle(mine, "nack", mine.element)

    async def requeue(self, delivery: Delivery, delay: float | None) -> None:
        wait = retry_delay(delay, self._settings.backoff, delivery.attempt)
        mine = self._mine(delivery)
        await self._settle(mine, "requeue", mine.failed(), int(wait * 1000))

    async def reject(self, delivery: Delivery, rejection: Reject) -> None:
        to = destination(self._source, rejection) or f"{self._queue}.dead"
        message = letter(delivery, rejection, DEFAULT_GROUP, to)
        await self._settle(delivery, "reject", element(message, str(message.id)), dead=to)

    async def extend(self, delivery: Delivery) -> None:
        self._mine(delivery).deadline = time.monotonic() + self._settings.lease

    def wake(self) -> None:
        self._wakes += 1

    async def close(self) -> None:
        living, self._living = self._living, None
        if living is None:
            return
        living.cancel()
        self._out.clear()
        # Without a server, the others give it back when its lease is over.
        with contextlib.suppress(RedisError, OSError):
            await self._recover(self._name)

    def _mine(self, delivery: Delivery) -> ListDelivery:
        if not isinstance(delivery, ListDelivery):
            raise TypeError(f"message {delivery.id!r} was not received from this transport")
        if delivery not in self._out:
            raise self._lost(delivery)
        return delivery

    def _lost(self, delivery: Delivery) -> LeaseLost:
        return LeaseLost(
            f"list {self._queue!r}: message {delivery.id!r}: it is settled already, or its lease ran out"
        )

    async def _settle(
        self, delivery: Delivery, what: str, write: bytes, delay: int = 0, dead: str | None = None
    ) -> None:
        mine = self._mine(delivery)
        done = await self._write(mine.element, what, write, delay, dead)
        self._out.pop(mine, None)
        if not done:
            raise self._lost(mine)

    async def _write(
        self, raw: bytes, what: str, write: bytes, delay: int = 0, dead: str | None = None
    ) -> bool:
        keys = [self._queue, self._own, self._scheduled, dead or self._queue]
        return bool(await self._run("list_settle", keys, [raw, what, write, delay]))

    @property
    def _scheduled(self) -> str:
        return f"{self._queue}:scheduled"

    async def _recover(self, name: str) -> int:
        keys = [f"{self._queue}:{kind}" for kind in ("consumers", "processing:", "alive:")]
        return int(await self._run("list_recover", [self._queue, *keys], [name]))

    async def _live(self) -> None:
        redis = (await self._transport.connection()).redis
        # Alive before it is known: another must not take it for dead in between.
        await redis.set(f"{self._queue}:alive:{self._name}", 1, px=int(self._settings.lease * 1000))
        await redis.sadd(f"{self._queue}:consumers", self._name)

    async def _keep_living(self) -> None:
        while True:
            await asyncio.sleep(self._settings.lease / 3)
            try:
                await self._live()
            except Exception as error:
                logger.warning("%s: no sign of life given: %s", self._queue, error)

    async def _run(self, script: str, keys: Sequence[str], arguments: Sequence[Any]) -> Any:
        return await (await self._transport.connection()).run(script, keys, arguments)
