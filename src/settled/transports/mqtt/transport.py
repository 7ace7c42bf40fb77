"""`mqtt://` and `mqtts://`: MQTT 5 as a transport."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any
from urllib.parse import parse_qsl, unquote

from paho.mqtt.client import topic_matches_sub

from settled.message import Delivery
from settled.settlement import Reject
from settled.signals import ConfigurationError
from settled.transports.base import (
    Attempts,
    BrokerStatus,
    Capabilities,
    DelayMeans,
    LeaseLost,
    NackMeans,
    Outgoing,
    Published,
    RejectMeans,
    Source,
    retry_delay,
)
from settled.transports.letters import destination, letter
from settled.transports.looped import LoopTransport
from settled.transports.mqtt.session import MqttDelivery, MqttTopic, Session
from settled.transports.mqtt.wire import Login, Refused, Wire
from settled.transports.urls import certificates, file, option, port_of, split

_OPTIONS = (
    "backoff",
    "ca_certs",
    "certfile",
    "client_id",
    "insecure",
    "keepalive",
    "keyfile",
    "session_expiry",
    "unheard",
)
_WEEK = 7 * 86400


class Hub:
    """All connections on one loop: one to publish through, and one for each subscription."""

    def __init__(self, login: Login, *, unheard: bool) -> None:
        self._login = login
        self._unheard = unheard
        self._publisher: Wire | None = None
        self._opening = asyncio.Lock()
        self.sessions: dict[str, Session] = {}

    @property
    def is_open(self) -> bool:
        publishes = self._publisher is not None and self._publisher.is_open
        return publishes and all(session.is_open for session in self.sessions.values())

    async def open(self) -> Wire:
        async with self._opening:
            if self._publisher is None or not self._publisher.is_open:
                if self._publisher is not None:
                    await self._publisher.close()
                self._publisher = Wire(self._login, "")
                await self._publisher.open(clean=True)
            return self._publisher

    async def publish(self, message: Outgoing, *, unheard: bool | None = None) -> str:
        wire = await self.open()
        return await wire.publish(message, unheard=self._unheard if unheard is None else unheard)

    async def close(self) -> None:
        for session in self.sessions.values():
            await session.close()
        if self._publisher is not None:
            await self._publisher.close()


CAPABILITIES = Capabilities(
    nack=NackMeans.REWIND,
    attempts=Attempts.NONE,
    reject=RejectMeans.PUBLISH,
    delay=DelayMeans.HELD,
    extends=False,
    wakes=True,
)


class MqttTransport(LoopTransport[Hub]):
    """Topics on an MQTT 5 broker, read with QoS 1 in a session that outlives the process.

    Seed 004 has `nack` do nothing here. It does: the acknowledgement is withheld, and the message is handed
    out again before all that came after it. Only this consumer can have it: no broker gives what is in one
    session to another. Nobody counts deliveries but this
    process, so attempts begin anew when it does. Options in the URL: `client_id` (needed to subscribe),
    `session_expiry`, `backoff`, `keepalive`, `unheard=true` (publishing where nobody subscribes is no
    error), and for TLS `ca_certs`, `certfile`, `keyfile`, `insecure`.
    """

    capabilities = CAPABILITIES

    def __init__(self, url: str) -> None:
        super().__init__()
        parts = split(url)
        options = dict(parse_qsl(parts.query, keep_blank_values=True))
        unknown = options.keys() - set(_OPTIONS)
        if unknown:
            raise ConfigurationError(
                f"{parts.scheme}://: no option {', '.join(sorted(unknown))}; there are {', '.join(_OPTIONS)}"
            )
        if parts.path not in ("", "/"):
            raise ConfigurationError(f"{parts.scheme}://: an MQTT address has no path, got {parts.path!r}")
        tls = parts.scheme == "mqtts"
        self._login = Login(
            host=parts.hostname or "localhost",
            port=port_of(parts) or (8883 if tls else 1883),
            username=None if parts.username is None else unquote(parts.username),
            password=None if parts.password is None else unquote(parts.password),
            tls=tls,
            ca_certs=_file("ca_certs", options, certificates),
            certfile=_file("certfile", options, file),
            keyfile=_file("keyfile", options, file),
            insecure=_flag("insecure", options.get("insecure", "false")),
            keepalive=int(_number("keepalive", options.get("keepalive", "60"), 5, 65535)),
        )
        self._client_id = options.get("client_id")
        self._expiry = _number("session_expiry", options.get("session_expiry", str(_WEEK)), 1)
        self._backoff = _number("backoff", options["backoff"], 0) if "backoff" in options else None
        self._unheard = _flag("unheard", options.get("unheard", "false"))
        self._hub: Hub | None = None

    async def connect(self) -> Hub:
        hub = Hub(self._login, unheard=self._unheard)
        await hub.open()
        self._hub = hub
        return hub

    def refuses(self, error: Exception) -> bool:
        return isinstance(error, (Refused, UnicodeError))

    def broker(self) -> BrokerStatus:
        where = f"MQTT broker at {self._login.host}:{self._login.port}"
        hub = self._hub
        lost = 0 if hub is None else sum(session.lost for session in hub.sessions.values())
        return BrokerStatus(
            connected=hub is not None and hub.is_open,
            detail=f"{where}; sessions lost: {lost}" if lost else where,
            sessions_lost=lost,
        )

    async def push(self, message: Outgoing) -> Published:
        if message.lane is not None:
            raise ConfigurationError(
                f"publish to {message.subject!r}: MQTT has no lanes; use a topic for each"
            )
        if not message.subject or any(sign in message.subject for sign in "#+\0"):
            raise ConfigurationError(
                f"publish to {message.subject!r}: a topic to publish to has no wildcards, and is not empty"
            )
        if message.delay > 0:
            raise ConfigurationError(
                f"publish to {message.subject!r}: MQTT cannot publish for later, got delay={message.delay:g}"
            )
        hub = await self.connection()
        return Published(id=await hub.publish(message))

    def async_channel(self, source: Source) -> MqttChannel:
        self._settings(source)
        return MqttChannel(self, source)

    async def prepare(self, source: Source) -> None:
        """Open the session, so that nothing that is published from now on is missed."""
        await (await self.session(source)).wire()

    async def session(self, source: Source) -> Session:
        """The session of a subscription, one for all its performers on this loop."""
        settings, client_id = self._settings(source)
        hub = await self.connection()
        topic = source.channel if source.group is None else f"$share/{source.group}/{source.channel}"
        # Its own for every subscription, and the same after a restart.
        own = f"{client_id}-{hashlib.sha256(topic.encode()).hexdigest()[:8]}"
        if own not in hub.sessions:
            expiry = self._expiry if settings.session_expiry is None else settings.session_expiry
            hub.sessions[own] = Session(self._login, own, topic, int(expiry), settings.receive_maximum)
        return hub.sessions[own]

    def retry_delay(self, source: Source, delivery: Delivery, delay: float | None = None) -> float:
        """How long a failed message waits."""
        settings, _ = self._settings(source)
        configured = self._backoff if settings.backoff is None else settings.backoff
        return retry_delay(delay, configured, delivery.attempt)

    def _settings(self, source: Source) -> tuple[MqttTopic, str]:
        settings = source.settings if source.settings is not None else MqttTopic()
        if not isinstance(settings, MqttTopic):
            raise ConfigurationError(
                f"subscriber {source.channel!r}: source must be an MqttTopic, got {settings!r}"
            )
        client_id = settings.client_id or self._client_id
        if not client_id:
            raise ConfigurationError(
                f"subscriber {source.channel!r}: MQTT needs a name for this consumer's session, its own and "
                "the same after a restart; add ?client_id=NAME to the URL"
            )
        for to in (source.dead_letter, source.invalid):
            if to is not None and topic_matches_sub(source.channel, to):
                raise ConfigurationError(
                    f"subscriber {source.channel!r}: it would read its dead letters in {to!r}"
                )
        if source.dead_letter is None and source.channel[0] in "#+":
            raise ConfigurationError(
                f"subscriber {source.channel!r}: it would read its own dead letters; name a topic outside of "
                "it: dead_letter=..."
            )
        return settings, client_id


class MqttChannel:
    """One performer's end of a session."""

    capabilities = CAPABILITIES

    def __init__(self, transport: MqttTransport, source: Source) -> None:
        self._transport = transport
        self._source = source
        self._session: Session | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._wakes = 0

    async def receive(self, limit: int, timeout: float) -> Sequence[Delivery]:
        self._loop = loop = asyncio.get_running_loop()
        wakes, until = self._wakes, loop.time() + timeout
        if self._session is None:
            self._session = await self._transport.session(self._source)
            self._session.members += 1
        session = self._session
        session.room = max(session.room, limit)
        while True:
            await session.wire()
            if taken := session.take(limit):
                return taken
            left = until - loop.time()
            if self._wakes != wakes or left <= 0:
                return ()
            session.bell.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(session.bell.wait(), left)

    async def ack(self, delivery: Delivery) -> None:
        session = self._ours()
        await self._or_later(session.mine(delivery), session.ack(delivery))

    async def nack(self, delivery: Delivery) -> None:
        self._ours().release(delivery)

    async def requeue(self, delivery: Delivery, delay: float | None) -> None:
        self._ours().park(delivery, self._transport.retry_delay(self._source, delivery, delay))

    async def reject(self, delivery: Delivery, rejection: Reject) -> None:
        session = self._ours()
        mine = session.mine(delivery)
        to = destination(self._source, rejection) or f"dead/{mine.subject}"
        await self._or_later(mine, self._bury(letter(mine, rejection, self._source.group or "", to), mine))

    async def _bury(self, dead: Outgoing, mine: MqttDelivery) -> None:
        hub = await self._transport.connection()
        await hub.publish(dead, unheard=False)
        await self._ours().ack(mine)

    async def _or_later(self, mine: MqttDelivery, settle: Coroutine[Any, Any, None]) -> None:
        try:
            await settle
        except LeaseLost:
            raise
        except Exception:
            self._ours().retry(mine, self._transport.retry_delay(self._source, mine))
            raise

    async def extend(self, delivery: Delivery) -> None:
        """There is nothing to extend: a delivery is its session's until it is acknowledged."""
        self._ours().mine(delivery)

    def wake(self) -> None:
        self._wakes += 1
        if self._loop is not None and not self._loop.is_closed() and self._session is not None:
            self._loop.call_soon_threadsafe(self._session.bell.set)

    async def close(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            session.members -= 1
            if session.members == 0:
                await session.close()

    def _ours(self) -> Session:
        if self._session is None:
            raise ConnectionError(f"topic {self._source.channel!r}: the channel is closed")
        return self._session


def _flag(name: str, text: str) -> bool:
    if text.lower() not in ("true", "false", "1", "0"):
        raise ConfigurationError(f"mqtt://: {name} must be true or false, got {text!r}")
    return text.lower() in ("true", "1")


def _file(name: str, options: Mapping[str, str], read: Callable[[str], str]) -> str | None:
    return option("mqtts", name, options[name], read) if name in options else None


def _number(name: str, text: str, least: float, most: float = 2**32 - 2) -> float:
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not least <= number <= most:
        reach = f"{least:g} on" if number < least else f"{least:g} to {most:.0f}"
        raise ConfigurationError(f"mqtt://: {name} must be a number of seconds from {reach}, got {text!r}")
    return number
