"""Test handlers as they will run: the real pump, redelivery, delays and dead letters, in no time."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from settled.app import App
from settled.clock import VirtualClock
from settled.pump import Counts, Proactor, Reactor
from settled.pump.loop import Strikes
from settled.runner import check_layers
from settled.settlement import Ack, Leave, Nack, Reject, Requeue
from settled.signals import ConfigurationError
from settled.subscriber import Subscription
from settled.transports.base import Published
from settled.transports.lanes import DeadLetter, QueueOptions, Settled
from settled.transports.memory import MemoryTransport

__all__ = ["NotIdle", "Rehearsal"]

_WORDS = {Ack: "ack", Nack: "nack", Requeue: "requeue", Reject: "reject", Leave: "leave"}


class NotIdle(AssertionError):
    """The app went on and on; most likely a handler blocks on a message for ever."""


class Rehearsal:
    """An app on the in-memory transport, whatever its own is, and on a clock that waits for nobody.

    >>> app = App("memory://")
    >>> @app.subscriber("orders")
    ... def handle(order: dict) -> None:
    ...     if order["id"] == 2:
    ...         raise ValueError("no such customer")
    >>> rehearsal = Rehearsal(app, QueueOptions(retry_limit=3))
    >>> good, bad = rehearsal.publish("orders", {"id": 1}), rehearsal.publish("orders", {"id": 2})
    >>> rehearsal.run_until_idle()
    >>> rehearsal.history(good.id), rehearsal.history(bad.id)
    (['ack'], ['requeue', 'requeue', 'reject'])
    """

    def __init__(self, app: App, options: QueueOptions | None = None) -> None:
        self.app = app
        self.clock = VirtualClock(start=1_000_000_000.0)
        self.transport = MemoryTransport(clock=self.clock, on_settled=self._note)
        self.counts = Counts()
        self._settled: list[Settled] = []
        self._allowed = 0
        self._pump: Proactor | Reactor | None = None
        app.transport, app.clock = self.transport, self.clock
        for subscription in app.subscriptions:
            self.transport.subscribe(subscription.source.channel, subscription.source.group)
            if options is not None:
                self.transport.configure(subscription.source.channel, options)

    def publish(
        self,
        channel: str,
        payload: Any,
        *,
        id: str | None = None,  # noqa: A002
        lane: str | None = None,
        headers: Mapping[str, str] | None = None,
        delay: float = 0.0,
    ) -> Published:
        """Publish, as the app would."""
        publication = self.app.publish(channel, payload, id=id, lane=lane, headers=headers, delay=delay)
        return publication.result()

    def run_until_idle(self, limit: int = 10_000) -> None:
        """Run every subscription until nothing is left, delayed or leased; NotIdle after `limit` deliveries.

        What would stop the app for good, a ConfigurationError, is raised.
        Only for sync tests; in an async one, await `run_until_idle_async`.
        """
        asyncio.run(self.run_until_idle_async(limit))

    async def run_until_idle_async(self, limit: int = 10_000) -> None:
        """The same, in a loop that runs already."""
        check_layers(self.app.subscriptions)
        self._allowed = self.counts.received + limit
        going = {s.name: (s, Strikes(s.policy, self.clock.now)) for s in self.app.subscriptions}
        while going:
            received = self.counts.received
            for name, (subscription, strikes) in list(going.items()):
                if not await self._drain(subscription, strikes):
                    del going[name]
            if self.counts.received > received:
                continue
            due = self.transport.next_due()
            if due is None:
                return
            self.clock.advance(max(0.0, due - self.clock.now()))

    async def _drain(self, subscription: Subscription, strikes: Strikes) -> bool:
        """Pump one subscription until its channel is empty; False if the pump stopped by itself."""
        source = subscription.source
        if subscription.is_async:
            proactor = Proactor(
                subscription, self.transport.async_channel(source), self.clock, strikes, until_idle=True
            )
            self._pump = proactor
            stopped = await proactor.run()
        else:
            reactor = Reactor(
                subscription, self.transport.channel(source), self.clock, strikes, until_idle=True
            )
            self._pump = reactor
            stopped = reactor.run()
        self.counts += self._pump.counts
        if self._pump.stopping:
            raise NotIdle(
                f"{subscription.name}: not idle after {self.counts.received} deliveries; "
                f"the last one was settled {_words(self._settled[-1:])}"
            )
        if stopped.error is not None and (
            isinstance(stopped.error, ConfigurationError) or not isinstance(stopped.error, Exception)
        ):
            raise stopped.error
        return stopped.why == "idle"

    def advance(self, seconds: float) -> None:
        """Let time pass, for instance until a lease expires."""
        self.clock.advance(seconds)

    def _note(self, line: Settled) -> None:
        self._settled.append(line)
        if self._pump is not None and self.counts.received + self._pump.counts.received >= self._allowed:
            self._pump.stop()

    def settlements(self, channel: str | None = None) -> list[Settled]:
        """How every delivery ended, in order."""
        return [line for line in self._settled if channel in (None, line.subject)]

    def history(self, id: str, group: str | None = None) -> list[str]:  # noqa: A002
        """How one message was settled, delivery by delivery: ack, nack, requeue or reject."""
        return _words([line for line in self._settled if line.id == id and group in (None, line.group)])

    def dead_letters(self, channel: str, group: str | None = None) -> list[DeadLetter]:
        """What was given up on."""
        return self.transport.dead_letters(channel, group)

    def assert_settled(self, id: str, *expected: str, group: str | None = None) -> None:  # noqa: A002
        """Fail unless the message was settled in just these ways, in this order."""
        found = self.history(id, group)
        if found != list(expected):
            raise AssertionError(f"message {id!r} was settled {found or 'not at all'}, not {list(expected)}")


def _words(lines: list[Settled]) -> list[str]:
    return [_WORDS[type(line.action)] for line in lines]
