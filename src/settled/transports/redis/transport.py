"""The transport: a pool of connections a loop, and publishing to streams and lists."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Sequence
from importlib import resources
from types import MappingProxyType
from typing import Any

from redis.asyncio import ConnectionPool, Redis
from redis.commands.core import AsyncScript
from redis.exceptions import ConnectionError as Disconnected
from redis.exceptions import RedisError, ResponseError
from redis.exceptions import TimeoutError as TimedOut

from settled.message import Delivery
from settled.signals import ConfigurationError
from settled.transports.base import Abandoned, AsyncChannel, BrokerStatus, Outgoing, Published, Source
from settled.transports.looped import LoopTransport
from settled.transports.redis.lists import ListChannel, element
from settled.transports.redis.settings import Options, parse, reading
from settled.transports.redis.streams import (
    StreamChannel,
    StreamDelivery,
    abandoned,
    prepare,
    scheduled,
    written,
)

# Each has a connection of its own while it waits for the answer.
_PUBLISH_AT_ONCE = 32
_SCRIPTS = resources.files("settled.transports.redis").joinpath("scripts")


class Refused(Exception):
    """The server will never take this message."""


def _told(message: Outgoing, error: ResponseError) -> Exception:
    """What a refusal of the server means."""
    text = str(error)
    if text.startswith("WRONGTYPE"):
        return ConfigurationError(
            f"publish to {message.subject!r}: the key is of another kind; a list is written with "
            "?lists=true in the URL, or by the app that reads it"
        )
    if "invalid bulk length" in text or "exceeds maximum allowed" in text:
        return Refused(f"publish to {message.subject!r}: {len(message.data)} bytes are too many: {text}")
    return error


class Pool:
    """Connections to one server, and the scripts that run there."""

    def __init__(self, redis: Redis, transport: RedisTransport) -> None:
        self.redis = redis
        self._transport = transport
        self._scripts: dict[str, AsyncScript] = {}
        self.turns = asyncio.Semaphore(_PUBLISH_AT_ONCE)

    async def run(self, name: str, keys: Sequence[str], arguments: Sequence[Any]) -> Any:
        """Run a script, which the server keeps."""
        script = self._scripts.get(name)
        if script is None:
            text = _SCRIPTS.joinpath(f"{name}.lua").read_text()
            script = self._scripts[name] = self.redis.register_script(text)
        try:
            answer = await script(keys=keys, args=arguments)
        except (Disconnected, TimedOut, OSError) as error:
            self._transport.lost(error)
            raise
        self._transport.lost(None)
        return answer

    async def close(self) -> None:
        await self.redis.aclose()


class RedisTransport(LoopTransport[Pool]):
    """Redis or Valkey, one server; redis-py's own options may be in the URL's query.

    >>> RedisTransport("redis://localhost:6379/0").broker().detail
    'not connected to localhost:6379'
    """

    capabilities = StreamChannel.capabilities
    variants = MappingProxyType({"lists": ListChannel.capabilities})

    def __init__(self, url: str) -> None:
        super().__init__()
        self.options: Options
        self.options, self._client = parse(url)
        self._lists: set[str] = set()
        self._connected = False
        self._trouble = ""

    @property
    def _where(self) -> str:
        path = self._client.get("path")
        return path or f"{self._client.get('host', 'localhost')}:{self._client.get('port', 6379)}"

    async def connect(self) -> Pool:
        # Each that waits has a connection of its own, so the number of them is that of the performers.
        redis = Redis.from_pool(ConnectionPool(**self._client))
        try:
            await redis.ping()
        except (Disconnected, TimedOut, OSError) as error:
            await redis.aclose()
            self.lost(error)
            raise ConnectionError(f"redis: {self._where}: {error}") from error
        except RedisError as error:
            await redis.aclose()
            raise ConfigurationError(f"redis: {self._where}: {error}") from error
        self.lost(None)
        return Pool(redis, self)

    def lost(self, error: BaseException | None) -> None:
        """A call has failed, or has not."""
        self._connected = error is None
        self._trouble = "" if error is None else f": {error}"

    def refuses(self, error: Exception) -> bool:
        return isinstance(error, (Refused, UnicodeError))

    def broker(self) -> BrokerStatus:
        if self._connected:
            return BrokerStatus(connected=True, detail=self._where)
        return BrokerStatus(connected=False, detail=f"not connected to {self._where}{self._trouble}")

    async def prepare(self, source: Source) -> None:
        """Find the group of a stream, or create it; a list needs nothing."""
        settings = reading(source, self.options)
        if settings.is_list:
            self._read_as_list(source)
            kind: Any = await (await self.connection()).redis.type(source.channel)
            if kind not in (b"none", b"list"):
                raise ConfigurationError(
                    f"subscriber {source.channel!r}: the key is no list, but a {kind.decode()}"
                )
        else:
            await prepare(self, source, settings)

    async def abandoned(self, source: Source) -> Abandoned:
        settings = reading(source, self.options)
        if settings.is_list:
            return await ListChannel(self, source, settings).abandoned()
        return await abandoned(self, source, settings)

    def position(self, delivery: Delivery) -> tuple[int, int]:
        # A list is given back to its head, in the old order.
        return delivery.position if isinstance(delivery, StreamDelivery) else (0, 0)

    def async_channel(self, source: Source) -> AsyncChannel:
        settings = reading(source, self.options)
        if settings.is_list:
            self._read_as_list(source)
            return ListChannel(self, source, settings)
        return StreamChannel(self, source, settings)

    def _read_as_list(self, source: Source) -> None:
        # What this app reads as a list, it also writes as one.
        named = {source.channel, f"{source.channel}.dead", source.dead_letter, source.invalid}
        self._lists |= {name for name in named if name is not None}

    async def push(self, message: Outgoing) -> Published:
        if message.lane is not None:
            raise ConfigurationError(
                f"publish to {message.subject!r}: Redis has no lanes, got lane={message.lane!r}; for order, "
                "read with one performer and a stream of its own"
            )
        pool = await self.connection()
        id_ = message.id or uuid.uuid4().hex
        async with pool.turns:
            try:
                await self._write(pool.redis, message, id_)
            except ResponseError as error:
                raise _told(message, error) from error
        self.lost(None)
        return Published(id=id_)

    async def _write(self, redis: Redis, message: Outgoing, id_: str) -> None:
        is_list = self.options.lists or message.subject in self._lists
        whole = element(message, id_) if is_list else scheduled(message, id_)
        if message.delay > 0:
            due = int((time.time() + message.delay) * 1000)
            await redis.zadd(f"{message.subject}:scheduled", {whole: due})
        elif is_list:
            await redis.lpush(message.subject, whole)
        else:
            trim = ["MAXLEN", "~", self.options.maxlen] if self.options.maxlen else []
            await redis.execute_command("XADD", message.subject, *trim, "*", *written(message, id_))  # type: ignore[no-untyped-call]
