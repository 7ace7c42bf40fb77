"""The in-memory transport: conformance, and what makes it the model of the queue."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pytest

from settled.clock import SystemClock, VirtualClock
from settled.settlement import Reject
from settled.transports.base import AsyncChannel, Channel, Outgoing, Published, Source
from settled.transports.lanes import QueueOptions
from settled.transports.memory import MemoryChannel, MemoryTransport
from tests.transports.conformance import Conformance, Extends, Ordered


class MemoryBroker:
    queue = "orders"
    lane = None
    counts_attempts = True

    def __init__(self, clock: VirtualClock | None) -> None:
        self.clock = clock
        self.transport = MemoryTransport(clock=clock or SystemClock())
        self.transport.configure("orders", QueueOptions(lease=self.lease()))

    def publish(self, message: Outgoing) -> Published:
        return self.transport.put(message)

    def channel(self) -> Channel:
        return self.transport.channel(Source(channel="orders"))

    def wait(self, seconds: float) -> None:
        if self.clock is not None:
            self.clock.advance(seconds)

    def lease(self) -> float:
        return 1.5 if self.clock is None else 30.0

    def dead_letters(self) -> list[tuple[bytes, str]]:
        return [(dead.data, dead.error) for dead in self.transport.dead_letters("orders")]

    def run_async(self, use: Callable[[AsyncChannel], Any]) -> None:
        async def main() -> None:
            await use(self.transport.async_channel(Source(channel="orders")))

        asyncio.run(main())


class TestMemory(Extends, Ordered, Conformance):
    @pytest.fixture
    def broker(self, request: pytest.FixtureRequest) -> MemoryBroker:
        # Waking a receive, or extending a lease meanwhile, only means something where time passes by itself.
        real = any(word in request.node.originalname for word in ("woken", "slower_than_the_lease"))
        return MemoryBroker(None if real else VirtualClock())


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


@pytest.fixture
def transport(clock: VirtualClock) -> MemoryTransport:
    return MemoryTransport(clock=clock)


def put(transport: MemoryTransport, *bodies: bytes, **options: Any) -> list[Published]:
    return [transport.put(Outgoing(subject="orders", data=body, **options)) for body in bodies]


def take(channel: MemoryChannel, limit: int = 10, lanes: int | None = None) -> list[bytes]:
    return [delivery.data for delivery in channel.take(limit, lanes)]


def channel_of(transport: MemoryTransport, group: str | None = None) -> MemoryChannel:
    return transport.immediate(Source(channel="orders", group=group))


def test_groups_are_independent(transport: MemoryTransport) -> None:
    billing, audit = channel_of(transport, "billing"), channel_of(transport, "audit")
    put(transport, b"1", b"2")
    for delivery in billing.take(10):
        billing.ack(delivery)
    assert take(billing) == []
    assert take(audit) == [b"1", b"2"]


def test_a_new_group_starts_with_all_that_is_kept_what_is_new_or_from_a_time_on(
    transport: MemoryTransport, clock: VirtualClock
) -> None:
    transport.subscribe("orders")
    put(transport, b"1")
    clock.advance(100)
    put(transport, b"2")
    transport.subscribe("orders", "all")
    transport.subscribe("orders", "new", start="new")
    transport.subscribe("orders", "later", start=datetime.fromtimestamp(50, UTC))
    put(transport, b"3")
    assert take(channel_of(transport, "all")) == [b"1", b"2", b"3"]
    assert take(channel_of(transport, "new")) == [b"3"]
    assert take(channel_of(transport, "later")) == [b"2", b"3"]
    with pytest.raises(ValueError, match="start must be 'all', 'new' or a datetime, got 'old'"):
        transport.subscribe("orders", "odd", start="old")  # type: ignore[arg-type]


def test_an_ordered_lane_has_one_lease_at_a_time(transport: MemoryTransport) -> None:
    one, other = channel_of(transport), channel_of(transport)
    put(transport, b"1", b"2", b"3", lane="eu")
    put(transport, b"4", lane="us")
    first = one.take(2, lanes=1)
    assert [d.data for d in first] == [b"1", b"2"]
    assert take(other) == [b"4"]
    one.ack(first[1])
    assert take(other) == []
    one.ack(first[0])
    assert take(other) == [b"3"]


def test_messages_without_a_lane_go_to_whoever_asks(transport: MemoryTransport) -> None:
    put(transport, b"1", b"2", b"3")
    assert take(channel_of(transport), 1) == [b"1"]
    assert take(channel_of(transport), 1) == [b"2"]


def test_lanes_are_served_in_turn(transport: MemoryTransport) -> None:
    for lane in ("a", "b", "c"):
        put(transport, *[f"{lane}{n}".encode() for n in range(3)], lane=lane)
    channel = channel_of(transport)
    seen = []
    for _ in range(9):
        (delivery,) = channel.take(1)
        seen.append(delivery.data)
        channel.ack(delivery)
    assert seen == [b"a0", b"b0", b"c0", b"a1", b"b1", b"c1", b"a2", b"b2", b"c2"]


def test_a_batch_may_span_lanes_or_be_held_to_some(transport: MemoryTransport) -> None:
    for lane in ("a", "b", "c"):
        put(transport, lane.encode(), lane=lane)
    channel = channel_of(transport)
    assert take(channel, lanes=2) == [b"a", b"b"]
    assert take(channel) == [b"c"]


def test_acks_in_any_order_and_released_ones_come_back_in_order(transport: MemoryTransport) -> None:
    put(transport, b"1", b"2", b"3", b"4", lane="eu")
    channel = channel_of(transport)
    one, two, three, four = channel.take(4)
    channel.ack(three)
    channel.nack(four)
    channel.nack(two)
    channel.ack(one)
    assert take(channel) == [b"2", b"4"]


def test_attempts_belong_to_a_message_not_to_its_lane(transport: MemoryTransport) -> None:
    put(transport, b"1", b"2", lane="eu")
    channel = channel_of(transport)
    one, two = channel.take(2)
    channel.requeue(one, 0)
    channel.ack(two)
    (again,) = channel.take(2)
    assert (again.data, again.attempt) == (b"1", 2)
    channel.ack(again)
    put(transport, b"3", lane="eu")
    assert [d.attempt for d in channel.take(2)] == [1]


def test_a_failed_message_in_the_middle_of_a_batch_is_retried_then_dead(
    transport: MemoryTransport, clock: VirtualClock
) -> None:
    transport.configure("orders", QueueOptions(retry_limit=2, retry_delay=10))
    put(transport, b"1", b"2", b"3", lane="eu")
    channel = channel_of(transport)
    one, two, three = channel.take(3)
    channel.ack(one)
    channel.requeue(two, None)
    channel.ack(three)
    put(transport, b"4", lane="eu")
    assert take(channel) == []
    clock.advance(10)
    two_again, _ = channel.take(2)
    channel.requeue(two_again, None)
    (dead,) = transport.dead_letters("orders")
    assert (dead.data, dead.attempts, dead.published_at, dead.died_at) == (b"2", 2, 0, 10)
    assert "retry_limit is 2" in dead.error


def test_the_backoff_doubles_up_to_its_maximum() -> None:
    options = QueueOptions(retry_delay=2, retry_delay_max=15)
    assert [options.backoff(n) for n in (1, 2, 3, 4, 5, 5000)] == [2, 4, 8, 15, 15, 15]


def test_a_lease_that_expired_gives_back_only_what_was_not_settled(
    transport: MemoryTransport, clock: VirtualClock
) -> None:
    put(transport, b"1", b"2", b"3", lane="eu")
    slow, quick = channel_of(transport), channel_of(transport)
    one, two, three = slow.take(3)
    slow.ack(two)
    clock.advance(301)
    assert take(quick) == [b"1", b"3"]
    assert [d.settled for d in (one, two, three)] == [False] * 3


def test_a_delayed_message_is_appended_when_due(transport: MemoryTransport, clock: VirtualClock) -> None:
    channel = channel_of(transport)
    put(transport, b"later", lane="eu", delay=10)
    put(transport, b"now", lane="eu")
    assert transport.depth("orders") == 2
    assert channel.due() == 10
    for delivery in channel.take(10):
        channel.ack(delivery)
    assert take(channel) == []
    clock.advance(10)
    assert take(channel) == [b"later"]


def test_an_id_is_remembered_while_its_message_is_kept_in_its_lane(transport: MemoryTransport) -> None:
    channel = channel_of(transport)
    first, second = put(transport, b"1", b"1 again", id="x", lane="eu")
    assert (first.duplicate, second.duplicate, second.id) == (False, True, "x")
    assert not put(transport, b"1", id="x", lane="us")[0].duplicate
    for delivery in channel.take(10):
        channel.ack(delivery)
    assert not put(transport, b"1", id="x", lane="eu")[0].duplicate


def test_what_all_groups_are_done_with_is_forgotten(transport: MemoryTransport) -> None:
    billing, audit = channel_of(transport, "billing"), channel_of(transport, "audit")
    put(transport, *[b"x"] * 100)
    lane = transport._queues["orders"].lanes[None]
    for delivery in billing.take(100):
        billing.ack(delivery)
    assert len(lane.log) == 100
    for delivery in reversed(audit.take(100)):
        audit.ack(delivery)
    assert len(lane.log) == 0
    assert lane.end == 100


def test_leases_and_timers_do_not_pile_up(transport: MemoryTransport) -> None:
    channel = channel_of(transport)
    held = put(transport, b"held") and channel.take(1)
    for _ in range(1000):
        put(transport, b"x")
        for delivery in channel.take(1):
            channel.ack(delivery)
    cursor = transport._queues["orders"].groups["__QUEUE_MODE__"].cursors[None]
    assert len(cursor.expiries) < 50
    assert len(channel._group.timers) < 50
    channel.ack(held[0])


def test_a_foreign_delivery_is_refused(transport: MemoryTransport) -> None:
    from settled.message import Delivery

    with pytest.raises(TypeError, match="was not received from this transport"):
        channel_of(transport).ack(Delivery(id="x", subject="orders", data=b"", headers={}))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"lease": 0}, "lease must be more than 0 seconds, got 0"),
        ({"retry": "never"}, "retry must be 'in_order' or 'parked', got 'never'"),
        ({"retry_limit": 0}, "retry_limit must be None or at least 1, got 0"),
        ({"retry_delay": -1}, "retry_delay must be 0 or more seconds, got -1"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        QueueOptions(**options)


def test_a_queue_needs_a_name(transport: MemoryTransport) -> None:
    with pytest.raises(ValueError, match="a name must not be empty"):
        transport.put(Outgoing(subject="", data=b""))


def test_many_threads_lose_nothing_and_keep_each_lane_in_order() -> None:
    transport = MemoryTransport()
    transport.subscribe("orders")
    lanes, each, producers, consumers = 5, 100, 4, 4
    seen: dict[str, list[int]] = {f"lane-{n}": [] for n in range(lanes)}
    done = threading.Event()
    total = lanes * each * producers

    def produce(start: int) -> None:
        for n in range(each):
            for lane in seen:
                put(transport, b"%d" % (start * each + n), lane=lane)

    def consume() -> None:
        channel = transport.channel(Source(channel="orders"))
        while not done.is_set():
            for delivery in channel.receive(7, 0.05):
                assert delivery.lane is not None
                seen[delivery.lane].append(int(delivery.data))
                channel.ack(delivery)
            if sum(map(len, seen.values())) >= total:
                done.set()

    threads = [threading.Thread(target=produce, args=(n,)) for n in range(producers)]
    threads += [threading.Thread(target=consume) for _ in range(consumers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    for numbers in seen.values():
        assert sorted(numbers) == list(range(each * producers))
        for producer in range(producers):
            mine = [n for n in numbers if n // each == producer]
            assert mine == sorted(mine)


def test_a_rejected_message_frees_its_lane(transport: MemoryTransport) -> None:
    put(transport, b"1", b"2", lane="eu")
    channel = channel_of(transport)
    (one,) = channel.take(1)
    channel.reject(one, Reject(error="no"))
    assert take(channel) == [b"2"]
