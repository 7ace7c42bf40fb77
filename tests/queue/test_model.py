"""The engine against its model, the in-memory transport: whatever is done, both must answer the same."""

from __future__ import annotations

import asyncio
import itertools
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from settled.queue.engine import Engine
from settled.queue.types import AckItem, PopRequest, PushItem
from settled.settlement import Reason, Reject
from settled.transports.base import LeaseLost, Outgoing, Source
from settled.transports.lanes import QueueOptions
from settled.transports.memory import MemoryTransport

if TYPE_CHECKING:
    from collections.abc import Iterator

LEASE, RETRY_DELAY, RETRY_LIMIT = 1000, 100, 3
LANES, GROUPS = ("one", "two"), ("g", "h")
STATUSES = ("completed", "completed", "completed", "failed", "failed", "dlq", "retry")
_numbers = itertools.count()


class ModelClock:
    """Time that moves when the test says so."""

    def __init__(self) -> None:
        self.time = 1_000_000.0

    def now(self) -> float:
        return self.time


class Both(RuleBasedStateMachine):
    """Does everything twice and compares; in the model a lane is a queue of its own, to be popped by name."""

    engine: Engine
    loop: asyncio.AbstractEventLoop

    @initialize(retry=st.sampled_from(["in_order", "parked"]))
    def start(self, retry: Any) -> None:
        self.queue = f"q{next(_numbers)}"
        self.retry = retry
        self.clock = ModelClock()
        self.model = MemoryTransport(clock=self.clock)  # type: ignore[arg-type]
        options = {
            "leaseTime": LEASE,
            "retryDelay": RETRY_DELAY * 1000,
            "retryLimit": RETRY_LIMIT,
            "retry": retry,
            "unsettledLimit": 0,
        }
        self.run(self.engine.configure(self.queue, options))
        for lane in LANES:
            self.model.configure(
                lane,
                QueueOptions(
                    lease=LEASE,
                    retry=retry,
                    retry_limit=RETRY_LIMIT,
                    retry_delay=RETRY_DELAY,
                    retry_delay_max=3600,
                ),
            )
            for group in GROUPS:
                self.model.subscribe(lane, group)
        self.sent: dict[str, list[str]] = {lane: [] for lane in LANES}
        self.out: list[tuple[str, str, Any, AckItem]] = []

    def run(self, work: Any) -> Any:
        return self.loop.run_until_complete(work)

    @rule(lane=st.sampled_from(LANES), count=st.integers(1, 6), twice=st.booleans())
    def push(self, lane: str, count: int, twice: bool) -> None:
        before = self.sent[lane]
        names = [f"{lane}-{len(before) + i}" for i in range(count)]
        again = before[-1:] if twice else []
        items = [PushItem(self.queue, b"1", lane, name) for name in [*names, *again]]
        statuses = [result.status for result in self.run(self.engine.push(items))]
        assert statuses == ["queued"] * count + ["duplicate"] * len(again)
        for name in names:
            self.model.put(Outgoing(subject=lane, data=b"1", id=name, lane="lane"))
        before += names

    @rule(
        lane=st.sampled_from(LANES),
        group=st.sampled_from(GROUPS),
        batch=st.sampled_from([1, 2, 5, 50]),
        count=st.integers(0, 6),
        plan=st.lists(st.tuples(st.integers(0, 999), st.sampled_from(STATUSES), st.booleans()), max_size=8),
    )
    def push_pop_and_settle(
        self, lane: str, group: str, batch: int, count: int, plan: list[tuple[int, str, bool]]
    ) -> None:
        """A little of everything in one step; the plan picks among all that was handed out, newest first."""
        if count:
            self.push(lane, count, False)
        self.pop(lane, group, batch)
        for place, status, again in plan:
            if self.out:
                self.settle(len(self.out) - 1 - place % min(len(self.out), 12), status, again)

    def pop(self, lane: str, group: str, batch: int) -> None:
        if self.retry == "parked":
            batch = 1000  # the model merges what was parked by age, the engine hands it out first
        popped = self.run(self.engine.pop(PopRequest(self.queue, lane, group=group, batch=batch)))
        mine = {m.transaction_id: m for m in popped.messages()}
        channel = self.model.immediate(Source(channel=lane, group=group))
        theirs = channel.take(batch)
        order = list if self.retry == "in_order" else sorted
        assert order(mine) == order(d.id for d in theirs)
        for delivery in theirs:
            message = mine[delivery.id]
            assert message.attempts == delivery.attempt - 1
            item = AckItem(delivery.id, message.partition_id, "", message.lease_id, "error", None, group)
            self.out.append((lane, group, delivery, item))

    def settle(self, at: int, status: str, again: bool) -> None:
        lane, group, delivery, item = self.out[at]
        if not again:  # else it is tried once more later, though it is settled
            del self.out[at]
        channel = self.model.immediate(Source(channel=lane, group=group))
        try:
            match status:
                case "completed":
                    channel.ack(delivery)
                case "failed":
                    channel.requeue(delivery, None)
                case "dlq":
                    channel.reject(delivery, Reject(Reason.DELIVERY_ERROR, "error"))
                case _:
                    channel.nack(delivery)
            expected = True
        except LeaseLost:
            expected = False
        asked = AckItem(item.transaction_id, item.partition_id, status, item.lease_id, "error", None, group)
        (result,) = self.run(self.engine.ack([asked], group))
        assert result.success == expected, result

    @rule(seconds=st.sampled_from([150, 450, 1050]))
    def time_passes(self, seconds: int) -> None:
        self.clock.time += seconds
        pool = self.engine._core.pool
        self.run(pool.fetch(f"update consumer set lease_until = lease_until - interval '{seconds} s'"))
        self.run(pool.fetch(f"update exception set due = due - interval '{seconds} s'"))

    @rule()
    def forget(self) -> None:
        """What a worker remembers must not matter."""
        core = self.engine._core
        core.ready.reset()
        core.leases.drop_older(float("inf"))
        for lane in core.registry.lanes_by_id.values():
            lane.remembered.forget()

    @invariant()
    def lag_and_dead_letters_agree(self) -> None:
        if not hasattr(self, "queue"):
            return
        lags = {
            (lane.group, lane.partition): lane.lag for lane in self.run(self.engine.lanes(queue=self.queue))
        }
        for (group, lane), lag in lags.items():
            if lane in LANES:
                assert lag == self.model.depth(lane, group), (group, lane)
        mine = sorted(
            (d.group, d.transaction_id, d.attempts)
            for d in self.run(self.engine.dead_letters(queue=self.queue, limit=999)).rows
        )
        theirs = sorted((d.group, d.id, d.attempts) for lane in LANES for d in self.model.dead_letters(lane))
        assert mine == theirs


@pytest.fixture
def both(dsn: str) -> Iterator[type[Both]]:
    loop = asyncio.new_event_loop()
    Both.loop = loop
    Both.engine = loop.run_until_complete(Engine.open(dsn, maintain=False))
    yield Both
    loop.run_until_complete(Both.engine.close())
    loop.close()


def test_the_engine_does_what_the_in_memory_transport_does(both: type[Both]) -> None:
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        both,
        settings=settings(
            max_examples=30,
            stateful_step_count=40,
            deadline=None,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        ),
    )
