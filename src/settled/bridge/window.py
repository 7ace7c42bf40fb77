"""A source that hands out a window of unsettled messages, and keeps what is out until it is settled."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from settled.message import Delivery
from settled.pump.leases import Keeper
from settled.settlement import Reject
from settled.signals import ConfigurationError
from settled.transports.base import (
    AsyncChannel,
    BrokerStatus,
    Buffers,
    Capabilities,
    Channel,
    Outgoing,
    Prepares,
    Publication,
    Recovers,
    Reports,
    Source,
    Transport,
)
from settled.transports.urls import in_one_line

logger = logging.getLogger("settled")

_AT_ONCE = 500
# For so long nothing more of a dead reader's messages has come.
_QUIET = 5.0
_LOOK_EVERY = 0.25
# A dead reader's last request is known to the broker for a while.
_IS_READ = 3.0
_SLACK = 0.5


class Window:
    """What is out, and how much more may be."""

    def __init__(self, size: int, limit: int | None) -> None:
        self.size = size
        self.limit = limit
        self.settled = 0
        self.out: dict[Delivery, None] = {}
        self.active = 0.0
        """When something last came, went or failed, by the loop's clock."""
        self._changed = asyncio.Event()

    @property
    def is_done(self) -> bool:
        """Whether as many as were wanted are settled."""
        return self.limit is not None and self.settled >= self.limit

    def room(self) -> int:
        """How many more may be handed out."""
        room = self.size - len(self.out)
        return room if self.limit is None else min(room, self.limit - self.settled - len(self.out))

    async def wait_for(self, wanted: int, seconds: float) -> int:
        """The room there is, as soon as it is as much as is wanted, or after the time."""
        if self.limit is not None:
            wanted = min(wanted, max(1, self.limit - self.settled - len(self.out)))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while self.room() < wanted:
                    self._changed.clear()
                    await self._changed.wait()
        return min(wanted, self.room())

    def took(self, deliveries: Sequence[Delivery]) -> None:
        self.out.update(dict.fromkeys(deliveries))
        if deliveries or not self.active:
            self.active = asyncio.get_running_loop().time()

    def ended(self, delivery: Delivery, *, settled: bool) -> None:
        self.out.pop(delivery, None)
        self.settled += settled
        self.touch()

    def touch(self) -> None:
        """Something happened."""
        self.active = asyncio.get_running_loop().time()
        self._changed.set()


class Past:
    """What a reader that is gone had in hand: gathered until it is complete, then handed out in order."""

    def __init__(self, count: int, position: Callable[[Delivery], Any]) -> None:
        self.missing = count
        self.deliveries: deque[Delivery] = deque()
        self._position = position
        self._since = 0.0

    def __bool__(self) -> bool:
        return self.missing > 0 or bool(self.deliveries)

    async def receive(self, channel: AsyncChannel, room: int, timeout: float) -> Sequence[Delivery]:
        """Take more of it; nothing is handed out while some is missing."""
        if self.missing > 0:
            came = await channel.receive(min(self.missing, _AT_ONCE), timeout)
            now = asyncio.get_running_loop().time()
            if came or not self._since:
                self._since = now
            self.deliveries.extend(came)
            # Another reader may have got some.
            self.missing = self.missing - len(came) if now - self._since < _QUIET else 0
            if self.missing > 0:
                return ()
            self.deliveries = deque(sorted(self.deliveries, key=self._position))
        return [self.deliveries.popleft() for _ in range(min(room, len(self.deliveries)))]


class WindowedChannel:
    """A channel whose receive waits for room, and whose messages are kept until they are settled."""

    def __init__(
        self,
        name: str,
        inner: AsyncChannel,
        window: Window,
        drain: Callable[[], Awaitable[None]],
        past: Past,
    ) -> None:
        self._name = name
        self._past = past
        self._inner = inner
        self._window = window
        self._drain = drain
        self._keeper: asyncio.Task[None] | None = None

    @property
    def capabilities(self) -> Capabilities:
        """Those of the channel, but for leases: a pump is done with a message before the target has it."""
        return replace(self._inner.capabilities, extends=False)

    async def receive(self, limit: int, timeout: float) -> Sequence[Delivery]:
        # As much as is asked for if it is there soon: many small receives would be slow.
        room = await self._window.wait_for(limit, timeout)
        if room <= 0:
            return ()
        if self._keeper is None and self._inner.capabilities.extends:
            # As long as it takes: the target may be away for days.
            keeper = Keeper(self._name, self._inner, self._held, math.inf)
            self._keeper = asyncio.create_task(keeper.run(), name="bridge-leases")
        try:
            if self._past:
                self._window.touch()
                taken = await self._past.receive(self._inner, room, timeout)
            else:
                taken = await self._inner.receive(room, timeout)
        except Exception:
            self._window.touch()
            raise
        self._window.took(taken)
        return taken

    async def ack(self, delivery: Delivery) -> None:
        await self._settle(delivery, self._inner.ack(delivery), settled=True)

    async def nack(self, delivery: Delivery) -> None:
        await self._settle(delivery, self._inner.nack(delivery))

    async def requeue(self, delivery: Delivery, delay: float | None) -> None:
        await self._settle(delivery, self._inner.requeue(delivery, delay))

    async def reject(self, delivery: Delivery, rejection: Reject) -> None:
        await self._settle(delivery, self._inner.reject(delivery, rejection), settled=True)

    async def _settle(self, delivery: Delivery, call: Awaitable[None], *, settled: bool = False) -> None:
        try:
            await call
        except BaseException:
            # It is the broker's now, and comes again.
            self._window.ended(delivery, settled=False)
            raise
        self._window.ended(delivery, settled=settled)

    async def extend(self, delivery: Delivery) -> None:
        await self._inner.extend(delivery)

    def wake(self) -> None:
        self._window.touch()
        self._inner.wake()

    async def close(self) -> None:
        await self._drain()
        while self._past.deliveries:
            with contextlib.suppress(Exception):  # what cannot be given back comes when its lease is over
                await self._inner.nack(self._past.deliveries.pop())
        if self._keeper is not None:
            self._keeper.cancel()
        await self._inner.close()

    def _held(self) -> list[Delivery]:
        out = [one for one in self._window.out if not one.settled] + list(self._past.deliveries)
        return [*out, *self._inner.buffered()] if isinstance(self._inner, Buffers) else out


class WindowedTransport:
    """The source's transport, seen through a window; `drain` is awaited before a channel closes."""

    def __init__(
        self, inner: Transport, name: str, window: Window, drain: Callable[[], Awaitable[None]]
    ) -> None:
        self.capabilities = inner.capabilities
        self._inner = inner
        self._name = name
        self._window = window
        self._drain = drain
        self._abandoned = 0

    async def open(self) -> None:
        await open_transport(self._inner, self._name)

    async def close(self) -> None:
        await self._inner.close()

    async def prepare(self, source: Source) -> None:
        if isinstance(self._inner, Prepares):
            with _named(f"cannot read {source.channel!r} of {self._name}"):
                await self._inner.prepare(source)
        if isinstance(self._inner, Recovers):
            with _named(f"cannot read {source.channel!r} of {self._name}"):
                self._abandoned = await self._wait_for_abandoned(self._inner, source)

    async def _wait_for_abandoned(self, inner: Recovers, source: Source) -> int:
        """How many messages a reader that is gone had in hand, once all of them are to be had.

        Newer ones would overtake them, and a lane would lose its order. Where another bridge reads the same
        there is none to keep.
        """
        began, told = asyncio.get_running_loop().time(), False
        while True:
            found = await inner.abandoned(source)
            waited = asyncio.get_running_loop().time() - began
            if not found.count or (found.is_read and waited > _IS_READ):
                return 0
            if waited > found.lease + _SLACK:
                return found.count
            if not told:
                told = True
                logger.warning(
                    "bridge: %d messages of %r are in hand of a reader that is gone; waiting for them, up to "
                    "%g s, so that newer ones do not overtake them",
                    found.count,
                    source.channel,
                    found.lease,
                )
            await asyncio.sleep(_LOOK_EVERY)

    def broker(self) -> BrokerStatus:
        if isinstance(self._inner, Reports):
            return self._inner.broker()
        return BrokerStatus(connected=True)

    def channel(self, source: Source) -> Channel:
        raise TypeError("a bridge reads with awaits")

    def async_channel(self, source: Source) -> AsyncChannel:
        name = f"bridge from {source.channel}"
        position = self._inner.position if isinstance(self._inner, Recovers) else lambda _: 0
        past = Past(self._abandoned, position)
        return WindowedChannel(name, self._inner.async_channel(source), self._window, self._drain, past)

    def publish(self, message: Outgoing) -> Publication:
        return self._inner.publish(message)


async def open_transport(transport: Transport, name: str) -> None:
    """Open it; a ConnectionError that names it if it cannot be reached."""
    with _named(f"cannot open {name}"):
        await transport.open()


@contextlib.contextmanager
def _named(what: str) -> Iterator[None]:
    """Whatever fails but what is set up wrongly is a ConnectionError that says what failed."""
    try:
        yield
    except ConfigurationError:
        raise
    except Exception as error:
        raise ConnectionError(f"bridge: {what}: {in_one_line(error)}") from error
