"""Many producers and consumers at once: nothing lost, nothing twice, nothing out of order, no deadlock."""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
import time

from settled.queue.engine import Engine
from settled.queue.types import AckItem, PopRequest, PushItem
from tests.queue.helpers import drain, ids, pop, push, settle, with_engine, with_engines


async def _produce(engine: Engine, name: str, count: int, lanes: int, rng: random.Random) -> list[str]:
    """Push `count` messages in batches of mixed sizes; answers their ids."""
    sent: list[str] = []
    while len(sent) < count:
        size = rng.choice((1, 1, 1, 3, 20, 200))
        lane = rng.randrange(lanes)
        names = [f"{name}:{lane}:{len(sent) + i:06d}" for i in range(size)]
        await push(engine, "q", *names, partition=f"p{lane}")
        sent += names
    return sent


def _check_order(got: list[tuple[str, int]]) -> None:
    """Within a lane by sequence, and each producer's messages in the order it pushed them."""
    last_seq = -1
    last: dict[str, str] = {}
    for name, seq in got:
        assert seq > last_seq
        last_seq = seq
        producer = name.split(":")[0]
        assert last.get(producer, "") < name
        last[producer] = name


def test_eight_producers_and_auto_ack_consumers_on_one_lane_lose_nothing(dsn: str) -> None:
    async def body() -> None:
        one, two = await Engine.open(dsn, worker="w1"), await Engine.open(dsn, worker="w2")
        stop = asyncio.Event()
        got: list[tuple[str, int]] = []

        async def consume(engine: Engine) -> None:
            while True:
                batch = await engine.pop(
                    PopRequest("q", batch=random.choice((1, 7, 500)), auto_ack=True, wait=0.3)
                )
                got.extend((m.transaction_id, m.seq) for m in batch.messages())
                if not len(batch) and stop.is_set():
                    return

        consumers = [asyncio.create_task(consume(engine)) for engine in (one, two, one)]
        producers = [_produce((one, two)[i % 2], f"w{i}", 1500, 1, random.Random(i)) for i in range(8)]
        sent = [name for names in await asyncio.gather(*producers) for name in names]
        stop.set()
        await asyncio.gather(*consumers)
        assert len(got) == len(sent)
        assert {name for name, _ in got} == set(sent)
        _check_order(sorted(got, key=lambda pair: pair[1]))
        await one.close()
        await two.close()

    asyncio.run(asyncio.wait_for(body(), 120))


def test_leases_with_acks_shuffled_through_two_engines_deliver_each_message_once_and_in_order(
    dsn: str,
) -> None:
    async def body() -> None:
        engines = [await Engine.open(dsn, worker=f"w{i}") for i in range(2)]
        lanes, stop = 3, asyncio.Event()
        got: dict[str, list[tuple[str, int]]] = {}
        out: set[str] = set()

        async def consume(number: int) -> None:
            rng = random.Random(number)
            while True:
                batch = await engines[number % 2].pop(PopRequest("q", batch=rng.choice((1, 5, 50)), wait=0.3))
                messages = list(batch.messages())
                if not messages:
                    if stop.is_set():
                        return
                    continue
                for m in messages:
                    assert m.partition_id not in out or m.lease_id == batch.lease_id
                    got.setdefault(m.partition, []).append((m.transaction_id, m.seq))
                assert messages[0].partition_id not in out
                out.add(messages[0].partition_id)
                rng.shuffle(messages)
                await asyncio.sleep(rng.random() * 0.005)
                out.discard(messages[0].partition_id)
                while messages:
                    part = [messages.pop() for _ in range(min(len(messages), rng.choice((1, 2, 9))))]
                    acks = [AckItem(m.transaction_id, m.partition_id, lease_id=m.lease_id) for m in part]
                    if not messages:
                        out.discard(part[0].partition_id)
                    results = await rng.choice(engines).ack(acks)
                    assert all(r.success for r in results), results

        consumers = [asyncio.create_task(consume(i)) for i in range(4)]
        producers = [_produce(engines[i % 2], f"w{i}", 800, lanes, random.Random(i)) for i in range(4)]
        sent = [name for names in await asyncio.gather(*producers) for name in names]
        stop.set()
        await asyncio.gather(*consumers)
        names = [name for lane in got.values() for name, _ in lane]
        assert len(names) == len(set(names))
        assert set(names) == set(sent)
        for lane in got.values():
            _check_order(lane)
        for engine in engines:
            await engine.close()

    asyncio.run(asyncio.wait_for(body(), 120))


_PUSHER = """
import asyncio, sys
from settled.queue import Engine, PushItem

async def main(dsn, name, order):
    async with await Engine.open(dsn, worker=name, maintain=False) as engine:
        numbers = list(range(400))[:: 1 if order == "up" else -1]
        for start in range(0, 400, 5):
            items = [PushItem("q", b"1", f"p{i % 3}", f"id-{i}") for i in numbers[start : start + 5]]
            for result in await engine.push(items):
                print(result.transaction_id, result.status, result.message_id)

asyncio.run(main(*sys.argv[1:]))
"""


def test_two_processes_pushing_the_same_ids_queue_each_once_and_name_the_same_message(dsn: str) -> None:
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", _PUSHER, dsn, f"w{i}", order], stdout=subprocess.PIPE, text=True
        )
        for i, order in enumerate(("up", "down", "up"))
    ]
    answers: dict[str, list[tuple[str, str]]] = {}
    for process in processes:
        out, _ = process.communicate(timeout=60)
        assert process.returncode == 0
        for line in out.splitlines():
            name, status, message = line.split()
            answers.setdefault(name, []).append((status, message))
    assert len(answers) == 400
    for found in answers.values():
        assert len(found) == 3
        assert [status for status, _ in found].count("queued") == 1
        assert len({message for _, message in found}) == 1

    async def count() -> None:
        async with await Engine.open(dsn) as engine:
            assert len(await drain(engine, "q")) == 400

    asyncio.run(count())


@with_engine
async def test_one_callers_bad_ack_does_not_touch_other_callers_acks(engine: Engine) -> None:
    for lane in range(10):
        await push(engine, "q", *(f"{lane}-{i}" for i in range(30)), partition=f"p{lane}")
    batches = [await pop(engine, "q", 30) for _ in range(10)]
    stolen = batches[0].lease_id

    async def good(batch: object, name: str) -> bool:
        return (await settle(engine, batch, "completed", name))[0].success  # type: ignore[arg-type]

    async def bad(partition: str) -> bool:
        item = AckItem("nobody", partition, lease_id=stolen)
        return (await engine.ack([item]))[0].success

    partitions = [next(b.messages()).partition_id for b in batches]
    jobs = [good(batch, name) for batch in batches for name in ids(batch)]
    worse = [bad(partitions[i % 10]) for i in range(100)]
    twice = [good(batches[1], "1-0" if ids(batches[1])[0] == "1-0" else ids(batches[1])[0]) for _ in range(5)]
    mixed = [*jobs, *worse, *twice]
    order = list(range(len(mixed)))
    random.Random(1).shuffle(order)
    results = dict(zip(order, await asyncio.gather(*(mixed[i] for i in order)), strict=True))
    assert (
        sum(results[i] for i in range(len(jobs))) + sum(results[len(jobs) + 100 + i] for i in range(5)) == 300
    )
    assert not any(results[len(jobs) + i] for i in range(100))
    assert (await engine.groups(queue="q"))[0].total_lag == 0


@with_engines(2)
async def test_everything_at_once_for_a_while_without_deadlock_or_loss(one: Engine, two: Engine) -> None:
    engines = (one, two)
    for queue in ("q", "r"):
        await one.configure(queue, {"retryDelay": 5, "retryLimit": 1000, "leaseTime": 30})
    end = time.monotonic() + 15
    done: dict[str, int] = {}
    sent: set[str] = set()

    async def produce(number: int) -> None:
        rng, i = random.Random(number), 0
        while time.monotonic() < end:
            names = [f"{number}-{i + k}" for k in range(rng.choice((1, 4, 40)))]
            i += len(names)
            items = [PushItem(rng.choice("qr"), b"1", f"p{rng.randrange(4)}", name) for name in names]
            await rng.choice(engines).push(items)
            sent.update(names)

    async def consume(number: int) -> None:
        rng = random.Random(number)
        while True:
            engine = rng.choice(engines)
            request = PopRequest(
                rng.choice("qr"), batch=rng.choice((1, 10, 100)), partitions=rng.choice((1, 3)), wait=0.2
            )
            batch = await engine.pop(request)
            messages = list(batch.messages())
            if not messages:
                if time.monotonic() > end and len(done) == len(sent):
                    return
                continue
            statuses = [rng.choices(("completed", "failed", "retry"), (20, 1, 1))[0] for _ in messages]
            items = [
                AckItem(m.transaction_id, m.partition_id, s, m.lease_id)
                for m, s in zip(messages, statuses, strict=True)
            ]
            for result, status in zip(await rng.choice(engines).ack(items), statuses, strict=True):
                assert result.success, result
                if status == "completed":
                    done[result.transaction_id] = done.get(result.transaction_id, 0) + 1

    async def disturb() -> None:
        while time.monotonic() < end:
            await one.groups()
            await two.tidy()
            await two.queue("q")
            await asyncio.sleep(0.2)

    await asyncio.gather(*(produce(i) for i in range(4)), *(consume(10 + i) for i in range(6)), disturb())
    assert set(done) == sent
    assert set(done.values()) == {1}
    deadlocks = await one._core.pool.fetchval(
        "select deadlocks from pg_stat_database where datname = current_database()"
    )
    assert deadlocks == 0


@with_engine
async def test_a_settlement_the_database_refuses_fails_alone_though_it_shared_a_call(engine: Engine) -> None:
    for lane in ("good", "bad"):
        await push(engine, "q", *(f"{lane}{i}" for i in range(20)), partition=lane)
    good = await engine.pop(PopRequest("q", "good", batch=20))
    bad = await engine.pop(PopRequest("q", "bad", batch=20))
    pool = engine._core.pool
    lane = engine._core.registry.lanes[("q", "bad")]
    refuse = (
        f"alter table consumer add constraint no_bad check (lane_id <> {lane.id} or cursor < 0) not valid"
    )
    await pool.fetch(refuse)
    jobs = [settle(engine, batch, "completed", name) for batch in (good, bad) for name in ids(batch)]
    results = await asyncio.gather(*jobs, return_exceptions=True)
    assert all(not isinstance(r, BaseException) and r[0].success for r in results[:20])
    assert all(isinstance(r, Exception) for r in results[20:])
    await pool.fetch("alter table consumer drop constraint no_bad")
    assert all(r.success for r in await settle(engine, bad, "completed"))
