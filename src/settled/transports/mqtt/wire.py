"""One MQTT connection, driven by the event loop it was opened on."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import socket
import ssl
import struct
import threading
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from paho.mqtt.client import Client, ConnectFlags, DisconnectFlags, MQTTMessage, MQTTv5
from paho.mqtt.enums import CallbackAPIVersion, MQTTErrorCode
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties
from paho.mqtt.reasoncodes import ReasonCode
from paho.mqtt.subscribeoptions import SubscribeOptions

from settled.codec import content_type_of
from settled.signals import ConfigurationError
from settled.transports.base import Outgoing

MESSAGE_ID = "message-id"
"""The user property that carries a message's id."""

_MISC_EVERY = 1.0
_AT_ONCE = 50
_UNHEARD = 0x10
# What surrounds topic, properties and body.
_FRAME = 9
# Controls and non-characters: a broker may end the connection over them, for all who publish.
_LAST_OF_PLANES = "".join(chr(plane << 16 | low) for plane in range(17) for low in (0xFFFE, 0xFFFF))
_UNFIT = re.compile(f"[\x00-\x1f\x7f-\x9f\ufdd0-\ufdef{_LAST_OF_PLANES}]")


class PublishFailed(Exception):
    """The broker did not take the message over, or nobody would ever have it."""


class Refused(PublishFailed):
    """It never will, whatever the moment: the message is too large, or not what it has to be."""


class Misdirected(PublishFailed, ConfigurationError):
    """No message can go there: the topic is no name of one, or not open to us."""


_NEVER: dict[int, type[PublishFailed]] = {
    0x87: Misdirected,  # not authorized
    0x90: Misdirected,  # topic name invalid
    0x95: Refused,  # packet too large
    0x99: Refused,  # payload format invalid
}
"""What of the broker's answers does not change with time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Login:
    """Where the broker is, and how to get in."""

    host: str
    port: int
    username: str | None = None
    password: str | None = None
    tls: bool = False
    ca_certs: str | None = None
    certfile: str | None = None
    keyfile: str | None = None
    insecure: bool = False
    keepalive: int = 60
    timeout: float = 30.0


class Wire:
    """A client that is used for one connection, and then thrown away."""

    def __init__(
        self,
        login: Login,
        client_id: str,
        on_message: Callable[[MQTTMessage], None] | None = None,
        on_lost: Callable[[], None] | None = None,
    ) -> None:
        self.why = ""
        self._login = login
        self._on_lost = on_lost
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._client = client = Client(
            CallbackAPIVersion.VERSION2,
            client_id=client_id,
            protocol=MQTTv5,
            manual_ack=True,
        )
        client.connect_timeout = login.timeout
        if login.username is not None:
            client.username_pw_set(login.username, login.password)
        if login.tls:
            client.tls_set(ca_certs=login.ca_certs, certfile=login.certfile, keyfile=login.keyfile)
            client.tls_insecure_set(login.insecure)
        client.on_connect = self._connected
        client.on_disconnect = self._disconnected
        client.on_publish = self._answered
        client.on_subscribe = self._subscribed
        if on_message is not None:
            client.on_message = lambda _client, _data, message: self._came(message, on_message)
        client.on_socket_open = lambda _client, _data, one: self._call(self._opened, one)
        client.on_socket_close = lambda _client, _data, one: self._closed(one)
        client.on_socket_register_write = lambda _client, _data, one: self._call(self._want_write, one)
        client.on_socket_unregister_write = lambda _client, _data, one: self._want_no_write(one)
        self._socket: Any = None
        self._misc: asyncio.TimerHandle | None = None
        self._connack: asyncio.Future[bool] = self._loop.create_future()
        self._gone: asyncio.Future[None] = self._loop.create_future()
        self._waiting: dict[int, asyncio.Future[int]] = {}
        self._largest: int | None = None
        self._messages = 0
        self._closing = False

    @property
    def is_open(self) -> bool:
        return self._connack.done() and not self._gone.done()

    async def open(self, *, clean: bool, expiry: int = 0, receive_maximum: int = 65535) -> bool:
        """Connect; True if the broker still had the session of this client."""
        properties = Properties(PacketTypes.CONNECT)  # type: ignore[no-untyped-call]
        properties.SessionExpiryInterval = expiry
        properties.ReceiveMaximum = receive_maximum
        login = self._login
        try:
            await asyncio.to_thread(
                self._client.connect,
                login.host,
                login.port,
                login.keepalive,
                clean_start=clean,
                properties=properties,
            )
            async with asyncio.timeout(login.timeout):
                return await self._connack
        except BaseException as error:
            self._drop()
            if isinstance(error, TimeoutError):
                raise ConnectionError(f"mqtt: {login.host}:{login.port} does not answer") from error
            if isinstance(error, OSError) and not isinstance(error, ssl.SSLError):
                why = error.strerror or error
                raise ConnectionError(f"mqtt: {login.host}:{login.port}: {why}") from error
            raise

    async def close(self) -> None:
        """Say goodbye, after everything that is still to be sent; the session stays."""
        if not self._gone.done():
            self._closing = True
            line = _another(self._client.socket())
            self._client.disconnect()
            await asyncio.wait([self._gone], timeout=2)
            if line is not None:
                with line:
                    await _drained(line)
        self._drop()

    def ack(self, mid: int) -> None:
        self._check(self._client.ack(mid, 1))

    async def subscribe(self, topic: str) -> None:
        # Retained messages only the first time: the session remembers the subscription, not what was sent.
        options = SubscribeOptions(qos=1, retainHandling=SubscribeOptions.RETAIN_SEND_IF_NEW_SUB)
        code, mid = self._client.subscribe(topic, options=options)
        self._check(code)
        answer = await self._answer(mid or 0)
        if answer >= 0x80:
            name = ReasonCode(PacketTypes.SUBACK, identifier=answer).getName()
            raise ConnectionError(f"mqtt: the broker refuses a subscription to {topic!r}: {name}")

    async def publish(self, message: Outgoing, *, unheard: bool) -> str:
        """Publish with QoS 1; done when the broker has it, and somebody's session too unless `unheard`."""
        identity = message.id or uuid.uuid4().hex
        properties = Properties(PacketTypes.PUBLISH)  # type: ignore[no-untyped-call]
        content_type = content_type_of(message.headers)
        if content_type is not None:
            properties.ContentType = content_type
        headers = [(k, v) for k, v in message.headers.items() if k.lower() != "content-type"]
        properties.UserProperty = [*headers, (MESSAGE_ID, identity)]
        _check(message.subject, identity, message.headers)
        try:
            self._fits(message, properties)
            info = self._client.publish(message.subject, message.data, qos=1, properties=properties)
        except (ValueError, struct.error) as error:
            raise Refused(f"publish to {message.subject!r}: {error}") from error
        self._check(info.rc)
        answer = await self._answer(info.mid)
        if answer >= 0x80:
            name = ReasonCode(PacketTypes.PUBACK, identifier=answer).getName()
            kind = _NEVER.get(answer, PublishFailed)
            raise kind(f"publish to {message.subject!r}: the broker refuses it: {name}")
        if answer == _UNHEARD and not unheard:
            raise PublishFailed(
                f"publish to {message.subject!r}: nobody subscribes to it, so it would be lost; subscribe "
                "first, or publish with ?unheard=true in the URL"
            )
        return identity

    def _fits(self, message: Outgoing, properties: Properties) -> None:
        """What is larger than the broker takes would end the connection, for all who publish."""
        size = len(message.data) + len(message.subject.encode()) + len(properties.pack()) + _FRAME  # type: ignore[no-untyped-call]
        if self._largest is not None and size > self._largest:
            raise Refused(
                f"publish to {message.subject!r}: a message must be {self._largest} bytes at most, got {size}"
            )

    async def _answer(self, mid: int) -> int:
        waiting: asyncio.Future[int] = self._loop.create_future()
        self._waiting[mid] = waiting
        try:
            async with asyncio.timeout(self._login.timeout):
                return await waiting
        except TimeoutError as error:
            raise PublishFailed("mqtt: the broker does not answer") from error
        finally:
            self._waiting.pop(mid, None)

    def _check(self, code: MQTTErrorCode) -> None:
        if code != MQTTErrorCode.MQTT_ERR_SUCCESS or not self.is_open:
            raise ConnectionError(f"mqtt: not connected: {self.why or code.name}")

    def _connected(
        self, _client: Client, _data: Any, flags: ConnectFlags, code: ReasonCode, told: Properties | None
    ) -> None:
        if self._connack.done():
            return
        self._largest = getattr(told, "MaximumPacketSize", None)
        if code.is_failure:
            self._connack.set_exception(ConnectionError(f"mqtt: the broker refuses: {code.getName()}"))
        else:
            self._connack.set_result(flags.session_present)

    def _disconnected(
        self, _client: Client, _data: Any, flags: DisconnectFlags, code: ReasonCode, _: Properties | None
    ) -> None:
        self._lose("closed" if self._closing else code.getName())

    def _answered(
        self, _client: Client, _data: Any, mid: int, code: ReasonCode, _: Properties | None
    ) -> None:
        self._tell(mid, code.value)

    def _subscribed(
        self, _client: Client, _data: Any, mid: int, codes: list[ReasonCode], _: Properties | None
    ) -> None:
        self._tell(mid, codes[0].value)

    def _tell(self, mid: int, answer: int) -> None:
        waiting = self._waiting.get(mid)
        if waiting is not None and not waiting.done():
            waiting.set_result(answer)

    def _lose(self, why: str) -> None:
        """The end of this wire: whoever waits for an answer gets none."""
        if self._gone.done():
            return
        self.why = why
        self._gone.set_result(None)
        if not self._connack.done():
            self._connack.set_exception(ConnectionError(f"mqtt: not connected: {why}"))
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(PublishFailed(f"mqtt: the connection is lost: {why}"))
        if self._on_lost is not None:
            self._on_lost()

    def _drop(self) -> None:
        """Let go of the socket, whatever its state."""
        self._lose("closed")
        if self._connack.done() and not self._connack.cancelled():
            self._connack.exception()
        if self._misc is not None:
            self._misc.cancel()
        one = self._socket
        if one is not None:
            self._closed(one)
            one.close()

    def _call(self, act: Callable[[Any], None], one: Any) -> None:
        # The client connects in another thread; everything else happens on the loop, and at once: the client
        # counts on it that a wish to write stands until it is taken back.
        if threading.get_ident() == self._thread:
            act(one)
        else:
            self._loop.call_soon_threadsafe(act, one)

    def _opened(self, one: Any) -> None:
        if self._gone.done() or one.fileno() < 0:
            one.close()
            return
        self._socket = one
        self._loop.add_reader(one, self._read)
        self._do_misc()

    def _want_write(self, one: Any) -> None:
        if one is self._socket and one.fileno() >= 0:
            self._loop.add_writer(one, self._write)

    def _want_no_write(self, one: Any) -> None:
        self._loop.remove_writer(one)

    def _closed(self, one: Any) -> None:
        if one is self._socket:
            self._socket = None
            self._loop.remove_reader(one)
            self._loop.remove_writer(one)

    def _came(self, message: MQTTMessage, on_message: Callable[[MQTTMessage], None]) -> None:
        self._messages += 1
        on_message(message)

    def _read(self) -> None:
        # The client reads a packet at a time: where one message came, the next is often there already.
        for _ in range(_AT_ONCE):
            before = self._messages
            self._go_on(self._client.loop_read())
            if self._messages == before or self._socket is None:
                break
        one = self._socket
        if one is not None and _pending(one):
            self._loop.call_soon(self._read_rest, one)

    def _read_rest(self, one: Any) -> None:
        if one is self._socket:
            self._read()

    def _write(self) -> None:
        self._go_on(self._client.loop_write())

    def _do_misc(self) -> None:
        if not self._gone.done():
            self._misc = self._loop.call_later(_MISC_EVERY, self._do_misc)
            self._go_on(self._client.loop_misc())
            if self._socket is not None and self._client.want_write():
                self._want_write(self._socket)

    def _go_on(self, code: MQTTErrorCode) -> None:
        if code not in (MQTTErrorCode.MQTT_ERR_SUCCESS, MQTTErrorCode.MQTT_ERR_AGAIN):
            self._lose(code.name)


def _check(subject: str, identity: str, headers: Mapping[str, str]) -> None:
    if _UNFIT.search(subject):
        raise Misdirected(f"publish to {subject!r}: a topic has no control characters")
    for name, value in [("id", identity), *headers.items()]:
        if _UNFIT.search(name) or _UNFIT.search(value):
            raise Refused(
                f"publish to {subject!r}: MQTT text has no control characters, got {name!r}: {value[:100]!r}"
            )


def _another(one: Any) -> socket.socket | None:
    """A second handle on a connection: it lasts until that is closed too."""
    try:
        return socket.socket(fileno=os.dup(one.fileno()))
    except (OSError, AttributeError):  # there is none
        return None


async def _drained(line: socket.socket) -> None:
    """Read until the broker hangs up: closed with something unread, it would lose our last acks unread."""
    loop = asyncio.get_running_loop()
    line.setblocking(False)
    with contextlib.suppress(TimeoutError, OSError):
        async with asyncio.timeout(1):
            while await loop.sock_recv(line, 65_536):
                pass


def _pending(one: Any) -> bool:
    """Whether TLS has read more from the socket than it has handed out: the selector does not know."""
    pending = getattr(one, "pending", None)
    return pending is not None and pending() > 0
