"""The engine does what the in-memory transport does, whatever is asked of both, in whatever order."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import asyncpg
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from settled.clock import VirtualClock
from settled.message import Delivery
from settled.portal import Portal
from settled.queue.engine import Engine
from settled.queue.types import AckItem, PoppedMessage, PopRequest, PushItem
from settled.settlement import Reject
from settled.transports.base import LeaseLost, Outgoing, Source
from settled.transports.lanes import QueueOptions
from settled.transports.memory import MemoryChannel, MemoryTransport

LANES = ["eu", "us"]
GROUPS = ["billing", "audit"]
LONG = 10_000.0

LET_TIME_PASS = [
    "update consumer set lease_until = clock_timestamp() - interval '1 second' where lease is not null",
    "update exception set due = clock_timestamp() - interval '1 second'",
    "update consumer set next_due = clock_timestamp() - interval '1 second' where next_due is not null",
]


class Both(RuleBasedStateMachine):
    """The engine beside its model; every answer of one must be the other's."""

    dsn = ""
    portal = Portal("model")
    number = 0

    deliveries: Bundle[tuple[Delivery, PoppedMessage]] = Bundle("deliveries")

    @initialize(retry=st.sampled_from(["in_order", "parked"]), limit=st.integers(1, 3))
    def start(self, retry: Any, limit: int) -> None:
        Both.number += 1
        self.queue = f"orders-{Both.number}"
        self.engine = self.portal.run(self._open())
        self.portal.run(
            self.engine.configure(
                self.queue, {"leaseTime": 300, "retryLimit": limit, "retryDelay": 60_000, "retry": retry}
            )
        )
        self.clock = VirtualClock()
        self.model = MemoryTransport(clock=self.clock)
        self.model.configure("q", QueueOptions(lease=300, retry=retry, retry_limit=limit, retry_delay=60))
        # The engine keeps what is settled; a group that takes nothing makes the model do so too.
        self.model.subscribe("q", "keeper")
        for group in GROUPS:
            self.model.subscribe("q", group)
        self.settings = (retry, limit)

    async def _open(self) -> Engine:
        return await Engine.open(self.dsn, maintain=False)

    def teardown(self) -> None:
        if hasattr(self, "engine"):
            try:
                self.drain()
            finally:
                self.portal.run(self.engine.close())

    def channel(self, group: str) -> MemoryChannel:
        return self.model.immediate(Source(channel="q", group=group))

    @rule(lane=st.sampled_from(LANES), numbers=st.lists(st.integers(0, 30), min_size=1, max_size=6))
    def push(self, lane: str, numbers: list[int]) -> None:
        items = [
            PushItem(queue=self.queue, partition=lane, transaction_id=f"m{n}", payload=b"%d" % n)
            for n in numbers
        ]
        pushed = self.portal.run(self.engine.push(items))
        put = [self.model.put(Outgoing(subject="q", data=b"", id=f"m{n}", lane=lane)) for n in numbers]
        assert [result.status == "duplicate" for result in pushed] == [p.duplicate for p in put]

    @rule(
        target=deliveries,
        lane=st.sampled_from(LANES),
        group=st.sampled_from(GROUPS),
        batch=st.integers(1, 5),
        pick=st.integers(0, 4),
    )
    def pop(self, lane: str, group: str, batch: int, pick: int) -> Any:
        pairs = self.pop_both(lane, group, batch)
        self.in_hand = [*getattr(self, "in_hand", []), *pairs]
        # One of them goes into the bundle; the others are settled by `settle_any`.
        return pairs[pick % len(pairs)] if pairs else (None, None)

    def pop_both(self, lane: str, group: str, batch: int) -> list[tuple[Delivery, PoppedMessage]]:
        request = PopRequest(queue=self.queue, partition=lane, group=group, batch=batch)
        popped = list(self.portal.run(self.engine.pop(request)).messages())
        taken = self.channel(group).take_from(lane, batch)
        assert [(m.transaction_id, m.attempts + 1) for m in popped] == [(d.id, d.attempt) for d in taken]
        return list(zip(taken, popped, strict=True))

    @rule(pair=deliveries, how=st.sampled_from(["ack", "nack", "again", "later", "backoff", "reject"]))
    def settle_one(self, pair: Any, how: str) -> None:
        if pair[0] is not None:
            self.settle(pair, how)

    @rule(
        picks=st.lists(st.integers(0, 50), min_size=1, max_size=5),
        how=st.sampled_from(["ack", "ack", "nack", "again"]),
    )
    def settle_any(self, picks: list[int], how: str) -> None:
        in_hand = getattr(self, "in_hand", [])
        for pick in picks:
            if in_hand:
                self.settle(in_hand[pick % len(in_hand)], how)

    def settle(self, pair: tuple[Delivery, PoppedMessage], how: str) -> None:
        delivery, message = pair
        status, delay = {
            "ack": ("completed", None),
            "nack": ("retry", None),
            "again": ("failed", 0.0),
            "later": ("failed", LONG),
            "backoff": ("failed", None),
            "reject": ("dlq", None),
        }[how]
        item = AckItem(
            message.transaction_id,
            message.partition_id,
            status,
            lease_id=message.lease_id,
            error="no",
            delay=delay,
        )
        (result,) = self.portal.run(self.engine.ack([item], message.group))
        channel = self.channel(message.group)
        try:
            match how:
                case "ack":
                    channel.ack(delivery)
                case "nack":
                    channel.nack(delivery)
                case "reject":
                    channel.reject(delivery, Reject(error="no"))
                case _:
                    channel.requeue(delivery, delay)
            settled = True
        except LeaseLost:
            settled = False
        assert result.success is settled, (how, result)

    @rule(pair=deliveries)
    def extend(self, pair: Any) -> None:
        delivery, message = pair
        if delivery is None:
            return
        extended = self.portal.run(self.engine.extend(message.lease_id, 300)).success
        try:
            self.channel(message.group).extend(delivery)
            held = True
        except LeaseLost:
            held = False
        assert extended is held

    @rule()
    def time_passes(self) -> None:
        self.clock.advance(2 * LONG)
        self.portal.run(self.engine.close())
        self.portal.run(self._let_time_pass())
        self.engine = self.portal.run(self._open())

    async def _let_time_pass(self) -> None:
        connection = await asyncpg.connect(self.dsn, server_settings={"search_path": "settled, public"})
        try:
            for statement in LET_TIME_PASS:
                await connection.execute(statement)
        finally:
            await connection.close()

    @rule(group=st.sampled_from(GROUPS))
    def dead_letters_are_the_same(self, group: str) -> None:
        page = self.portal.run(self.engine.dead_letters(queue=self.queue, group=group, limit=1000))
        ours = sorted((d.partition, d.transaction_id, d.attempts) for d in page.rows)
        theirs = sorted((d.lane, d.id, d.attempts) for d in self.model.dead_letters("q", group))
        assert ours == theirs

    def drain(self) -> None:
        """In the end both still have the same left, in the same order, for every group."""
        self.time_passes()
        for group in GROUPS:
            self.dead_letters_are_the_same(group)
            for lane in LANES:
                while pairs := self.pop_both(lane, group, 5):
                    for pair in pairs:
                        self.settle(pair, "ack")


@pytest.fixture
def machine(dsn: str) -> Iterator[type[Both]]:
    Both.dsn = dsn
    yield Both
    Both.portal.close()


def test_the_engine_is_its_model(machine: type[Both]) -> None:
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        machine,
        settings=settings(
            max_examples=25,
            stateful_step_count=25,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


