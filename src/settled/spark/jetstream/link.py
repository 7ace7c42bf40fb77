"""A connection to NATS for blocking callers, who wait a while for one that was lost."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import nats.errors
import nats.js.errors

from settled.portal import Portal
from settled.queue.errors import QueueError
from settled.transports.nats import Connection, PublishFailed
from settled.transports.nats.connection import parse

T = TypeVar("T")
RECONNECT_FOR = 30.0
_TIMEOUT = 5.0
# What goes away by itself when a server or a leader comes back.
_PASSING = (
    nats.errors.TimeoutError,
    nats.errors.NoRespondersError,
    nats.errors.ConnectionClosedError,
    nats.errors.OutboundBufferLimitError,
    nats.js.errors.ServiceUnavailableError,
    PublishFailed,
    ConnectionError,
    asyncio.TimeoutError,
)
_links: dict[tuple[int, str], Link] = {}


class Away(QueueError):
    """No NATS server answers now."""


class Link:
    """One connection, opened when it is needed, on a loop in a thread of its own."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._portal = Portal("settled-spark-nats")
        self._connection: Connection | None = None

    def run(self, work: Callable[[Connection], Coroutine[Any, Any, T]], patience: float = RECONNECT_FOR) -> T:
        """Do work that may be done twice: again if the server is away, for `patience` seconds."""
        return self._portal.run(self._patiently(work, patience))

    async def _patiently(self, work: Callable[[Connection], Coroutine[Any, Any, T]], patience: float) -> T:
        if self._connection is None:
            servers, login = parse(self._url, None)
            self._connection = Connection(servers, login, name="settled-spark", timeout=_TIMEOUT)
        deadline = time.monotonic() + patience
        while True:
            try:
                await self._connection.open()
                return await work(self._connection)
            except _PASSING as error:
                if time.monotonic() > deadline:
                    why = str(error) or type(error).__name__
                    raise Away(f"NATS at {self._connection.where} is unavailable: {why}") from error
                await asyncio.sleep(0.2)

    def close(self) -> None:
        """Disconnect; the next use connects again."""
        connection, self._connection = self._connection, None
        if connection is not None:
            self._portal.run(connection.close())
        self._portal.close()


def link_to(url: str) -> Link:
    """This process's connection; Spark reuses its worker processes, and so do we."""
    return _links.setdefault((os.getpid(), url), Link(url))
