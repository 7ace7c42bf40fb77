"""A connection to NATS that comes back by itself, and publishing that is acknowledged."""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import parse_qsl, urlsplit

import nats.errors
import nats.js.errors
from nats.aio.client import Client
from nats.js import JetStreamContext
from nats.js.api import PubAck

from settled.signals import ConfigurationError
from settled.transports.base import BrokerStatus
from settled.transports.urls import certificates, file, masked, option, port_of, split

logger = logging.getLogger("settled")
T = TypeVar("T")


# What goes away by itself when a server or a leader comes back.
_PASSING = (
    nats.errors.TimeoutError,
    nats.errors.NoRespondersError,
    nats.errors.ConnectionClosedError,
    nats.errors.OutboundBufferLimitError,
    ConnectionError,
)


# How long one try waits: an answer can be lost with the server that owed it.
_ONE_TRY = 2.0
# As long as a cluster takes at most to elect a leader, or to give a stream more replicas.
_ELECTION = 15.0


@dataclass(frozen=True, slots=True)
class Stored:
    """A stream has it. A duplicate at a later try may be a duplicate of an earlier one of ours."""

    sequence: int
    duplicate: bool
    tries: int


class PublishFailed(Exception):
    """No server acknowledged the message in time; it may or may not be stored."""


class Refused(PublishFailed):
    """No stream ever will: NATS has no way to write it."""


class TooLarge(Refused, nats.errors.MaxPayloadError):
    """It is more than the server takes."""

    def __str__(self) -> str:
        return str(self.args[0])


def wire_size(data: bytes, headers: Mapping[str, str]) -> int:
    """What the server holds against its max_payload: headers count too.

    >>> wire_size(b"{}", {"tenant": "acme"})
    28
    """
    lines = sum(len(f"{name}: {value}\r\n".encode()) for name, value in headers.items())
    return len(data) + (len("NATS/1.0\r\n\r\n") + lines if headers else 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Login:
    """Who we are to the server; a user and password, or a token, may be in the URL as well."""

    user: str | None = None
    password: str | None = None
    token: str | None = None
    nkey: str | Path | None = None
    """A file with an nkey seed."""
    credentials: str | Path | None = None
    """A .creds file."""
    tls: ssl.SSLContext | None = None
    tls_hostname: str | None = None

    def options(self) -> dict[str, Any]:
        """As the client takes them."""
        found = {
            "user": self.user,
            "password": self.password,
            "token": self.token,
            "nkeys_seed": None if self.nkey is None else str(self.nkey),
            "user_credentials": None if self.credentials is None else str(self.credentials),
            "tls": self.tls,
            "tls_hostname": self.tls_hostname,
        }
        return {name: value for name, value in found.items() if value is not None}


def asks_to_create(url: str) -> bool:
    """Whether the URL says `create=true`: make the consumer of a group, and the stream of a subject."""
    found = dict(parse_qsl(urlsplit(url).query)).get("create", "false")
    if found not in ("true", "false"):
        raise ConfigurationError(f"nats: create in the URL must be true or false, got {found!r}")
    return found == "true"


def parse(url: str, login: Login | None) -> tuple[list[str], Login]:
    """The servers of a URL, and the login its query gives: credentials, nkey, tls_ca, tls_cert, tls_key.

    >>> parse("nats://ann:secret@one:4222,two:4222", None)[0]
    ['nats://ann:secret@one:4222', 'nats://ann:secret@two:4222']
    """
    parts = split(url)
    query = dict(parse_qsl(parts.query))
    known = {"create", "credentials", "nkey", "tls_ca", "tls_cert", "tls_key"}
    if query.keys() - known:
        unknown = ", ".join(sorted(query.keys() - known))
        raise ConfigurationError(
            f"nats: the URL has no option {unknown}; there are {', '.join(sorted(known))}"
        )
    if query.keys() - {"create"} and login is not None:
        raise ConfigurationError("nats: give the login either in the URL's query or as login=, not both")
    who, _, hosts = parts.netloc.rpartition("@")
    prefix = f"{parts.scheme}://{who}@" if who else f"{parts.scheme}://"
    servers = [f"{prefix}{host}" for host in hosts.split(",") if host]
    if not servers:
        raise ConfigurationError(f"nats: no server in {masked(url)!r}; write nats://host:4222")
    for server in servers:
        port_of(split(server))
    for name, path in query.items():
        if name != "create":
            option("nats", name, path, certificates if name == "tls_ca" else file)
    tls = None
    if query.keys() & {"tls_ca", "tls_cert", "tls_key"}:
        tls = ssl.create_default_context(cafile=query.get("tls_ca"))
        if "tls_cert" in query:
            tls.load_cert_chain(query["tls_cert"], query.get("tls_key"))
    if login is None:
        login = Login(credentials=query.get("credentials"), nkey=query.get("nkey"), tls=tls)
    return servers, login


class Connection:
    """One client connection, on one loop. A client that has closed for good is replaced by a new one."""

    def __init__(self, servers: list[str], login: Login, *, name: str, timeout: float) -> None:
        self.servers = servers
        self.timeout = timeout
        self.generation = 0
        self.loop: asyncio.AbstractEventLoop | None = None
        self._login = login
        self._name = name
        self._client: Client | None = None
        self._opening: asyncio.Lock | None = None
        self._closed = False
        self._last_error: BaseException | None = None

    @property
    def home(self) -> asyncio.AbstractEventLoop | None:
        """The loop it lives on, if that has not ended."""
        return None if self.loop is None or self.loop.is_closed() else self.loop

    @property
    def where(self) -> str:
        """The servers, without passwords."""
        return ", ".join(server.rpartition("@")[2].rpartition("/")[2] for server in self.servers)

    @property
    def client(self) -> Client:
        """The connected client; ConnectionError while there is none."""
        client = self._client
        if client is None or not client.is_connected:
            raise ConnectionError(f"nats: not connected to {self.where}{self._why()}")
        return client

    @property
    def sending(self) -> Client:
        """The client to send with: while it reconnects it keeps what is sent, and sends it then."""
        if self._client is None:
            raise ConnectionError(f"nats: not connected to {self.where}")
        return self._client

    @property
    def jetstream(self) -> JetStreamContext:
        return self.sending.jetstream(timeout=self.timeout)

    def status(self) -> BrokerStatus:
        client = self._client
        if client is not None and client.is_connected:
            url = client.connected_url
            return BrokerStatus(
                connected=True, detail=f"connected to {url.hostname}:{url.port}" if url else ""
            )
        if client is None or self._closed:
            return BrokerStatus(connected=False, detail=f"not connected to {self.where}")
        return BrokerStatus(connected=False, detail=f"reconnecting to {self.where}{self._why()}")

    def _why(self) -> str:
        error = self._last_error
        return "" if error is None else f": {type(error).__name__}: {error}"

    async def open(self) -> Client:
        """Connect if need be; ConnectionError, with the reason, if no server can be reached."""
        here = asyncio.get_running_loop()
        if self._opening is None or self.home is None:
            # The first time; or the loop it was opened on has ended, and the client with it.
            self._client, self._opening, self.loop = None, asyncio.Lock(), here
        async with self._opening:
            if self._client is None or self._client.is_closed:
                self._client = await self._connect()
                self._closed = False
                self.generation += 1
            return self._client

    async def _connect(self) -> Client:
        client = Client()
        try:
            await client.connect(
                self.servers,
                name=self._name,
                error_cb=self._on_error,
                disconnected_cb=self._on_disconnected,
                reconnected_cb=self._on_reconnected,
                connect_timeout=2,
                # Only for this first time, so that a wrong password or address is reported.
                max_reconnect_attempts=2,
                reconnect_time_wait=0.2,  # type: ignore[arg-type]
                **self._login.options(),
            )
        except Exception as error:
            why = self._last_error or error
            raise ConnectionError(
                f"nats: cannot connect to {self.where}: {type(why).__name__}: {why}"
            ) from error
        client.options["max_reconnect_attempts"] = -1
        self._last_error = None
        return client

    async def _on_error(self, error: Exception) -> None:
        self._last_error = error
        logger.debug("nats: %s: %s", type(error).__name__, error)

    async def _on_disconnected(self) -> None:
        if not self._closed:
            logger.warning("nats: lost the connection to %s, reconnecting%s", self.where, self._why())

    async def _on_reconnected(self) -> None:
        self._last_error = None
        self.generation += 1
        logger.info("nats: %s again", self.status().detail)

    async def close(self) -> None:
        """Send what is to be sent, and disconnect."""
        self._closed = True
        client, self._client = self._client, None
        self._opening = self.loop = None
        if client is None or client.is_closed:
            return
        if client.is_connected:
            try:
                await client.flush(timeout=2)
            except Exception as error:
                logger.warning("nats: the last messages may not have been sent: %s", error)
        try:
            await client.close()
        except OSError as error:  # it writes what it kept while it reconnected, and nobody is there
            logger.warning("nats: the last messages were not sent: %s", error)

    async def ask(self, call: Callable[[JetStreamContext], Awaitable[T]]) -> T:
        """Ask JetStream, again and again while a cluster elects a leader: nobody answers then."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + _ELECTION
        while True:
            try:
                return await call(self.sending.jetstream(timeout=min(self.timeout, _ONE_TRY)))
            except (nats.errors.TimeoutError, nats.js.errors.ServiceUnavailableError):
                if loop.time() >= deadline:
                    raise
            await asyncio.sleep(0.1)

    async def publish_once(
        self, subject: str, data: bytes, headers: Mapping[str, str], timeout: float
    ) -> PubAck:
        """Publish and wait for the stream's acknowledgement; whatever goes wrong is raised as it is."""
        size, most = wire_size(data, headers), self.sending.max_payload
        if size > most:
            # The client counts the body alone, and the server would end the connection, for all.
            raise TooLarge(
                f"publish: subject {subject!r}: a message must be {most} bytes at most (max_payload), got "
                f"{size} with its headers"
            )
        return await self.jetstream.publish(subject, data, timeout=timeout, headers=dict(headers))

    async def publish(
        self, subject: str, data: bytes, headers: Mapping[str, str], timeout: float | None = None
    ) -> Stored:
        """The same, tried again within the timeout, also while a cluster elects a leader.

        The headers must have a `Nats-Msg-Id`, so that what was stored without us knowing is not stored twice.
        """
        timeout = self.timeout if timeout is None else timeout
        loop = asyncio.get_running_loop()
        deadline, pause, tries = loop.time() + timeout, 0.02, 0
        while True:
            tries += 1
            left = deadline - loop.time()
            try:
                await self.open()
                stored = await self.publish_once(subject, data, headers, max(0.05, min(left, _ONE_TRY)))
                return Stored(stored.seq, bool(stored.duplicate), tries)
            except nats.js.errors.NoStreamResponseError as error:
                if not await self._is_taken(subject, max(0.05, min(deadline - loop.time(), _ONE_TRY))):
                    raise ConfigurationError(
                        f"publish: no stream takes subject {subject!r}; create one that does"
                    ) from error
                failed: Exception = error
            except nats.js.errors.ServiceUnavailableError as error:
                failed = error
            except _PASSING as error:
                failed = error
            if loop.time() + pause >= deadline:
                raise PublishFailed(
                    f"publish: subject {subject!r}: not acknowledged within {timeout:g} s: "
                    f"{type(failed).__name__}: {failed}"
                ) from failed
            await asyncio.sleep(pause)
            pause = min(pause * 2, 0.5)

    async def _is_taken(self, subject: str, timeout: float) -> bool:
        """Whether a stream takes the subject; yes when in doubt."""
        try:
            # Nobody answers while a cluster elects a leader: whoever waits long here misses the new one.
            await self.sending.jetstream(timeout=timeout).find_stream_name_by_subject(subject)
        except nats.js.errors.NotFoundError:
            return False
        except (nats.errors.Error, nats.js.errors.APIError):
            return True
        return True
