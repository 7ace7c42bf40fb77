"""The leases of what is in hand are started anew, for as long as is allowed and no longer."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from typing import Any

import pytest

from settled import App
from settled.message import Delivery, Message
from settled.pump.leases import Keeper
from settled.transports.base import LeaseLost, Outgoing, Source
from settled.transports.faces import AsyncImmediateChannel
from settled.transports.lanes import QueueOptions
from settled.transports.memory import MemoryTransport

LEASE = 1.5


@pytest.fixture
def transport() -> MemoryTransport:
    found = MemoryTransport()
    found.configure("orders", QueueOptions(lease=LEASE))
    return found


def run(app: App, *bodies: bytes) -> None:
    for body in bodies:
        app.transport.publish(Outgoing(subject="orders", data=body))
    app.run()


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_an_app_keeps_what_its_handlers_work_on_and_what_waits_behind(
    transport: MemoryTransport, kind: str
) -> None:
    # A machine that stands still for most of a lease loses it; three times in a row would be our fault.
    outcomes = (handled(transport, kind) for _ in range(3))
    assert any(seen == [b"1", b"2", b"3"] and not failed for seen, failed in outcomes)


def handled(transport: MemoryTransport, kind: str) -> tuple[list[bytes], int]:
    """What is handled of three messages whose first takes longer than a lease, and how many are lost."""
    app, seen = App(transport=transport), []

    def note(body: bytes) -> float:
        seen.append(body)
        if len(seen) == 3:
            app.stop()
        return 1.5 * LEASE if body == b"1" else 0.0

    def handle(body: bytes) -> None:
        time.sleep(note(body))

    async def handle_async(body: bytes) -> None:
        await asyncio.sleep(note(body))

    # Another performer would have what is not kept.
    app.subscriber("orders", buffer=3, performers=2)(handle if kind == "sync" else handle_async)
    run(app, b"1", b"2", b"3")
    return sorted(seen), app.status().subscriptions[0].counts.settle_failed


def test_without_it_another_has_the_message_when_the_lease_is_over(transport: MemoryTransport) -> None:
    app, seen = App(transport=transport), []

    @app.subscriber("orders", performers=2, extend_for=0)
    def handle(body: bytes) -> None:
        seen.append(body)
        if len(seen) == 2:
            app.stop()
        else:
            time.sleep(2 * LEASE)

    run(app, b"1")
    assert seen == [b"1", b"1"]


def test_a_message_that_nobody_settles_is_not_kept_when_its_handler_is_through(
    transport: MemoryTransport,
) -> None:
    app, times = App(transport=transport), []

    @app.subscriber("orders")
    def handle(message: Message[bytes]) -> None:
        times.append(time.monotonic())
        if len(times) == 2:
            message.ack()
            app.stop()

    run(app, b"1")
    assert times[1] - times[0] >= 0.9 * LEASE


class Clumsy(AsyncImmediateChannel):
    """A channel that fails to extend, in the given ways."""

    def __init__(self, inner: Any, *errors: Exception | None) -> None:
        super().__init__(inner)
        self.errors = list(errors)
        self.calls = 0

    async def extend(self, delivery: Delivery) -> None:
        self.calls += 1
        error = self.errors.pop(0) if self.errors else None
        if error is not None:
            raise error
        await super().extend(delivery)


async def keep(
    channel: Clumsy, held: Sequence[Delivery], *, calls: int, longest: float = 60.0, seconds: float = 20.0
) -> None:
    """Run a keeper until it has made so many calls, or for so long."""
    keeping = asyncio.create_task(Keeper("orders", channel, lambda: held, longest).run())
    until = time.monotonic() + seconds
    while channel.calls < calls and time.monotonic() < until:
        await asyncio.sleep(0.02)
    keeping.cancel()


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def clumsy(transport: MemoryTransport, *errors: Exception | None) -> tuple[Clumsy, list[Delivery]]:
    transport.put(Outgoing(subject="orders", data=b"1", id="m-1"))
    inner = transport.immediate(Source(channel="orders"))
    return Clumsy(inner, *errors), list(inner.take(1))


def test_a_failed_extension_is_told_and_tried_again(
    transport: MemoryTransport, caplog: pytest.LogCaptureFixture
) -> None:
    channel, held = clumsy(transport, ConnectionError("away"))
    asyncio.run(keep(channel, held, calls=2))
    assert channel.calls == 2
    warning = warnings(caplog)[0]
    assert "the lease is not extended, the message may come twice message_id=m-1" in warning
    assert "ConnectionError: away" in warning


def test_a_lease_that_is_lost_is_told_of_once(
    transport: MemoryTransport, caplog: pytest.LogCaptureFixture
) -> None:
    channel, held = clumsy(transport, LeaseLost("gone"))
    asyncio.run(keep(channel, held, calls=2, seconds=1.5 * LEASE))
    assert channel.calls == 1
    assert len(warnings(caplog)) == 1


def test_a_handler_that_hangs_does_not_keep_its_message_for_ever(
    transport: MemoryTransport, caplog: pytest.LogCaptureFixture
) -> None:
    channel, held = clumsy(transport)
    asyncio.run(keep(channel, held, calls=100, longest=LEASE, seconds=2.5 * LEASE))
    assert channel.calls <= 4
    (warning,) = warnings(caplog)
    assert "it has been in hand for" in warning


def test_a_settled_message_is_not_extended_and_a_late_failure_is_no_news(
    transport: MemoryTransport, caplog: pytest.LogCaptureFixture
) -> None:
    channel, (delivery,) = clumsy(transport, LeaseLost("settled meanwhile"))
    delivery.claim()
    asyncio.run(keep(channel, [delivery], calls=1))
    assert channel.calls == 1
    assert not warnings(caplog)


def test_a_lease_on_many_messages_is_extended_once_for_all(transport: MemoryTransport) -> None:
    for number in range(5):
        transport.put(Outgoing(subject="orders", data=b"%d" % number, lane="eu"))
    inner = transport.immediate(Source(channel="orders"))
    held = inner.take(5)
    assert len({delivery.metadata().lease for delivery in held}) == 1
    channel = Clumsy(inner)
    began = time.monotonic()
    asyncio.run(keep(channel, held, calls=2))
    assert channel.calls == 2
    # Two rounds, not two of one: a third of the lease lies between them.
    assert time.monotonic() - began >= 0.9 * LEASE / 3


def test_two_messages_with_the_same_id_are_both_kept(transport: MemoryTransport) -> None:
    inner = transport.immediate(Source(channel="orders"))
    channel = Clumsy(inner)
    extended: list[Delivery] = []

    class Plain(Delivery):
        """One whose lease has no name."""

    async def extend(delivery: Delivery) -> None:
        extended.append(delivery)
        channel.calls += 1

    channel.extend = extend  # type: ignore[method-assign]
    held = [Plain(id="same", subject="orders", data=b"%d" % n, headers={}) for n in range(2)]
    asyncio.run(keep(channel, held, calls=2))
    assert {delivery.data for delivery in extended} == {b"0", b"1"}
