"""The bridge: an app whose handler publishes to another transport."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
from collections import deque
from collections.abc import Awaitable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any
from urllib.parse import urlsplit

from settled.app import App
from settled.bridge.outlet import CALLS, Outlet, Refused
from settled.bridge.same import reads, same_broker
from settled.bridge.window import Window, WindowedTransport, open_transport
from settled.clock import SystemClock
from settled.codec import content_type_of
from settled.message import Message
from settled.settlement import describe
from settled.signals import ConfigurationError
from settled.transports import connect
from settled.transports.base import (
    BrokerStatus,
    Capabilities,
    Outgoing,
    Published,
    Remembers,
    Reports,
    TellsLanes,
    Transport,
)
from settled.transports.queue import was_spread

LANE = "settled-lane"
"""The header that carries a lane through a broker that has none."""
SUBJECT = "settled-subject"
"""The header with the subject of a message that was read with a pattern."""

logger = logging.getLogger("settled")


@dataclass(slots=True)
class Totals:
    """What became of the messages that were read."""

    read: int = 0
    written: int = 0
    duplicates: int = 0
    """The target had them already."""
    rejected: int = 0
    """The target will never take them; they are the source's dead letters."""
    released: int = 0
    """Given back to the source, unwritten."""
    unsettled: int = 0
    """The source could not be told, so they come again."""

    def __str__(self) -> str:
        line = (
            f"read={self.read} written={self.written} duplicates={self.duplicates} rejected={self.rejected}"
        )
        rest = {"released": self.released, "unsettled": self.unsettled}
        return " ".join([line, *(f"{name}={count}" for name, count in rest.items() if count)])


class Bridge:
    """Reads a channel of one transport and writes to a channel of another, at least once.

    A message is acknowledged when the target has confirmed it, under its own id: into a queue, which knows
    its ids, it goes once. Many are on their way at a time; those of one lane go one after the other.

    >>> bridge = Bridge("memory://", "memory://", channel="orders", to="archive", idle_exit=0.1)
    >>> asyncio.run(bridge.run())
    Totals(read=0, written=0, duplicates=0, rejected=0, released=0, unsettled=0)
    """

    def __init__(
        self,
        source: str | Transport,
        target: str | Transport,
        *,
        channel: str,
        to: str | None = None,
        group: str | None = None,
        dead_letter: str | None = None,
        settings: object = None,
        content_type: str | None = None,
        buffer: int = 500,
        limit: int | None = None,
        idle_exit: float | None = None,
        grace: float = 10.0,
    ) -> None:
        """Nothing is opened yet.

        `settings` are those of `@app.subscriber(source=...)`. `content_type` is for messages that have none.
        `buffer` messages are read at a time, twice as many are on their way. It ends by itself after `limit`
        messages, or when nothing has come for `idle_exit` seconds. A stop waits `grace` seconds for the
        target, then gives back what is left.
        """
        for name, value in (("buffer", buffer), ("limit", limit)):
            if value is not None and value < 1:
                raise ConfigurationError(f"bridge: {name} must be at least 1, got {value!r}")
        if to is not None and not to:
            raise ConfigurationError(f"bridge: to must be a name, got {to!r}")
        if _feeds_itself(source, target, channel, to or channel):
            raise ConfigurationError(
                f"bridge: it would copy {channel!r} of {_name(source)} onto itself without end; "
                "name another channel: --to NAME, or to=..."
            )
        clock = SystemClock()
        self.totals = Totals()
        self.to = to or channel
        self._channel = channel
        self._source = connect(source, clock) if isinstance(source, str) else source
        self._target = connect(target, clock) if isinstance(target, str) else target
        self._target_name = _name(target)
        self._has_lanes = _has_lanes(self._target)
        self._outlet: Outlet | None = None
        self._window = Window(2 * buffer, limit)
        self._content_type = content_type
        self._idle_exit = idle_exit
        self._grace = grace
        self._carrying: dict[asyncio.Task[None], None] = {}
        self._lanes: dict[str, deque[Message[Any]]] = {}
        self._loose: deque[Message[Any]] = deque()
        self._stop: asyncio.Event | None = None
        self._hurry = asyncio.Event()
        self._settling = asyncio.Semaphore(CALLS)
        self._failure: ConfigurationError | None = None
        if group is None and settings is None and isinstance(self._source, Remembers):
            settings = self._source.lasting(_reader(channel, self._target_name, self.to))
        seen = WindowedTransport(self._source, _name(source), self._window, self._drain)
        self._app = App(transport=seen)
        self._app.subscriber(channel, group=group, dead_letter=dead_letter, source=settings, buffer=buffer)(
            self._forward
        )
        # Whatever it is, it is carried as it is.
        self._app.subscriptions = [replace(s, decode=_as_it_is) for s in self._app.subscriptions]

    @property
    def in_flight(self) -> int:
        """How many messages are on their way."""
        return len(self._window.out)

    @property
    def target_status(self) -> BrokerStatus:
        """Whether the target takes messages, or why not."""
        if self._outlet is not None and self._outlet.is_away:
            return BrokerStatus(connected=False, detail=self._outlet.why_away)
        return self._target.broker() if isinstance(self._target, Reports) else BrokerStatus(connected=True)

    @property
    def source_status(self) -> BrokerStatus:
        """Whether the source is there."""
        return self._app.status().broker or BrokerStatus(connected=False)

    async def run(self, stop: asyncio.Event | None = None) -> Totals:
        """Carry until `stop` is set or until it ends by itself; then wait for what is on its way."""
        self._stop = stop or asyncio.Event()
        self._outlet = Outlet(self._target, self._target_name)
        await open_transport(self._target, self._target_name)
        watching = asyncio.create_task(self._watch(self._stop))
        try:
            status = await self._app.serve(self._stop)
        finally:
            watching.cancel()
            await self._target.close()
        if self._failure is not None:
            raise self._failure
        if not status.healthy:
            why = "; ".join(s.why for s in status.subscriptions if s.why)
            raise ConfigurationError(f"bridge: reading {self._channel!r} ended: {why}")
        return self.totals

    def hurry(self) -> None:
        """Do not wait for the target any longer: give back what is on its way."""
        self._hurry.set()

    async def _watch(self, stop: asyncio.Event) -> None:
        """End it when it has done what it was to do."""
        loop = asyncio.get_running_loop()
        window = self._window
        while not window.is_done:
            await asyncio.sleep(0.05)
            idle = not window.out and window.active and loop.time() - window.active
            if self._idle_exit is not None and idle and idle >= self._idle_exit:
                break
        stop.set()

    async def _forward(self, message: Message[Any]) -> None:
        """Send it on its way, behind those of its lane that are on theirs."""
        self.totals.read += 1
        lane = _lane(message)
        if lane is None:
            self._loose.append(message)
            if len(self._loose) == 1:
                # What else is received with it goes with it.
                asyncio.get_running_loop().call_soon(self._send_loose)
            return
        waiting = self._lanes.get(lane)
        if waiting is not None:
            waiting.append(message)
        else:
            self._lanes[lane] = deque([message])
            self._start(self._carry_lane(lane))

    def _send_loose(self) -> None:
        assert self._outlet is not None  # noqa: S101
        while self._loose:
            size = min(len(self._loose), self._outlet.most)
            self._start(self._carry(deque(self._loose.popleft() for _ in range(size))))

    def _start(self, carrying: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(carrying)
        self._carrying[task] = None
        task.add_done_callback(self._carried)

    def _carried(self, task: asyncio.Task[None]) -> None:
        del self._carrying[task]
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("bridge: messages were left to the source", exc_info=error)

    async def _carry_lane(self, lane: str) -> None:
        try:
            await self._carry(self._lanes[lane])
        finally:
            # In the same step in which nothing waited any more: who comes later starts anew.
            del self._lanes[lane]

    async def _carry(self, waiting: deque[Message[Any]]) -> None:
        """Write what waits, in its order, and settle it, until nothing waits."""
        assert self._outlet is not None  # noqa: S101
        try:
            while waiting:
                batch = list(islice(waiting, self._outlet.most))
                results = await self._write(self._outlet, [self._outgoing(message) for message in batch])
                if len(batch) == 1:
                    await self._settle(batch[0], results[0])
                else:
                    await asyncio.gather(*map(self._settle, batch, results))
                for _ in batch:
                    waiting.popleft()
        except ConfigurationError as error:
            self._fail(error)
            await self._give_back(waiting)
        except asyncio.CancelledError:
            await self._give_back(waiting)

    async def _write(self, outlet: Outlet, messages: list[Outgoing]) -> Sequence[Published | Refused]:
        if len(messages) > 1:
            with contextlib.suppress(Refused):
                return await outlet.write(messages)
        found: list[Published | Refused] = []
        for message in messages:
            try:
                found += await outlet.write([message])
            except Refused as refused:
                found.append(refused)
        return found

    async def _settle(self, message: Message[Any], result: Published | Refused) -> None:
        match result:
            case Refused():
                logger.warning("bridge: rejected message_id=%s: %s", message.id, result)
                if await self._settled(message, message.term(str(result))):
                    self.totals.rejected += 1
            case Published(duplicate=True):
                self.totals.duplicates += 1
                await self._settled(message, message.ack())
            case Published():
                self.totals.written += 1
                await self._settled(message, message.ack())

    async def _give_back(self, waiting: deque[Message[Any]]) -> None:
        """Last first, so that a broker which gives back to the head ends up with the old order."""
        while waiting:
            message = waiting.pop()
            if not message.settled and await self._settled(message, message.release()):
                self.totals.released += 1

    async def _settled(self, message: Message[Any], call: Awaitable[None]) -> bool:
        try:
            async with self._settling:
                await call
        except Exception as error:
            self.totals.unsettled += 1
            logger.warning(
                "bridge: settle failed, left to the source message_id=%s: %s", message.id, describe(error)
            )
            return False
        return True

    def _fail(self, error: ConfigurationError) -> None:
        """The target is set up wrongly: that is no message's fault, and waiting does not help."""
        if self._failure is None:
            self._failure = error
        self._hurry.set()
        if self._stop is not None:
            self._stop.set()

    async def _drain(self) -> None:
        """Wait for what is on its way, as long as the grace lasts; give back the rest, last first."""
        hurry = asyncio.create_task(self._hurry.wait())
        self._send_loose()
        if self._carrying:
            done = asyncio.ensure_future(asyncio.wait(list(self._carrying)))
            await asyncio.wait({done, hurry}, timeout=self._grace, return_when=asyncio.FIRST_COMPLETED)
            done.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await done
        hurry.cancel()
        left = list(self._carrying)
        for task in reversed(left):
            task.cancel()
        if left:
            logger.warning(
                "bridge: %s has not taken %d messages; giving them back", self._target_name, len(left)
            )
            await asyncio.wait(left)

    def _outgoing(self, message: Message[Any]) -> Outgoing:
        headers = dict(_carried_headers(message.headers))
        if self._content_type is not None and content_type_of(headers) is None:
            headers["content-type"] = self._content_type
        if message.subject != self._channel:
            headers.setdefault(SUBJECT, message.subject)
        headers.pop(LANE, None)
        lane = _lane(message)
        if isinstance(self._target, TellsLanes) and self._target.lane_header in headers:
            # It comes from such a broker, and has the lane there that it had here.
            lane = None
        if lane is not None and not self._has_lanes:
            headers[LANE], lane = lane, None
        return Outgoing(subject=self.to, data=message.data, headers=headers, id=message.id, lane=lane)


def _carried_headers(headers: Mapping[str, str]) -> Mapping[str, str]:
    """All but those that a NATS server acts on: they were meant for the stream that was read."""
    return {name: value for name, value in headers.items() if not name.lower().startswith("nats-")}


def _lane(message: Message[Any]) -> str | None:
    """The lane it has, or had before a broker that has none."""
    lane = message.lane
    if lane is None or was_spread(lane):
        lane = message.headers.get(LANE)
    return lane or None


def _has_lanes(transport: Transport) -> bool:
    """Whether it takes a lane, in one of the ways it can be set up."""
    variants: Mapping[str, Capabilities] = getattr(transport, "variants", {})
    return any(can.lanes for can in (transport.capabilities, *variants.values()))


def _feeds_itself(source: str | Transport, target: str | Transport, channel: str, to: str) -> bool:
    if isinstance(source, str) and isinstance(target, str):
        return same_broker(source, target) and reads(source, channel, to)
    return source is target and channel == to


def _reader(*way: str) -> str:
    """The name of a bridge on its source: another for every way it goes, and the same after a restart."""
    return f"settled-bridge-{hashlib.sha256(' '.join(way).encode()).hexdigest()[:12]}"


def _as_it_is(data: bytes, headers: Mapping[str, str]) -> bytes:
    return data


def _name(transport: str | Transport) -> str:
    """What a transport is called in messages: its URL without secrets."""
    if not isinstance(transport, str):
        return type(transport).__name__
    parts = urlsplit(transport)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
