"""Popping: waiting, fairness, namespaces, delays, windows, priorities and paused queues."""

from __future__ import annotations

import asyncio
import time

import pytest

from settled.queue.engine import Engine
from settled.queue.types import BadRequest, PopRequest, PushItem, Unavailable
from tests.queue.helpers import drain, ids, pop, push, settle, with_engine, with_engines


@with_engine
async def test_an_empty_pop_says_why(engine: Engine) -> None:
    assert (await pop(engine, "nowhere")).empty == "no_available_partition"
    assert (await pop(engine, "nowhere", partition="p")).empty == "partition_not_found"
    await push(engine, "q", "a")
    await pop(engine, "q")
    assert (await pop(engine, "q", partition="Default")).empty == "lease_held"
    assert (await pop(engine, "q", wait=0.05)).empty == "timeout"


@with_engine
async def test_a_timeout_is_answered_on_time(engine: Engine) -> None:
    await push(engine, "q", "a")
    await drain(engine, "q")
    for where in (
        {"queue": "q"},
        {"queue": "new"},
        {"queue": "q", "partition": "Default"},
        {"namespace": "n"},
    ):
        started = time.monotonic()
        assert (await engine.pop(PopRequest(**where, wait=0.4))).empty == "timeout"  # type: ignore[arg-type]
        assert 0.36 < time.monotonic() - started < 10


async def _delays(pusher: Engine, popper: Engine, rounds: int, **where: str) -> list[float]:
    delays = []
    for i in range(rounds):
        waiting = asyncio.create_task(popper.pop(PopRequest("q", wait=10, auto_ack=True, **where)))  # type: ignore[arg-type]
        await asyncio.sleep(0.03)
        name = f"m{i}-{time.monotonic_ns()}"
        await push(pusher, "q", name, partition="p")
        committed = time.monotonic()
        assert ids(await waiting) == [name]
        delays.append(time.monotonic() - committed)
    return sorted(delays)


async def _quick(pusher: Engine, popper: Engine, **where: str) -> bool:
    """Whether a quarter of pops, of some tries of a busy machine, wake within 20 ms."""
    for _ in range(5):
        if (await _delays(pusher, popper, 15, **where))[3] < 0.02:
            return True
    return False


@with_engine
async def test_a_waiting_pop_wakes_within_20_ms_of_the_commit(engine: Engine) -> None:
    assert await _quick(engine, engine)
    assert await _quick(engine, engine, partition="p")


@with_engines(2)
async def test_a_waiting_pop_wakes_within_20_ms_of_a_commit_through_another_engine(
    one: Engine, two: Engine
) -> None:
    assert await _quick(one, two)
    assert await _quick(one, two, partition="p")


@with_engines(2)
async def test_a_pop_without_waiting_sees_what_another_engine_pushed_before(one: Engine, two: Engine) -> None:
    await push(one, "q", "first")
    assert ids(await pop(two, "q", auto_ack=True)) == ["first"]
    for i in range(20):
        await push(one, "q", f"m{i}", partition=f"p{i % 3}")
        assert ids(await pop(two, "q", auto_ack=True)) == [f"m{i}"]


@with_engines(2)
async def test_a_waiting_pop_wakes_when_another_engine_releases_or_fails_a_batch(
    one: Engine, two: Engine
) -> None:
    await one.configure("q", {"retryDelay": 0})
    await push(one, "q", "a", "b")
    spent = []
    for status in ("completed", "failed"):
        batch = await pop(one, "q", 1)
        waiting = asyncio.create_task(pop(two, "q", 1, wait=10))
        await asyncio.sleep(0.1)
        started = time.monotonic()
        await settle(one, batch, status)
        got = await waiting
        spent.append(time.monotonic() - started)
        assert ids(got) == ["b"]
        await settle(two, got, "retry")
    assert min(spent) < 0.5  # without the news it would wait a second


@with_engine
async def test_a_waiting_pop_takes_over_when_a_lease_expires(engine: Engine) -> None:
    await push(engine, "q", "a")
    await pop(engine, "q", lease_seconds=1)
    started = time.monotonic()
    assert ids(await pop(engine, "q", wait=20)) == ["a"]
    assert 0.9 < time.monotonic() - started < 15


@with_engine
async def test_many_waiters_share_what_comes(engine: Engine) -> None:
    await push(engine, "q", "x")
    await drain(engine, "q")
    waiting = [asyncio.create_task(pop(engine, "q", 1, wait=5, auto_ack=True)) for _ in range(30)]
    await asyncio.sleep(0.05)
    for i in range(30):
        await push(engine, "q", f"m{i}", partition=f"p{i % 4}")
    got = [name for batch in await asyncio.gather(*waiting) for name in ids(batch)]
    assert sorted(got) == sorted(f"m{i}" for i in range(30))


@with_engine
async def test_a_busy_lane_does_not_starve_the_others(engine: Engine) -> None:
    await push(engine, "q", *(f"busy-{i}" for i in range(500)), partition="busy")
    for lane in range(5):
        await push(engine, "q", f"rare-{lane}", partition=f"rare{lane}")
    first = [name for _ in range(12) for name in ids(await pop(engine, "q", 10, auto_ack=True))]
    assert {f"rare-{lane}" for lane in range(5)} <= set(first)


@with_engine
async def test_a_pop_over_several_partitions_shares_one_lease_and_one_batch(engine: Engine) -> None:
    for lane in range(4):
        await push(engine, "q", *(f"{lane}-{i}" for i in range(5)), partition=f"p{lane}")
    batch = await engine.pop(PopRequest("q", batch=12, partitions=3))
    assert len(batch) == 12
    assert len(batch.lanes) == 3
    assert {m.lease_id for m in batch.messages()} == {batch.lease_id}
    assert all(r.success for r in await settle(engine, batch, "completed"))
    rest = await drain(engine, "q")
    assert len(rest) == 8


@with_engine
async def test_pop_by_namespace_and_task_takes_the_highest_priority_first(engine: Engine) -> None:
    await engine.configure("low", {"priority": 1}, namespace="shop", task="mail")
    await engine.configure("high", {"priority": 9}, namespace="shop", task="mail")
    await engine.configure("other", {}, namespace="shop", task="print")
    for queue in ("low", "high", "other"):
        await push(engine, queue, queue)
    order = [
        ids(await engine.pop(PopRequest(namespace="shop", task="mail", auto_ack=True))) for _ in range(3)
    ]
    assert order == [["high"], ["low"], []]
    assert ids(await engine.pop(PopRequest(namespace="shop", auto_ack=True))) == ["other"]
    assert ids(await engine.pop(PopRequest(task="nothing"))) == []
    waiting = asyncio.create_task(engine.pop(PopRequest(namespace="shop", wait=5)))
    await asyncio.sleep(0.05)
    await push(engine, "low", "late")
    assert ids(await waiting) == ["late"]


@with_engine
async def test_delayed_processing_hides_young_messages(engine: Engine) -> None:
    await engine.configure("q", {"delayedProcessing": 600})
    await push(engine, "q", "old")
    await push(engine, "q", "young")
    assert (await pop(engine, "q")).empty
    aged = "update segment set created_at = created_at - interval '599 s' where first_seq = 0"
    await engine._core.pool.fetch(aged)
    engine._core.ready.reset()
    assert ids(await pop(engine, "q", wait=30, auto_ack=True)) == ["old"]
    assert (await pop(engine, "q")).empty


@with_engine
async def test_a_window_buffer_hides_a_lane_until_its_newest_message_is_old_enough(engine: Engine) -> None:
    await engine.configure("q", {"windowBuffer": 1})
    await push(engine, "q", "a")
    await asyncio.sleep(0.6)
    await push(engine, "q", "b")
    assert (await pop(engine, "q")).empty == "window_buffer"
    started = time.monotonic()
    assert ids(await pop(engine, "q", wait=4)) == ["a", "b"]
    assert time.monotonic() - started > 0.6


@with_engine
async def test_a_lease_lasts_as_long_as_the_queue_says(engine: Engine) -> None:
    await engine.configure("q", {"leaseTime": 1})
    await push(engine, "q", "a")
    await pop(engine, "q")
    assert (await pop(engine, "q")).empty
    assert ids(await pop(engine, "q", wait=3)) == ["a"]


@with_engine
async def test_absurd_requests_are_refused_by_name(engine: Engine) -> None:
    for request in (
        PopRequest("q", batch=0),
        PopRequest("q", batch=10**9),
        PopRequest("q", partitions=0),
        PopRequest("q", wait=-1),
        PopRequest("q", lease_seconds=0),
        PopRequest(),
        PopRequest(namespace="n", partition="p"),
        PopRequest("q", group="g\0"),
        PopRequest("q", subscription_mode="sometimes"),
        PopRequest("q", group="g", subscription_from="yesterday"),
    ):
        with pytest.raises(BadRequest):
            await engine.pop(request)


@with_engine
async def test_maintenance_switches_pause_pops_and_refuse_pushes(engine: Engine) -> None:
    await push(engine, "q", "a")
    await engine.maintenance(push=True, pop=True)
    assert (await pop(engine, "q")).empty == "paused"
    with pytest.raises(Unavailable, match="maintenance"):
        await engine.push([PushItem("q", b"1")])
    state = await engine.maintenance(push=False, pop=False)
    assert (state.push, state.pop) == (False, False)
    assert ids(await pop(engine, "q")) == ["a"]
    waiting = asyncio.create_task(pop(engine, "q", wait=30))
    await asyncio.sleep(0.2)
    await engine.maintenance(pop=True)
    await push(engine, "q", "b", partition="other")
    assert (await waiting).empty == "paused"


@with_engine
async def test_a_pop_of_any_lane_does_not_look_at_idle_lanes(engine: Engine) -> None:
    await push(engine, "q", "warm")
    idle = (
        "insert into lane (queue_id, name) select queue_id, 'idle' || i from lane, generate_series(1, $1) i"
    )
    await engine._core.pool.fetch(idle, 20_000)
    await drain(engine, "q")
    rounds = 100

    async def quickest() -> float:
        took = []
        for _ in range(rounds):
            started = time.perf_counter()
            await push(engine, "q", f"{started}")
            assert len(await pop(engine, "q", 1, auto_ack=True)) == 1
            took.append(time.perf_counter() - started)
        return min(took)

    crowded = await quickest()
    await engine._core.pool.fetch("delete from lane where name like 'idle%'")
    assert crowded < 3 * await quickest()


@with_engine
async def test_what_was_leased_to_a_caller_who_went_away_is_given_back(engine: Engine) -> None:
    for i in range(20):
        await push(engine, "q", f"m{i}")
        gone = asyncio.create_task(pop(engine, "q", 1, wait=5))
        for _ in range(i % 6):
            await asyncio.sleep(0)
        gone.cancel()
        result = (await asyncio.gather(gone, return_exceptions=True))[0]
        if isinstance(result, asyncio.CancelledError):
            assert ids(await pop(engine, "q", 1, wait=5, auto_ack=True)) == [f"m{i}"]
        else:
            await settle(engine, result, "completed")  # type: ignore[arg-type]


@with_engine
async def test_closing_answers_those_who_wait(engine: Engine) -> None:
    async with await Engine.open(engine._core.dsn, worker="other") as other:
        waiting = [asyncio.create_task(pop(other, "q", wait=30)) for _ in range(3)]
        await asyncio.sleep(0.1)
    for batch in await asyncio.wait_for(asyncio.gather(*waiting), 5):
        assert batch.empty == "timeout"


@with_engines(2)
async def test_a_parked_message_that_is_due_is_found_by_who_did_not_see_it_fail(
    one: Engine, two: Engine
) -> None:
    await one.configure("q", {"retry": "parked", "retryDelay": 100, "leaseTime": 1})
    await push(one, "q", "a", "b")
    taken = await pop(one, "q")
    await settle(one, taken, "failed", "a")
    await settle(one, taken, "completed", "b")
    await asyncio.sleep(0.3)
    assert ids(await pop(two, "q", wait=10)) == ["a"]  # though nothing lies before the cursor
    await asyncio.sleep(1.2)  # its lease is over, and nobody was told
    two._core.ready.reset()
    assert ids(await pop(two, "q", wait=10)) == ["a"]


@with_engine
async def test_partitions_of_one_pop_are_served_in_turn(engine: Engine) -> None:
    await push(engine, "q", *map(str, range(100)), partition="busy")
    await push(engine, "q", "x", partition="quiet")
    for start in range(100, 1000, 100):
        taken = await pop(engine, "q", 10, partitions=2)
        await settle(engine, taken, "completed")
        if "x" in ids(taken):
            break
        await push(engine, "q", *map(str, range(start, start + 100)), partition="busy")
    else:
        pytest.fail("the quiet partition was never served")


@with_engine
async def test_several_partitions_of_several_queues_come_by_priority(engine: Engine) -> None:
    await engine.configure("low", {"priority": 1}, namespace="n")
    await engine.configure("high", {"priority": 9}, namespace="n")
    await push(engine, "low", "a", "b", "c")
    await push(engine, "high", "d", "e")
    taken = await engine.pop(PopRequest(namespace="n", batch=3, partitions=2))
    assert ids(taken) == ["d", "e", "a"]


@with_engine
async def test_a_lease_over_several_partitions_is_extended_whichever_gave_something(engine: Engine) -> None:
    await push(engine, "q", "a", partition="first")
    await push(engine, "q", "b", partition="second")
    stale = await pop(engine, "q", partition="first", auto_ack=True)  # as if another worker had taken it
    assert ids(stale) == ["a"]
    taken = await pop(engine, "q", partitions=2)
    assert ids(taken) == ["b"]
    assert (await engine.extend(taken.lease_id or "", 60)).success


@with_engines(2)
async def test_what_was_held_back_comes_when_the_queue_does_not_ask_for_it_any_more(
    one: Engine, two: Engine
) -> None:
    for option in ("delayedProcessing", "windowBuffer"):
        await one.configure(option, {option: 600})
        await push(one, option, "a")
        assert ids(await pop(one, option)) == ids(await pop(two, option)) == []
        await one.configure(option, {option: None})
        assert ids(await pop(two, option, wait=10)) == ["a"]
        await push(one, option, "b", partition="other")
        assert ids(await pop(one, option, wait=10)) == ["b"]
