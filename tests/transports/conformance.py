"""What every transport must do, whatever broker is behind it.

A transport's test module makes a class of its own from `Conformance`, and from those of `Releases`,
`Extends`, `Ordered` and `Restarts` that its broker can, and gives it a `broker` fixture: a `Broker` that
knows how to publish to, and how to open channels on, a fresh and empty queue.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import pytest

from settled.clock import SystemClock
from settled.message import Delivery, Message
from settled.policy import Policy
from settled.pump import Reactor
from settled.pump.leases import Keeper
from settled.pump.settlers import perform
from settled.settlement import Reason, Reject, Requeue
from settled.subscriber import subscribe
from settled.transports.base import AsyncChannel, Channel, LeaseLost, NackMeans, Outgoing, Published, Source


class Broker(Protocol):
    """A real broker with an empty queue called `queue`."""

    queue: str
    lane: str | None
    """Where messages go whose order matters to a test; None if the queue is in order without one."""
    counts_attempts: bool
    """Whether only failed deliveries count as attempts: giving back does not."""

    def publish(self, message: Outgoing) -> Published: ...

    def channel(self) -> Channel:
        """A blocking channel on the queue."""

    def wait(self, seconds: float) -> None:
        """Let time pass on the broker's clock."""

    def lease(self) -> float:
        """How long a delivery is a consumer's own."""

    def dead_letters(self) -> list[tuple[bytes, str]]:
        """Body and error of what was rejected."""

    def run_async(self, use: Callable[[AsyncChannel], Any]) -> None:
        """Call `use` with an awaitable channel on the queue, in a loop."""


class Restartable(Broker, Protocol):
    """One that can be restarted."""

    def restart(self) -> None:
        """Stop the broker and start it again, with the same address and data; return when it is up."""


@dataclass
class Queue:
    broker: Broker
    channel: Channel

    def publish(self, *bodies: bytes, lane: str | None = None) -> None:
        for body in bodies:
            self.broker.publish(Outgoing(subject=self.broker.queue, data=body, lane=lane or self.broker.lane))

    def receive(self, limit: int = 1, timeout: float = 5.0) -> Sequence[Delivery]:
        return self.channel.receive(limit, timeout)

    def one(self) -> Delivery:
        (delivery,) = self.receive()
        return delivery

    def empty(self) -> bool:
        return not self.receive(timeout=0.2)

    def in_the_end(self) -> Delivery:
        """The next message, from a broker that may be on its way back."""
        deadline = time.monotonic() + 90
        while time.monotonic() < deadline:
            with contextlib.suppress(Exception):
                for delivery in self.receive():
                    return delivery
            time.sleep(0.05)
        raise AssertionError("no message within 90 s")


def slowly(queue: Queue) -> list[bytes]:
    """What is handled, here or elsewhere, of two messages whose first takes longer than a lease."""
    queue.publish(b"slow", b"behind")
    other = queue.broker.channel()
    seen: list[bytes] = []

    def handle(message: Message[bytes]) -> None:
        seen.append(message.data)
        until = time.monotonic() + 1.6 * queue.broker.lease()
        while message.data == b"slow" and time.monotonic() < until:
            for delivery in other.receive(1, 0.1):
                seen.append(delivery.data)
                other.ack(delivery)
            time.sleep(0.05)
        with contextlib.suppress(LeaseLost):
            message.ack()
        if len(seen) >= 2:
            reactor.stop()

    policy = Policy(buffer=2, receive_timeout=1.0)
    subscription = subscribe(handle, Source(channel=queue.broker.queue), policy)
    reactor = Reactor(subscription, queue.channel, SystemClock())
    keeper = Keeper("test", queue.channel, reactor.held, 60.0)

    async def main() -> None:
        keeping = asyncio.create_task(keeper.run())
        giving_up = asyncio.get_running_loop().call_later(30, reactor.stop)
        await asyncio.to_thread(reactor.run)
        giving_up.cancel()
        keeping.cancel()

    asyncio.run(main())
    other.close()
    return seen


NASTY = "1 error for Order\nid\r\n  must be an int, got '\0\ud800\ufffe\x9f' " + 300_000 * "x"
"""What brokers refuse in a header, each something else of it."""


class Releases:
    """A message that is given back is anybody's at once."""

    def test_a_nacked_message_is_there_at_once(self, queue: Queue) -> None:
        queue.publish(b"1", b"2")
        queue.channel.nack(queue.one())
        again = queue.one()
        assert again.data in (b"1", b"2")
        assert again.attempt == 1 or not queue.broker.counts_attempts
        queue.channel.ack(again)
        queue.channel.ack(queue.one())
        assert queue.empty()

    def test_a_message_given_back_goes_to_another_consumer(self, queue: Queue) -> None:
        queue.publish(b"1")
        delivery = queue.one()
        other = Queue(queue.broker, queue.broker.channel())
        queue.channel.nack(delivery)
        queue.channel.close()
        again = other.one()
        assert again.data == b"1"
        other.channel.ack(again)


class Extends(Releases):
    """A lease can be renewed, so that a slow handler keeps its message."""

    def test_a_handler_slower_than_the_lease_keeps_its_message_and_those_behind_it(
        self, queue: Queue
    ) -> None:
        # A machine that stands still for most of a lease loses it; three times in a row would be our fault.
        for _ in range(3):
            if (seen := slowly(queue)) == [b"slow", b"behind"]:
                break
            while left := queue.receive():
                queue.channel.ack(*left)
        assert seen == [b"slow", b"behind"]
        assert queue.empty()


class Ordered:
    """Messages of one lane wait for each other."""

    def test_a_lane_is_in_order_and_waits_for_its_first_message(self, queue: Queue) -> None:
        queue.publish(b"1", b"2", b"3", lane="eu")
        queue.channel.nack(queue.one())
        assert queue.one().data == b"1"
        assert queue.empty()

    def test_what_was_buffered_behind_a_message_given_back_does_not_overtake_it(self, queue: Queue) -> None:
        queue.publish(b"1", b"2", b"3", lane="eu")
        batch = list(queue.receive(limit=3))
        assert batch[0].data == b"1"
        for delivery in batch:
            queue.channel.nack(delivery)
        seen = []
        while len(seen) < 3:
            for delivery in queue.receive():
                seen.append(delivery.data)
                queue.channel.ack(delivery)
        assert seen == [b"1", b"2", b"3"]


class Restarts:
    """The broker keeps its messages when it restarts, and this one can be restarted."""

    def test_a_restarted_broker_still_has_the_messages_and_their_attempts(
        self, queue: Queue, broker: Restartable
    ) -> None:
        queue.publish(b"1")
        queue.channel.requeue(queue.one(), 0)
        queue.channel.requeue(queue.one(), 1.0)
        broker.restart()
        delivery = queue.in_the_end()
        assert delivery.data == b"1"
        assert delivery.attempt >= 3
        queue.channel.ack(delivery)
        queue.publish(b"2")
        after = queue.in_the_end()
        assert after.data == b"2"
        queue.channel.ack(after)


class Conformance:
    """The suite."""

    @pytest.fixture
    def queue(self, broker: Broker) -> Queue:
        return Queue(broker, broker.channel())

    def test_what_the_channel_says_it_can_is_asked_of_it(self, queue: Queue) -> None:
        can = queue.channel.capabilities
        if can.nack is NackMeans.RELEASE:
            assert isinstance(self, Extends if can.extends else Releases)

    def test_what_is_published_is_received_whole(self, queue: Queue) -> None:
        body = bytes(range(256))
        queue.broker.publish(
            Outgoing(subject=queue.broker.queue, data=body, headers={"tenant": "acme"}, id="m-1")
        )
        delivery = queue.one()
        assert delivery.data == body
        assert delivery.headers["tenant"] == "acme"
        assert delivery.subject == queue.broker.queue
        assert delivery.id == "m-1"
        assert delivery.attempt == 1
        assert delivery.metadata().redelivery_count == 0
        queue.channel.ack(delivery)

    def test_an_empty_queue_gives_nothing(self, queue: Queue) -> None:
        assert queue.empty()

    def test_an_acked_message_does_not_come_again(self, queue: Queue) -> None:
        queue.publish(b"1")
        queue.channel.ack(queue.one())
        queue.broker.wait(queue.broker.lease() + 1)
        assert queue.empty()

    def test_a_limit_is_a_limit(self, queue: Queue) -> None:
        queue.publish(*[b"%d" % n for n in range(5)])
        received: list[bytes] = []
        while len(received) < 5:
            batch = queue.receive(limit=2)
            assert 1 <= len(batch) <= 2
            for delivery in batch:
                received.append(delivery.data)
                queue.channel.ack(delivery)
        assert received == [b"%d" % n for n in range(5)]

    def test_a_requeued_message_comes_after_its_delay_and_counts(self, queue: Queue) -> None:
        queue.publish(b"1")
        queue.channel.requeue(queue.one(), 2.0)
        assert queue.empty()
        queue.broker.wait(2.0)
        again = queue.one()
        assert again.attempt == 2
        queue.channel.ack(again)

    def test_a_requeue_without_a_delay_waits_a_second_and_then_twice_as_long(self, queue: Queue) -> None:
        """Defect P1: the same numbers on every broker, where nobody has configured others."""
        queue.publish(b"1")
        queue.channel.requeue(queue.one(), None)
        assert queue.empty()
        queue.broker.wait(1.0)
        queue.channel.requeue(queue.one(), None)
        queue.broker.wait(1.2)
        assert queue.empty()
        queue.broker.wait(0.8)
        queue.channel.ack(queue.one())

    def test_a_delay_longer_than_any_broker_has_is_cut_and_is_still_a_delay(self, queue: Queue) -> None:
        queue.publish(b"1")
        perform(queue.channel, queue.one(), Requeue(1e12))
        assert queue.empty()

    def test_a_requeue_of_no_delay_is_immediate(self, queue: Queue) -> None:
        queue.publish(b"1")
        for attempt in (1, 2, 3):
            delivery = queue.one()
            assert delivery.attempt == attempt
            queue.channel.requeue(delivery, 0)
        queue.channel.ack(queue.one())

    @pytest.mark.parametrize(
        ("reason", "error", "told"),
        [
            (Reason.DELIVERY_ERROR, "no such customer", "no such customer"),
            (Reason.UNACCEPTABLE, NASTY, "1 error for Order id must be an int, got ' ' xxxx"),
        ],
        ids=["plain", "nasty"],
    )
    def test_a_rejected_message_is_a_dead_letter_with_its_body_and_error(
        self, queue: Queue, reason: Reason, error: str, told: str
    ) -> None:
        queue.publish(b"poison")
        queue.channel.reject(queue.one(), Reject(reason, error))
        assert queue.empty()
        ((body, found),) = queue.broker.dead_letters()
        assert body == b"poison"
        assert found == told or (error is NASTY and found.startswith(told) and found.endswith("x..."))

    def test_an_unsettled_message_comes_again_when_its_lease_is_over(self, queue: Queue) -> None:
        queue.publish(b"1")
        queue.one()
        assert queue.empty()
        queue.broker.wait(queue.broker.lease() + 1)
        queue.channel.ack(queue.one())

    def test_an_extended_lease_holds(self, queue: Queue) -> None:
        queue.publish(b"1")
        delivery = queue.one()
        for _ in range(3):
            queue.broker.wait(queue.broker.lease() * 0.6)
            queue.channel.extend(delivery)
        assert queue.empty()
        queue.channel.ack(delivery)

    def test_the_async_face_does_the_same(self, broker: Broker) -> None:
        for body in (b"ack", b"nack", b"requeue", b"reject"):
            broker.publish(Outgoing(subject=broker.queue, data=body))

        async def use(channel: AsyncChannel) -> None:
            seen: list[bytes] = []
            while len(seen) < 7:
                all_seen = {b"ack", b"nack", b"requeue", b"reject"} <= set(seen)
                received = await channel.receive(1, 0.5 if all_seen else 5.0)
                if all_seen and not received:
                    break
                for delivery in received:
                    first = delivery.data not in seen
                    seen.append(delivery.data)
                    await channel.extend(delivery)
                    match delivery.data:
                        case b"nack" if first:
                            await channel.nack(delivery)
                        case b"requeue" if first:
                            await channel.requeue(delivery, 0)
                        case b"reject":
                            await channel.reject(delivery, Reject(error="no"))
                        case _:
                            await channel.ack(delivery)
            assert sorted(set(seen)) == [b"ack", b"nack", b"reject", b"requeue"]
            assert seen.count(b"requeue") == 2

        broker.run_async(use)
        assert broker.dead_letters() == [(b"reject", "no")]

    def test_a_waiting_receive_is_woken(self, broker: Broker) -> None:
        async def use(channel: AsyncChannel) -> None:
            waiting = asyncio.create_task(channel.receive(1, 30.0))
            await asyncio.sleep(0.05)
            channel.wake()
            assert not await asyncio.wait_for(waiting, 5)

        broker.run_async(use)
