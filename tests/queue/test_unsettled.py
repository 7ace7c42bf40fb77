"""Deliveries that end without a verdict: counted for each message, and bounded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from settled.queue.types import AckItem, AckOp, PopRequest
from tests.queue.helpers import drain, ids, pop, push, settle, with_engine, with_engines

if TYPE_CHECKING:
    from settled.queue.engine import Engine
    from settled.queue.types import Popped


async def _expire(engine: Engine) -> None:
    """As if an hour had passed for all leases, and nothing were remembered of them."""
    await engine._core.pool.fetch("update consumer set lease_until = lease_until - interval '1 hour'")
    engine._core.ready.reset()


async def _work(engine: Engine, queue: str, bad: set[str], leases: int = 1, **how: Any) -> dict[str, int]:
    """Consumers of one process, which crashes as soon as it has a bad message; returns their deliveries."""
    seen: dict[str, int] = {}
    for _ in range(300):
        # Of those that are near the limit, one is out at a time: the others wait.
        held = [await pop(engine, queue, wait=0 if i else 1, **how) for i in range(leases)]
        taken = [name for popped in held for name in ids(popped)]
        if not taken:
            return seen
        for name in taken:
            seen[name] = seen.get(name, 0) + 1
        assert {m.attempts for popped in held for m in popped.messages()} <= {0}
        if bad.isdisjoint(taken):
            for popped in held:
                if popped.lease_id:
                    await settle(engine, popped, "completed")
        else:
            await _expire(engine)
    raise AssertionError(f"no end: {seen}")


@with_engine
async def test_a_message_that_always_ends_its_consumer_becomes_a_dead_letter_that_says_so(
    engine: Engine,
) -> None:
    """Defect Q2."""
    await engine.configure("q", {"unsettledLimit": 3, "retryLimit": 2})
    await push(engine, "q", "bad", "good")
    seen = await _work(engine, "q", {"bad"}, batch=1)
    assert seen == {"bad": 3, "good": 1}
    (letter,) = (await engine.dead_letters(queue="q")).rows
    assert (letter.transaction_id, letter.attempts, letter.unsettled) == ("bad", 0, 3)
    assert "delivered 3 times without a verdict (unsettledLimit 3)" in (letter.error or "")
    assert letter.payload == b'"bad"'
    assert await engine._core.pool.fetch("select from lost_lease") == []
    assert not await engine._core.pool.fetchval("select bool_or(odd) from consumer")


@with_engine
async def test_of_a_batch_only_the_message_that_ends_its_consumer_is_buried(engine: Engine) -> None:
    """Defect Q2: nothing of the batch is acked before the consumer ends."""
    names = [f"m{i}" for i in range(100)]
    await push(engine, "q", *names)
    seen = await _work(engine, "q", {"m50"}, batch=100)
    assert seen["m50"] == 10
    assert [d.transaction_id for d in (await engine.dead_letters()).rows] == ["m50"]
    assert set(seen) == set(names)


@with_engine
async def test_a_low_limit_buries_nothing_that_was_never_alone(engine: Engine) -> None:
    """Defect Q2."""
    await engine.configure("q", {"unsettledLimit": 1})
    await push(engine, "q", *"abcde")
    seen = await _work(engine, "q", {"c"}, batch=5)
    assert [d.transaction_id for d in (await engine.dead_letters()).rows] == ["c"]
    assert seen["c"] == 2


@pytest.mark.parametrize("how", [{"leases": 12, "batch": 5}, {"partitions": 12, "batch": 60}])
def test_a_consumer_that_holds_many_partitions_loses_only_what_ends_it(dsn: str, how: dict[str, int]) -> None:
    """Defect Q2."""

    @with_engine
    async def body(engine: Engine) -> None:
        for partition in range(12):
            await push(engine, "q", *(f"{partition}-{i}" for i in range(3)), partition=str(partition))
        seen = await _work(engine, "q", {"7-1"}, **how)
        assert [d.transaction_id for d in (await engine.dead_letters()).rows] == ["7-1"]
        assert len(seen) == 36

    body(dsn)


@with_engine
async def test_a_parked_message_that_ends_its_consumer_is_buried_with_its_attempts(engine: Engine) -> None:
    """Defect Q2."""
    await engine.configure("q", {"retry": "parked", "retryDelay": 0, "unsettledLimit": 4})
    await push(engine, "q", *"abc")
    batch = await pop(engine, "q")
    await settle(engine, batch, "failed", "b")
    await settle(engine, batch, "completed", "a", "c")
    for _ in range(4):
        again = await pop(engine, "q")
        assert [(m.transaction_id, m.attempts) for m in again.messages()] == [("b", 1)]
        await _expire(engine)
    assert ids(await pop(engine, "q")) == []
    (letter,) = (await engine.dead_letters()).rows
    assert (letter.transaction_id, letter.attempts, letter.unsettled) == ("b", 1, 4)


@with_engine
async def test_without_a_limit_a_message_comes_again_whatever_happened(engine: Engine) -> None:
    """Defect Q2."""
    await engine.configure("q", {"unsettledLimit": 0})
    await push(engine, "q", *"abc")
    for _ in range(12):
        assert ids(await pop(engine, "q")) == ["a", "b", "c"]
        await _expire(engine)
    assert await engine._core.pool.fetchval("select count(*) from lost_lease") == 1
    assert await drain(engine, "q") == ["a", "b", "c"]


@with_engine
async def test_the_count_is_shown_with_the_message_and_its_life(engine: Engine) -> None:
    """Defect Q2."""
    (pushed, _) = await push(engine, "q", "a", "b")
    for _ in range(2):
        batch = await pop(engine, "q")
        await settle(engine, batch, "retry", *ids(batch)[1:])
        await _expire(engine)
    assert ids(await pop(engine, "q")) == ["a"]
    for name, times in (("a", 2), ("b", 0)):
        view = await engine.message(pushed.partition_id, name)
        assert [(g.unsettled, g.attempts) for g in view.groups] == [(times, 0)]
    life = await engine.journal(partition_id=pushed.partition_id, transaction_id="a")
    assert [entry.kind for entry in life] == ["expired", "expired"]


@with_engine
async def test_a_lease_that_could_not_be_read_or_was_given_back_charges_nobody(engine: Engine) -> None:
    """Defect Q2."""
    await push(engine, "q", "a")
    batch = await pop(engine, "q")
    core = engine._core
    lane = next(iter(core.registry.lanes_by_id.values()))
    group = core.registry.groups["__QUEUE_MODE__"]
    await core.pool.fetch("select take_back($1, $2, $3, $4, $5)", lane.id, group, batch.lease_id, [0], [0])
    core.ready.reset()
    batch = await pop(engine, "q")
    assert ids(batch) == ["a"]
    await settle(engine, batch, "retry")
    assert ids(await pop(engine, "q")) == ["a"]
    assert await core.pool.fetch("select from lost_lease") == []


@with_engine
async def test_a_message_past_its_time_is_never_delivered(engine: Engine) -> None:
    """Defect Q14."""
    await engine.configure("q", {"ttl": 30})
    await push(engine, "q", "old", "older")
    await push(engine, "q", "old", partition="other")
    await engine._core.pool.fetch("update segment set created_at = created_at - interval '1 minute'")
    await push(engine, "q", "young")
    for how in ({"auto_ack": True, "group": "g"}, {"partition": "Default"}, {"group": "h"}):
        popped = await engine.pop(PopRequest("q", batch=10, wait=2, **how))
        assert ids(popped) == ["young"], how
    letters = [(d.group, d.transaction_id) for d in (await engine.dead_letters(queue="q")).rows]
    assert letters.count(("g", "old")) >= 1
    assert ("__QUEUE_MODE__", "older") in letters
    assert {d.error for d in (await engine.dead_letters(queue="q")).rows} == {"waited longer than ttl (30 s)"}


@with_engine
async def test_a_retry_past_its_time_is_not_delivered_either(engine: Engine) -> None:
    """Defect Q14."""
    for retry in ("parked", "in_order"):
        await engine.configure(retry, {"retry": retry, "maxWaitTimeSeconds": 30, "retryDelay": 0})
        await push(engine, retry, "a", "b")
        await settle(engine, await pop(engine, retry, 1), "failed")
        await engine._core.pool.fetch("update segment set created_at = created_at - interval '1 minute'")
        await push(engine, retry, "c")
        assert ids(await pop(engine, retry, 10, wait=2)) == ["c"]
        letters = {(d.transaction_id, d.attempts) for d in (await engine.dead_letters(queue=retry)).rows}
        assert letters == {("a", 1), ("b", 0)}


@with_engine
async def test_many_past_their_time_do_not_keep_a_young_one_waiting(engine: Engine) -> None:
    """Defect Q14."""
    await engine.configure("q", {"ttl": 30})
    await push(engine, "q", *(f"m{i}" for i in range(3000)))
    await engine._core.pool.fetch("update segment set created_at = created_at - interval '1 minute'")
    await push(engine, "q", "young")
    assert ids(await pop(engine, "q", 10, wait=10)) == ["young"]
    assert (await engine.dead_letters(queue="q")).total == 3000


async def _twice(engine: Engine, *names: str, queue: str = "q") -> tuple[Popped, Popped]:
    """A first holder whose lease ran out, and the second one who has the messages now."""
    await push(engine, queue, *names)
    first = await pop(engine, queue)
    await _expire(engine)
    second = await pop(engine, queue)
    assert ids(first) == ids(second) == list(names)
    return first, second


@pytest.mark.parametrize("status", ["completed", "failed", "retry", "dlq"])
@pytest.mark.parametrize("forgotten", [False, True])
def test_who_names_no_lease_does_not_settle_what_another_holds_now(
    dsn: str, status: str, forgotten: bool
) -> None:
    """Defect Q3."""

    @with_engine
    async def body(engine: Engine) -> None:
        first, second = await _twice(engine, "a", "b")
        if forgotten:
            engine._core.leases.drop_older(float("inf"))
        for which in (["a"], ["a", "b"]):
            results = await settle(engine, first, status, *which, lease=False)
            assert {(r.success, r.message) for r in results} == {(False, "invalid_lease")}
            assert all("send the leaseId of yours" in (r.error or "") for r in results)
        assert [r.success for r in await settle(engine, second, status)] == [True, True]

    body(dsn)


@with_engine
async def test_who_names_no_lease_settles_a_first_delivery_and_one_after_a_verdict(engine: Engine) -> None:
    """Defect Q3."""
    await engine.configure("q", {"retryDelay": 0})
    await push(engine, "q", "a", "b")
    assert [r.message for r in await settle(engine, await pop(engine, "q"), "failed", lease=False)] == [
        "failed_retry"
    ] * 2
    batch = await pop(engine, "q")
    assert [r.success for r in await settle(engine, batch, "retry", "a", lease=False)] == [True]
    assert [r.success for r in await settle(engine, batch, "completed", "b", lease=False)] == [True]
    batch = await pop(engine, "q")
    assert [r.success for r in await settle(engine, batch, "completed", "a", lease=False)] == [True]


@with_engine
async def test_a_transaction_settles_under_the_leases_it_requires(engine: Engine) -> None:
    """Defect Q3; the peer's older clients name leases there only."""
    first, second = await _twice(engine, "a")
    (message,) = second.messages()
    operation = AckOp(AckItem("a", message.partition_id))
    refused = await engine.transaction([operation])
    assert (refused.success, "send the leaseId of yours" in (refused.error or "")) == (False, True)
    assert not (await engine.transaction([operation], [first.lease_id or ""])).success
    assert (await engine.transaction([operation], [second.lease_id or ""])).success


@with_engine
async def test_a_holder_from_before_a_seek_does_not_settle_after_it_without_its_lease(engine: Engine) -> None:
    """Defect Q3."""
    await push(engine, "q", "a", "b")
    before = await pop(engine, "q", group="g")
    await settle(engine, before, "completed", "a")
    await engine.seek("g", "q", "beginning")
    after = await pop(engine, "q", group="g")
    assert ids(after) == ["a", "b"]
    (late,) = await settle(engine, before, "completed", "b", lease=False)
    assert (late.success, late.message) == (False, "invalid_lease")
    assert [r.success for r in await settle(engine, after, "completed")] == [True, True]
    await engine.seek("g", "q", "beginning")
    again = await pop(engine, "q", group="g")
    (first, second) = await settle(engine, again, "completed", lease=False, atomic=False)
    assert (first.success, second.success) == (True, False)
    letters = (await engine.dead_letters()).rows
    assert letters == []


@with_engine
async def test_a_holder_from_before_its_group_was_deleted_needs_its_lease_too(engine: Engine) -> None:
    """Defect Q3."""
    await push(engine, "q", "a")
    before = await pop(engine, "q", group="g")
    await engine.delete_group("g")
    after = await pop(engine, "q", group="g")
    assert ids(after) == ["a"]
    (late,) = await settle(engine, before, "failed", lease=False)
    assert (late.success, late.message) == (False, "invalid_lease")
    assert (await settle(engine, after, "completed"))[0].success


@with_engines(2)
async def test_a_worker_that_remembers_an_older_lease_finds_the_one_that_is_out(
    one: Engine, two: Engine
) -> None:
    await push(one, "q", "a", "b")
    await settle(one, await pop(one, "q", 1), "retry")
    stale = await pop(one, "q", 1)
    await settle(two, stale, "completed")
    fresh = await pop(two, "q", 1, wait=2)
    assert ids(fresh) == ["b"]
    assert [r.success for r in await settle(one, fresh, "completed", lease=False)] == [True]


@with_engine
async def test_a_message_is_buried_by_hand_although_it_was_delivered_twice(engine: Engine) -> None:
    _, second = await _twice(engine, "a")
    (message,) = second.messages()
    await engine.bury_message(message.partition_id, "a")
    assert (await engine.dead_letters()).total == 1
