"""A transport whose connection lives on an event loop, for callers on any loop and on none."""

from __future__ import annotations

import asyncio
import contextlib
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Coroutine
from typing import Any, Generic, Protocol, TypeVar

from settled.portal import Portal
from settled.transports.base import (
    AsyncChannel,
    Capabilities,
    Channel,
    Outgoing,
    Publication,
    Published,
    Source,
)
from settled.transports.faces import BlockingChannel

_CLOSE_WITHIN = 2.0


class Closes(Protocol):
    """What is connected, and can be disconnected."""

    async def close(self) -> None: ...


C = TypeVar("C", bound=Closes)


class LoopTransport(ABC, Generic[C]):
    """Connects once a loop: the app's, and one in a thread for sync code while no app runs.

    A subclass says what its channels can do, how to connect, how to publish and what a channel is.
    """

    capabilities: Capabilities

    def __init__(self) -> None:
        self._connections: dict[asyncio.AbstractEventLoop, asyncio.Task[C]] = {}
        self._ends: dict[asyncio.AbstractEventLoop, AsyncGenerator[None, None]] = {}
        self._serving: asyncio.AbstractEventLoop | None = None
        self._portal = Portal("settled-publish")

    @abstractmethod
    async def connect(self) -> C:
        """A connection on the running loop."""

    @abstractmethod
    async def push(self, message: Outgoing) -> Published:
        """Publish, and wait until the broker has it."""

    @abstractmethod
    def async_channel(self, source: Source) -> AsyncChannel:
        """An awaitable channel."""

    async def connection(self) -> C:
        """The connection of the running loop; a failed one is tried anew."""
        loop = asyncio.get_running_loop()
        connecting = self._connections.get(loop)
        if connecting is None or (connecting.done() and connecting.exception() is not None):
            connecting = self._connections[loop] = asyncio.create_task(self.connect())
            if self._ends.get(loop) is None:
                self._ends[loop] = self._until_the_loop_ends()
                await anext(self._ends[loop])
        return await asyncio.shield(connecting)

    async def _until_the_loop_ends(self) -> AsyncGenerator[None, None]:
        """Disconnects when the loop ends, as `asyncio.run` closes the generators that are still open then."""
        try:
            yield
        finally:
            self._ends.pop(asyncio.get_running_loop(), None)
            with contextlib.suppress(Exception):
                async with asyncio.timeout(_CLOSE_WITHIN):
                    await self._disconnect()

    async def open(self) -> None:
        self._serving = asyncio.get_running_loop()
        await self.connection()

    async def close(self) -> None:
        self._serving = None
        await self._disconnect()
        await asyncio.to_thread(self._close_portal)

    def _close_portal(self) -> None:
        if self._portal.is_open:
            self._portal.run(self._disconnect())
            self._portal.close()

    async def _disconnect(self) -> None:
        loop = asyncio.get_running_loop()
        connecting = self._connections.pop(loop, None)
        ending = self._ends.pop(loop, None)
        if connecting is not None:
            connection = await connecting
            await connection.close()
        if ending is not None:
            await ending.aclose()

    def channel(self, source: Source) -> Channel:
        return BlockingChannel(self.async_channel(source), asyncio.get_running_loop())

    def publish(self, message: Outgoing) -> Publication:
        serving = self._serving
        home = None if serving is None or serving.is_closed() else serving
        return publish_from_anywhere(self.push(message), home, self._portal)


def publish_from_anywhere(
    call: Coroutine[Any, Any, Published], home: asyncio.AbstractEventLoop | None, portal: Portal
) -> Publication:
    """Publish on the loop `home` if there is one, else where the caller is: on its loop, or in the portal.

    On a running loop it is awaited; in other code it is done when this returns.
    """
    try:
        here = asyncio.get_running_loop()
    except RuntimeError:
        if home is None:
            return Publication.of(portal.run(call))
        return Publication.of(asyncio.run_coroutine_threadsafe(call, home).result())
    if home is None or home is here:
        return Publication.when_awaited(call)
    return Publication.when_awaited(asyncio.wrap_future(asyncio.run_coroutine_threadsafe(call, home)))
