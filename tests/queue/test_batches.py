"""Batches of a pipeline with many failures, settled in a database that has no statistics yet."""

from __future__ import annotations

import asyncio
import time
from uuid import UUID, uuid4

import pytest

from settled.queue.engine import Engine
from settled.queue.errors import Conflict, Fenced
from settled.queue.manifest import Reader
from settled.queue.types import AckItem, PushItem
from tests.queue.helpers import ids, pop, push

MANY = 10_000


def _fill(dsn: str, count: int, **options: object) -> None:
    async def body() -> None:
        async with await Engine.open(dsn) as engine:
            await engine.configure("q", {"retryDelay": 1, "dlqAfterMaxRetries": True, **options})
            await engine.push([PushItem("q", b"1") for _ in range(count)])

    asyncio.run(body())


def _batch(reader: Reader, count: int) -> tuple[int, int, list[int]]:
    """The next batch, when there is one: its number, its lane and the messages in it."""
    until = time.monotonic() + 30
    while (number := reader.claim(count, None)) is None:
        assert time.monotonic() < until
        time.sleep(0.05)
    (lane,) = reader.serve(number)
    return number, lane.lane, [*lane.parked, *range(lane.first, lane.end)]


def _stage(reader: Reader, lane: int, seqs: list[int], outcome: str) -> UUID:
    write = uuid4()
    with reader.link.get().cursor() as cursor:
        cursor.execute(
            "insert into staged_outcome (write, lane_id, first_seq, end_seq, outcome, error, message_id, "
            "transaction_id, created_at, payload) select %s, %s, s, s + 1, %s, 'no', gen_random_uuid(), s, "
            "now(), '1' from unnest(%s::bigint[]) s",
            (write, lane, outcome, seqs),
        )
    return write


def test_many_failures_are_settled_in_a_time_that_grows_with_their_number(dsn: str) -> None:
    _fill(dsn, MANY, retry="parked", retryLimit=3)
    reader = Reader(dsn, "q", "g", str(uuid4()), 60)
    with reader.link:
        reader.link.get().execute("set statement_timeout = '15s'")  # a loop within a loop would take longer
        reader.hold(streaming=False)
        for attempt in (1, 2, 3):
            number, lane, seqs = _batch(reader, MANY)
            assert len(seqs) == MANY
            halves = [_stage(reader, lane, seqs[at::2], "retry") for at in (0, 1)]
            done = reader.settle(number, halves, MANY, 0)
            again = attempt < 3
            assert (done.acked, done.retried, done.dead) == (0, MANY * again, MANY * (not again))
        rows = reader.link.get().execute(
            "select count(distinct id) as ids, count(distinct seq) as seqs, min(attempts) as least, "
            "max(attempts) as most from dead_letter"
        )
        assert rows.fetchall() == [{"ids": MANY, "seqs": MANY, "least": 3, "most": 3}]
        left = reader.link.get().execute("select count(*) as n from exception").fetchall()
        assert left == [{"n": 0}]


def test_a_retry_that_succeeds_is_forgotten_and_the_others_are_not(dsn: str) -> None:
    _fill(dsn, 6, retry="parked", retryLimit=9)
    reader = Reader(dsn, "q", "g", str(uuid4()), 60)
    with reader.link:
        reader.hold(streaming=False)
        number, lane, seqs = _batch(reader, 10)
        reader.settle(number, [_stage(reader, lane, seqs[:4], "retry")], 4, 0)
        number, lane, again = _batch(reader, 10)
        assert again == seqs[:4]
        writes = [_stage(reader, lane, again[:1], "retry"), _stage(reader, lane, again[1:2], "invalid")]
        done = reader.settle(number, writes, 2, 0)
        assert (done.acked, done.retried, done.dead) == (2, 1, 1)
        left = reader.link.get().execute("select seq, attempts from exception").fetchall()
        assert left == [{"seq": seqs[0], "attempts": 2}]


def test_in_order_what_is_held_back_keeps_the_attempts_it_had(dsn: str) -> None:
    _fill(dsn, 4, retryLimit=9)
    reader = Reader(dsn, "q", "g", str(uuid4()), 60)
    with reader.link:
        reader.hold(streaming=False)
        for attempts in (1, 2):
            number, lane, _ = _batch(reader, 10)
            done = reader.settle(number, [_stage(reader, lane, [1], "retry")], 1, 0)
            assert (done.retried, done.released) == (1, 2)
            left = reader.link.get().execute("select seq, attempts from exception").fetchall()
            assert left == [{"seq": 1, "attempts": attempts}]
        held = reader.link.get().execute("select attempts from journal where kind = 'released'").fetchall()
        assert held == [{"attempts": 0}] * 2


def test_what_failed_before_and_is_given_back_keeps_its_attempts(dsn: str) -> None:
    _fill(dsn, 3, retry="parked", retryLimit=9)
    reader = Reader(dsn, "q", "g", str(uuid4()), 60)
    with reader.link:
        reader.hold(streaming=False)
        number, lane, seqs = _batch(reader, 10)
        reader.settle(number, [_stage(reader, lane, seqs[:1], "retry")], 1, 0)
        number, lane, again = _batch(reader, 10)
        assert again == seqs[:1]
        assert reader.settle(number, [_stage(reader, lane, again, "release")], 1, 0).released == 1
        left = reader.link.get().execute("select seq, attempts from exception").fetchall()
        assert left == [{"seq": seqs[0], "attempts": 1}]


def test_what_failed_before_and_is_held_back_keeps_its_attempts(dsn: str) -> None:
    _fill(dsn, 4, retryLimit=9)
    reader = Reader(dsn, "q", "g", str(uuid4()), 60)
    with reader.link:
        reader.hold(streaming=False)
        for failing in (2, 0):
            number, lane, _ = _batch(reader, 10)
            reader.settle(number, [_stage(reader, lane, [failing], "retry")], 1, 0)
            if failing == 2:  # go back to before what failed
                reader.link.get().execute("update consumer set cursor = 0, base = 0")
        left = reader.link.get().execute("select seq, attempts from exception order by seq").fetchall()
        assert left == [{"seq": 0, "attempts": 1}, {"seq": 2, "attempts": 1}]


def test_an_outcome_of_a_message_that_was_not_handed_out_is_refused(dsn: str) -> None:
    _fill(dsn, 3, retry="parked", retryDelay=3_600_000, retryLimit=9)
    reader = Reader(dsn, "q", "g", str(uuid4()), 60)
    with reader.link:
        reader.hold(streaming=False)
        number, lane, seqs = _batch(reader, 10)
        reader.settle(number, [_stage(reader, lane, seqs[:1], "retry")], 1, 0)
        asyncio.run(_one_more(dsn))
        number, lane, _ = _batch(reader, 10)
        with pytest.raises(Conflict, match="1 rows do not belong to batch"):
            reader.settle(number, [_stage(reader, lane, seqs[:1], "retry")], 1, 0)


async def _one_more(dsn: str) -> None:
    async with await Engine.open(dsn) as engine:
        await push(engine, "q", "more")


def test_nobody_else_settles_a_message_of_an_open_batch_until_its_query_is_gone(dsn: str) -> None:
    _fill(dsn, 4, retry="parked")
    reader = Reader(dsn, "q", "g", str(uuid4()), 60)

    async def by_hand(*, works: bool) -> None:
        async with await Engine.open(dsn) as engine:
            partition = (await engine.queue("q")).lanes[0].id
            second = (await engine.messages(queue="q"))[-2].transaction_id
            item = AckItem(second, partition)  # of whoever has it: no lease is named
            assert [r.message for r in await engine.ack([item], "g")] == ["invalid_lease"]
            if works:
                await engine.bury_message(partition, second, group="g")
                assert [d.transaction_id for d in (await engine.dead_letters()).rows] == [second]
            else:
                with pytest.raises(Conflict, match="is in a batch that a Spark query of group 'g' has open"):
                    await engine.bury_message(partition, second, group="g")

    with reader.link:
        reader.hold(streaming=False)
        number, _, seqs = _batch(reader, 10)
        asyncio.run(by_hand(works=False))
        reader.link.get().execute("update consumer set lease_until = now() - interval '1 s'")
        asyncio.run(by_hand(works=True))
        with pytest.raises(Fenced, match="lost the lease of 1 partitions"):
            reader.settle(number, [], 0, 0)
        reader.serve(number)
        assert reader.settle(number, [], 0, 0).acked == 0
        number, _, left = _batch(reader, 10)
        assert [seq for seq in seqs if seq in left] == seqs
        done = reader.settle(number, [], 0, 0)
        assert (done.messages, done.acked) == (3, 3)


def test_an_open_batch_whose_leases_ran_out_is_no_delivery_without_a_verdict(dsn: str) -> None:
    """Defect Q2."""
    _fill(dsn, 5, unsettledLimit=1)
    reader = Reader(dsn, "q", "g", str(uuid4()), 60)
    with reader.link:
        reader.hold(streaming=False)
        _batch(reader, 10)
        for _ in range(3):
            reader.link.get().execute("update consumer set lease_until = clock_timestamp()")
            number, _, seqs = _batch(reader, 10)  # the same one again
            assert (number, seqs) == (1, [0, 1, 2, 3, 4])
        reader.link.get().execute("update consumer set lease_until = clock_timestamp()")

    async def body() -> None:
        async with await Engine.open(dsn) as engine:
            popped = await pop(engine, "q", group="g")
            assert len(ids(popped)) == 5
            assert await engine._core.pool.fetchval("select count(*) from lost_lease") == 0

    asyncio.run(body())


def test_a_lease_that_a_pop_lost_is_counted_when_a_batch_takes_its_messages(dsn: str) -> None:
    """Defect Q2."""
    _fill(dsn, 5)

    async def body() -> None:
        async with await Engine.open(dsn) as engine:
            assert len(ids(await pop(engine, "q", group="g"))) == 5
            await engine._core.pool.fetch("update consumer set lease_until = clock_timestamp()")

    asyncio.run(body())
    with (reader := Reader(dsn, "q", "g", str(uuid4()), 60)).link:
        reader.hold(streaming=False)
        number, lane, seqs = _batch(reader, 10)
        assert seqs == [0, 1, 2, 3, 4]
        reader.settle(number, [_stage(reader, lane, [2], "dead")], 1, 0)
        connection = reader.link.get()
        assert connection.execute("select unsettled from dead_letter").fetchall() == [{"unsettled": 1}]
        assert connection.execute("select times from lost_lease").fetchall() == []
