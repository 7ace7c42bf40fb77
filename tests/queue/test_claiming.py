"""Claims of many lanes at once: the short way for the usual ones must not change what the others get."""

from __future__ import annotations

import asyncio
from collections import Counter

from settled.queue.engine import Engine
from settled.queue.types import PopRequest
from tests.queue.helpers import ids, pop, push, settle, with_engine, with_engines

LANES = 12


async def fill(engine: Engine, count: int) -> None:
    for lane in range(LANES):
        await push(engine, "q", *(f"{lane}-{i}" for i in range(count)), partition=f"p{lane}")


async def pop_all(engine: Engine, batch: int, *, auto_ack: bool = False) -> dict[int, list[str]]:
    """What as many concurrent pops as there are lanes got, by lane; each of one lane only."""
    before = engine.metrics()["claims_total"]
    request = PopRequest("q", batch=batch, auto_ack=auto_ack, lease_seconds=None if auto_ack else 60)
    popped = await asyncio.gather(*(engine.pop(request) for _ in range(LANES)))
    assert engine.metrics()["claims_total"] - before < LANES  # they did share
    got: dict[int, list[str]] = {}
    for each in popped:
        assert ids(each) or each.lease_id is None
        lanes = {int(message.split("-")[0]) for message in ids(each)}
        assert len(lanes) <= 1
        for lane in lanes:
            got.setdefault(lane, []).extend(ids(each))
        if not auto_ack and each.lease_id is not None:
            await settle(engine, each, "completed")
    return got


@with_engine
async def test_concurrent_pops_lease_a_lane_each_and_go_on_where_they_stopped(engine: Engine) -> None:
    await fill(engine, 6)
    for start in (0, 2, 4):
        got = await pop_all(engine, 2)
        assert got == {lane: [f"{lane}-{start}", f"{lane}-{start + 1}"] for lane in range(LANES)}
    assert await pop_all(engine, 2) == {}


@with_engine
async def test_concurrent_pops_that_settle_at_once_get_each_message_once_and_the_journal_says_so(
    engine: Engine,
) -> None:
    await fill(engine, 6)
    got: Counter[str] = Counter()
    for _ in range(40):
        for messages in (await pop_all(engine, 1, auto_ack=True)).values():
            got.update(messages)
    assert got == Counter(f"{lane}-{i}" for lane in range(LANES) for i in range(6))
    journal = [entry for entry in await engine.journal(queue="q", limit=1000) if entry.kind == "auto_ack"]
    assert sum(entry.count for entry in journal) == LANES * 6


@with_engines(2)
async def test_leased_failed_deleted_and_expired_ones_among_many_lanes_are_as_if_claimed_alone(
    one: Engine, two: Engine
) -> None:
    await one.configure("q", {"retryLimit": 3, "retryDelay": 0})
    await fill(one, 4)
    assert len(await pop_all(one, 1)) == LANES  # now every lane has a consumer
    held = await pop(two, "q", partition="p1", batch=2)
    failed = await pop(one, "q", partition="p2", batch=2)
    await settle(one, failed, "failed", "2-1")
    await settle(one, failed, "completed", "2-2")
    lane_3 = await pop(one, "q", partition="p3", batch=1)
    await settle(one, lane_3, "completed")
    await one.delete_message(lane_3.lanes[0].partition_id, "3-2")
    expired = await pop(one, "q", partition="p4", batch=3, lease_seconds=1)
    await settle(one, expired, "completed", "4-2")
    # As if retention had removed all of it.
    await one._core.pool.fetch("update lane set first_seq = next_seq where name = 'p5'")
    await asyncio.sleep(1.1)

    got = await pop_all(one, 2)
    assert ids(held) == ["1-1", "1-2"]
    assert 1 not in got
    assert got[2] == ["2-1", "2-3"]
    assert got[3] == ["3-3"]
    assert got[4] == ["4-1", "4-3"]
    assert 5 not in got
    others = set(range(LANES)) - {1, 2, 3, 4, 5}
    assert {lane: got[lane] for lane in others} == {lane: [f"{lane}-1", f"{lane}-2"] for lane in others}
    # A lane that had nothing to give is not leased for nothing.
    await push(one, "q", "5-9", partition="p5")
    assert ids(await pop(one, "q", partition="p5")) == ["5-9"]


@with_engine
async def test_of_many_pops_that_name_one_partition_one_gets_the_lease(engine: Engine) -> None:
    await fill(engine, 3)
    await pop_all(engine, 1)
    named = [PopRequest("q", partition=f"p{lane}", batch=5) for lane in (0, 0, 0, 1, 1, 2)]
    popped = await asyncio.gather(*(engine.pop(request) for request in named))
    assert Counter(tuple(ids(each)) for each in popped) == Counter(
        [("0-1", "0-2"), ("1-1", "1-2"), ("2-1", "2-2"), (), (), ()]
    )
    assert {each.empty for each in popped if each.empty is not None} == {"lease_held"}
