"""A subscription's end of a stream: one consumer of a group."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import msgspec
from redis.asyncio import Redis
from redis.exceptions import RedisError, ResponseError

from settled.message import Delivery, Metadata
from settled.settlement import Reject
from settled.signals import ConfigurationError
from settled.transports.base import (
    Abandoned,
    Capabilities,
    LeaseLost,
    Outgoing,
    RejectMeans,
    Source,
    retry_delay,
)
from settled.transports.letters import destination, letter
from settled.transports.redis.settings import DEFAULT_GROUP, Reading

if TYPE_CHECKING:
    from settled.transports.redis.transport import RedisTransport

logger = logging.getLogger("settled")

SLICE = 0.2
"""A consumer that waits looks so often for what was given back."""
_FLUSH_AFTER = 0.05
_OURS = "settled-"
_NOBODY = "settled-nobody"


class StreamDelivery(Delivery):
    """An entry, pending for one consumer."""

    __slots__ = ("entry", "facts")

    def __init__(self, entry: bytes, attempt: int, fields: Mapping[bytes, bytes], source: Source) -> None:
        id_, data, headers = read(entry, fields)
        super().__init__(id=id_, subject=source.channel, data=data, headers=headers, attempt=attempt)
        self.entry = entry
        self.facts = source.group or DEFAULT_GROUP

    @property
    def position(self) -> tuple[int, int]:
        """In the stream."""
        milliseconds, _, number = self.entry.partition(b"-")
        return int(milliseconds), int(number)

    def metadata(self) -> Metadata:
        milliseconds = int(self.entry.partition(b"-")[0])
        return Metadata(
            timestamp=datetime.fromtimestamp(milliseconds / 1000, UTC),
            redelivery_count=self.attempt - 1,
            consumer=self.facts,
            lease=self.entry.decode(),
        )


def read(entry: bytes, fields: Mapping[bytes, bytes]) -> tuple[str, bytes, Mapping[str, str]]:
    """Id, body and headers of an entry; what others added, without `data`, is a JSON object of its fields.

    >>> read(b"7-0", {b"name": b"ann"})
    ('7-0', b'{"name":"ann"}', {'content-type': 'application/json'})
    """
    id_ = fields.get(b"id", entry).decode(errors="replace")
    if b"data" in fields:
        try:
            headers = msgspec.json.decode(fields.get(b"headers", b"{}"), type=dict[str, str])
        except msgspec.MsgspecError:
            headers = {}
        return id_, fields[b"data"], headers
    named = {name.decode(errors="replace"): value.decode(errors="replace") for name, value in fields.items()}
    return id_, msgspec.json.encode(named), {"content-type": "application/json"}


def written(message: Outgoing, id_: str) -> list[bytes]:
    """The fields of an entry, names and values in turn."""
    headers = msgspec.json.encode(dict(message.headers))
    return [b"id", id_.encode(), b"headers", headers, b"data", message.data]


def scheduled(message: Outgoing, id_: str) -> bytes:
    """A message that waits to become an entry: headers and id, a line of JSON each, then the body.

    Those that wait are a set, in which two that are alike would be one; so each has a mark beside its id.
    """
    head = msgspec.json.encode([id_, new_mark()])
    return b"\n".join((msgspec.json.encode(dict(message.headers)), head, message.data))


def new_mark() -> str:
    """What tells a message that waits from one that is like it."""
    return uuid.uuid4().hex[:12]


class StreamChannel:
    """One consumer of a group.

    A nack makes the message claimable at once, for any consumer, and takes its delivery off the count. Where
    others do nothing, because a list's pop cannot be undone, a stream keeps the message until it is settled.
    What a dead consumer had is claimed when its lease is over. Settling checks that the message is still
    this consumer's, and a dead letter is written in the same step. With a buffer of one, every settlement is
    done when its call returns; with a larger one, acknowledgements wait for the last of the batch, or 50 ms,
    unless `confirm` is set.
    """

    capabilities = Capabilities(reject=RejectMeans.TOGETHER, wakes=True)

    def __init__(self, transport: RedisTransport, source: Source, settings: Reading) -> None:
        self._transport = transport
        self._source = source
        self._settings = settings
        self._group = source.group or DEFAULT_GROUP
        self._name = f"{_OURS}{uuid.uuid4().hex}"
        self._lease = int(settings.lease * 1000)
        self.capabilities = replace(self.capabilities, lease=settings.lease)
        self._look_at = 0.0
        self._wakes = 0
        self._joined = False
        self._open = 0
        self._acked: list[StreamDelivery] = []
        self._flushing: asyncio.Task[None] | None = None

    async def receive(self, limit: int, timeout: float) -> Sequence[Delivery]:
        wakes = self._wakes
        loop = asyncio.get_running_loop()
        until = loop.time() + timeout
        redis = (await self._transport.connection()).redis
        await self._flush()
        while True:
            try:
                taken = await self._take(redis, limit, until - loop.time())
            except ResponseError as error:
                if not str(error).startswith("NOGROUP"):
                    raise
                await prepare(self._transport, self._source, self._settings)
                continue
            if taken or self._wakes != wakes or loop.time() >= until:
                self._open = len(taken)
                return taken
            await asyncio.sleep(0)

    async def _take(self, redis: Redis, limit: int, wait: float) -> list[Delivery]:
        due, taken = await self._claim(limit)
        if len(taken) == limit:
            return taken
        wait = min(SLICE, wait, due)
        # Block 0 would be for ever.
        block = None if taken or wait < 0.001 else int(wait * 1000)
        answer: Any = await redis.xreadgroup(
            self._group, self._name, {self._source.channel: ">"}, count=limit - len(taken), block=block
        )
        for _, entries in answer or ():
            taken += [StreamDelivery(entry, 1, fields, self._source) for entry, fields in entries]
        return taken

    async def _claim(self, limit: int) -> tuple[float, list[Delivery]]:
        """What is due again, and in how many seconds the next will be."""
        now = time.monotonic()
        look = now >= self._look_at
        arguments = [self._group, self._name, _NOBODY, limit, self._lease, int(look)]
        due, claimed, trimmed = await self._run("stream_take", self._keys("due", "scheduled"), arguments)
        self._joined = True
        if look and len(claimed) < limit:
            self._look_at = now + min(1.0, self._settings.lease / 4)
        for entry in trimmed:
            logger.error(
                "%s: entry %s was trimmed away before it was settled", self._source.channel, entry.decode()
            )
        taken: list[Delivery] = []
        for entry, attempt, flat in claimed:
            fields = dict(zip(flat[::2], flat[1::2], strict=True))
            taken.append(StreamDelivery(entry, attempt, fields, self._source))
        return SLICE if due < 0 else due / 1000, taken

    async def ack(self, delivery: Delivery) -> None:
        mine = _mine(delivery)
        self._open -= 1
        if self._open > 0 and not self._settings.confirm:
            self._acked.append(mine)
            if self._flushing is None or self._flushing.done():
                self._flushing = asyncio.create_task(self._flush_later(), name="redis-ack")
            return
        await self._flush()
        (done,) = await self._ack([mine])
        if not done:
            raise self._lost(mine)

    async def _ack(self, deliveries: Sequence[StreamDelivery]) -> list[int]:
        pairs = [part for delivery in deliveries for part in (delivery.entry, delivery.attempt)]
        arguments = [self._group, self._name, int(self._settings.delete), *pairs]
        answers: list[int] = await self._run("stream_ack", [self._source.channel], arguments)
        return answers

    async def _flush_later(self) -> None:
        await asyncio.sleep(_FLUSH_AFTER)
        try:
            await self._flush()
        except Exception as error:
            logger.error("%s: acknowledgements failed: %s", self._source.channel, error)  # noqa: TRY400

    async def _flush(self) -> None:
        waiting, self._acked = self._acked, []
        if not waiting:
            return
        try:
            answers = await self._ack(waiting)
        except BaseException:
            # Said again with the next ones. If it was heard, they are reported as lost, which does no harm.
            self._acked = [*waiting, *self._acked]
            raise
        for delivery, done in zip(waiting, answers, strict=True):
            if not done:
                logger.error("settle failed, left to the broker: %s", self._lost(delivery))

    async def nack(self, delivery: Delivery) -> None:
        await self._settle(delivery, "nack")

    async def requeue(self, delivery: Delivery, delay: float | None) -> None:
        wait = retry_delay(delay, self._settings.backoff, delivery.attempt)
        await self._settle(delivery, "requeue", int(wait * 1000))

    async def reject(self, delivery: Delivery, rejection: Reject) -> None:
        to = destination(self._source, rejection) or f"{self._source.channel}.dead"
        message = letter(delivery, rejection, self._group, to)
        fields = written(message, str(message.id))
        await self._settle(delivery, "reject", int(self._settings.delete), *fields, dead=to)

    async def extend(self, delivery: Delivery) -> None:
        await self._settle(delivery, "extend")

    def wake(self) -> None:
        self._wakes += 1

    async def close(self) -> None:
        if self._flushing is not None:
            await asyncio.wait([self._flushing])
        if self._joined:
            self._joined = False
            names = [self._group, self._name, _OURS, _NOBODY]
            # Without a server or a group there is nothing to leave.
            with contextlib.suppress(RedisError, OSError):
                await self._run("stream_leave", [self._source.channel], names)

    async def _settle(self, delivery: Delivery, what: str, *more: Any, dead: str | None = None) -> None:
        mine = _mine(delivery)
        if what != "extend":
            self._open -= 1
        names = [self._group, self._name, _NOBODY]
        arguments = [*names, mine.entry, mine.attempt, self._lease, what, *more]
        keys = [*self._keys("due"), dead or self._source.channel]
        if not await self._run("stream_settle", keys, arguments):
            raise self._lost(mine)

    def _lost(self, delivery: Delivery) -> LeaseLost:
        return LeaseLost(
            f"stream {self._source.channel!r}: message {delivery.id!r}: it is settled already, "
            "or its lease ran out and another consumer has it"
        )

    def _keys(self, *kinds: str) -> list[str]:
        stream = self._source.channel
        named = {"due": f"{stream}:{self._group}:due", "scheduled": f"{stream}:scheduled"}
        return [stream, *(named[kind] for kind in kinds)]

    async def _run(self, script: str, keys: Sequence[str], arguments: Sequence[Any]) -> Any:
        return await (await self._transport.connection()).run(script, keys, arguments)


def _mine(delivery: Delivery) -> StreamDelivery:
    if not isinstance(delivery, StreamDelivery):
        raise TypeError(f"message {delivery.id!r} was not received from this transport")
    return delivery


async def abandoned(transport: RedisTransport, source: Source, settings: Reading) -> Abandoned:
    """What consumers of the group have in hand, and whether one of them is there."""
    redis = (await transport.connection()).redis
    group = source.group or DEFAULT_GROUP
    consumers = [one for one in await redis.xinfo_consumers(source.channel, group) if one["pending"]]
    held = [one for one in consumers if one["name"] != _NOBODY.encode()]
    is_read = any(one["idle"] < 5_000 * SLICE for one in held)
    return Abandoned(sum(one["pending"] for one in held), settings.lease, is_read)


async def prepare(transport: RedisTransport, source: Source, settings: Reading) -> None:
    """Find the group of a subscription, or create it."""
    redis = (await transport.connection()).redis
    group = source.group or DEFAULT_GROUP
    try:
        groups = await redis.xinfo_groups(source.channel)
    except ResponseError as error:
        if str(error).startswith("WRONGTYPE"):
            raise ConfigurationError(
                f"subscriber {source.channel!r}: the key is no stream; a list is read with source=RedisList()"
            ) from error
        groups = []
    if any(found["name"] == group.encode() for found in groups):
        return
    if not settings.create:
        raise ConfigurationError(
            f"subscriber {source.channel!r}: the stream has no group {group!r}; run XGROUP CREATE "
            f"{source.channel} {group} 0 MKSTREAM, or say RedisStream(create=True), or ?create=true"
        )
    try:
        await redis.xgroup_create(source.channel, group, settings.start, mkstream=True)
    except ResponseError as error:
        if not str(error).startswith("BUSYGROUP"):
            raise
