"""The blocking face of an awaitable channel: what a sync handler waits for, and what it does not."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from settled.clock import SystemClock
from settled.message import Delivery
from settled.policy import Policy
from settled.pump import Reactor, Stopped
from settled.settlement import Reject
from settled.signals import Defer
from settled.subscriber import subscribe
from settled.transports.base import Outgoing, Source
from settled.transports.faces import BlockingChannel
from settled.transports.memory import MemoryTransport

ORDERS = Source(channel="orders")


class Line:
    """A channel of the in-memory transport as a broker's own would be, with a slow or broken line to it."""

    def __init__(self, messages: int, ack: Callable[[Delivery], Any] | None = None) -> None:
        transport = MemoryTransport()
        transport.subscribe("orders")
        for number in range(messages):
            transport.put(Outgoing(subject="orders", data=b"%d" % number, id=f"m{number}"))
        self._inner = transport.async_channel(ORDERS)
        self._before_ack = ack
        self.capabilities = self._inner.capabilities
        self.wake = self._inner.wake
        self.calls: list[str] = []

    async def receive(self, limit: int, timeout: float) -> Sequence[Delivery]:
        self.calls.append("receive")
        return await self._inner.receive(limit, timeout)

    async def ack(self, delivery: Delivery) -> None:
        await asyncio.sleep(0.01)
        if self._before_ack is not None:
            self._before_ack(delivery)
        await self._inner.ack(delivery)
        self.calls.append(f"ack {delivery.id}")

    async def nack(self, delivery: Delivery) -> None:
        self.calls.append(f"nack {delivery.id}")
        await self._inner.nack(delivery)

    async def requeue(self, delivery: Delivery, delay: float | None) -> None:
        self.calls.append(f"requeue {delivery.id}")
        await self._inner.requeue(delivery, delay)

    async def reject(self, delivery: Delivery, rejection: Reject) -> None:
        await self._inner.reject(delivery, rejection)

    async def extend(self, delivery: Delivery) -> None:
        await self._inner.extend(delivery)

    async def close(self) -> None:
        self.calls.append("close")


def pump(line: Line, handle: Callable[[int], None], buffer: int = 10) -> Reactor:
    """Run a sync handler until nothing is left, then close the channel."""

    async def main() -> Reactor:
        channel = BlockingChannel(line, asyncio.get_running_loop())
        subscription = subscribe(handle, ORDERS, Policy(buffer=buffer))
        reactor = Reactor(subscription, channel, SystemClock(), until_idle=True)
        stopped: Stopped = await asyncio.wait_for(asyncio.to_thread(reactor.run), 30)
        await asyncio.to_thread(channel.close)
        assert stopped.why == "idle"
        return reactor

    return asyncio.run(main())


def test_acks_of_a_sync_handler_are_sent_while_it_goes_on() -> None:
    first_acked = threading.Event()
    line = Line(2, lambda _: first_acked.set())

    def handle(order: int) -> None:
        # The second message is in the same buffer: nothing is asked of the channel before this returns.
        assert order == 0 or first_acked.wait(10)

    assert pump(line, handle).counts.acked == 2


@pytest.mark.parametrize("buffer", [1, 2, 10])
def test_what_is_asked_of_a_channel_finds_the_acks_before_it_sent(buffer: int) -> None:
    line = Line(3)

    def handle(order: int) -> None:
        if order == 2 and "requeue m2" not in line.calls:
            raise Defer(0)

    counts = pump(line, handle, buffer).counts
    assert (counts.acked, counts.requeued) == (3, 1)
    settled = [call for call in line.calls if call not in ("receive", "close")]
    assert settled == ["ack m0", "ack m1", "requeue m2", "ack m2"]
    assert line.calls[-3:] == ["ack m2", "receive", "close"]


def test_an_ack_that_fails_behind_a_sync_handler_is_counted_logged_and_open_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    kept: list[Delivery] = []

    def broken(delivery: Delivery) -> None:
        if delivery.id == "m1":
            kept.append(delivery)
            raise ConnectionError("the line is down")

    def handle(order: int) -> None: ...

    counts = pump(Line(3, broken), handle).counts
    assert (counts.acked, counts.settle_failed) == (2, 1)
    assert [one.settled for one in kept] == [False]
    (record,) = [r for r in caplog.records if "settle failed" in r.getMessage()]
    assert "left to the broker message_id=m1 channel=orders" in record.getMessage()
    assert "the line is down" in record.getMessage()


def test_a_thread_that_waits_while_the_loop_ends_is_told() -> None:
    waiting = threading.Event()
    errors: list[Exception] = []

    class Endless(Line):
        async def receive(self, limit: int, timeout: float) -> Sequence[Delivery]:
            waiting.set()
            await asyncio.sleep(60)
            return ()

    def receive(channel: BlockingChannel) -> None:
        try:
            channel.receive(1, 1)
        except ConnectionError as error:
            errors.append(error)

    async def main() -> threading.Thread:
        channel = BlockingChannel(Endless(0), asyncio.get_running_loop())
        thread = threading.Thread(target=receive, args=(channel,))
        thread.start()
        while not waiting.is_set():
            await asyncio.sleep(0.001)
        return thread

    asyncio.run(main()).join(10)
    assert "the app's loop is ending" in str(errors[0])


def end(
    line: Line, handle: Callable[[int], None], *, told: Callable[[Reactor], None], **policy: Any
) -> float:
    """Run a sync handler that somebody tells to stop; how long the pump and its channel took to end then."""

    async def main() -> float:
        channel = BlockingChannel(line, asyncio.get_running_loop())
        subscription = subscribe(handle, ORDERS, Policy(buffer=10, **policy))
        reactor = Reactor(subscription, channel, SystemClock())
        running = asyncio.create_task(asyncio.to_thread(reactor.run))
        await asyncio.to_thread(told, reactor)
        stopped = time.monotonic()
        await asyncio.wait_for(running, 30)
        await asyncio.to_thread(channel.close)
        return time.monotonic() - stopped

    return asyncio.run(main())


def test_a_pump_that_ends_has_its_last_ack_sent_before_its_channel_is_closed() -> None:
    acked = threading.Event()
    line = Line(1, lambda _: acked.set())

    async def main() -> None:
        channel = BlockingChannel(line, asyncio.get_running_loop())

        def handle(order: int) -> None:
            reactor.stop()

        reactor = Reactor(subscribe(handle, ORDERS, Policy()), channel, SystemClock())
        await asyncio.to_thread(reactor.run)
        # Nobody asks anything of the channel any more: others of the app may go on for days.
        assert await asyncio.to_thread(acked.wait, 10)

    asyncio.run(main())
    assert "close" not in line.calls


def test_what_waits_to_be_acked_is_held_so_that_its_lease_is_kept() -> None:
    may_ack = threading.Event()
    held: list[set[str]] = []

    class Slow(Line):
        async def ack(self, delivery: Delivery) -> None:
            await asyncio.to_thread(may_ack.wait, 10)
            await super().ack(delivery)

    async def main() -> None:
        channel = BlockingChannel(Slow(3), asyncio.get_running_loop())

        def handle(order: int) -> None:
            if order == 2:
                held.append({one.id for one in reactor.held()})
                may_ack.set()

        reactor = Reactor(
            subscribe(handle, ORDERS, Policy(buffer=10)), channel, SystemClock(), until_idle=True
        )
        await asyncio.to_thread(reactor.run)

    asyncio.run(main())
    # The first may be on its way; the second waits behind it, the third is in hand.
    assert {"m1", "m2"} <= held[0]


def test_a_stop_while_the_broker_is_away_does_not_wait_for_each_ack_to_fail() -> None:
    first = threading.Event()

    class Away(Line):
        async def ack(self, delivery: Delivery) -> None:
            first.set()
            await asyncio.sleep(0.5)
            raise ConnectionError("nobody home")

    def told(reactor: Reactor) -> None:
        assert first.wait(10)
        reactor.stop()

    def handle(order: int) -> None: ...

    assert end(Away(10), handle, told=told) < 3


def test_a_stop_while_acks_are_sent_is_not_overheard_by_the_receive_behind_them() -> None:
    last = threading.Event()

    class Slow(Line):
        async def ack(self, delivery: Delivery) -> None:
            if delivery.id == "m4":
                last.set()
                await asyncio.sleep(0.3)
            await super().ack(delivery)

    def told(reactor: Reactor) -> None:
        assert last.wait(10)
        reactor.stop()

    def handle(order: int) -> None: ...

    assert end(Slow(5), handle, told=told, receive_timeout=20.0) < 10


def test_an_ack_that_its_client_cancels_is_a_failed_one() -> None:
    class Cancels(Line):
        async def ack(self, delivery: Delivery) -> None:
            if delivery.id == "m1":
                raise asyncio.CancelledError
            await super().ack(delivery)

    def handle(order: int) -> None: ...

    counts = pump(Cancels(3), handle).counts
    assert (counts.acked, counts.settle_failed, counts.receive_failed) == (2, 1, 0)
