"""A subscription's session: what the broker keeps for it, and what is in hand of that."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from collections import deque
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass

from paho.mqtt.client import MQTTMessage

from settled.message import Delivery, Metadata
from settled.signals import ConfigurationError
from settled.transports.base import LeaseLost
from settled.transports.mqtt.wire import MESSAGE_ID, Login, Wire

logger = logging.getLogger("settled")

_PLACES = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class MqttTopic:
    """How a topic is read."""

    client_id: str | None = None
    """The name of this consumer's session: its own, and the same after a restart. None is the URL's."""
    session_expiry: float | None = None
    """How many seconds the broker keeps the session while nobody is connected; None is the URL's."""
    backoff: float | None = None
    """How many seconds a failed message waits; None is the URL's, else the subscriber's backoff."""
    receive_maximum: int | None = None
    """How many messages may be unsettled at once; None is what the buffers have room for, at least 16."""

    def __post_init__(self) -> None:
        for name, least in (("session_expiry", 1), ("backoff", 0), ("receive_maximum", 1)):
            value = getattr(self, name)
            if value is not None and not value >= least:
                raise ConfigurationError(f"mqtt: {name} must be at least {least}, got {value!r}")
        if self.client_id == "":
            raise ConfigurationError("mqtt: client_id must be a name, got ''")


class MqttDelivery(Delivery):
    """A delivery that is open until its packet is acknowledged, whichever connection that goes through.

    It keeps nothing of the client's: a message there is some hundred objects, and those that wait their turn
    would keep the garbage collector busy.
    """

    __slots__ = ("client_id", "connection", "mid", "named", "number")

    def __init__(self, message: MQTTMessage, number: int, client_id: str, connection: int) -> None:
        headers = dict(_user_properties(message))
        identity = headers.pop(MESSAGE_ID, None)
        content_type = getattr(message.properties, "ContentType", None)
        if content_type:
            headers["content-type"] = content_type
        super().__init__(
            id=identity or uuid.uuid4().hex,
            subject=message.topic,
            data=bytes(message.payload),
            headers=headers,
        )
        self.mid = message.mid
        # Its place in the order in which messages came.
        self.number = number
        # Whether its publisher gave it an id, by which it is known when it comes again.
        self.named = bool(identity)
        self.client_id = client_id
        # The last one that it, or a copy of it, came through.
        self.connection = connection

    def again(self, attempt: int) -> MqttDelivery:
        """The same message, to be settled anew."""
        other = copy(self)
        other.attempt = attempt
        other.settled = other.handled = False
        return other

    def metadata(self) -> Metadata:
        return Metadata(redelivery_count=self.attempt - 1, consumer=self.client_id)


class Session:
    """What all performers of a subscription share: one client, its inbox, and what it has not acknowledged.

    After a reconnect the broker sends again all that is unacknowledged, under the packet ids it had. What is
    still in hand here is known by its id, so the copy is ignored and the original is acknowledged when done.
    If it is done before its copy has come, the copy is what is acknowledged, when it comes. Packet ids are
    used again, so it must have the message's own id too; what has none is acknowledged at once.
    """

    def __init__(
        self, login: Login, client_id: str, topic: str, expiry: int, receive_maximum: int | None
    ) -> None:
        self.client_id = client_id
        self.members = 0
        self.room = 1
        self._login = login
        self._topic = topic
        self._expiry = expiry
        self._receive_maximum = receive_maximum
        self._wire: Wire | None = None
        self._opening = asyncio.Lock()
        self._inbox: deque[MqttDelivery] = deque()
        self._held: dict[int, MqttDelivery] = {}
        self._owed: dict[int, str] = {}
        self._connections = 0
        self._known = False
        self._timers: dict[int, asyncio.TimerHandle] = {}
        self._once = 0
        self._came = 0
        self.lost = 0
        """How often the broker had forgotten the session while this process lives."""
        self.bell = asyncio.Event()

    @property
    def is_open(self) -> bool:
        return self._wire is not None and self._wire.is_open

    async def wire(self) -> Wire:
        """The connection, opened again if it was lost."""
        async with self._opening:
            wire = self._wire
            if wire is None or not wire.is_open:
                if wire is not None and wire.why and wire.why != "closed":
                    logger.warning(
                        "mqtt: %s: connection of client %s lost: %s; if it goes on, another process has the "
                        "same client_id",
                        self._topic,
                        self.client_id,
                        wire.why,
                    )
                if wire is not None:
                    await wire.close()
                wire = await self._open()
            return wire

    async def _open(self) -> Wire:
        self._connections += 1
        self._wire = wire = Wire(self._login, self.client_id, self._arrived, self._lost)
        places = self._receive_maximum or max(_PLACES, self.room * max(1, self.members))
        present = await wire.open(clean=False, expiry=self._expiry, receive_maximum=min(places, 65535))
        if not present:
            self._tell_of_new()
            self._forget()
        self._known = True
        await wire.subscribe(self._topic)
        return wire

    def _tell_of_new(self) -> None:
        if not self._known:
            logger.info(
                "mqtt: %s: the broker had no session of client %s and begins one: nothing published before "
                "is in it; after a restart this means that it was lost",
                self._topic,
                self.client_id,
            )
            return
        self.lost += 1
        logger.warning(
            "mqtt: %s: the broker has lost the session of client %s (%d times so far): what it kept is gone, "
            "and so is the right to settle the %d messages in hand; check the broker's persistence, and "
            "whether session_expiry, %d s, is long enough",
            self._topic,
            self.client_id,
            self.lost,
            len(self._held),
            self._expiry,
        )

    async def close(self) -> None:
        async with self._opening:
            wire, self._wire = self._wire, None
            if wire is not None:
                with contextlib.suppress(ConnectionError):
                    for mid in self._owed:
                        wire.ack(mid)
                await wire.close()
            self._forget()

    def take(self, limit: int) -> list[MqttDelivery]:
        return [self._inbox.popleft() for _ in range(min(limit, len(self._inbox)))]

    def mine(self, delivery: Delivery) -> MqttDelivery:
        if not isinstance(delivery, MqttDelivery):
            raise TypeError(f"message {delivery.id!r} was not received from this transport")
        if self._held.get(delivery.mid) is not delivery:
            raise LeaseLost(
                f"topic {delivery.subject!r}: message {delivery.id!r} is not this consumer's any more: it is "
                "settled, or the broker has lost the session"
            )
        return delivery

    async def ack(self, delivery: Delivery) -> None:
        wire = await self.wire() if self._wire is None or not self._wire.is_open else self._wire
        # Only now: the session it belongs to may just have been found to be lost.
        mine = self.mine(delivery)
        if mine.mid > 0:
            if mine.connection == self._connections or not mine.named:
                wire.ack(mine.mid)
            else:
                self._owed[mine.mid] = mine.id
        del self._held[mine.mid]

    def release(self, delivery: Delivery) -> None:
        """Hand it out again, before all that came after it.

        Its packet stays unacknowledged, so nobody else can have it and the broker sends it again if this
        process dies. The connection need not be made anew for that.
        """
        mine = self.mine(delivery)
        again = self._held[mine.mid] = mine.again(mine.attempt)
        behind = next((n for n, one in enumerate(self._inbox) if one.number > mine.number), len(self._inbox))
        self._inbox.insert(behind, again)
        self.bell.set()

    def park(self, delivery: Delivery, delay: float) -> None:
        """Keep it here, unacknowledged, until it is due."""
        mine = self.mine(delivery)
        again = mine.again(mine.attempt + 1)
        self._held[mine.mid] = again
        self._timers[mine.mid] = asyncio.get_running_loop().call_later(max(0.0, delay), self._due, again)

    def retry(self, delivery: MqttDelivery, delay: float) -> None:
        """Settling it failed, and no lease runs out here: bring it again, unless somebody settles it."""
        asyncio.get_running_loop().call_later(delay, self._retry, delivery)

    def _retry(self, delivery: MqttDelivery) -> None:
        if self._held.get(delivery.mid) is delivery and not delivery.settled:
            self.park(delivery, 0)

    def _due(self, again: MqttDelivery) -> None:
        self._timers.pop(again.mid, None)
        if self._held.get(again.mid) is again:
            self._inbox.append(again)
            self.bell.set()

    def _arrived(self, message: MQTTMessage) -> None:
        if message.qos == 0:
            # It has no packet id, and the broker has forgotten it already.
            self._once -= 1
            message.mid = self._once
        owed = self._owed.pop(message.mid, None)
        if message.dup and message.mid in self._held:
            self._held[message.mid].connection = self._connections
            return
        if message.dup and owed is not None and owed == _own_id(message):
            self._owed[message.mid] = owed
            asyncio.get_running_loop().call_soon(self._pay, message.mid)
            return
        # That it is a duplicate tells nothing of how often it came: brokers also mark what they only queued.
        self._came += 1
        delivery = MqttDelivery(message, self._came, self.client_id, self._connections)
        self._held[message.mid] = delivery
        self._inbox.append(delivery)
        self.bell.set()

    def _pay(self, mid: int) -> None:
        """Acknowledge what was done before it came; if that fails it comes once more."""
        if mid in self._owed and self._wire is not None:
            with contextlib.suppress(ConnectionError):
                self._wire.ack(mid)
                del self._owed[mid]

    def _lost(self) -> None:
        self.bell.set()

    def _forget(self) -> None:
        """The broker knows nothing of what is in hand, so it is nobody's to settle."""
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
        self._inbox.clear()
        self._held.clear()
        self._owed.clear()


def _user_properties(message: MQTTMessage) -> Sequence[tuple[str, str]]:
    found: Sequence[tuple[str, str]] = getattr(message.properties, "UserProperty", ())
    return found


def _own_id(message: MQTTMessage) -> str | None:
    """The id that its publisher gave it."""
    return dict(_user_properties(message)).get(MESSAGE_ID) or None
