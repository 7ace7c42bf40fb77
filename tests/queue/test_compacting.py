"""Small segments are merged behind everybody's back: nothing a reader can see changes."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from settled.queue import compact, segment
from settled.queue.columns import decode
from settled.queue.compact import Size, plan
from settled.queue.db import migrate
from settled.queue.engine import Engine
from settled.queue.types import AckItem, PopRequest, PushItem
from tests.queue.helpers import drain, ids, pop, push, settle, with_engine, with_engines


@pytest.fixture(autouse=True)
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything is old enough to be merged."""
    monkeypatch.setattr(compact, "AGE", -1.0)
    monkeypatch.setattr(compact, "IDLE", -1.0)


async def _segments(engine: Engine) -> int:
    return int(await engine._core.pool.fetchval("select count(*) from segment"))


async def _compact(engine: Engine) -> int:
    """Merge all there is, when no other engine's janitor is at work."""
    before = await _segments(engine)
    while not await engine.tidy():
        await asyncio.sleep(0.01)
    return before - await _segments(engine)


def _seen(message: Any) -> tuple[Any, ...]:
    return (message.id, message.transaction_id, message.payload, message.content_type, message.headers,
            message.created_at, message.seq, message.trace_id, message.producer)  # fmt: skip


async def _mixed(engine: Engine, count: int) -> None:
    """Messages of every kind, one by one."""
    for i in range(count):
        own = f"t{i}" if i % 3 else None
        trace = "11111111-1111-4111-8111-111111111111" if i % 7 == 0 else None
        headers = {"n": str(i)} if i % 4 == 0 else None
        kind = "text/plain" if i % 5 == 0 else "application/json"
        await engine.push(
            [PushItem("q", b'"%d"' % i, "p", own, headers, kind, 0, trace, "me" if i % 6 else None)]
        )


@with_engines(2)
async def test_messages_read_the_same_after_merging_as_before(one: Engine, two: Engine) -> None:
    await _mixed(one, 60)
    await push(one, "q", *(f"big{i}" for i in range(100)), partition="p")
    await _mixed(one, 3)
    before = [_seen(m) for m in (await pop(one, "q", 1000, group="before", auto_ack=True)).messages()]
    text = (await pop(one, "q", 1000, group="json", auto_ack=True)).json_messages()
    assert len(before) == 161  # two of the last three were there already
    assert await _compact(one) == 59
    assert await _compact(one) == 0
    for engine in (one, two):  # one still has the small ones in its cache, two has nothing
        for batch in (7, 1000):
            group = f"{batch}-{engine is one}"
            got: list[Any] = []
            while part := list((await pop(engine, "q", batch, group=group, auto_ack=True)).messages()):
                got += part
            assert [_seen(m) for m in got] == before
    again = (await pop(two, "q", 1000, group="json2", auto_ack=True)).json_messages()
    assert again.replace(b"json2", b"json") == text
    rows = await one._core.pool.fetch("select first_seq, n, 0::bigint, body from segment order by first_seq")
    columns = decode(tuple(row) for row in rows)
    assert columns.seqs.tolist() == [m[6] for m in before]
    assert [raw.tobytes().hex() for raw in columns.ids] == [m[0].replace("-", "") for m in before]


@with_engines(2)
async def test_ids_stay_known_though_another_worker_missed_the_middle_of_a_merged_segment(
    one: Engine, two: Engine
) -> None:
    first = [(await push(one, "q", f"a{i}"))[0].message_id for i in range(6)]
    later = [(await push(two, "q", f"b{i}"))[0].message_id for i in range(6)]
    assert await _compact(one) == 11
    # `one` knows the first six; what it missed is now in the middle of a segment.
    results = await push(one, "q", "b3", "new", "a2", "b5")
    assert [r.status for r in results] == ["duplicate", "queued", "duplicate", "duplicate"]
    assert [results[0].message_id, results[2].message_id, results[3].message_id] == [
        later[3],
        first[2],
        later[5],
    ]
    again = await push(two, "q", "new", "a0")
    assert [r.status for r in again] == ["duplicate", "duplicate"]
    partition = again[0].partition_id
    assert (await one.message(partition, "b4")).payload == b'"b4"'
    async with await Engine.open(one._core.dsn, worker="fresh", maintain=False) as fresh:
        assert [r.status for r in await push(fresh, "q", "a5", "b0")] == ["duplicate", "duplicate"]


@with_engine
async def test_times_inside_a_merged_segment_still_count(engine: Engine) -> None:
    await engine.configure("q", {"delayedProcessing": 0})
    for i in range(8):
        await push(engine, "q", f"m{i}")
    pool = engine._core.pool
    # As if they had been pushed a minute apart.
    await pool.fetch(
        "update segment set created_at = created_at - make_interval(mins => (8 - first_seq)::int)"
    )
    times = [r[0] for r in await pool.fetch("select created_at from segment order by first_seq")]
    engine._core.cache.forget_lane(engine._core.registry.lanes[("q", "Default")].id)
    assert await _compact(engine) == 7
    assert [m.created_at for m in (await pop(engine, "q", group="g", auto_ack=True)).messages()] == times
    await engine.seek("g", "q", times[4])
    assert await drain(engine, "q", "g") == ["m5", "m6", "m7"]
    since = PopRequest("q", batch=100, group="since", subscription_from=times[2].isoformat(), auto_ack=True)
    assert ids(await engine.pop(since)) == ["m3", "m4", "m5", "m6", "m7"]
    listed = await engine.messages(queue="q", since=times[3], until=times[6])
    assert [m.transaction_id for m in listed] == ["m5", "m4", "m3"]
    (lag,) = await engine.lanes(queue="q", group="since")
    assert lag.lag == 0
    await engine.configure("q", {"delayedProcessing": 250})  # the last four are younger
    assert ids(await pop(engine, "q", group="delayed")) == ["m0", "m1", "m2", "m3"]
    assert ids(await pop(engine, "q", 1, group="slow", auto_ack=True)) == ["m0"]
    await engine.configure("q", {"maxWaitTimeSeconds": 330})
    await _compact(engine)
    waited = [d.transaction_id for d in (await engine.dead_letters(group="slow")).rows]
    assert sorted(waited) == ["m1", "m2"]


@with_engine
async def test_leases_failures_and_deleted_messages_survive_merging(engine: Engine) -> None:
    await engine.configure("q", {"retry": "parked", "retryDelay": 0})
    for i in range(12):
        await push(engine, "q", f"m{i:02d}")
    batch = await pop(engine, "q", 6)
    partition = next(batch.messages()).partition_id
    await settle(engine, batch, "failed", "m01", error="late")
    await settle(engine, batch, "completed", "m00", "m03")
    await engine.delete_message(partition, "m08")
    assert await _compact(engine) == 11
    engine._core.leases.drop_older(float("inf"))
    engine._core.cache.forget_lane(engine._core.registry.lanes[("q", "Default")].id)
    assert all(r.success for r in await settle(engine, batch, "completed", "m02", "m04", "m05"))
    rest = await pop(engine, "q")
    assert ids(rest) == ["m01", "m06", "m07", "m09", "m10", "m11"]
    assert [m.attempts for m in rest.messages()][:1] == [1]
    await settle(engine, rest, "dlq", error="no")
    letters = (await engine.dead_letters(queue="q")).rows
    assert {d.transaction_id: d.payload for d in letters} == {i: f'"{i}"'.encode() for i in ids(rest)}


@with_engines(2)
async def test_merging_while_everything_goes_on_loses_nothing_and_repeats_nothing(
    one: Engine, two: Engine
) -> None:
    engines = (one, two)
    for queue in ("q", "r"):
        await one.configure(
            queue, {"retryDelay": 1, "retryLimit": 1000, "retry": "parked" if queue == "r" else "in_order"}
        )
    sent: set[str] = set()
    done: list[str] = []
    seen: dict[tuple[str, str], int] = {}
    stop = asyncio.Event()

    async def produce(number: int) -> None:
        rng = random.Random(number)
        for i in range(150):
            name = f"{number}-{i}"
            await rng.choice(engines).push([PushItem("qr"[i % 2], b"1", f"p{i % 3}", name)])
            sent.add(name)
            if i % 10 == 0:
                assert (await rng.choice(engines).push([PushItem("qr"[i % 2], b"1", f"p{i % 3}", name)]))[
                    0
                ].status == "duplicate"

    async def consume(number: int) -> None:
        rng = random.Random(number)
        while True:
            engine = rng.choice(engines)
            batch = await engine.pop(PopRequest(rng.choice("qr"), batch=rng.choice((1, 10, 100)), wait=0.1))
            messages = list(batch.messages())
            if not messages:
                if stop.is_set() and len(done) >= len(sent):
                    return
                continue
            assert len({m.transaction_id for m in messages}) == len(messages)
            statuses = [rng.choices(("completed", "failed", "retry"), (8, 1, 1))[0] for _ in messages]
            for m in messages:
                if m.queue == "q" and m.attempts == 0 and statuses[0] == "completed":
                    seen[(m.partition, m.transaction_id)] = m.seq
            items = [
                AckItem(m.transaction_id, m.partition_id, s, m.lease_id)
                for m, s in zip(messages, statuses, strict=True)
            ]
            for result, status in zip(await rng.choice(engines).ack(items), statuses, strict=True):
                assert result.success, result
                if status == "completed":
                    done.append(result.transaction_id)

    async def merge() -> int:
        saved = 0
        while not stop.is_set():
            saved += (await one.tidy()).get("compacted", 0)
            for engine in engines:  # read from the tables now and then
                engine._core.leases.drop_older(float("inf"))
            await asyncio.sleep(0.01)
        return saved

    merging = asyncio.create_task(merge())
    consumers = [asyncio.create_task(consume(10 + i)) for i in range(4)]
    await asyncio.gather(*(produce(i) for i in range(4)))
    stop.set()
    await asyncio.gather(*consumers)
    assert await merging > 100
    assert sorted(done) == sorted(sent)
    assert sorted(await drain(one, "q", "late") + await drain(two, "r", "late")) == sorted(sent)
    deadlocks = "select deadlocks from pg_stat_database where datname = current_database()"
    assert await one._core.pool.fetchval(deadlocks) == 0


def test_a_plan_merges_full_and_idle_runs_and_leaves_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compact, "IDLE", 600.0)

    def size(first: int, n: int = 1, at: float = 0, age: float = 100) -> Size:
        return Size(first, n, at, at, 100, age)

    assert plan([size(i) for i in range(10)], 0, 3600, more=False) == ([], 0)
    idle = [size(i, age=1e6) for i in range(10)]
    assert plan(idle, 0, 3600, more=False) == ([idle], 10)
    assert plan(idle[:3], 0, 3600, more=False) == ([], 3)
    full = [size(i) for i in range(300)]
    assert plan(full, 0, 3600, more=False) == ([full[: compact.FULL]], compact.FULL)
    large = [size(0), size(1), size(2), size(3), size(4, 100), size(104)]
    assert plan(large, 0, 3600, more=False) == ([large[:4]], 104)
    apart = [size(i, at=i * 1000.0) for i in range(9)]
    assert plan(apart, 0, 3600, more=False) == ([apart[:4], apart[4:8]], 8)
    gap = [*full[:4], *(size(i, age=1e6) for i in range(10, 14))]
    assert plan(gap, 0, 3600, more=False) == ([gap[:4], gap[4:]], 14)


def test_a_database_of_an_earlier_version_gets_new_columns_options_and_functions(dsn: str) -> None:
    async def body() -> None:
        async with await Engine.open(dsn, maintain=False) as engine:
            await push(engine, "q", "a")
            pool = engine._core.pool
            await pool.fetch(
                """update queue set options = options || '{"deadLetterQueue": false, "ttl": 3600}'"""
            )
            await pool.fetch("delete from migration where id between 13 and 15")
            for each in ("compact", "bury", "put_back"):
                await pool.fetch(f"drop function {each}")
            await pool.fetch("alter table segment drop column times")
            await pool.fetch("alter table lane drop column compacted")
            old = "function start_of(p_group int, p_lane bigint) returns bigint language sql"
            await pool.fetch(f"create or replace {old} as 'select 99::bigint'")
        await migrate(dsn)
        async with await Engine.open(dsn, maintain=False) as engine:
            assert (await engine.configure("new")).options.ttl == 0
            assert (await engine.queue("q")).options.dead_letter_queue
            assert await drain(engine, "q", "g") == ["a"]
            assert (await engine.tidy())["compacted"] == 0

    asyncio.run(body())


def test_a_stored_segment_says_how_many_messages_it_has() -> None:
    base = segment.new_base()
    assert segment.count(segment.encode(base, [b"t"], [b"1"])) == 1
    assert segment.count(segment.encode(base, [b"", b""], [b"1", b"2"])) == 2
    assert segment.count(segment.encode(base, [b""] * 900, [b"12345"] * 900)) == 900
