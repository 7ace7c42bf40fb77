"""The transport: a client a loop, its senders, and publishing."""

from __future__ import annotations

import asyncio
import contextlib
import os
import uuid
from collections.abc import Callable
from dataclasses import replace
from types import MappingProxyType
from typing import Any
from urllib.parse import unquote

from azure.servicebus import NEXT_AVAILABLE_SESSION, ServiceBusMessage, TransportType
from azure.servicebus.aio import ServiceBusClient
from azure.servicebus.exceptions import MessageSizeExceededError, MessagingEntityNotFoundError

from settled.signals import ConfigurationError
from settled.transports.base import AsyncChannel, BrokerStatus, DelayMeans, Outgoing, Published, Source
from settled.transports.looped import LoopTransport
from settled.transports.servicebus.channel import CAPABILITIES, ServiceBusChannel
from settled.transports.servicebus.delivery import outgoing
from settled.transports.servicebus.settings import DEFAULTS, Entity, Place
from settled.transports.urls import flag, masked, parse, seconds

ENVIRONMENT = "AZURE_SERVICEBUS_CONNECTION_STRING"


class Refused(Exception):
    """Service Bus will never take this message."""


class _Bus:
    """A client, and its senders, each of which takes one message at a time."""

    def __init__(self, client: ServiceBusClient, credential: Any) -> None:
        self.client = client
        self._credential = credential
        self._senders: dict[str, tuple[Any, asyncio.Lock]] = {}

    async def send(self, to: str, message: ServiceBusMessage) -> None:
        while True:
            if to not in self._senders:
                # A topic is sent to the same way as a queue.
                self._senders[to] = (self.client.get_queue_sender(to), asyncio.Lock())
            sender, turn = self._senders[to]
            async with turn:
                if to not in self._senders or self._senders[to][0] is not sender:
                    # Whoever had the turn before us has closed it.
                    continue
                try:
                    await sender.send_messages(message)
                except Exception:
                    del self._senders[to]
                    with contextlib.suppress(Exception):
                        await sender.close()
                    raise
                return

    async def close(self) -> None:
        for sender, _ in self._senders.values():
            with contextlib.suppress(Exception):
                await sender.close()
        await self.client.close()
        if self._credential is not None:
            await self._credential.close()


class ServiceBusTransport(LoopTransport[_Bus]):
    """Azure Service Bus, by namespace.

    A key is in the URL (`servicebus://name:key@namespace.servicebus.windows.net`), or in the connection
    string of AZURE_SERVICEBUS_CONNECTION_STRING if the URL is `servicebus://`. Without either, azure-identity
    finds who runs this.

    >>> ServiceBusTransport("servicebus://shop.servicebus.windows.net").broker().detail
    'not connected to shop.servicebus.windows.net'
    """

    capabilities = CAPABILITIES
    variants = MappingProxyType({"sessions": replace(CAPABILITIES, delay=DelayMeans.HELD)})

    def __init__(self, url: str) -> None:
        super().__init__()
        known: dict[str, Callable[[str], Any]] = {
            "backoff": seconds,
            "emulator": flag,
            "idle": seconds,
            "max_delivery_count": int,
            "sessions": flag,
            "socket_timeout": seconds,
            "websocket": flag,
        }
        parts, options = parse(url, known)
        emulator, self._websocket = options.pop("emulator", False), options.pop("websocket", False)
        self._socket_timeout = options.pop("socket_timeout", None)
        if parts.path.strip("/"):
            raise ConfigurationError(
                "servicebus: the URL has a namespace only; queues are named by subscribers"
            )
        self._host = parts.netloc.rpartition("@")[2]
        self._connection_string: str | None = None
        if parts.username and parts.password and self._host:
            self._connection_string = (
                f"Endpoint=sb://{self._host};SharedAccessKeyName={unquote(parts.username)};"
                f"SharedAccessKey={unquote(parts.password)};UseDevelopmentEmulator={str(emulator).lower()}"
            )
        elif parts.username and self._host:
            raise ConfigurationError(
                f"servicebus: the URL has a key's name, {parts.username!r}, and no key; write name:key@ with "
                "all of / + = in the key as %2F %2B %3D, or neither"
            )
        elif not self._host:
            self._connection_string = None if parts.netloc else os.environ.get(ENVIRONMENT)
            if self._connection_string is None:
                raise ConfigurationError(
                    f"servicebus: the URL {masked(url)!r} has no namespace; write "
                    f"servicebus://namespace.servicebus.windows.net, or set {ENVIRONMENT}"
                )
            self._host = "the namespace of the connection string"
        self._defaults = Entity(**options).over(DEFAULTS)
        self._trouble: str | None = f"not connected to {self._host}"

    async def connect(self) -> _Bus:
        kind = TransportType.AmqpOverWebsocket if self._websocket else TransportType.Amqp
        # The pump tries again by itself: better soon than after the client's long patience.
        options: dict[str, Any] = {"retry_total": 1, "retry_backoff_factor": 0.1, "transport_type": kind}
        if self._socket_timeout is not None:
            options["socket_timeout"] = self._socket_timeout
        if self._connection_string is not None:
            return _Bus(ServiceBusClient.from_connection_string(self._connection_string, **options), None)
        try:
            from azure.identity.aio import DefaultAzureCredential
        except ModuleNotFoundError as error:
            raise ConfigurationError(
                f"servicebus: no key for {self._host}; put name:key@ into the URL, set {ENVIRONMENT}, "
                "or run: pip install azure-identity"
            ) from error
        credential = DefaultAzureCredential()
        return _Bus(ServiceBusClient(self._host, credential, **options), credential)

    def watch(self, error: BaseException | None) -> None:
        """Remember whether Service Bus could be reached."""
        self._trouble = None if error is None else f"{self._host}: {error}"

    def refuses(self, error: Exception) -> bool:
        return isinstance(error, (MessageSizeExceededError, Refused))

    def broker(self) -> BrokerStatus:
        return BrokerStatus(connected=self._trouble is None, detail=self._trouble or self._host)

    def settings(self, source: Source) -> Entity:
        """How a subscription reads."""
        match source.settings:
            case None:
                return self._defaults
            case Entity() as settings:
                return settings.over(self._defaults)
            case other:
                raise ConfigurationError(
                    f"subscriber {source.channel!r}: source must be a servicebus.Entity, got {other!r}"
                )

    async def prepare(self, source: Source) -> None:
        """See that what is read is there; with sessions, which that would lock, it is found out later."""
        place = Place.of(source)
        if self.settings(source).sessions:
            return
        receiver = await self.receiver(place, False, 0)
        await receiver.close()
        self.watch(None)

    async def receiver(self, place: Place, session: bool, wait: float) -> Any:
        """An open receiver of the client's; with `session`, of the next session that has messages."""
        client = (await self.connection()).client
        options: dict[str, Any] = (
            {"session_id": NEXT_AVAILABLE_SESSION, "max_wait_time": wait} if session else {}
        )
        if place.subscription is None:
            receiver = client.get_queue_receiver(place.name, **options)
        else:
            receiver = client.get_subscription_receiver(place.name, place.subscription, **options)
        try:
            await receiver.__aenter__()
        except BaseException as error:
            with contextlib.suppress(Exception):
                await receiver.close()
            if isinstance(error, MessagingEntityNotFoundError):
                raise _missing(place) from error
            raise
        return receiver

    def async_channel(self, source: Source) -> AsyncChannel:
        return ServiceBusChannel(self, source, self.settings(source))

    async def send(self, to: str, message: ServiceBusMessage) -> None:
        """Send to a queue or topic, and wait until it is stored."""
        bus = await self.connection()
        try:
            await bus.send(to, message)
        except MessagingEntityNotFoundError as error:
            raise _missing(Place(to)) from error
        self.watch(None)

    async def push(self, message: Outgoing) -> Published:
        """Send; the lane is the session, and a delay is the broker's own."""
        identity = message.id or uuid.uuid4().hex
        try:
            sent = outgoing(message, identity)
        except (ValueError, TypeError) as error:
            # An id or a session longer than 128 characters, or text that is not Unicode.
            raise Refused(f"publish to {message.subject!r}: {error}") from error
        await self.send(message.subject.partition("/")[0], sent)
        return Published(id=identity, lane=message.lane)


def _missing(place: Place) -> ConfigurationError:
    if place.subscription is None:
        return ConfigurationError(
            f"servicebus: no queue or topic {place.name!r}; "
            f"run: az servicebus queue create --name {place.name}"
        )
    return ConfigurationError(
        f"servicebus: topic {place.name!r} has no subscription {place.subscription!r}; "
        f"run: az servicebus topic subscription create --topic-name {place.name} --name {place.subscription}"
    )
