"""Connections to Postgres that come back after an outage, and the schema brought up to date."""

from __future__ import annotations

import asyncio
import re
import time
from contextlib import asynccontextmanager
from importlib import resources
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import asyncpg

from settled.queue.errors import BadRequest, QueueError, Unavailable
from settled.queue.names import SCHEMA

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable

MIGRATION_LOCK = 0x5E771ED
_SETTINGS = {
    "search_path": SCHEMA,
    "timezone": "UTC",
    "application_name": "settled",
    "jit": "off",
    # A plan made while a table was small would read all of it, and is kept when the table has grown.
    "enable_seqscan": "off",
    "enable_hashjoin": "off",
    "enable_mergejoin": "off",
    "enable_material": "off",
}
# For whoever looks at everything.
_BROAD = {"enable_hashjoin": "on", "enable_mergejoin": "on", "enable_material": "on"}

_GONE = (
    OSError,
    asyncio.TimeoutError,
    asyncpg.PostgresConnectionError,
    asyncpg.InterfaceError,
    asyncpg.InternalClientError,
    asyncpg.exceptions.OperatorInterventionError,
    asyncpg.exceptions.InsufficientResourcesError,
    asyncpg.exceptions.InvalidCatalogNameError,
)


def listed(values: Iterable[object]) -> str:
    """Numbers or uuids as the text of an array, to be cast: the client takes much longer over a list.

    >>> listed([1, 2])
    '{1,2}'
    """
    return f"{{{','.join(map(str, values))}}}"


def sql(name: str) -> str:
    """A named statement of schema/queries.sql."""
    return _QUERIES[name]


def _load_queries() -> dict[str, str]:
    text = resources.files("settled.queue").joinpath("schema", "queries.sql").read_text()
    parts = re.split(r"^-- name: (\w+)\n", text, flags=re.M)[1:]
    return {name: body.strip().rstrip(";") for name, body in zip(parts[::2], parts[1::2], strict=True)}


_QUERIES = _load_queries()


def check_dsn(dsn: str) -> None:
    """Refuse a DSN that no connection can be made with; its user, password and options are not shown.

    >>> check_dsn("postgresql://ann:secret@127.0.0.1:port/shop")
    Traceback (most recent call last):
    settled.queue.errors.BadRequest: dsn: the port must be 1..65535, got 'postgresql://127.0.0.1:port/shop'
    """
    scheme, _, rest = dsn.partition("://")
    shown = f"{scheme}://{rest.rpartition('@')[2]}".partition("?")[0] if rest else ""
    if scheme not in ("postgresql", "postgres") or not rest:
        raise BadRequest("dsn", shown, "must be postgresql://user@host:port/database")
    try:
        hosts = urlsplit(dsn).netloc.rpartition("@")[2].split(",")
        ports = [urlsplit(f"//{host}").port for host in hosts]
    except ValueError:
        ports = [0]
    if 0 in ports:
        raise BadRequest("dsn", shown, "the port must be 1..65535")


async def connect(dsn: str, **settings: str) -> asyncpg.Connection:
    """One connection with our schema on its path."""
    return await asyncpg.connect(
        dsn, server_settings={**_SETTINGS, **settings}, timeout=10, command_timeout=60
    )


class Link:
    """A dedicated connection that is opened when it is needed, and again after it was lost."""

    def __init__(self, dsn: str, **settings: str) -> None:
        self._dsn = dsn
        self._settings = settings
        self._connection: asyncpg.Connection | None = None
        self._opening: asyncio.Task[asyncpg.Connection] | None = None
        self._closed = False

    async def get(self) -> asyncpg.Connection:
        """The open connection; Unavailable if there can be none now."""
        while self._connection is None or self._connection.is_closed():
            if self._closed:
                raise Unavailable("the engine is closed")
            # A caller may be cancelled; a connection half made would be left open.
            if self._opening is None:
                self._opening = asyncio.create_task(connect(self._dsn, **self._settings))
                self._opening.add_done_callback(self._opened)
            try:
                await asyncio.shield(self._opening)
            except _GONE as error:
                raise Unavailable(str(error) or type(error).__name__) from error
        return self._connection

    def _opened(self, opening: asyncio.Task[asyncpg.Connection]) -> None:
        self._opening = None
        if not opening.cancelled() and opening.exception() is None:
            self._connection = opening.result()

    async def fetch(self, query: str, *args: Any) -> list[Any]:
        """Run one statement; Unavailable if the connection is lost, whatever became of the statement."""
        connection = await self.get()
        try:
            return await connection.fetch(query, *args)
        except _GONE as error:
            self.drop()
            raise Unavailable(str(error) or type(error).__name__) from error

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[asyncpg.Connection]:
        """A transaction on this connection."""
        connection = await self.get()
        try:
            async with connection.transaction():
                yield connection
        except _GONE as error:
            self.drop()
            raise Unavailable(str(error) or type(error).__name__) from error

    def drop(self) -> None:
        """Forget the connection; the next use opens another."""
        if self._connection is not None:
            self._connection.terminate()
            self._connection = None

    async def close(self) -> None:
        """Disconnect for good."""
        self._closed = True
        if self._opening is not None:
            await asyncio.wait([self._opening])
        if self._connection is not None:
            connection, self._connection = self._connection, None
            try:
                await connection.close(timeout=2)
            except (*_GONE, asyncio.CancelledError):
                connection.terminate()


class Pool:
    """A few links for whatever is not the hot path."""

    def __init__(self, dsn: str, size: int) -> None:
        self._links = [Link(dsn, **_BROAD) for _ in range(size)]
        self._free: asyncio.LifoQueue[Link] = asyncio.LifoQueue()
        self._running: set[asyncio.Task[list[Any]]] = set()
        for link in self._links:
            self._free.put_nowait(link)

    @asynccontextmanager
    async def link(self) -> AsyncIterator[Link]:
        """Borrow a link."""
        try:
            async with asyncio.timeout(15):
                link = await self._free.get()
        except TimeoutError:
            raise Unavailable("all connections are busy") from None
        try:
            yield link
        finally:
            self._free.put_nowait(link)

    async def fetch(self, query: str, *args: Any) -> list[Any]:
        """Run one statement, to its end though the caller be cancelled: cancelling one costs a connection."""
        running = asyncio.create_task(self._fetch(query, *args))
        self._running.add(running)
        running.add_done_callback(self._running.discard)
        return await asyncio.shield(running)

    async def _fetch(self, query: str, *args: Any) -> list[Any]:
        async with self.link() as link:
            return await link.fetch(query, *args)

    async def fetchrow(self, query: str, *args: Any) -> Any:
        """Run one statement and answer its first row, or None."""
        rows = await self.fetch(query, *args)
        return rows[0] if rows else None

    async def fetchval(self, query: str, *args: Any) -> Any:
        """Run one statement and answer its first value, or None."""
        rows = await self.fetch(query, *args)
        return rows[0][0] if rows else None

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[asyncpg.Connection]:
        """A transaction on a borrowed link."""
        async with self.link() as link, link.transaction() as connection:
            yield connection

    async def close(self) -> None:
        """Disconnect all."""
        await asyncio.gather(*self._running, return_exceptions=True)
        for link in self._links:
            await link.close()


class Clock:
    """The database's clock as seen from here."""

    def __init__(self) -> None:
        self.offset = 0.0

    def now(self) -> float:
        """The database's time, in seconds since 1970."""
        return time.time() + self.offset

    async def sync(self, pool: Pool) -> None:
        """Measure the difference again."""
        before = time.time()
        there = await pool.fetchval("select extract(epoch from clock_timestamp())::float8")
        self.offset = there - (before + time.time()) / 2


def _functions(text: str) -> str:
    """A migration's functions, to be made or replaced: tables are migrated, functions follow the program."""
    found = re.findall(r"^create (function .*?^\$\$;\n)", text, flags=re.M | re.S)
    return "".join(f"create or replace {each}" for each in found)


async def migrate(dsn: str) -> None:
    """Apply missing migrations, one starter at a time; refuse a schema newer than this program."""
    folder = resources.files("settled.queue").joinpath("schema")
    steps = sorted((f for f in folder.iterdir() if re.match(r"\d{3}_.*\.sql$", f.name)), key=lambda f: f.name)
    check_dsn(dsn)
    try:
        connection = await connect(dsn)
    except asyncpg.exceptions.ClientConfigurationError as error:
        raise QueueError(f"dsn: {error}") from error
    except _GONE as error:
        raise Unavailable(str(error) or type(error).__name__) from error
    try:
        await connection.fetch("select pg_advisory_lock($1)", MIGRATION_LOCK)
        await connection.execute(f"create schema if not exists {SCHEMA}")
        await connection.execute(_QUERIES["migrations"])
        done = {row["id"] for row in await connection.fetch("select id from migration")}
        newest = int(steps[-1].name[:3])
        if done and max(done) > newest:
            raise QueueError(
                f"the database's queue schema is at version {max(done)}, this program knows {newest}: "
                "upgrade settled"
            )
        missing = [step for step in steps if int(step.name[:3]) not in done]
        for step in missing:
            async with connection.transaction():
                await connection.execute(step.read_text())
                await connection.fetch(
                    "insert into migration (id, name) values ($1, $2)", int(step.name[:3]), step.name
                )
        if missing and done:
            async with connection.transaction():
                await connection.execute("".join(_functions(step.read_text()) for step in steps))
    finally:
        await connection.close()
