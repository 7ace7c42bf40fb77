"""Accepts connections on a socket, drops the dead ones, and stops without leaving a request unanswered."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from .config import BACKLOG
from .protocol import Connection, Shared

if TYPE_CHECKING:
    import socket

    from .protocol import Close, Handler, Soon

REQUEST_TIMEOUT = 60.0
IDLE_TIMEOUT = 120.0
UNREAD_TIMEOUT = 30.0
FIRST_WORD = 0.25


class Listener:
    """An HTTP server over one listening socket.

    `stop()` first refuses new connections, then waits for what is in flight; the handler is expected to
    end its long polls when it is told so.
    """

    def __init__(
        self, handler: Handler, *, body_limit: int, soon: Soon | None = None, close: Close | None = None
    ) -> None:
        self._shared = Shared(handler, body_limit, soon, close)
        self._server: asyncio.Server | None = None
        self._beat: asyncio.TimerHandle | None = None

    @property
    def connections(self) -> int:
        """How many clients are connected."""
        return len(self._shared.connections)

    @property
    def unsent(self) -> int:
        """How many bytes of answers wait for clients to read."""
        return self._shared.unsent

    async def start(self, sock: socket.socket) -> None:
        """Begin to accept on `sock`."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: Connection(self._shared), sock=sock, backlog=BACKLOG)
        self._pulse()

    def _pulse(self) -> None:
        loop = asyncio.get_running_loop()
        self._shared.tick()
        now = loop.time()
        for connection in list(self._shared.connections):
            if connection.unread(now) > UNREAD_TIMEOUT:
                connection.drop()
            elif connection.overdue(now, REQUEST_TIMEOUT, IDLE_TIMEOUT):
                connection.close()
        self._beat = loop.call_later(1.0, self._pulse)

    async def stop(self, grace: float) -> None:
        """Answer what is in flight for up to `grace` seconds, then hang up."""
        self._shared.stopping = True
        if self._server is not None:
            self._server.close()
        loop = asyncio.get_running_loop()
        deadline = loop.time() + grace
        hurry = loop.time() + min(grace, FIRST_WORD)
        while self._shared.connections and loop.time() < deadline:
            for connection in list(self._shared.connections):
                # Who has only just connected is about to ask.
                if connection.silent and (connection.served or loop.time() >= hurry):
                    connection.close()
            await asyncio.sleep(0.01)
        for connection in list(self._shared.connections):
            connection.close()
        if self._beat is not None:
            self._beat.cancel()
