"""Pushing: order, ids, duplicates, delays, limits, and callers that do not harm each other."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable

import pytest

from settled.queue import dedup
from settled.queue.engine import Engine
from settled.queue.errors import PartlyStored
from settled.queue.types import BadRequest, PushItem, PushOp, QueueFull
from tests.queue.helpers import drain, ids, pop, push, settle, with_engine, with_engines


@with_engine
async def test_a_push_comes_back_with_payload_headers_and_order(engine: Engine) -> None:
    items = [
        PushItem("q", b'{"n": 1}', "p", "one", {"tenant": "a", "traceparent": "00-1"}),
        PushItem("q", b"\x00\xff raw", "p", "two", None, "application/octet-stream"),
        PushItem("q", b"3", "p", trace_id="0f8fad5b-d9cb-469f-a165-70867728950e", producer="svc"),
    ]
    results = await engine.push(items)
    assert [r.status for r in results] == ["queued"] * 3
    one, two, three = (await pop(engine, "q")).messages()
    assert (one.payload, one.headers, one.content_type) == (b'{"n": 1}', items[0].headers, "application/json")
    assert (two.payload, two.content_type, two.headers) == (b"\x00\xff raw", "application/octet-stream", {})
    assert three.transaction_id == three.id == results[2].message_id == results[2].transaction_id
    assert (three.trace_id, three.producer) == (items[2].trace_id, "svc")
    assert {m.partition_id for m in (one, two, three)} == {results[0].partition_id}


@with_engine
async def test_a_pop_is_ready_made_json_with_payloads_as_they_were_pushed(engine: Engine) -> None:
    import msgspec

    await engine.push(
        [
            PushItem("q", b'{"price": 1.50}', transaction_id='quo"te\\d'),
            PushItem("q", b"hello", content_type="text/plain", headers={"h": "1"}),
            PushItem("q", b"\xff\x00", content_type="image/png"),
        ]
    )
    batch = await pop(engine, "q")
    raw = b"[" + batch.json_messages() + b"]"
    assert b'"data":{"price": 1.50}' in raw
    a, b, c = msgspec.json.decode(raw)
    assert a["transactionId"] == 'quo"te\\d'
    assert (b["data"], b["contentType"], b["headers"]) == ("hello", "text/plain", {"h": "1"})
    assert (c["data"], c["encoding"]) == ("/wA=", "base64")
    assert a["leaseId"] == batch.lease_id
    assert (a["queue"], a["partition"], a["consumerGroup"], a["retryCount"]) == (
        "q",
        "Default",
        "__QUEUE_MODE__",
        0,
    )


@with_engine
async def test_a_second_push_of_an_id_is_a_duplicate_of_the_first(engine: Engine) -> None:
    (first,) = await push(engine, "q", "a")
    again, new, twice, other = await engine.push(
        [PushItem("q", b"2", transaction_id=t) for t in ("a", "b", "b")] + [PushItem("q", b"2", "p2", "a")]
    )
    assert (again.status, again.message_id) == ("duplicate", first.message_id)
    assert new.status == "queued"
    assert (twice.status, twice.message_id) == ("duplicate", new.message_id)
    assert other.status == "queued"
    assert engine.metrics()["duplicate_messages_total"] == 2
    assert sorted(await drain(engine, "q")) == ["a", "a", "b"]
    assert (await push(engine, "q", "a"))[0].message_id == first.message_id


@with_engines(2)
async def test_concurrent_pushes_of_the_same_ids_through_two_engines_queue_each_id_once(
    one: Engine, two: Engine
) -> None:
    names = [f"id-{i}" for i in range(300)]

    async def produce(engine: Engine, order: list[str]) -> dict[str, tuple[str, str]]:
        answers = {}
        for start in range(0, len(order), 7):
            for result in await push(engine, "q", *order[start : start + 7]):
                answers[result.transaction_id] = (result.status, result.message_id)
        return answers

    all_answers = await asyncio.gather(
        produce(one, names),
        produce(two, names[::-1]),
        produce(one, names[150:] + names[:150]),
        produce(two, names),
    )
    for name in names:
        answers = [a[name] for a in all_answers]
        assert len({message for _, message in answers}) == 1
        assert [status for status, _ in answers].count("queued") == 1
    assert sorted(await drain(one, "q")) == sorted(names)


@with_engines(2)
async def test_an_engine_that_starts_later_knows_the_ids_of_before(one: Engine, two: Engine) -> None:
    names = [f"id-{i}" for i in range(5000)]
    for start in range(0, 5000, 500):
        await push(one, "q", *names[start : start + 500])
    results = await push(two, "q", *names[::50], "fresh")
    assert [r.status for r in results] == ["duplicate"] * 100 + ["queued"]
    results = await push(one, "q", "fresh", names[7])
    assert [r.status for r in results] == ["duplicate", "duplicate"]


def test_ids_with_the_same_hash_are_still_told_apart(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dedup, "fingerprint", lambda tx: 1 + len(tx) % 2)
    monkeypatch.setattr(dedup, "FRESH_LIMIT", 20)

    async def body() -> None:
        names = [f"{'x' * (i % 5)}{i:03d}" for i in range(120)]
        async with await Engine.open(dsn) as one, await Engine.open(dsn) as two:
            first = {}
            for start in range(0, 120, 8):
                for r in await push((one, two)[start // 8 % 2], "q", *names[start : start + 8]):
                    assert r.status == "queued"
                    first[r.transaction_id] = r.message_id
            for engine in (one, two):
                for r in await push(engine, "q", *names):
                    assert (r.status, r.message_id) == ("duplicate", first[r.transaction_id])
            assert await drain(one, "q") == names

    asyncio.run(body())


@with_engine
async def test_a_bad_item_fails_its_own_request_and_nobody_elses(engine: Engine) -> None:
    bad = [
        [PushItem("q", b"1", transaction_id="nul\0")],
        [PushItem("q\0", b"1")],
        [PushItem("q", b"1", "p" * 300)],
        [PushItem("q", b"1", transaction_id="x" * 256)],
        [PushItem("q", b"1", transaction_id="")],
        [PushItem("q", b"1", transaction_id="\ud800")],
        [PushItem("", b"1")],
        [PushItem("q", b"1", delay_seconds=-5)],
    ]
    good = [push(engine, "q", f"g{i}") for i in range(40)]
    mixed = [engine.push(items) for items in bad] + good
    results = await asyncio.gather(*mixed, return_exceptions=True)
    assert all(isinstance(r, BadRequest) for r in results[: len(bad)])
    assert all(r[0].status == "queued" for r in results[len(bad) :])  # type: ignore[index]
    assert len(await drain(engine, "q")) == 40


@with_engine
async def test_what_the_database_refuses_fails_alone_though_it_shared_a_flush(engine: Engine) -> None:
    await push(engine, "bad", "warm")
    await push(engine, "q", "warm")
    pool = engine._core.pool
    lane = engine._core.registry.lanes[("bad", "Default")]
    await pool.fetch(f"alter table segment add constraint no_bad check (lane_id <> {lane.id}) not valid")
    jobs = [push(engine, "bad", f"b{i}") for i in range(3)] + [push(engine, "q", f"g{i}") for i in range(30)]
    results = await asyncio.gather(*jobs, return_exceptions=True)
    assert all(isinstance(r, Exception) for r in results[:3])
    assert all(not isinstance(r, BaseException) and r[0].status == "queued" for r in results[3:])
    await pool.fetch("alter table segment drop constraint no_bad")
    assert (await push(engine, "bad", "b1"))[0].status == "queued"
    assert await drain(engine, "bad") == ["warm", "b1"]


@with_engine
async def test_a_delayed_message_comes_when_it_is_due_and_not_before(engine: Engine) -> None:
    started = time.monotonic()
    (later,) = await push(engine, "q", "later", delay_seconds=2)
    (again,) = await push(engine, "q", "later", delay_seconds=0.1)
    assert later.status == "queued"
    assert (again.status, again.message_id) == ("duplicate", later.message_id)
    await push(engine, "q", "now")
    assert ids(await pop(engine, "q", auto_ack=True)) == ["now"]
    (message,) = (await pop(engine, "q", wait=20)).messages()
    assert (message.transaction_id, message.id, message.payload) == ("later", later.message_id, b'"later"')
    assert time.monotonic() - started >= 2


@with_engine
async def test_max_size_refuses_what_does_not_fit_until_some_is_settled(engine: Engine) -> None:
    await engine.configure("q", {"maxSize": 5})
    results = await asyncio.gather(*(push(engine, "q", f"m{i}") for i in range(12)), return_exceptions=True)
    refused = [r for r in results if isinstance(r, QueueFull)]
    assert len(refused) == 7
    assert "maxSize 5" in str(refused[0])
    batch = await pop(engine, "q", 3)
    await settle(engine, batch, "completed")
    await push(engine, "q", "x", "y")
    with pytest.raises(QueueFull):
        await push(engine, "q", "1", "2", "3", "4")


@with_engine
async def test_max_size_counts_what_is_delayed_and_refuses_dead_letters_too(engine: Engine) -> None:
    await engine.configure("q", {"maxSize": 3, "retryLimit": 1})
    await push(engine, "q", "a")
    await settle(engine, await pop(engine, "q", 1), "failed")
    later = [PushItem("q", b"1", delay_seconds=3600) for _ in range(2)]
    await engine.push(later)
    await push(engine, "q", "b")
    for more in ([PushItem("q", b"1")], later[:1]):
        with pytest.raises(QueueFull, match="3 pending, maxSize 3"):
            await engine.push(more)
    (letter,) = (await engine.dead_letters(queue="q")).rows
    await engine._core.pool.fetch("update dead_letter set seq = -1")  # as if its message were gone
    with pytest.raises(QueueFull, match="3 pending, maxSize 3"):
        await engine.requeue(letter.id)
    await settle(engine, await pop(engine, "q", 1), "completed")
    await engine.requeue(letter.id)
    assert not (await engine.dead_letters(queue="q")).rows


@with_engine
async def test_a_push_after_the_queue_was_deleted_makes_it_anew(engine: Engine) -> None:
    await push(engine, "q", "a")
    async with await Engine.open(engine._core.dsn, worker="other") as other:
        assert await other.delete_queue("q")
    assert [r.status for r in await push(engine, "q", "a", "b")] == ["queued", "queued"]
    assert await drain(engine, "q") == ["a", "b"]


@with_engine
async def test_a_queue_made_by_a_push_takes_namespace_and_task_from_its_name(engine: Engine) -> None:
    await push(engine, "billing.invoices.eu", "a")
    await push(engine, "plain", "a")
    named = {q.name: (q.namespace, q.task) for q in await engine.queues()}
    assert named == {"billing.invoices.eu": ("billing", "invoices"), "plain": ("", "")}


@with_engine
async def test_an_empty_push_answers_nothing(engine: Engine) -> None:
    assert await engine.push([]) == []


@with_engine
async def test_a_crowd_of_first_pushes_makes_each_partition_once(engine: Engine) -> None:
    registry = engine._core.registry
    make, made = registry.make, []

    async def counted(names: Iterable[tuple[str, str]]) -> None:
        made.extend(names)
        await make(names)

    registry.make = counted  # type: ignore[method-assign]
    pushes = [engine.push([PushItem("q", partition=f"lane {n % 5}")]) for n in range(500)]
    bad = engine.push([PushItem("q", partition="\0")])
    *results, refused = await asyncio.gather(*pushes, bad, return_exceptions=True)
    assert isinstance(refused, BadRequest)
    assert {r[0].status for r in results if isinstance(r, list)} == {"queued"}
    assert len(results) == 500
    assert sorted(made) == [("q", f"lane {n}") for n in range(5)]


@with_engines(3)
async def test_max_size_holds_though_many_servers_push_at_once(*engines: Engine) -> None:
    await engines[0].configure("q", {"maxSize": 40})
    await engines[0].configure("r", {"maxSize": 1000})
    for turn in range(3):
        pushes = [
            engines[i % 3].push(
                [PushItem("q", b"1", f"p{i % 4}"), PushItem("q", b"2"), PushItem("r" if i % 2 else "s", b"3")]
            )
            for i in range(60)
        ]
        results = await asyncio.gather(*pushes, return_exceptions=True)
        assert sum(isinstance(r, QueueFull) for r in results) == (40 if turn == 0 else 60)
        assert sum(isinstance(r, list) for r in results) == (20 if turn == 0 else 0)
        assert (await engines[1].queue("q")).pending == 40
    assert (await engines[1].queue("r")).pending + (await engines[1].queue("s")).pending == 20
    await engines[2].clear_queue("q")
    assert len(await engines[1].push([PushItem("q", b"1")])) == 1


@with_engines(2)
async def test_max_size_counts_what_was_there_before_it_was_set(one: Engine, two: Engine) -> None:
    await push(one, "q", "a", "b", "c")
    await one.configure("q", {"maxSize": 4000})
    await push(one, "q", "d")
    await one.configure("q", {"maxSize": None})
    await push(two, "q", *(f"x{i}" for i in range(10)))
    await one.configure("q", {"maxSize": 14})
    with pytest.raises(QueueFull, match="14 pending"):
        await push(one, "q", "e")


@with_engine
async def test_a_limit_that_is_lifted_while_a_push_waits_does_not_refuse_it(engine: Engine) -> None:
    await engine.configure("q", {"maxSize": 1})
    room, queue = engine._core.room, engine._core.registry.queues["q"]
    counts = room.limited([PushItem("q", b"1")] * 5)
    assert counts == {queue: 5}
    await engine.configure("q", {"maxSize": None})
    async with room.hold(counts):
        await push(engine, "q", *"abcde")
    assert len(await drain(engine, "q")) == 5


@with_engines(2)
async def test_an_id_that_waits_for_its_time_is_met_by_a_push_without_a_delay(
    one: Engine, two: Engine
) -> None:
    (first,) = await push(one, "q", "k", delay_seconds=1)
    (other,) = await push(one, "q", "l", delay_seconds=1)
    for engine in (one, two, one):
        again = await push(engine, "q", "k", "fresh", "k")
        assert [result.status for result in again] == ["duplicate", again[1].status, "duplicate"]
        assert {again[0].message_id, again[2].message_id} == {first.message_id}
    refused = await two.transaction([PushOp([PushItem("q", b"2", transaction_id="l")])])
    assert not refused.success
    assert "'l'" in (refused.error or "")
    taken: list[str] = []
    async with asyncio.timeout(20):
        while len(taken) < 3:
            taken += ids(await pop(two, "q", auto_ack=True, wait=1))
    assert sorted(taken) == ["fresh", "k", "l"]
    (late,) = await push(two, "q", "l")
    assert (late.status, late.message_id) == ("duplicate", other.message_id)
    await push(two, "q", "m")
    assert not two._core.registry.lanes[("q", "Default")].later


@with_engines(2)
async def test_pushes_to_a_queue_that_is_deleted_meanwhile_are_answered(one: Engine, two: Engine) -> None:
    await one.configure("limited", {"maxSize": 100_000})
    stop = asyncio.Event()

    async def pushing(engine: Engine, number: int) -> int:
        count = 0
        while not stop.is_set():
            for queue in ("limited", "plain"):
                delay = 30.0 if count % 3 == 0 else 0.0
                items = [PushItem(queue, b"1", f"p{i}", delay_seconds=delay) for i in range(1 + count % 2)]
                results = await engine.push(items)
                assert {result.status for result in results} == {"queued"}
            count += 1
        return count

    tasks = [asyncio.create_task(pushing(engine, n)) for n, engine in enumerate([one, two] * 3)]
    for _ in range(25):
        await asyncio.gather(one.delete_queue("limited"), two.delete_queue("plain"))
        await one.configure("limited", {"maxSize": 100_000})
        await asyncio.sleep(0.02)
    stop.set()
    assert all(await asyncio.gather(*tasks))


@with_engine
async def test_a_push_that_fails_for_one_partition_says_what_is_stored(engine: Engine) -> None:
    """Defect Q8."""
    await push(engine, "q", "first", partition="bad")
    async with engine._core.pool.transaction() as connection:
        lane = await connection.fetchval("select id from lane where name = 'bad'")
        await connection.execute("""
            create function refuse() returns trigger language plpgsql as
            $$ begin raise exception 'no more of this'; end $$""")
        await connection.execute(f"""
            create trigger refuse before insert on segment for each row
            when (new.lane_id = {lane}) execute function refuse()""")
    items = [
        PushItem("q", b"1", partition, name) for name, partition in (("a", "x"), ("b", "bad"), ("c", "y"))
    ]
    with pytest.raises(PartlyStored, match="2 of 3 items are stored") as refused:
        await engine.push(items)
    assert [(r.transaction_id, r.status) for r in refused.value.results] == [
        ("a", "queued"),
        ("b", "failed"),
        ("c", "queued"),
    ]
    assert sorted(await drain(engine, "q")) == ["a", "c", "first"]
    async with engine._core.pool.transaction() as connection:
        await connection.execute("drop trigger refuse on segment")
    assert [r.status for r in await engine.push(items)] == ["duplicate", "queued", "duplicate"]
