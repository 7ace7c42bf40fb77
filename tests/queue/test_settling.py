"""Acks, nacks, leases and attempts, as a consumer sees them."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

import pytest

from settled.queue.types import AckItem, BadRequest, PopRequest
from tests.queue.helpers import drain, ids, pop, push, settle, with_engine, with_engines

if TYPE_CHECKING:
    from settled.queue.engine import Engine


@with_engine
async def test_a_batch_is_acknowledged_and_the_lease_released_with_the_last_ack(engine: Engine) -> None:
    await push(engine, "q", "a", "b", "c", "d")
    batch = await pop(engine, "q", 3)
    assert ids(batch) == ["a", "b", "c"]
    assert (await pop(engine, "q")).empty == "no_available_partition"
    assert [r.lease_released for r in await settle(engine, batch, "completed", "a")] == [False]
    assert [r.lease_released for r in await settle(engine, batch, "completed", "b", "c")] == [True, True]
    assert ids(await pop(engine, "q")) == ["d"]


@with_engine
async def test_acks_in_reverse_order_settle_each_message_once(engine: Engine) -> None:
    await push(engine, "q", *"abcde")
    batch = await pop(engine, "q")
    for name in "edcba":
        (result,) = await settle(engine, batch, "completed", name)
        assert result.success
        assert result.message == "acknowledged"
        assert result.lease_released == (name == "a")
    assert await drain(engine, "q") == []


@with_engine
async def test_acking_only_the_last_message_does_not_ack_the_earlier_ones(engine: Engine) -> None:
    await push(engine, "q", *"abc")
    batch = await pop(engine, "q", lease_seconds=1)
    assert (await settle(engine, batch, "completed", "c"))[0].success
    (lag,) = await engine.groups(queue="q")
    assert lag.total_lag == 2
    again = await pop(engine, "q", wait=3)
    assert ids(again) == ["a", "b"]


@with_engine
async def test_a_message_acked_beyond_the_prefix_does_not_come_again_after_a_takeover(engine: Engine) -> None:
    await push(engine, "q", *"abcdef")
    batch = await pop(engine, "q", lease_seconds=1)
    await settle(engine, batch, "completed", "b", "d", "f")
    taken = await pop(engine, "q", 1, wait=3)
    assert ids(taken) == ["a"]
    await settle(engine, taken, "completed")
    rest = await pop(engine, "q", 2)
    assert ids(rest) == ["c", "e"]
    await settle(engine, rest, "completed", "e")
    await settle(engine, rest, "completed", "c")
    assert await drain(engine, "q") == []
    assert (await engine.groups(queue="q"))[0].total_lag == 0


@with_engine
async def test_a_second_ack_of_a_message_changes_nothing_and_says_so(engine: Engine) -> None:
    await push(engine, "q", *"ab")
    batch = await pop(engine, "q")
    await settle(engine, batch, "completed", "a")
    (again,) = await settle(engine, batch, "completed", "a")
    assert (again.success, again.message) == (False, "not_found")
    await settle(engine, batch, "completed", "b")
    (late,) = await settle(engine, batch, "completed", "b")
    assert (late.success, late.message, late.noop) == (False, "not_found", True)


@with_engine
async def test_a_message_listed_twice_in_one_call_is_settled_once(engine: Engine) -> None:
    await push(engine, "q", *"ab")
    batch = await pop(engine, "q")
    results = await settle(engine, batch, "completed", "a", "a", atomic=False)
    assert [r.success for r in results] == [True, False]
    (lag,) = await engine.groups(queue="q")
    assert lag.total_lag == 1


@with_engine
async def test_an_ack_after_expiry_is_an_invalid_lease_and_changes_nothing(engine: Engine) -> None:
    await push(engine, "q", *"ab")
    batch = await pop(engine, "q", lease_seconds=1)
    await asyncio.sleep(1.05)
    results = await settle(engine, batch, "completed")
    assert [r.message for r in results] == ["invalid_lease", "invalid_lease"]
    assert ids(await pop(engine, "q")) == ["a", "b"]


@with_engine
async def test_a_foreign_lease_settles_nothing(engine: Engine) -> None:
    await push(engine, "q", "a")
    await push(engine, "other", "a")
    batch = await pop(engine, "q")
    other = await pop(engine, "other")
    (message,) = batch.messages()
    for lease in (other.lease_id, "not-a-lease", "00000000-0000-0000-0000-000000000000"):
        (result,) = await engine.ack([AckItem("a", message.partition_id, lease_id=lease)])
        assert (result.success, result.message) == (False, "invalid_lease")
    assert (await settle(engine, batch, "completed"))[0].success


@with_engine
async def test_without_a_lease_id_only_what_is_leased_to_the_group_now_is_settled(engine: Engine) -> None:
    await push(engine, "q", *"ab")
    batch = await pop(engine, "q", 1)
    (message,) = batch.messages()
    not_leased, wrong_group = AckItem("b", message.partition_id), AckItem("a", message.partition_id)
    assert (await engine.ack([not_leased]))[0].message == "not_found"
    assert (await engine.ack([wrong_group], "strangers"))[0].message == "invalid_lease"
    assert (await engine.ack([wrong_group]))[0].success
    assert (await engine.ack([wrong_group]))[0].message == "not_found"


@with_engine
async def test_an_ack_of_a_message_of_another_lane_is_not_found(engine: Engine) -> None:
    await push(engine, "q", "a", partition="p1")
    await push(engine, "q", "b", partition="p2")
    first, second = await pop(engine, "q"), await pop(engine, "q")
    (one,), (two,) = first.messages(), second.messages()
    (result,) = await engine.ack([AckItem(two.transaction_id, one.partition_id, lease_id=first.lease_id)])
    assert (result.success, result.message) == (False, "not_found")
    unknown = "00000000-0000-4000-8000-000000000000"
    assert (await engine.ack([AckItem("a", unknown)]))[0].message == "not_found"
    with pytest.raises(BadRequest, match="partitionId"):
        await engine.ack([AckItem("a", "nonsense")])
    with pytest.raises(BadRequest, match="status"):
        await engine.ack([AckItem("a", one.partition_id, "done")])


@with_engine
async def test_one_callers_bad_ack_among_many_at_once_touches_nobody_elses(engine: Engine) -> None:
    lanes = [f"p{i}" for i in range(8)]
    for lane in lanes:
        await push(engine, "q", "a", "b", partition=lane)
    batches = [await pop(engine, "q", partition=lane) for lane in lanes]
    await settle(engine, batches[3], "completed", "a")
    answers = await asyncio.gather(*(settle(engine, batch, "completed", "a") for batch in batches))
    assert [answer[0].success for answer in answers] == [i != 3 for i in range(8)]
    assert answers[3][0].message == "not_found"
    answers = await asyncio.gather(*(settle(engine, batch, "completed", "b") for batch in batches))
    assert [answer[0].lease_released for answer in answers] == [True] * 8


@with_engine
async def test_a_lease_of_many_messages_knows_each_of_them(engine: Engine) -> None:
    names = [f"m{i}" for i in range(700)]
    await push(engine, "q", *names)
    batch = await pop(engine, "q", 700)
    stranger = AckItem("nobody", batch.lanes[0].partition_id, "completed", batch.lease_id)
    assert (await engine.ack([stranger]))[0].message == "not_found"
    every_third = names[::-3]
    assert all(r.success for r in await settle(engine, batch, "completed", *every_third))
    assert not (await settle(engine, batch, "completed", names[-1]))[0].success
    rest = [name for name in names if name not in set(every_third)]
    assert all(r.success for r in await settle(engine, batch, "completed", *rest[1:]))
    assert (await settle(engine, batch, "completed", rest[0]))[0].lease_released


@with_engine
async def test_an_atomic_batch_ack_settles_all_or_nothing(engine: Engine) -> None:
    await push(engine, "q", *"abc")
    batch = await pop(engine, "q")
    (m, *_) = batch.messages()
    items = [AckItem(t, m.partition_id, lease_id=batch.lease_id) for t in ("a", "nobody", "b")]
    assert [r.message for r in await engine.ack(items)] == ["not_applied", "not_found", "not_applied"]
    assert (await engine.groups(queue="q"))[0].total_lag == 3
    assert [r.success for r in await engine.ack(items, atomic=False)] == [True, False, True]
    assert (await engine.groups(queue="q"))[0].total_lag == 1


@with_engine
async def test_acks_of_several_partitions_in_one_call_are_each_partitions_own(engine: Engine) -> None:
    for partition in ("eu", "us", "asia"):
        await push(engine, "q", f"{partition}1", f"{partition}2", partition=partition)
    batch = await pop(engine, "q", partitions=3)
    items = [AckItem(m.transaction_id, m.partition_id, lease_id=m.lease_id) for m in batch.messages()]
    # Somebody has acked one of these before, so its partition must be looked at closer.
    assert (await engine.ack(items[2:3]))[0].success
    calls = engine._core.settler.plain.calls
    results = await engine.ack([items[5], items[2], items[0], items[1], items[3], items[4]], atomic=False)
    assert [r.transaction_id for r in results] == [items[i].transaction_id for i in (5, 2, 0, 1, 3, 4)]
    assert [r.success for r in results] == [True, False, True, True, True, True]
    # The others went together, by the short way.
    assert engine._core.settler.plain.settled == 1 + 4
    assert engine._core.settler.plain.calls > calls
    assert (await engine.groups(queue="q"))[0].total_lag == 0
    assert ids(await pop(engine, "q", partitions=3)) == []


@with_engine
async def test_a_bad_item_beside_acks_that_stand_is_answered_not_raised(engine: Engine) -> None:
    await push(engine, "q", "a")
    (message,) = (await pop(engine, "q")).messages()
    good = AckItem("a", message.partition_id, lease_id=message.lease_id)
    bad = AckItem("b", "not-a-uuid", lease_id=message.lease_id)
    results = await engine.ack([bad, good], atomic=False)
    assert [(r.success, r.message) for r in results] == [(False, "not_applied"), (True, "acknowledged")]
    assert "not-a-uuid" in (results[0].error or "")
    with pytest.raises(BadRequest):
        await engine.ack([bad], atomic=False)


@with_engine
async def test_an_atomic_call_over_several_partitions_settles_all_or_nothing(engine: Engine) -> None:
    for partition in ("eu", "us"):
        await push(engine, "q", f"{partition}1", partition=partition)
    batch = await pop(engine, "q", partitions=2)
    items = [AckItem(m.transaction_id, m.partition_id, lease_id=m.lease_id) for m in batch.messages()]
    items.append(AckItem("nobody", items[0].partition_id, lease_id=batch.lease_id))
    assert [r.message for r in await engine.ack(items)] == ["not_applied", "not_applied", "not_found"]
    assert (await engine.groups(queue="q"))[0].total_lag == 2
    assert all(r.success for r in await engine.ack(items[:2]))
    assert (await engine.groups(queue="q"))[0].total_lag == 0


@with_engine
async def test_a_failed_message_in_the_middle_of_a_batch_is_retried_with_its_own_counter(
    engine: Engine,
) -> None:
    await engine.configure("q", {"retryDelay": 0, "retryLimit": 3})
    await push(engine, "q", *"abcd")
    batch = await pop(engine, "q")
    await settle(engine, batch, "completed", "a", "b", "d")
    (failed,) = await settle(engine, batch, "failed", "c", error="no luck")
    assert (failed.success, failed.message, failed.attempts, failed.lease_released) == (
        True,
        "failed_retry",
        1,
        True,
    )
    again = await pop(engine, "q")
    assert [(m.transaction_id, m.attempts) for m in again.messages()] == [("c", 1)]
    await settle(engine, again, "failed")
    await push(engine, "q", "e")
    third = await pop(engine, "q")
    assert [(m.transaction_id, m.attempts) for m in third.messages()] == [("c", 2), ("e", 0)]
    c, e = await settle(engine, third, "failed", error="for good")
    assert (c.message, c.dlq, c.attempts) == ("failed_dlq", True, 3)
    assert (e.message, e.attempts) == ("failed_retry", 1)
    page = await engine.dead_letters(queue="q")
    assert page.total == 1
    (letter,) = page.rows
    assert (letter.transaction_id, letter.error, letter.attempts, letter.payload) == (
        "c",
        "for good",
        3,
        b'"c"',
    )
    assert letter.created_at < letter.failed_at
    assert [(m.transaction_id, m.attempts) for m in (await pop(engine, "q")).messages()] == [("e", 1)]


@with_engine
async def test_retry_delay_doubles_with_each_attempt(engine: Engine) -> None:
    await engine.configure("q", {"retryDelay": 150, "retryLimit": 10})
    await push(engine, "q", "a")
    waits = []
    batch = await pop(engine, "q", wait=20)
    for _ in range(3):
        started = time.monotonic()
        await settle(engine, batch, "failed")
        batch = await pop(engine, "q", wait=20)
        waits.append(time.monotonic() - started)
    for wait, delay in zip(waits, (0.15, 0.3, 0.6), strict=True):
        assert 0.9 * delay < wait < 10


@with_engine
async def test_a_caller_may_choose_the_delay_of_a_nack(engine: Engine) -> None:
    await push(engine, "q", "a")
    await engine.configure("q", {"retryDelay": 60_000})
    batch = await pop(engine, "q")
    started = time.monotonic()
    await settle(engine, batch, "failed", delay=0.2)
    assert ids(await pop(engine, "q", wait=20)) == ["a"]
    assert time.monotonic() - started > 0.18


@with_engine
async def test_in_order_holds_the_lane_for_a_failed_message(engine: Engine) -> None:
    await engine.configure("q", {"retryDelay": 300})
    await push(engine, "q", *"abc")
    await settle(engine, await pop(engine, "q", 1), "failed")
    assert (await pop(engine, "q")).empty
    assert ids(await pop(engine, "q", wait=3)) == ["a", "b", "c"]


@with_engine
async def test_parked_lets_the_lane_go_on_and_brings_the_message_back_when_due(engine: Engine) -> None:
    await engine.configure("q", {"retryDelay": 1500, "retry": "parked", "retryLimit": 2})
    await push(engine, "q", *"abcd")
    first = await pop(engine, "q", 2)
    await settle(engine, first, "failed", "a", error="later")
    await settle(engine, first, "completed", "b")
    second = await pop(engine, "q", 1)
    assert ids(second) == ["c"]
    await settle(engine, second, "completed")
    assert ids(await pop(engine, "q", 1, auto_ack=True)) == ["d"]
    back = await pop(engine, "q", wait=30)
    assert [(m.transaction_id, m.attempts) for m in back.messages()] == [("a", 1)]
    assert (await engine.groups(queue="q"))[0].total_lag == 1
    (dead,) = await settle(engine, back, "failed", error="never")
    assert dead.message == "failed_dlq"
    assert (await engine.dead_letters()).rows[0].payload == b'"a"'
    assert await drain(engine, "q") == []


@with_engine
async def test_a_parked_message_that_is_out_can_be_acked_or_expire(engine: Engine) -> None:
    await engine.configure("q", {"retryDelay": 0, "retry": "parked", "retryLimit": 9})
    await push(engine, "q", *"ab")
    await settle(engine, await pop(engine, "q", 1), "failed")
    both = await pop(engine, "q", lease_seconds=1)
    assert sorted(ids(both)) == ["a", "b"]
    await settle(engine, both, "completed", "b")
    again = await pop(engine, "q", wait=3)
    assert [(m.transaction_id, m.attempts) for m in again.messages()] == [("a", 1)]
    assert (await settle(engine, again, "completed"))[0].message == "acknowledged"
    assert await drain(engine, "q") == []


@with_engines(2)
async def test_a_parked_message_amid_newer_ones_is_acked_through_another_engine(
    one: Engine, other: Engine
) -> None:
    await one.configure("q", {"retryDelay": 0, "retry": "parked", "retryLimit": 9})
    await push(one, "q", *"abc")
    first = await pop(one, "q")
    await settle(one, first, "failed", "b")
    await settle(one, first, "retry", "a", "c")
    again = await pop(one, "q")
    assert sorted(ids(again)) == ["a", "b", "c"]
    (acked,) = await settle(other, again, "completed", "b")
    assert (acked.success, acked.message) == (True, "acknowledged")
    await settle(other, again, "completed", "a", "c")
    assert await drain(one, "q") == []


@with_engine
async def test_retry_releases_a_message_without_counting_an_attempt(engine: Engine) -> None:
    await push(engine, "q", *"ab")
    batch = await pop(engine, "q")
    (released,) = await settle(engine, batch, "retry", "a")
    assert (released.success, released.message) == (True, "released")
    await settle(engine, batch, "completed", "b")
    assert [(m.transaction_id, m.attempts) for m in (await pop(engine, "q")).messages()] == [("a", 0)]


@with_engine
async def test_an_expired_lease_counts_no_attempt(engine: Engine) -> None:
    await engine.configure("q", {"retryLimit": 1})
    await push(engine, "q", "a")
    for _ in range(2):
        assert ids(await pop(engine, "q", lease_seconds=1, wait=3)) == ["a"]
    final = await pop(engine, "q", wait=3)
    assert [m.attempts for m in final.messages()] == [0]
    assert (await settle(engine, final, "failed"))[0].attempts == 1


@with_engine
async def test_dlq_sends_a_message_to_the_dead_letters_at_once_with_headers(engine: Engine) -> None:
    await push(engine, "q", *"ab", headers={"tenant": "t1"}, content_type="text/plain", producer="me")
    batch = await pop(engine, "q")
    await settle(engine, batch, "dlq", "a", error="poison")
    (letter,) = (await engine.dead_letters(group="__QUEUE_MODE__")).rows
    assert (letter.headers, letter.content_type, letter.producer) == ({"tenant": "t1"}, "text/plain", "me")
    assert letter.message_id == next(batch.messages()).id
    await settle(engine, batch, "completed", "b")
    assert await drain(engine, "q") == []


@with_engine
async def test_a_lease_is_extended_by_seconds(engine: Engine) -> None:
    await push(engine, "q", "a")
    batch = await pop(engine, "q", lease_seconds=1)
    assert batch.lease_id is not None
    longer = await engine.extend(batch.lease_id, 30)
    assert longer.success
    assert longer.expires_at is not None
    assert (await engine.extend(batch.lease_id, 5)).expires_at == longer.expires_at
    await asyncio.sleep(1.1)
    assert (await pop(engine, "q")).empty
    assert (await settle(engine, batch, "completed"))[0].success
    gone = await engine.extend(batch.lease_id, 30)
    assert (gone.success, gone.error) == (False, "Lease not found")
    assert not (await engine.extend("rubbish", 3)).success
    with pytest.raises(BadRequest, match="seconds"):
        await engine.extend(batch.lease_id, -1)


@with_engine
async def test_an_expired_lease_cannot_be_extended(engine: Engine) -> None:
    await push(engine, "q", "a")
    batch = await pop(engine, "q", lease_seconds=1)
    await asyncio.sleep(1.05)
    assert batch.lease_id is not None
    late = await engine.extend(batch.lease_id, 30)
    assert (late.success, late.error) == (False, "Lease already expired")


@with_engines(2)
async def test_a_lease_of_one_engine_is_settled_and_extended_by_another(one: Engine, two: Engine) -> None:
    for partition in ("p1", "p2"):
        await push(one, "q", "a", "b", "c", partition=partition)
    batch = await one.pop(PopRequest("q", batch=6, partitions=2, lease_seconds=2))
    assert len(batch.lanes) == 2
    assert batch.lease_id is not None
    assert (await two.extend(batch.lease_id, 60)).success
    for message in batch.messages():
        item = AckItem(message.transaction_id, message.partition_id, lease_id=batch.lease_id)
        assert (await two.ack([item]))[0].success
    assert await drain(one, "q") == []


@with_engine
async def test_auto_ack_settles_on_delivery(engine: Engine) -> None:
    await push(engine, "q", *"abc")
    batch = await pop(engine, "q", 2, auto_ack=True)
    assert batch.lease_id is None
    assert ids(batch) == ["a", "b"]
    assert ids(await pop(engine, "q", auto_ack=True)) == ["c"]
    assert (await engine.groups(queue="q"))[0].total_lag == 0


@with_engine
async def test_auto_ack_takes_failed_messages_too(engine: Engine) -> None:
    await engine.configure("q", {"retryDelay": 0})
    await push(engine, "q", *"abc")
    batch = await pop(engine, "q")
    await settle(engine, batch, "failed", "b")
    await settle(engine, batch, "completed", "a", "c")
    assert [(m.transaction_id, m.attempts) for m in (await pop(engine, "q", auto_ack=True)).messages()] == [
        ("b", 1)
    ]
    assert await drain(engine, "q") == []


@with_engine
async def test_the_journal_tells_how_a_message_was_settled(engine: Engine) -> None:
    await engine.configure("q", {"retryDelay": 0})
    await push(engine, "q", *"abc")
    batch = await pop(engine, "q")
    partition = next(batch.messages()).partition_id
    await settle(engine, batch, "completed", "a", "c")
    assert await engine.journal(partition_id=partition, transaction_id="b") == []
    assert [e.exact for e in await engine.journal(partition_id=partition, transaction_id="c")] == [False]
    await settle(engine, batch, "failed", "b", error="boom")
    await settle(engine, await pop(engine, "q"), "completed")
    life = await engine.journal(partition_id=partition, transaction_id="b")
    assert [(e.kind, e.error, e.attempts) for e in life if e.kind == "failed"] == [("failed", "boom", 1)]
    assert [(e.kind, e.count) for e in life] == [("settled", 1), ("failed", 1)]
    assert len(await engine.journal(queue="q")) == 3
    figures = engine.metrics()
    assert (figures["settled_messages_total"], figures["failed_retry_messages_total"]) == (4, 1)
