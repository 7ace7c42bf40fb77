"""Size: many partitions, many remembered ids, and what is done about them in the background."""

from __future__ import annotations

import asyncio
import os
import time
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from settled.queue import dedup, janitor, recall
from settled.queue.engine import Engine
from settled.queue.errors import BadRequest
from settled.queue.ready import ReadySet
from settled.queue.types import PopRequest, PushItem, PushOp
from tests.queue.helpers import drain, push, with_engine

if TYPE_CHECKING:
    import pytest

    from settled.queue.lanes import Lane


def _lane(engine: Engine, queue: str, partition: str = "Default") -> Lane:
    return engine._core.registry.lanes[(queue, partition)]


def _seconds_to_take(lanes_before: int) -> float:
    """How long takes and returns of ten lanes take, after so many others were emptied."""
    ready = ReadySet(1, 1)
    ready.add_all(dict.fromkeys(range(lanes_before + 10), 1))
    for _ in range(lanes_before):
        lane = ready.take()
        assert lane is not None
        ready.answered(lane, "ok", None, 0, ready.turn)
    began = time.process_time()
    for _ in range(2000):
        lane = ready.take()
        assert lane is not None
        ready.answered(lane, "ok", None, 1, ready.turn)
    return time.process_time() - began


def test_a_pop_of_any_partition_does_not_walk_over_the_idle_ones() -> None:
    few = min(_seconds_to_take(10) for _ in range(5))
    assert _seconds_to_take(100_000) < 20 * few + 0.02


@given(
    st.lists(st.lists(st.integers(0, 60), min_size=1, max_size=30), max_size=30),
    st.lists(st.lists(st.integers(0, 60), min_size=1, max_size=30), max_size=10),
    st.integers(0, 400),
)
def test_ids_that_came_to_nothing_are_forgotten_and_no_others(
    kept: list[list[int]], undone: list[list[int]], bound: int
) -> None:
    limits = dedup.FRESH_LIMIT, dedup.SIEVE_FROM
    dedup.FRESH_LIMIT, dedup.SIEVE_FROM = 10, 20
    try:
        memory = dedup.Memory()
        remembered = dedup.Remembered(memory)
        remembered.load([], 0)
        expected: list[tuple[int, int]] = []
        for hashes in kept:
            first = remembered.known
            remembered.add(first, hashes)
            remembered.known = first + len(hashes)
            expected += [(key, first + i) for i, key in enumerate(hashes) if key]
        remembered.mark()
        known = remembered.known
        for hashes in undone:
            remembered.add(remembered.known, hashes)
            remembered.known += len(hashes)
        remembered.rewind()
        assert remembered.known == known
        assert _all(remembered) == sorted(expected)
        remembered.trim(bound)
        assert _all(remembered) == sorted(pair for pair in expected if pair[1] >= bound)
        assert memory.total == remembered.size
        remembered.forget()
        assert memory.total == 0
    finally:
        dedup.FRESH_LIMIT, dedup.SIEVE_FROM = limits


def _all(remembered: dedup.Remembered) -> list[tuple[int, int]]:
    many = remembered.suspects(list(range(61)))
    one_by_one = {key: found for key in range(61) for found in remembered.suspects([key]).values()}
    assert many == one_by_one
    return sorted((key, seq) for key, seqs in many.items() for seq in seqs)


def test_partitions_with_many_ids_are_read_apart_and_every_duplicate_is_found(
    dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("MANY", 50), ("PAGE", 3), ("RUN", 40)):
        monkeypatch.setattr(recall, name, value)

    async def body() -> None:
        names = {f"p{n}": [f"{n}-{i}" for i in range(10 + 90 * (n % 2))] for n in range(6)}
        async with await Engine.open(dsn) as one:
            for partition, own in names.items():
                for start in range(0, len(own), 10):
                    await push(one, "q", *own[start : start + 10], partition=partition)
        async with await Engine.open(dsn) as two:
            pushes = [push(two, "q", *own, "new", partition=p) for p, own in names.items()]
            for results, own in zip(await asyncio.gather(*pushes), names.values(), strict=True):
                assert [r.status for r in results] == ["duplicate"] * len(own) + ["queued"]
        async with await Engine.open(dsn) as three:  # one that is told to stop while it still reads
            items = [PushItem("q", b"1", p, each) for p, own in names.items() for each in own]
            waiting = asyncio.create_task(three.push(items))
            while not three._core.pusher._recall.busy and not waiting.done():
                await asyncio.sleep(0)
            await three.close()
            assert all(r.status == "duplicate" for r in await waiting)

    asyncio.run(asyncio.wait_for(body(), 60))


@with_engine
async def test_a_refused_transaction_does_not_cost_a_partition_its_memory(engine: Engine) -> None:
    await push(engine, "q", *(f"id-{i}" for i in range(100)))
    lane = _lane(engine, "q")
    fresh, known = PushItem("q", b"1", transaction_id="fresh"), PushItem("q", b"1", transaction_id="id-7")
    assert not (await engine.transaction([PushOp([fresh, known])])).success
    assert (lane.remembered.known, lane.remembered.size) == (100, 100)
    results = await push(engine, "q", "fresh", "id-7")
    assert [r.status for r in results] == ["queued", "duplicate"]


@with_engine
async def test_memory_of_ids_is_kept_for_partitions_in_use(engine: Engine) -> None:
    worker = engine._core.janitor
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(janitor, "RESTING_IDS", 100)
        await engine.configure("short", {"retentionEnabled": True, "retentionSeconds": 1})
        for queue in ("old", "short", "used"):
            await push(engine, queue, *(f"id-{i}" for i in range(80)))
        await engine._core.pool.fetch(
            "update segment set created_at = created_at - interval '10 s' where lane_id = $1",
            _lane(engine, "short").id,
        )
        while not (await engine.tidy()).get("retained"):
            await asyncio.sleep(0.05)  # the background janitor is at it
        engine._core.registry.memory.rounds += janitor.LONG_UNUSED
        await push(engine, "used", "one more")
        await worker._forget()
        assert [_lane(engine, queue).remembered.size for queue in ("old", "short", "used")] == [0, 0, 81]
        for queue, status in (("old", "duplicate"), ("short", "queued"), ("used", "duplicate")):
            assert (await push(engine, queue, "id-3"))[0].status == status


@with_engine
async def test_ids_of_partitions_left_alone_are_packed(engine: Engine) -> None:
    memory = engine._core.registry.memory
    await push(engine, "idle", *(f"id-{i}" for i in range(80)))
    idle = _lane(engine, "idle").remembered
    assert idle in memory.loose
    memory.rounds += 1
    await push(engine, "used", *(f"id-{i}" for i in range(80)))
    used = _lane(engine, "used").remembered
    await engine._core.janitor._forget()
    assert idle not in memory.loose
    assert used in memory.loose or used.used < memory.rounds - 1  # the background janitor may have come by
    assert (idle.known, idle.size) == (80, 80)
    again = await push(engine, "idle", "id-3", "new", "id-79")
    assert [r.status for r in again] == ["duplicate", "queued", "duplicate"]


@with_engine
async def test_a_pop_reads_ahead_only_what_is_small(engine: Engine) -> None:
    cache = engine._core.cache
    for queue, payload in (("small", b"1"), ("large", b'"' + os.urandom(40_000).hex().encode() + b'"')):
        for i in range(10):
            await engine.push([PushItem(queue, payload, transaction_id=f"id-{i}")])
        lane = _lane(engine, queue).id
        cache.forget_lane(lane)
        first = await engine.pop(PopRequest(queue, batch=1, auto_ack=True))
        assert [m.transaction_id for m in first.messages()] == ["id-0"]
        assert len(cache.run(lane, 0, 10)[0]) == (10 if queue == "small" else 1)
        rest = await engine.pop(PopRequest(queue, batch=100, auto_ack=True))
        assert [m.transaction_id for m in rest.messages()] == [f"id-{i}" for i in range(1, 10)]


@with_engine
async def test_many_partitions_are_tidied_a_part_at_a_time(engine: Engine) -> None:
    limits = janitor.LANES_A_ROUND, janitor.STEP_LANES
    janitor.LANES_A_ROUND, janitor.STEP_LANES = 10, 5
    try:
        await engine.configure("q", {"retentionEnabled": True, "retentionSeconds": 3600})
        await engine.push([PushItem("q", b"1", f"p{i}") for i in range(30)])
        await engine.push([PushItem("gone", b"1", f"p{i}") for i in range(30)])
        for queue in ("q", "gone"):
            await engine.pop(PopRequest(queue, batch=100, partitions=30, auto_ack=True))
        pool = engine._core.pool
        await pool.fetch(
            "delete from lane where name <> 'p0' and queue_id = (select id from queue where name = 'gone')"
        )
        last = _lane(engine, "q", "p29").id
        await pool.fetch(
            "update segment set created_at = created_at - interval '2 h' where lane_id = $1", last
        )
        swept = removed = 0
        for _ in range(200):
            done = await engine.tidy()
            swept += done.get("consumers", 0)
            removed += done.get("retained", 0)
            if swept == 29 and removed == 1:
                break
            await asyncio.sleep(0.02)
        left = await pool.fetchval(
            "select count(*) from consumer c where not exists (select from lane l where l.id = c.lane_id)"
        )
        assert (left, removed) == (0, 1)
        assert await drain(engine, "q") == []
    finally:
        janitor.LANES_A_ROUND, janitor.STEP_LANES = limits


@with_engine
async def test_an_old_journal_is_removed_in_steps_until_none_is_left(engine: Engine) -> None:
    pool = engine._core.pool
    step, janitor.JOURNAL_STEP = janitor.JOURNAL_STEP, 10
    try:
        await pool.fetch(
            "insert into journal (at, kind, worker, lanes, groups, firsts, lasts, counts)"
            " select now() - interval '8 days', 'settled', 'w', '{1}', '{1}', '{0}', '{0}', '{1}'"
            " from generate_series(1, 35)"
        )
        await push(engine, "q", "a")
        assert await drain(engine, "q") == ["a"]
        while await pool.fetchval("select count(*) from journal") > 1:
            await engine.tidy()  # or the background janitor did it
        assert await pool.fetchval("select kind from journal") == "auto_ack"
    finally:
        janitor.JOURNAL_STEP = step


@with_engine
async def test_ids_for_duplicates_are_forgotten_oldest_first_when_they_do_not_fit(engine: Engine) -> None:
    """Defect Q11."""
    memory = engine._core.registry.memory
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dedup, "LEAST", 500)
        memory.limit = 4000
        for start in range(0, 10_000, 1000):
            await push(engine, "q", *(f"m{i}" for i in range(start, start + 1000)))
        await push(engine, "small", "s")
        assert memory.total == 10_001
        await engine._core.janitor._forget()
        assert 3000 <= memory.total <= 4000
        assert memory.forgotten == engine.metrics()["forgotten_ids_total"] == 10_001 - memory.total
        again = await push(engine, "q", "m0", "m9000", "m9999")
        assert [r.status for r in again] == ["queued", "duplicate", "duplicate"]
        assert (await push(engine, "small", "s"))[0].status == "duplicate"
    memory.limit = 2000
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dedup, "LEAST", 500)
        lane = engine._core.registry.lanes[("q", "Default")]
        lane.remembered.forget()
        assert (await push(engine, "q", "m9999"))[0].status == "duplicate"
        assert memory.total <= 2500  # what is read again is bounded, too


def test_a_limit_from_the_environment_that_is_no_number_is_refused_by_name() -> None:
    """Defect Q11."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SETTLED_DEDUP_BYTES", "lots")
        with pytest.raises(BadRequest, match="SETTLED_DEDUP_BYTES"):
            dedup.Memory()
        patch.setenv("SETTLED_DEDUP_BYTES", "1400")
        assert dedup.Memory().limit == 100
        patch.setenv("SETTLED_JOURNAL_SECONDS", "3600")
        assert janitor.journal_seconds() == 3600
