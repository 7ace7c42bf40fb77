"""The blocking face of an awaitable channel: what a sync handler waits for, and what it does not."""

from __future__ import annotations

import asyncio
import threading
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
