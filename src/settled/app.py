"""The application: handlers on channels, and running them."""

from __future__ import annotations

import asyncio
import inspect
import math
import os
import signal
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Self, TypeVar, Unpack

from settled import cloudevents, codec
from settled.clock import Clock, SystemClock
from settled.cloudevents import CloudEvent
from settled.handlers.layers import mark_subscribed
from settled.message import DONE
from settled.policy import Policy, PolicyOptions
from settled.pump import Counts, Status
from settled.runner import Runner
from settled.signals import ConfigurationError
from settled.subscriber import Subscription, subscribe
from settled.transports import connect
from settled.transports.base import BrokerStatus, Outgoing, Publication, Reports, Source, Transport

H = TypeVar("H", bound=Callable[..., Any])

URL = "SETTLED_URL"
"""The environment variable with the URL of an app that names none."""


@dataclass(frozen=True, slots=True)
class SubscriptionStatus:
    """How a subscription is doing: its pumps' state, why the first one stopped, and its counts."""

    name: str
    channel: str
    group: str | None
    status: Status
    why: str
    performers: int
    running: int
    strikes: int
    counts: Counts


@dataclass(frozen=True, slots=True)
class AppStatus:
    """How an app is doing."""

    running: bool
    subscriptions: tuple[SubscriptionStatus, ...]
    broker: BrokerStatus | None = None
    starting: str = ""
    """Why it does not run yet: it was not started, or is about to be, or could not be."""

    @property
    def healthy(self) -> bool:
        """Whether it runs, with its broker and all its pumps, or has run and was told to stop."""
        return not self.trouble

    @property
    def trouble(self) -> str:
        """Why it is not healthy; empty if it is."""
        if self.starting:
            return self.starting
        if self.running and self.broker is not None and not self.broker.connected:
            return f"the broker is away: {self.broker.detail}"
        bad = (Status.LIMIT_EXCEEDED, Status.ERROR)
        ended = (f"{s.name}: {s.status}: {s.why}" for s in self.subscriptions if s.status in bad)
        return "; ".join(ended)

    @property
    def counts(self) -> Counts:
        """The counts of all subscriptions."""
        return sum((s.counts for s in self.subscriptions), Counts())


class App:
    """Handlers and a transport: that of `url`, else of the variable SETTLED_URL, else in memory.

    >>> app = App("memory://")
    >>> @app.subscriber("orders")
    ... def handle(order: dict) -> None:
    ...     print("got", order)
    """

    def __init__(
        self,
        url: str | None = None,
        *,
        policy: Policy | None = None,
        transport: Transport | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.clock: Clock = clock or SystemClock()
        self.policy = policy or Policy()
        self.transport = transport or connect(url or os.environ.get(URL) or "memory://", self.clock)
        self.subscriptions: list[Subscription] = []
        self._runner: Runner | None = None

    def subscriber(
        self,
        channel: str,
        *,
        group: str | None = None,
        dead_letter: str | None = None,
        invalid: str | None = None,
        source: object = None,
        policy: Policy | None = None,
        **options: Unpack[PolicyOptions],
    ) -> Callable[[H], H]:
        """Run the function below for every message of a channel.

        A parameter `order: Order` is implicit mode: return acknowledges, an exception is settled by the
        policy. `message: Message[Order]` is explicit mode: the handler settles. The function itself is
        returned unchanged. Rejected messages go to the channel `dead_letter`, and what does not decode to
        `invalid`, where given; else to the transport's own dead letters. A `source` says more about what is
        read, in a transport's own terms.
        """
        if not isinstance(channel, str) or not channel:
            raise ConfigurationError(f"subscriber: channel must be a name, got {channel!r}")
        if channel in (dead_letter, invalid):
            raise ConfigurationError(
                f"subscriber {channel!r}: it would read its own dead letters; name another channel for them"
            )
        unknown = options.keys() - PolicyOptions.__annotations__.keys()
        if unknown:
            known = ", ".join(PolicyOptions.__annotations__)
            raise ConfigurationError(
                f"subscriber {channel!r}: no option {', '.join(sorted(unknown))}; there are {known}"
            )
        try:
            # replace() checks every value; that on_error may be a plain word is the policy's own doing.
            chosen = replace(policy or self.policy, **options)  # type: ignore[arg-type]
        except ValueError as error:
            raise ConfigurationError(f"subscriber {channel!r}: {error}") from error
        read = Source(channel=channel, group=group, dead_letter=dead_letter, invalid=invalid, settings=source)

        def register(handler: H) -> H:
            # A handler defined inside a function may be annotated with a name that only lives there.
            frame = inspect.currentframe()
            names = frame.f_back.f_locals if frame is not None and frame.f_back is not None else {}
            self.subscriptions.append(subscribe(handler, read, chosen, names))
            mark_subscribed(handler, chosen)
            return handler

        return register

    def publish(
        self,
        channel: str,
        payload: Any,
        *,
        id: str | None = None,  # noqa: A002
        lane: str | None = None,
        headers: Mapping[str, str] | None = None,
        content_type: str | None = None,
        delay: float = 0.0,
        event: CloudEvent | None = None,
        structured: bool = False,
    ) -> Publication:
        """Publish a payload; in async code await it, in sync code it is done when it returns.

        An `id` makes a second publish of it a duplicate. Messages of one `lane` stay in order. An `event`
        makes it a CloudEvent, in `ce-` headers or, with `structured`, as one JSON document.
        """
        if not 0 <= delay < math.inf:
            raise ValueError(f"publish: delay must be 0 or more seconds, got {delay!r}")
        data, content_type = codec.encode(payload, content_type)
        all_headers = {**(headers or {}), "content-type": content_type}
        if event is not None and structured:
            data = cloudevents.wrap(event, data, content_type)
            all_headers["content-type"] = cloudevents.STRUCTURED
        elif event is not None:
            all_headers = {**all_headers, **cloudevents.to_headers(event), "content-type": content_type}
        return self.transport.publish(
            Outgoing(subject=channel, data=data, headers=all_headers, id=id, lane=lane, delay=delay)
        )

    def status(self) -> AppStatus:
        """What every subscription is doing, and how its messages were settled."""
        running = self._runner
        broker = self.transport.broker() if isinstance(self.transport, Reports) else None
        if running is None:
            idle = tuple(_status(s, Status.CREATED, "", 0, 0, Counts()) for s in self.subscriptions)
            return AppStatus(False, idle, broker, starting="not started")
        return AppStatus(
            running.is_running,
            tuple(
                _status(
                    crew.subscription, crew.status, crew.why, crew.running, crew.strikes.total, crew.counts
                )
                for crew in running.crews
            ),
            broker,
            running.trouble,
        )

    async def serve(self, stop: asyncio.Event | None = None) -> AppStatus:
        """Run until `stop` is set, or until every pump has ended; then drain and release.

        Async handlers run on the loop of the caller, sync ones in threads.
        """
        if self._runner is not None and self._runner.is_running:
            raise RuntimeError("app: it is running already")
        if not self.subscriptions:
            raise ConfigurationError("app: it has no subscriber; decorate a function with @app.subscriber")
        self._runner = Runner(self.subscriptions, self.transport, self.clock)
        await self._runner.run(stop or asyncio.Event())
        return self.status()

    def stop(self) -> None:
        """Ask a running app to stop; safe from any thread, and from a handler."""
        if self._runner is not None:
            self._runner.stop()

    def run(self) -> AppStatus:
        """Run until SIGINT or SIGTERM, or until every pump has ended. A second signal does not wait.

        ConnectionError if the broker is away at the start: one short error, without the client's own.
        """
        try:
            return asyncio.run(self._run())
        except (ConfigurationError, ConnectionError) as error:
            raise error.with_traceback(None) from None

    def close(self) -> Awaitable[None]:
        """Disconnect an app that publishes and does not run; in async code await it.

        `with App(url) as app:` and `async with` do it too. An app that runs disconnects at its end by itself.
        """
        if self._runner is not None and self._runner.is_running:
            raise RuntimeError("app: it is running; stop() it, and it closes by itself")
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            asyncio.run(self.transport.close())
            return DONE
        return self.transport.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            self.close()
        else:
            raise RuntimeError("app: in async code write `async with App(...)`")

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _run(self) -> AppStatus:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()

        def on_signal() -> None:
            if stop.is_set() and self._runner is not None:
                self._runner.hurry()
            stop.set()

        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, on_signal)
        return await self.serve(stop)


def _status(
    subscription: Subscription, status: Status, why: str, running: int, strikes: int, counts: Counts
) -> SubscriptionStatus:
    return SubscriptionStatus(
        name=subscription.name,
        channel=subscription.source.channel,
        group=subscription.source.group,
        status=status,
        why=why,
        performers=subscription.policy.performers,
        running=running,
        strikes=strikes,
        counts=counts,
    )
