"""Where a channel's messages come from: pulled in batches, or pushed by the server."""

from __future__ import annotations

import asyncio
import json
from collections import deque
from typing import Protocol

import nats.errors
import nats.js.errors
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from settled.transports.nats.connection import Connection
from settled.transports.nats.delivery import NatsDelivery
from settled.transports.nats.sources import Consumer

NAK = b"-NAK"
_ACK_PREFIX = "$JS.ACK."
# A request stays open over several takes, so that an idle app asks seldom; a lost one is never answered, so
# not for long.
_OPEN_FOR = 2.0
_GRACE = 0.25
_DRAIN_TIMEOUT = 2.0
_AT_ONCE = 0.02
# A batch of more than one message is of so many bytes at most.
MOST_BYTES = 16 * 1024 * 1024
# How long nothing has to be pushed before the server is asked whether the consumer is still there.
_QUIET = 10.0


class ConsumerGone(Exception):
    """The server has no such consumer any more."""


class FeedFailed(Exception):
    """The server refused to hand out messages."""


class Feed(Protocol):
    """A supply of deliveries on one loop."""

    async def take(self, limit: int, timeout: float) -> list[NatsDelivery]:
        """Up to `limit` messages; waits at most `timeout` for the first."""

    def wake(self) -> None:
        """End a take that waits; called on the loop."""

    def waiting(self) -> list[NatsDelivery]:
        """What has arrived and was not taken."""

    def give_back(self) -> list[NatsDelivery]:
        """The same, and it is the caller's to release."""

    async def close(self) -> None:
        """Stop it, and wait for what is on its way."""


class _Arrivals:
    """Messages that arrived, and one waiter."""

    def __init__(self) -> None:
        self.messages: deque[NatsDelivery] = deque()
        self._waiter: asyncio.Future[None] | None = None

    def ring(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def wait(self, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        self._waiter = loop.create_future()
        timer = loop.call_later(seconds, self.ring)
        try:
            await self._waiter
        finally:
            timer.cancel()
            self._waiter = None

    def take(self, limit: int) -> list[NatsDelivery]:
        messages = self.messages
        if len(messages) <= limit:
            taken = list(messages)
            messages.clear()
            return taken
        return [messages.popleft() for _ in range(limit)]


async def _unsubscribe(subscription: Subscription | None) -> None:
    if subscription is None or not subscription._conn.is_connected:
        return
    try:
        # A round trip, so that what was sent before the server knew has arrived.
        await asyncio.wait_for(subscription.drain(), _DRAIN_TIMEOUT)  # type: ignore[no-untyped-call]
    except (nats.errors.Error, ConnectionError, TimeoutError):
        return


class PullFeed:
    """Asks for a batch when one is wanted: never more is on its way than the caller has room for."""

    def __init__(self, connection: Connection, consumer: Consumer) -> None:
        self._connection = connection
        self._consumer = consumer
        self._arrivals = _Arrivals()
        self._subscription: Subscription | None = None
        self._inbox = ""
        self._generation = -1
        self._request = 0
        self._missing = 0
        self._expires = 0.0
        self._error: Exception | None = None
        self._too_large = False
        self._woken = False

    async def take(self, limit: int, timeout: float) -> list[NatsDelivery]:
        arrivals = self._arrivals
        if arrivals.messages:
            return arrivals.take(limit)
        loop = asyncio.get_running_loop()
        await self._subscribe()
        self._woken = False
        if not self._missing or loop.time() > self._expires:
            await self._ask(limit, _OPEN_FOR if timeout > 0 else 0)
        # All of a batch, which the server sends in one go, is there when its end is announced.
        began = loop.time()
        until = began + (timeout or _GRACE)
        await self._wait(until)
        if self._too_large and not arrivals.messages:
            # The next message is larger than a whole batch may be: alone it may be of any size.
            await self._ask(1, _OPEN_FOR if timeout > 0 else 0)
            await self._wait(until)
        if self._error is not None and not arrivals.messages:
            error, self._error = self._error, None
            raise error
        if not arrivals.messages and not self._woken and timeout > _GRACE and loop.time() - began < _AT_ONCE:
            # Nothing, and that at once: whatever the reason, it must not become a busy loop.
            await arrivals.wait(_GRACE)
        return arrivals.take(limit)

    async def _wait(self, until: float) -> None:
        loop = asyncio.get_running_loop()
        while self._missing and not self._woken and (left := until - loop.time()) > 0:
            await self._arrivals.wait(left)

    async def _subscribe(self) -> None:
        client = self._connection.client
        if self._generation == self._connection.generation:
            return
        # After a reconnect the server knows of no request, and the client has subscribed again by itself.
        self._missing = 0
        if self._subscription is None or self._subscription._conn is not client:
            self._inbox = client.new_inbox()
            self._subscription = await client.subscribe(
                f"{self._inbox}.*", cb=self._on_message, pending_msgs_limit=0, pending_bytes_limit=0
            )
        self._generation = self._connection.generation

    async def _ask(self, limit: int, patience: float) -> None:
        self._request += 1
        self._missing, self._error, self._too_large = limit, None, False
        # With no_wait the server ends the request as soon as it has sent what it has.
        wanted: dict[str, object] = {"batch": limit, "no_wait": True}
        if limit > 1:
            wanted["max_bytes"] = MOST_BYTES
        if patience > 0:
            wanted["expires"] = int(patience * 1e9)
        self._expires = asyncio.get_running_loop().time() + patience + _GRACE
        await self._connection.client.publish(
            f"$JS.API.CONSUMER.MSG.NEXT.{self._consumer.stream}.{self._consumer.name}",
            json.dumps(wanted).encode(),
            reply=f"{self._inbox}.{self._request}",
        )

    async def _on_message(self, message: Msg) -> None:
        if message.reply.startswith(_ACK_PREFIX):
            self._arrivals.messages.append(NatsDelivery(message))
            self._missing -= 1
            if self._missing <= 0:
                self._missing = 0
                self._arrivals.ring()
        elif message.subject == f"{self._inbox}.{self._request}":
            self._on_status(message)

    def _on_status(self, message: Msg) -> None:
        headers = message.headers or {}
        status, text = headers.get("Status", ""), headers.get("Description", "")
        if status == "100":
            return
        self._missing = 0
        consumer = f"{self._consumer.stream}/{self._consumer.name}"
        if status == "503" or "Consumer Deleted" in text:
            self._error = ConsumerGone(
                f"nats: consumer {consumer} does not answer: {text or 'no responders'}"
            )
        elif "MaxBytes" in text:
            self._too_large = True
        elif status not in ("404", "408") and not _is_passing(text):
            self._error = FeedFailed(f"nats: consumer {consumer}: {status} {text}")
        self._arrivals.ring()

    def wake(self) -> None:
        self._woken = True
        self._arrivals.ring()

    def waiting(self) -> list[NatsDelivery]:
        return list(self._arrivals.messages)

    def give_back(self) -> list[NatsDelivery]:
        return self._arrivals.take(len(self._arrivals.messages))

    async def close(self) -> None:
        subscription, self._subscription = self._subscription, None
        await _unsubscribe(subscription)


def _is_passing(text: str) -> bool:
    """Whether a refusal only means: ask again."""
    return any(word in text for word in ("Leadership Change", "Server Shutdown", "Batch Completed"))


class PushFeed:
    """What the server pushes to a deliver subject; the performers of a subscription share one."""

    def __init__(self, connection: Connection, consumer: Consumer) -> None:
        self._connection = connection
        self._consumer = consumer
        self._messages: deque[NatsDelivery] = deque()
        self._waiters: list[_Arrivals] = []
        self._subscription: Subscription | None = None
        self._lock = asyncio.Lock()
        self._woken = 0
        self._heard = 0.0
        self.users = 0

    async def take(self, limit: int, timeout: float) -> list[NatsDelivery]:
        await self._subscribe()
        if not self._messages:
            await self._check()
        if not self._messages and timeout > 0:
            waiter, woken = _Arrivals(), self._woken
            self._waiters.append(waiter)
            try:
                if woken == self._woken:
                    await waiter.wait(timeout)
            finally:
                self._waiters.remove(waiter)
        messages = self._messages
        return [messages.popleft() for _ in range(min(limit, len(messages)))]

    async def _subscribe(self) -> None:
        client = self._connection.client
        async with self._lock:
            if self._subscription is None or self._subscription._conn is not client:
                self._subscription = await client.subscribe(
                    self._consumer.deliver_subject or "",
                    queue=self._consumer.deliver_group or "",
                    cb=self._on_message,
                )

    async def _check(self) -> None:
        """A pull request to a consumer that is gone is refused; a push consumer only falls silent."""
        now = asyncio.get_running_loop().time()
        if self._heard and now - self._heard < _QUIET:
            return
        self._heard = now
        consumer = self._consumer
        try:
            await self._connection.jetstream.consumer_info(consumer.stream, consumer.name)
        except nats.js.errors.NotFoundError as error:
            self._heard = 0.0
            name = f"{consumer.stream}/{consumer.name}"
            raise ConsumerGone(f"nats: consumer {name} is gone: {error.description}") from error

    async def _on_message(self, message: Msg) -> None:
        self._heard = asyncio.get_running_loop().time()
        if message.reply.startswith(_ACK_PREFIX):
            self._messages.append(NatsDelivery(message))
            if self._waiters:
                self._waiters[0].ring()
            return
        # Flow control: the server goes on when it is answered; a stalled one says so in its heartbeat.
        stalled = (message.headers or {}).get("Nats-Consumer-Stalled")
        if answer := message.reply or stalled:
            await self._connection.client.publish(answer)

    def wake(self) -> None:
        self._woken += 1
        for waiter in self._waiters:
            waiter.ring()

    def waiting(self) -> list[NatsDelivery]:
        return list(self._messages)

    def give_back(self) -> list[NatsDelivery]:
        held = list(self._messages)
        self._messages.clear()
        return held

    async def close(self) -> None:
        """The last user's close stops it."""
        self.users -= 1
        if self.users <= 0:
            subscription, self._subscription = self._subscription, None
            await _unsubscribe(subscription)
