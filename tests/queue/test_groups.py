"""Consumer groups: where they start, how far they are, how they are moved, and that they stay apart."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import pytest

from settled.queue.types import BadRequest, NotFound, PopRequest
from tests.queue.helpers import drain, ids, pop, push, settle, with_engine, with_engines

if TYPE_CHECKING:
    from settled.queue.engine import Engine


@with_engine
async def test_groups_are_independent_of_each_other(engine: Engine) -> None:
    await push(engine, "q", *"abc")
    billing = await pop(engine, "q", 2, group="billing")
    await settle(engine, billing, "failed", "a")
    assert ids(await pop(engine, "q", group="mail")) == ["a", "b", "c"]
    assert ids(await pop(engine, "q")) == ["a", "b", "c"]
    lags = {lag.group: lag for lag in await engine.groups(queue="q")}
    assert set(lags) == {"billing", "mail", "__QUEUE_MODE__"}
    assert all(lag.total_lag == 3 and lag.state == "Stable" for lag in lags.values())


@with_engine
async def test_a_new_group_starts_at_all_new_or_a_time(engine: Engine) -> None:
    await push(engine, "q", "a")
    await asyncio.sleep(0.02)
    between = datetime.now(UTC)
    await asyncio.sleep(0.02)
    await push(engine, "q", "b")

    def start(group: str, **how: str) -> PopRequest:
        return PopRequest("q", group=group, batch=10, auto_ack=True, **how)  # type: ignore[arg-type]

    requests = {
        "all": start("all"),
        "new": start("new", subscription_mode="new"),
        "only": start("only", subscription_mode="new-only"),
        "now": start("now", subscription_from="now"),
        "time": start("time", subscription_from=between.isoformat()),
    }
    first = {name: ids(await engine.pop(request)) for name, request in requests.items()}
    assert first == {"all": ["a", "b"], "new": [], "only": [], "now": [], "time": ["b"]}
    await push(engine, "q", "c")
    await push(engine, "q", "d", partition="later")
    second = {name: sorted(await drain(engine, "q", name)) for name in requests}
    assert all(got == ["c", "d"] for got in second.values())
    with pytest.raises(BadRequest, match="subscriptionFrom"):
        await engine.pop(start("bad", subscription_from="2026-13-45"))


@with_engine
async def test_the_first_choice_of_a_start_wins(engine: Engine) -> None:
    await push(engine, "q", "a")
    assert (await pop(engine, "q", group="g", subscription_mode="new")).empty
    assert (await pop(engine, "q", group="g", subscription_mode="all")).empty
    (lag,) = await engine.groups(group="g")
    assert (lag.subscription_mode, lag.total_lag) == ("new", 0)


@with_engine
async def test_seek_moves_to_the_end_the_beginning_or_a_time(engine: Engine) -> None:
    await push(engine, "q", "a", "b")
    await asyncio.sleep(0.02)
    between = datetime.now(UTC)
    await asyncio.sleep(0.02)
    await push(engine, "q", "c")
    held = await pop(engine, "q", 2, group="g")
    assert await engine.seek("g", "q", "end") == 1
    # The group is past them: there is nothing left to settle.
    assert (await settle(engine, held, "completed"))[0].message == "not_found"
    assert (await pop(engine, "q", group="g")).empty
    await engine.seek("g", "q", "beginning")
    assert ids(await pop(engine, "q", group="g")) == ["a", "b", "c"]
    await engine.seek("g", "q", between)
    assert ids(await pop(engine, "q", group="g")) == ["c"]
    await engine.seek("g", "q", between.isoformat(), partition="Default")
    assert ids(await pop(engine, "q", group="g")) == ["c"]
    with pytest.raises(BadRequest, match="timestamp"):
        await engine.seek("g", "q", "sometime")
    with pytest.raises(NotFound, match="queue"):
        await engine.seek("g", "nowhere", "end")
    with pytest.raises(NotFound, match="partition"):
        await engine.seek("g", "q", "end", partition="nowhere")


@with_engine
async def test_seek_to_the_end_covers_lanes_the_group_has_not_touched(engine: Engine) -> None:
    await push(engine, "q", "a", partition="p1")
    await push(engine, "q", "b", partition="p2")
    await engine.seek("g", "q", "end")
    assert await drain(engine, "q", "g") == []
    await push(engine, "q", "c", partition="p2")
    assert await drain(engine, "q", "g") == ["c"]


@with_engine
async def test_seek_forgets_failures_and_settled_bits(engine: Engine) -> None:
    await push(engine, "q", *"abc")
    batch = await pop(engine, "q")
    await settle(engine, batch, "failed", "a")
    await settle(engine, batch, "completed", "c")
    await engine.seek("__QUEUE_MODE__", "q", "beginning")
    again = await pop(engine, "q")
    assert [(m.transaction_id, m.attempts) for m in again.messages()] == [("a", 0), ("b", 0), ("c", 0)]


@with_engines(2)
async def test_seek_through_one_engine_is_seen_by_the_other(one: Engine, two: Engine) -> None:
    await push(one, "q", "a", "b")
    assert await drain(two, "q", "g") == ["a", "b"]
    await one.seek("g", "q", "beginning")
    assert ids(await pop(two, "q", group="g", wait=2)) == ["a", "b"]


@with_engine
async def test_a_deleted_group_starts_over(engine: Engine) -> None:
    await push(engine, "q", "a")
    assert await drain(engine, "q", "g") == ["a"]
    assert await engine.delete_group("g", queue="q") == 1
    assert await engine.groups(group="g") == []
    assert await drain(engine, "q", "g") == ["a"]
    assert await engine.delete_group("nobody") == 0


@with_engine
async def test_lag_is_told_by_group_and_by_partition(engine: Engine) -> None:
    await push(engine, "q", *"abcd", partition="p1")
    await push(engine, "q", *"xy", partition="p2")
    batch = await engine.pop(PopRequest("q", "p1", group="g", batch=3))
    await settle(engine, batch, "completed", "b")
    (lag,) = await engine.groups(group="g")
    assert (lag.partitions, lag.partitions_with_lag, lag.total_lag, lag.active_leases) == (2, 2, 5, 1)
    assert lag.max_time_lag > 0
    lanes = {lane.partition: lane for lane in await engine.lanes(group="g")}
    assert (lanes["p1"].lag, lanes["p1"].total_consumed, lanes["p1"].lease_id) == (3, 1, batch.lease_id)
    assert (lanes["p2"].lag, lanes["p2"].lease_id) == (2, None)
    assert await engine.lanes(group="g", min_lag_seconds=3600) == []


@with_engine
async def test_push_does_not_write_anything_for_each_group(engine: Engine) -> None:
    await push(engine, "q", "warm")
    for g in range(10):
        await drain(engine, "q", f"g{g}")
    before = await engine._core.pool.fetch("select lane_id, group_id, xmin::text from consumer order by 1, 2")
    await push(engine, "q", "more")
    assert before == await engine._core.pool.fetch(
        "select lane_id, group_id, xmin::text from consumer order by 1, 2"
    )
    assert [await drain(engine, "q", f"g{g}") for g in range(10)] == [["more"]] * 10
