"""Transactions and stream cycles: all or nothing, with leases checked."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from settled.queue.types import (
    AckItem,
    AckOp,
    BadRequest,
    Conflict,
    CycleAck,
    NotFound,
    PushItem,
    PushOp,
    QueueFull,
    StateOp,
)
from tests.queue.helpers import drain, ids, pop, push, settle, with_engine, with_engines

if TYPE_CHECKING:
    from settled.queue.engine import Engine


@with_engine
async def test_acks_nacks_and_pushes_over_several_queues_are_applied_together(engine: Engine) -> None:
    await engine.configure("in", {"retryDelay": 0})
    await push(engine, "in", *"abc")
    batch = await pop(engine, "in")
    partition = next(batch.messages()).partition_id
    result = await engine.transaction(
        [
            AckOp(AckItem("a", partition, lease_id=batch.lease_id)),
            PushOp([PushItem("out", b"1", "p", "x"), PushItem("other", b"2")]),
            AckOp(AckItem("b", partition, "failed", batch.lease_id, "why")),
            AckOp(AckItem("c", partition, "dlq", batch.lease_id, "bad")),
            PushOp([PushItem("out", b"3", "p", "later", delay_seconds=1.5)]),
        ],
        [batch.lease_id or ""],
    )
    assert result.success
    assert [type(r).__name__ for r in result.results] == ["AckResult", "PushResult", "PushResult"] + [
        "AckResult"
    ] * 2 + ["PushResult"]
    assert [(m.transaction_id, m.attempts) for m in (await pop(engine, "in")).messages()] == [("b", 1)]
    assert (await engine.dead_letters(queue="in")).total == 1
    assert ids(await pop(engine, "out", auto_ack=True)) == ["x"]
    assert ids(await pop(engine, "out", wait=30)) == ["later"]
    assert len(await drain(engine, "other")) == 1


@with_engine
async def test_one_bad_operation_undoes_all_of_them(engine: Engine) -> None:
    await push(engine, "in", *"ab")
    await push(engine, "out", "taken")
    batch = await pop(engine, "in")
    partition = next(batch.messages()).partition_id
    ack = AckOp(AckItem("a", partition, lease_id=batch.lease_id))
    new = PushOp([PushItem("out", b"1", transaction_id="new")])
    for bad in (
        PushOp([PushItem("out", b"1", transaction_id="taken")]),
        PushOp([PushItem("out", b"1", transaction_id="t"), PushItem("out", b"1", transaction_id="t")]),
        AckOp(AckItem("nobody", partition, lease_id=batch.lease_id)),
        AckOp(AckItem("b", partition, lease_id="00000000-0100-8001-8000-000000000000")),
    ):
        result = await engine.transaction([ack, new, bad])
        assert not result.success
        assert result.error
    refused = await engine.transaction([ack, new], ["00000000-0100-8001-8000-000000000000"])
    assert "lease" in (refused.error or "")
    with pytest.raises(BadRequest, match="operations"):
        await engine.transaction([])
    with pytest.raises(BadRequest, match="status"):
        await engine.transaction([new, AckOp(AckItem("a", partition, "nonsense"))])
    assert (await engine.groups(queue="in"))[0].total_lag == 2
    assert await drain(engine, "out") == ["taken"]
    assert (await engine.transaction([ack, new])).success
    assert await drain(engine, "out") == ["new"]
    assert (await push(engine, "out", "new"))[0].status == "duplicate"


@with_engine
async def test_a_transaction_that_finds_a_queue_full_changes_nothing(engine: Engine) -> None:
    await engine.configure("out", {"maxSize": 2})
    await push(engine, "in", "a")
    batch = await pop(engine, "in")
    ack = AckOp(AckItem("a", next(batch.messages()).partition_id, lease_id=batch.lease_id))
    with pytest.raises(QueueFull, match="0 pending and 3 to be pushed, maxSize 2"):
        await engine.transaction([ack, PushOp([PushItem("out", b"1")] * 3)])
    assert (await settle(engine, batch, "completed"))[0].success
    assert await drain(engine, "out") == []
    assert (await engine.transaction([PushOp([PushItem("out", b"1")] * 2)])).success


@with_engine
async def test_a_transaction_after_the_lease_expired_is_refused(engine: Engine) -> None:
    await push(engine, "in", "a")
    batch = await pop(engine, "in", lease_seconds=1)
    (message,) = batch.messages()
    await asyncio.sleep(1.05)
    result = await engine.transaction(
        [AckOp(AckItem("a", message.partition_id, lease_id=batch.lease_id)), PushOp([PushItem("out", b"1")])]
    )
    assert not result.success
    assert await drain(engine, "out") == []


@with_engines(2)
async def test_transactions_and_pushes_meet_on_the_same_lanes_without_loss_or_deadlock(
    one: Engine, two: Engine
) -> None:
    lanes = [f"p{i}" for i in range(4)]

    async def transactions(engine: Engine, name: str) -> int:
        for i in range(40):
            order = lanes if i % 2 else lanes[::-1]
            done = await engine.transaction(
                [PushOp([PushItem("q", b"1", lane, f"{name}-{i}-{lane}") for lane in order])]
            )
            assert done.success
        return 160

    async def pushes(engine: Engine, name: str) -> int:
        for i in range(80):
            await push(engine, "q", f"{name}-{i}", partition=lanes[i % 4])
        return 80

    sent = await asyncio.gather(
        transactions(one, "a"),
        transactions(two, "b"),
        pushes(one, "c"),
        pushes(two, "d"),
        transactions(one, "e"),
    )
    got = await drain(one, "q")
    assert len(got) == len(set(got)) == sum(sent)


@with_engine
async def test_a_stream_cycle_commits_state_pushes_and_ack_together(engine: Engine) -> None:
    await push(engine, "source", *"abcd")
    query = await engine.register_query("totals", "source", "hash-1", sink_queue="sink")
    assert query.fresh
    batch = await pop(engine, "source", 3)
    partition = next(batch.messages()).partition_id
    done = await engine.cycle(
        query.query_id,
        partition,
        state_ops=[
            StateOp("upsert", "k1", b'{"windowEnd": 10}'),
            StateOp("upsert", "k2", b"2"),
            StateOp("delete", "k2"),
        ],
        push_items=[PushItem("sink", b"1", transaction_id="s1")],
        ack=CycleAck("b", batch.lease_id),
    )
    assert (done.acked, done.lease_released, done.state_ops_applied) == (2, True, 3)
    assert [r.key for r in await engine.state(query.query_id, partition)] == ["k1"]
    assert await engine.state(query.query_id, partition, ripe_at_or_before=9) == []
    assert (
        len(await engine.state(query.query_id, partition, ripe_at_or_before=10, key_prefix="k", keys=["k1"]))
        == 1
    )
    assert ids(await pop(engine, "source")) == ["c", "d"]
    again = await engine.cycle(
        query.query_id, partition, push_items=[PushItem("sink", b"1", transaction_id="s1")]
    )
    assert again.push_results[0].status == "duplicate"
    assert await drain(engine, "sink") == ["s1"]


@with_engine
async def test_a_failed_cycle_changes_nothing(engine: Engine) -> None:
    await push(engine, "source", "a")
    query = await engine.register_query("q", "source", "h")
    batch = await pop(engine, "source", lease_seconds=1)
    partition = next(batch.messages()).partition_id
    await asyncio.sleep(1.05)
    work = {"state_ops": [StateOp("upsert", "k", b"1")], "push_items": [PushItem("sink", b"1")]}
    with pytest.raises(Conflict):
        await engine.cycle(query.query_id, partition, ack=CycleAck("a", batch.lease_id), **work)  # type: ignore[arg-type]
    with pytest.raises(NotFound):
        await engine.cycle("00000000-0000-4000-8000-000000000000", partition, **work)  # type: ignore[arg-type]
    with pytest.raises(BadRequest):
        await engine.cycle("nonsense", partition)
    assert await engine.state(query.query_id, partition) == []
    assert await drain(engine, "sink") == []
    with pytest.raises(Conflict, match="config_hash"):
        await engine.register_query("q", "source", "other")
    assert (await engine.register_query("q", "source", "other", reset=True)).reset


@with_engine
async def test_a_cycle_may_keep_its_lease(engine: Engine) -> None:
    await push(engine, "source", *"ab")
    query = await engine.register_query("q", "source", "h")
    batch = await pop(engine, "source")
    partition = next(batch.messages()).partition_id
    kept = await engine.cycle(
        query.query_id, partition, ack=CycleAck("a", batch.lease_id), release_lease=False
    )
    assert not kept.lease_released
    assert (await settle(engine, batch, "completed", "b"))[0].lease_released
