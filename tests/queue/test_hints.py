"""A worker's memory is a hint: what others did is heard of at once, and found in the tables if it was not."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import asyncpg
import pytest

from settled.queue.db import migrate
from settled.queue.engine import Engine
from settled.queue.errors import Unavailable
from settled.queue.ready import ReadySet
from settled.queue.types import AckItem, AckOp, PopRequest
from tests.queue.helpers import drain, ids, pop, push, settle, with_engines
from tests.queue.lost import lose_everything, unaudited

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

MODE = "__QUEUE_MODE__"
BOUND = 1.0


# What one worker does is told to the others: with no audit at all.


@with_engines(2)
async def test_the_last_ack_through_another_worker_frees_the_partition(one: Engine, two: Engine) -> None:
    """Defect Q1, M1: the release leaves nothing to read; the worker that saw the lease must hear of it."""
    await unaudited(one, two)
    await push(one, "q", "a")
    batch = await pop(one, "q")
    await settle(two, batch, "completed")
    await push(two, "q", "b")
    assert ids(await pop(one, "q")) == ["b"]


@with_engines(2)
async def test_the_last_ack_by_the_careful_way_frees_the_partition(one: Engine, two: Engine) -> None:
    """Defect Q1, M1: acks that the other worker has to look up, in settle()'s short path."""
    await unaudited(one, two)
    await push(one, "q", "a", "b")
    batch = await pop(one, "q")
    await two._core.settler.settle_closely(
        [AckItem(m.transaction_id, m.partition_id, lease_id=m.lease_id) for m in batch.messages()],
        MODE,
        atomic=True,
    )
    await push(two, "q", "c")
    assert ids(await pop(one, "q")) == ["c"]


@with_engines(2)
async def test_a_consumer_whose_acks_go_through_another_worker_gets_everything(
    one: Engine, two: Engine
) -> None:
    """Defect Q1, kin: 25 of 30 were not delivered in 3 s."""
    await unaudited(one, two)
    got: list[str] = []
    for i in range(30):
        await push(one, "q", f"m{i}", partition=f"p{i % 5}")
        batch = await pop(two, "q", 1, wait=3)
        got += ids(batch)
        await settle(one, batch, "completed")
    assert got == [f"m{i}" for i in range(30)]


@with_engines(2)
async def test_a_lease_that_was_extended_elsewhere_holds_nothing_once_it_is_over(
    one: Engine, two: Engine
) -> None:
    """Defect Q1, kin: extended through one worker, acked through the other."""
    await unaudited(one, two)
    await push(one, "q", "a")
    batch = await pop(two, "q")
    assert batch.lease_id is not None
    assert (await two.extend(batch.lease_id, 3600)).success
    await settle(one, batch, "completed")
    await push(one, "q", "b")
    assert ids(await pop(two, "q")) == ["b"]


@with_engines(1)
async def test_an_extension_that_is_answered_after_the_last_ack_holds_nothing(engine: Engine) -> None:
    """Defect Q1, M5."""
    await unaudited(engine)
    await push(engine, "q", "a")
    batch = await pop(engine, "q")
    assert batch.lease_id is not None
    acked, fetch = asyncio.Event(), engine._core.pool.fetch

    async def late(query: str, *args: Any) -> list[Any]:
        rows = await fetch(query, *args)
        await acked.wait()
        return rows

    engine._core.pool.fetch = late  # type: ignore[method-assign]
    extending = asyncio.create_task(engine.extend(batch.lease_id, 600))
    await asyncio.sleep(0.05)
    engine._core.pool.fetch = fetch  # type: ignore[method-assign]
    await settle(engine, batch, "completed")
    acked.set()
    assert (await extending).success
    await push(engine, "q", "b")
    assert ids(await pop(engine, "q")) == ["b"]


@pytest.mark.parametrize("wait", [0.0, 0.5])
@pytest.mark.parametrize("what", ["seek", "configure"])
def test_the_first_pop_after_a_change_elsewhere_looks_again(dsn: str, what: str, wait: float) -> None:
    """Defect Q1, M6: it looked at the set that the news had just dropped."""

    @with_engines(2)
    async def body(one: Engine, two: Engine) -> None:
        await unaudited(one, two)
        for _ in range(5):
            if what == "configure":
                await one.configure("q", {"windowBuffer": 600})
                await push(one, "q", f"a{time.monotonic_ns()}")
            else:
                await push(one, "q", f"a{time.monotonic_ns()}")
                await drain(two, "q")
            assert not len(await pop(two, "q"))
            if what == "configure":
                await one.configure("q", {"windowBuffer": 0})
            else:
                await one.seek(MODE, "q", "beginning")
            began = time.monotonic()
            assert len(await pop(two, "q", auto_ack=True, wait=wait))
            assert not wait or time.monotonic() - began < wait
            await drain(two, "q")

    body(dsn)


def test_a_claim_that_knows_less_than_was_heard_since_holds_nothing() -> None:
    """Defect Q1, M2 and M3: of two claims of a lane under way one was answered, and the lane freed since."""
    ready = ReadySet(1, 1)
    ready.add(7)
    assert ready.take() == 7
    first = ready.turn
    ready.add(7)
    assert ready.take() == 7
    second = ready.turn
    ready.answered(7, "ok", 300.0, 0, first)
    ready.free(7)
    ready.answered(7, "leased", 300.0, 0, second)
    assert not ready.held
    ready.add(7)
    assert 7 in ready.ready


@pytest.mark.parametrize("event", ["free", "release", "add", "add_all"])
def test_whatever_is_heard_of_a_lane_outdates_the_claims_under_way(event: str) -> None:
    """Defect Q1, M2."""
    ready = ReadySet(1, 1)
    ready.add(7)
    assert ready.take() == 7
    turn = ready.turn
    ready.ready[7] = 1  # also where it is known to be ready already
    match event:
        case "free":
            ready.free(7)
        case "release":
            ready.release(7, None, 0)
        case "add":
            ready.add(7)
        case "add_all":
            ready.add_all({7: 1})
    ready.answered(7, "leased", 300.0, 0, turn)
    assert 7 in ready.ready
    assert not ready.held


@with_engines(2)
async def test_a_release_while_a_set_is_read_outdates_what_is_read(one: Engine, two: Engine) -> None:
    """Defect Q1, M4."""
    await unaudited(one, two)
    await push(one, "q", "a", "b")
    batch = await pop(one, "q", 1)
    sets, pool = two._core.ready, two._core.ready._pool
    read, go_on, fetch = asyncio.Event(), asyncio.Event(), pool.fetch

    async def late(query: str, *args: Any) -> list[Any]:
        rows = await fetch(query, *args)
        if "newest_at" in query:
            read.set()
            await go_on.wait()
        return rows

    pool.fetch = late  # type: ignore[method-assign]
    popping = asyncio.create_task(pop(two, "q"))
    await read.wait()
    pool.fetch = fetch  # type: ignore[method-assign]
    await settle(one, batch, "completed")
    await two._core.activity.read()
    go_on.set()
    assert ids(await popping) == ["b"]
    assert sets.sets


@with_engines(2)
async def test_a_group_deleted_elsewhere_subscribes_anew(one: Engine, two: Engine) -> None:
    """Defect Q1, kin: with subscriptionMode=new it got all the old messages."""
    await unaudited(one, two)
    await push(one, "q", "old")
    assert await drain(two, "q", "g") == ["old"]
    await one.delete_group("g")
    await two._core.activity.read()
    assert not len(await pop(two, "q", group="g", subscription_mode="new"))
    await push(one, "q", "new")
    assert ids(await pop(two, "q", group="g", subscription_mode="new")) == ["new"]


@with_engines(2)
async def test_a_subscription_moved_elsewhere_is_read_again(one: Engine, two: Engine) -> None:
    """Defect Q1, kin: it stayed empty until the next push."""
    await unaudited(one, two)
    await push(one, "q", "a")
    assert not len(await pop(two, "q", group="g", subscription_mode="new"))
    await one.subscribe("g", "q", datetime.now(UTC) - timedelta(hours=1))
    assert ids(await pop(two, "q", group="g")) == ["a"]


@with_engines(2)
async def test_a_message_for_a_queue_deleted_elsewhere_is_no_duplicate(one: Engine, two: Engine) -> None:
    """Defect Q1, kin: 20 of 20 were answered `duplicate` and stored nowhere."""
    for i in range(10):
        assert [r.status for r in await push(two, "q", f"m{i}")] == ["queued"]
        await one.delete_queue("q")
        assert [r.status for r in await push(two, "q", f"m{i}")] == ["queued"]
        assert await drain(two, "q") == [f"m{i}"]


@with_engines(1)
async def test_the_bell_for_a_transaction_rings_after_its_commit(engine: Engine) -> None:
    """Defect Q1, kin: a long poll at another worker found the lane leased, and waited half a second."""
    await push(engine, "q", "a", "b")
    batch = await pop(engine, "q", 1)
    (message,) = batch.messages()
    core, seen = engine._core, []

    async def leased() -> bool:
        return bool(await core.pool.fetchval("select lease is not null from consumer"))

    def ring() -> None:
        seen.append(asyncio.create_task(leased()))

    core.activity.ring = ring  # type: ignore[method-assign]
    item = AckItem(message.transaction_id, message.partition_id, lease_id=message.lease_id)
    assert (await engine.transaction([AckOp(item)])).success
    assert [await task for task in seen] == [False]


@with_engines(2)
async def test_a_claim_that_is_taken_back_is_told(one: Engine, two: Engine) -> None:
    """Defect Q1, kin: take_back() ended a lease, or undid an auto-ack, without a word."""
    await unaudited(one, two)
    for auto_ack in (False, True):
        await push(one, "q", f"a{auto_ack}")
        batch = await pop(one, "q", auto_ack=auto_ack)
        (message,) = batch.messages()
        assert not len(await pop(two, "q"))
        lane = one._core.registry.lanes_by_uid[message.partition_id]
        await one._core.pool.fetch(
            "select take_back($1, $2, $3, $4, $5)",
            lane.id, await one._core.registry.group(MODE), batch.lease_id, [message.seq], [0],
        )  # fmt: skip
        assert await drain(two, "q") == [f"a{auto_ack}"]


@with_engines(2)
async def test_news_that_could_not_be_taken_over_are_made_up_for(one: Engine, two: Engine) -> None:
    """Defect Q1, kin: what came after the row that failed was lost."""
    await unaudited(one, two)
    await push(one, "q", "a")
    assert await drain(two, "q") == ["a"]
    refresh, failed = two._core.registry.refresh, asyncio.Event()

    async def fail(*_: object) -> None:
        failed.set()
        raise Unavailable("gone for a moment")

    two._core.registry.refresh = fail  # type: ignore
    async with one._core.pool.transaction() as connection:  # both are read at once
        await connection.execute(
            "select configure('w', 'other', null, null, (select options from queue), '{}', true)"
        )
        await connection.execute(
            "insert into activity (worker, kind, queues, lanes)"
            " select 'w', 'push', array[queue_id], array[id] from lane"
            " where queue_id = (select id from queue where name = 'q')"
        )
        await connection.execute("update consumer set cursor = 0, base = 0")
    while not failed.is_set():
        with suppress(Unavailable):
            await two._core.activity.read()
    two._core.registry.refresh = refresh  # type: ignore[method-assign]
    assert ids(await pop(two, "q")) == ["a"]


@with_engines(1)
async def test_a_parked_failure_does_not_hold_back_what_is_pushed_behind_it(engine: Engine) -> None:
    """Defect Q1: a lane with nothing but a parked message was held until that came due."""
    await unaudited(engine)
    await engine.configure("q", {"retry": "parked", "retryDelay": 600_000})
    await push(engine, "q", "bad")
    await settle(engine, await pop(engine, "q"), "failed")
    assert not len(await pop(engine, "q"))
    await push(engine, "q", "good")
    assert ids(await pop(engine, "q")) == ["good"]


@with_engines(2)
async def test_a_message_behind_partitions_that_others_emptied_is_found(one: Engine, two: Engine) -> None:
    """Defect Q1: a pop gave up after a hundred of them, though the message was there."""
    await unaudited(one, two)
    await push(one, "q", "first", partition="p0")
    assert await drain(two, "q") == ["first"]
    for start in range(0, 400, 100):
        await asyncio.gather(*(push(one, "q", f"m{i}", partition=f"p{i}") for i in range(start, start + 100)))
    assert len(await drain(one, "q")) == 400
    await push(one, "q", "last", partition="p999")
    assert ids(await pop(two, "q")) == ["last"]


@with_engines(1)
async def test_a_poll_that_was_woken_and_went_away_passes_it_on(engine: Engine) -> None:
    """Defect Q1: the message waited for the next push, with another poll waiting beside it."""
    await unaudited(engine)
    await push(engine, "q", "a")
    await drain(engine, "q")
    polls = [asyncio.create_task(pop(engine, "q", wait=5)) for _ in range(2)]
    (ready,) = engine._core.ready.sets.values()
    while len(ready.waiters) < 2:
        await asyncio.sleep(0.01)
    lane = await engine._core.registry.lane("q", "Default")
    assert lane is not None
    await engine._core.pool.fetch("update consumer set cursor = 0, base = 0")
    ready.add(lane.id)
    polls[0].cancel()
    assert ids(await asyncio.wait_for(polls[1], 3)) == ["a"]


# What is not told is found in the tables: nothing that one worker does reaches the other.


async def _acked_elsewhere(one: Engine, two: Engine) -> AsyncIterator[None]:
    await push(one, "q", "a")
    batch = await pop(one, "q")
    await settle(two, batch, "completed")
    yield
    await push(two, "q", "wanted")


async def _pushed(one: Engine, two: Engine) -> AsyncIterator[None]:
    await push(one, "q", "a")
    assert await drain(one, "q") == ["a"]
    yield
    await push(two, "q", "wanted")


async def _pushed_to_a_new_partition(one: Engine, two: Engine) -> AsyncIterator[None]:
    await push(one, "q", "a")
    assert await drain(one, "q") == ["a"]
    yield
    await push(two, "q", "wanted", partition="never seen")


async def _pushed_to_a_new_queue(one: Engine, two: Engine) -> AsyncIterator[None]:
    yield
    await push(two, "q", "wanted")


async def _pushed_in_a_transaction_that_commits_late(one: Engine, two: Engine) -> AsyncIterator[None]:
    await push(one, "q", "a")
    assert await drain(one, "q") == ["a"]
    lane = await two._core.registry.lane("q", "Default")
    assert lane is not None
    async with two._core.pool.transaction() as connection:
        body = await connection.fetchval("select body from segment limit 1")
        await connection.execute("select append('w', $1, $2, '{null}', '{1}', '{null}', $3)",
                                 [lane.queue.id], [lane.id], [body])  # fmt: skip
        await asyncio.sleep(0.7)  # several audits pass it by
        yield


async def _released(one: Engine, two: Engine) -> AsyncIterator[None]:
    await push(one, "q", "wanted")
    batch = await pop(two, "q")
    yield
    await settle(two, batch, "retry")


async def _failed(one: Engine, two: Engine) -> AsyncIterator[None]:
    await one.configure("q", {"retryDelay": 100})
    await push(one, "q", "wanted")
    batch = await pop(two, "q")
    yield
    await settle(two, batch, "failed")


async def _unblocked(one: Engine, two: Engine) -> AsyncIterator[None]:
    """The message that the lane waits for is buried by hand."""
    await one.configure("q", {"retryDelay": 600_000})
    (pushed, _) = await push(one, "q", "a", "wanted")
    await settle(one, await pop(one, "q", 1), "failed")
    yield
    await two.bury_message(pushed.partition_id, "a")


async def _expired(one: Engine, two: Engine) -> AsyncIterator[None]:
    await push(two, "q", "wanted")
    await pop(two, "q", lease_seconds=1)
    yield
    await asyncio.sleep(1)


async def _sought(one: Engine, two: Engine) -> AsyncIterator[None]:
    await push(one, "q", "wanted")
    assert await drain(one, "q") == ["wanted"]
    yield
    await two.seek(MODE, "q", "beginning")


async def _configured(one: Engine, two: Engine) -> AsyncIterator[None]:
    await one.configure("q", {"windowBuffer": 600})
    await push(one, "q", "wanted")
    yield
    await two.configure("q", {"windowBuffer": 0})


async def _undelayed(one: Engine, two: Engine) -> AsyncIterator[None]:
    await one.configure("q", {"delayedProcessing": 600})
    await push(one, "q", "wanted")
    yield
    await two.configure("q", {"delayedProcessing": 0})


async def _retried(one: Engine, two: Engine) -> AsyncIterator[None]:
    await push(one, "q", "wanted")
    await settle(one, await pop(one, "q"), "dlq")
    (letter,) = (await two.dead_letters()).rows
    yield
    await two.requeue(letter.id)


async def _made_again(one: Engine, two: Engine) -> AsyncIterator[None]:
    await push(one, "q", "a")
    assert await drain(one, "q") == ["a"]
    yield
    await two.delete_queue("q")
    await push(two, "q", "wanted")


async def _delayed(one: Engine, two: Engine) -> AsyncIterator[None]:
    await push(one, "q", "a")
    assert await drain(one, "q") == ["a"]
    yield
    await push(two, "q", "wanted", delay_seconds=0.2)
    await asyncio.sleep(0.2)


async def _moved(one: Engine, two: Engine) -> AsyncIterator[None]:
    await push(one, "q", "wanted")
    yield
    await two.subscribe("g", "q", datetime.now(UTC) - timedelta(hours=1))


SCENARIOS = [
    _acked_elsewhere, _pushed, _pushed_to_a_new_partition, _pushed_to_a_new_queue,
    _pushed_in_a_transaction_that_commits_late, _released, _failed, _unblocked, _expired, _sought,
    _configured, _undelayed, _retried, _made_again, _delayed, _moved,
]  # fmt: skip


@pytest.mark.parametrize("how", ["poll", "named", "namespace", "plain"])
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda each: each.__name__.strip("_"))
def test_what_no_worker_is_told_of_is_found_in_the_tables(
    dsn: str, scenario: Callable[[Engine, Engine], AsyncIterator[None]], how: str
) -> None:
    """Defect Q1: every row of activity is lost, and every bell."""

    if (scenario, how) == (_moved, "named"):
        return  # who names a partition has begun there: moving its subscription moves nothing

    @with_engines(2)
    async def body(one: Engine, two: Engine) -> None:
        await lose_everything(dsn, one, two)
        group = "g" if scenario is _moved else MODE
        request = PopRequest("q", group=group, batch=10, wait=5, subscription_mode="new")
        if how == "named":
            partition = "never seen" if scenario is _pushed_to_a_new_partition else "Default"
            request = PopRequest("q", partition, group=group, batch=10, wait=5, subscription_mode="new")
        elif how == "namespace":
            await two.configure("x.other", {}, namespace="x")
            request = PopRequest(None, None, "x", group=group, batch=10, wait=5, subscription_mode="new")
        happening = scenario(one, two)
        await anext(happening)
        if how == "namespace":
            await two._core.pool.fetch("update queue set namespace = 'x', changed = pg_current_xact_id()")
            await two._core.pool.fetch("alter table queue alter column namespace set default 'x'")
        before = await one.pop(_plainly(request))  # memory is sure that there is nothing
        late = scenario is _pushed_in_a_transaction_that_commits_late
        assert not len(before)
        waiting = asyncio.create_task(one.pop(request)) if how != "plain" else None
        await asyncio.sleep(0.05)
        await anext(happening, None)
        if how == "namespace":
            await two._core.pool.fetch(
                "update queue set namespace = 'x', changed = pg_current_xact_id() where namespace <> 'x'"
            )
        began = time.monotonic()
        if waiting is not None:
            popped = await waiting
        else:
            popped = await one.pop(_plainly(request))
            while not len(popped) and time.monotonic() - began < BOUND:
                await asyncio.sleep(0.01)
                popped = await one.pop(_plainly(request))
        assert ids(popped) if late else ids(popped) == ["wanted"]
        assert time.monotonic() - began < BOUND

    body(dsn)


def _plainly(request: PopRequest) -> PopRequest:
    return PopRequest(
        request.queue, request.partition, request.namespace, group=request.group, batch=request.batch,
        subscription_mode=request.subscription_mode,
    )  # fmt: skip


@with_engines(2)
async def test_a_group_deleted_elsewhere_subscribes_anew_though_nobody_said_so(
    one: Engine, two: Engine
) -> None:
    """Defect Q1, kin, with the rows lost: memory is believed for a quarter of a second."""
    await lose_everything(one._core.dsn, one, two)
    await push(one, "q", "old")
    assert await drain(two, "q", "g") == ["old"]
    await one.delete_group("g")
    await asyncio.sleep(0.3)
    assert not len(await pop(two, "q", group="g", subscription_mode="new"))


@with_engines(1)
async def test_idle_partitions_and_waiting_polls_cost_an_audit_nothing(engine: Engine) -> None:
    """Defect Q1: a round looks at what was appended and at what is held, not at what is idle."""
    for start in range(0, 2000, 500):
        await asyncio.gather(
            *(push(engine, "q", f"m{i}", partition=f"p{i}") for i in range(start, start + 500))
        )
    assert len(await drain(engine, "q")) == 2000
    auditor, seen = engine._core.auditor, []
    await auditor._rounds.run()
    fetch = auditor._link.fetch

    async def watched(query: str, *args: Any) -> list[Any]:
        seen.append(sum(len(str(arg)) for arg in args))
        return await fetch(query, *args)

    auditor._link.fetch = watched  # type: ignore[method-assign]
    polls = [asyncio.create_task(pop(engine, "q", 1, wait=2)) for _ in range(500)]
    await asyncio.gather(*polls)
    assert len(seen) <= 40  # ten rounds, of two statements with nothing in them; twice that on a slow machine
    assert max(seen) < 200


def test_a_database_of_the_version_before_is_brought_up_to_date(dsn: str) -> None:
    async def body() -> None:
        connection = await asyncpg.connect(dsn)
        await connection.execute(
            "set search_path to settled; delete from migration where id = 29;"
            "alter table segment drop column xid; alter table queue drop column changed;"
            "drop function reopen, move_subscription;"
        )
        await connection.close()
        await migrate(dsn)
        async with await Engine.open(dsn) as engine:
            await push(engine, "q", "a")
            assert ids(await pop(engine, "q")) == ["a"]

    asyncio.run(body())
