"""What is kept and for how long: retention, waiting too long, dead letters, deletion, inspection."""

from __future__ import annotations

import asyncio
from uuid import uuid4

import pytest

from settled.queue.engine import Engine
from settled.queue.manifest import Reader
from settled.queue.types import BadRequest, Conflict, NotFound, PopRequest, PushItem
from tests.queue.helpers import drain, ids, pop, push, settle, with_engine, with_engines


async def _age(engine: Engine, seconds: int) -> None:
    """As if all messages had been pushed earlier."""
    await engine._core.pool.fetch(f"update segment set created_at = created_at - interval '{seconds} s'")


@with_engine
async def test_retention_removes_old_messages_consumed_or_not(engine: Engine) -> None:
    await engine.configure("q", {"retentionEnabled": True, "retentionSeconds": 1})
    await engine.configure("kept", {"retentionSeconds": 1})
    for queue in ("q", "kept"):
        await push(engine, queue, "old")
    await asyncio.sleep(1.1)
    await push(engine, "q", "young")
    assert (await engine.tidy())["retained"] == 1
    assert await drain(engine, "q") == ["young"]
    assert await drain(engine, "kept") == ["old"]
    assert (await push(engine, "q", "old"))[0].status == "queued"


@with_engine
async def test_completed_retention_waits_for_every_group_and_every_retry(engine: Engine) -> None:
    options = {"retentionEnabled": True, "completedRetentionSeconds": 1, "retry": "parked", "retryDelay": 0}
    await engine.configure("q", options)
    for name in "abc":
        await push(engine, "q", name)
    await drain(engine, "q", "fast")
    slow = await pop(engine, "q", 2, group="slow")
    await settle(engine, slow, "failed", "a")
    await settle(engine, slow, "completed", "b")
    await asyncio.sleep(1.1)
    assert (await engine.tidy())["retained"] == 0
    retried = await pop(engine, "q", 1, group="slow")
    assert ids(retried) == ["a"]
    await settle(engine, retried, "completed")
    assert (await engine.tidy())["retained"] == 2
    assert await drain(engine, "q", "slow") == ["c"]


@with_engine
async def test_what_waits_too_long_goes_to_the_dead_letters_of_the_group_that_did_not_take_it(
    engine: Engine,
) -> None:
    await engine.configure("q", {"maxWaitTimeSeconds": 1})
    await engine.configure("unread", {"maxWaitTimeSeconds": 1})
    await push(engine, "q", "a", "b", headers={"k": "v"})
    await push(engine, "unread", "u")
    assert ids(await pop(engine, "q", 1, group="busy", auto_ack=True)) == ["a"]
    assert (await pop(engine, "q", 1, group="late")).lease_id
    await asyncio.sleep(1.1)
    await push(engine, "q", "c")
    done = await engine.tidy()
    letters = {(d.queue, d.group, d.transaction_id) for d in (await engine.dead_letters()).rows}
    assert letters == {("q", "busy", "b"), ("unread", "__QUEUE_MODE__", "u")}
    assert done["expired"] == 2
    assert (await engine.dead_letters(queue="q")).rows[0].headers == {"k": "v"}
    assert await drain(engine, "q", "busy") == ["c"]


@with_engine
async def test_what_waits_for_a_retry_or_behind_one_does_not_live_longer(engine: Engine) -> None:
    for retry in ("in_order", "parked"):
        options = {"retry": retry, "ttl": 5, "retryDelay": 600_000}
        await engine.configure(retry, options)
        await push(engine, retry, "a", "b", "c")
        await settle(engine, await pop(engine, retry, 1), "failed", "a")
    await _age(engine, 60)
    await push(engine, "parked", "young")
    while (await engine.tidy()).get("expired", 1):
        pass
    for retry in ("in_order", "parked"):
        letters = (await engine.dead_letters(queue=retry)).rows
        assert sorted(letter.transaction_id for letter in letters) == ["a", "b", "c"]
        assert {letter.error for letter in letters} == {"waited longer than ttl (5 s)"}
    assert await drain(engine, "parked") == ["young"]


@with_engine
async def test_a_young_retry_is_not_too_old_because_its_neighbour_is(engine: Engine) -> None:
    await engine.configure("q", {"retry": "parked", "ttl": 30, "retryDelay": 0})
    await push(engine, "q", "old")
    await push(engine, "q", "young")
    taken = await pop(engine, "q", partition="Default")
    await engine._core.pool.fetch(
        "update segment set created_at = created_at - interval '60 s' where first_seq = 0"
    )
    await settle(engine, taken, "failed", "young")
    await settle(engine, taken, "retry", "old")
    assert (await engine.tidy())["expired"] == 1
    assert await drain(engine, "q") == ["young"]


@with_engine
async def test_many_that_are_too_old_do_not_keep_each_other(engine: Engine) -> None:
    await engine.configure("q", {"ttl": 5, "retryDelay": 600_000})
    for number in range(250):
        await push(engine, "q", "a", partition=str(number))
    for _ in range(120):
        await settle(engine, await pop(engine, "q", 1), "failed")
    await _age(engine, 60)
    while (await engine.tidy()).get("expired", 1):
        pass
    assert (await engine.dead_letters(queue="q")).total == 250


@with_engine
async def test_dead_letters_outlive_their_message(engine: Engine) -> None:
    await push(engine, "q", "a")
    await settle(engine, await pop(engine, "q"), "dlq", error="bad")
    assert await engine.clear_queue("q") == 1
    (letter,) = (await engine.dead_letters(queue="q")).rows
    assert letter.payload == b'"a"'


@with_engine
async def test_dead_letters_are_paged_and_filtered_with_a_total(engine: Engine) -> None:
    for group in ("g1", "g2"):
        await push(engine, "q", *(f"{group}-{i}" for i in range(5)))
        await settle(engine, await pop(engine, "q", group=group), "dlq", error="x")
    total = (await engine.dead_letters()).total
    assert total == 15
    first = await engine.dead_letters(group="g2", limit=4)
    second = await engine.dead_letters(group="g2", limit=4, offset=4)
    assert (first.total, len(first.rows), len(second.rows)) == (10, 4, 4)
    assert not {r.id for r in first.rows} & {r.id for r in second.rows}
    beyond = await engine.dead_letters(group="g2", limit=4, offset=100)
    assert (beyond.total, beyond.rows) == (10, [])
    assert (await engine.dead_letters(since="2100-01-01")).total == 0
    assert (await engine.dead_letters(until="2100-01-01", partition="Default")).total == 15
    assert (await engine.dead_letters(queue="nowhere")).total == 0
    with pytest.raises(BadRequest, match="limit"):
        await engine.dead_letters(limit=0)
    with pytest.raises(BadRequest, match="from"):
        await engine.dead_letters(since="whenever")
    assert await engine.delete_dead_letters([r.id for r in first.rows]) == 4
    assert (await engine.dead_letters()).total == 11


@with_engine
async def test_a_dead_letter_is_requeued_once(engine: Engine) -> None:
    await push(engine, "q", "a", partition="p", headers={"h": "1"})
    batch = await pop(engine, "q")
    await settle(engine, batch, "dlq")
    (letter,) = (await engine.dead_letters()).rows
    again = await engine.requeue(letter.id)
    assert again.status == "queued"
    (message,) = (await pop(engine, "q")).messages()
    assert (message.payload, message.headers, message.partition) == (b'"a"', {"h": "1"}, "p")
    assert (await engine.dead_letters()).total == 0
    with pytest.raises(NotFound):
        await engine.requeue(letter.id)
    with pytest.raises(NotFound):
        await engine.retry_message(message.partition_id, "a")
    with pytest.raises(BadRequest):
        await engine.requeue("nonsense")


@with_engines(2)
async def test_a_dead_letter_is_put_back_for_its_own_group(one: Engine, two: Engine) -> None:
    await one.configure("q", {"retryLimit": 2, "retryDelay": 0})
    await push(one, "q", "a", "b")
    assert await drain(one, "q", "other") == ["a", "b"]
    assert await drain(two, "q", "other") == []
    batch = await pop(one, "q", group="mine")
    await settle(one, batch, "dlq", "a")  # the rest of the batch is still out
    waiting = asyncio.create_task(pop(two, "q", group="mine", wait=30))
    (letter,) = (await one.dead_letters()).rows
    again = await one.requeue(letter.id)
    assert (again.transaction_id, again.message_id) == ("a", letter.message_id)
    await settle(one, batch, "completed", "b")
    taken = await waiting
    assert [(m.transaction_id, m.attempts) for m in taken.messages()] == [("a", 0)]
    await settle(two, taken, "failed")  # it has all its attempts again
    retried = await pop(one, "q", group="mine", wait=30)
    assert [(m.transaction_id, m.attempts) for m in retried.messages()] == [("a", 1)]
    await settle(one, retried, "failed")
    (letter,) = (await one.dead_letters()).rows
    assert letter.attempts == 2
    assert await drain(one, "q", "other") == []
    await one.clear_queue("q")  # its message is gone: the copy is pushed, for all
    assert (await one.requeue(letter.id)).transaction_id.startswith("a:")
    assert len(await drain(one, "q", "mine")) == len(await drain(two, "q", "other")) == 1


@with_engine
async def test_a_message_can_be_looked_up_with_what_each_group_did(engine: Engine) -> None:
    await push(engine, "q", *"abc", headers={"h": "1"})
    made = (await engine.push([PushItem("q", b"7")]))[0]
    batch = await pop(engine, "q", 2)
    partition = next(batch.messages()).partition_id
    await settle(engine, batch, "completed", "a")
    await drain(engine, "q", "g")
    view = await engine.message(partition, "a")
    assert (view.payload, view.headers, view.status) == (b'"a"', {"h": "1"}, "completed")
    b = await engine.message(partition, "b")
    assert {s.group: s.status for s in b.groups} == {"__QUEUE_MODE__": "processing", "g": "completed"}
    assert (await engine.message(partition, "c")).status == "pending"
    assert (await engine.message(partition, made.transaction_id)).payload == b"7"
    listed = await engine.messages(queue="q")
    assert [m.transaction_id for m in listed][1:] == ["c", "b", "a"]
    assert [m.transaction_id for m in await engine.messages(queue="q", status="processing")] == ["b"]
    assert len(await engine.messages(limit=2, offset=1)) == 2
    for wrong in ("x", "00000000-0000-4000-8000-000000000000"):
        with pytest.raises(NotFound):
            await engine.message(partition, wrong)


@with_engine
async def test_a_deleted_message_is_not_delivered(engine: Engine) -> None:
    await push(engine, "q", *"abcd")
    partition = (await engine.queue("q")).lanes[0].id
    await engine.delete_message(partition, "a")
    await engine.delete_message(partition, "c")
    with pytest.raises(NotFound):
        await engine.delete_message(partition, "c")
    batch = await pop(engine, "q")
    assert ids(batch) == ["b", "d"]
    assert all(r.success for r in await settle(engine, batch, "completed"))
    assert await drain(engine, "q", "g") == ["b", "d"]
    assert [m.transaction_id for m in await engine.messages(queue="q")] == ["d", "b"]
    assert (await engine.queue("q")).total == 2
    assert [r.status for r in await push(engine, "q", "a", "b")] == ["queued", "duplicate"]  # its id is free
    assert (await engine.message(partition, "a")).seq == 4
    await engine.delete_message(partition, "a")
    assert await drain(engine, "q") == []
    assert (await push(engine, "q", "a"))[0].status == "queued"
    assert await drain(engine, "q", "h") == ["b", "d", "a"]
    with pytest.raises(BadRequest, match="partitionId"):
        await engine.journal(queue="q", transaction_id="a")


@with_engine
async def test_a_message_can_be_buried_by_hand(engine: Engine) -> None:
    await push(engine, "q", *"abc")
    partition = (await engine.queue("q")).lanes[0].id
    await engine.bury_message(partition, "b")
    assert (await engine.dead_letters()).rows[0].transaction_id == "b"
    assert ids(await pop(engine, "q")) == ["a", "c"]
    assert await engine.retry_message(partition, "b") == 1


@with_engine
async def test_a_message_far_behind_others_is_buried_and_what_is_settled_is_not(engine: Engine) -> None:
    await engine.push([PushItem("q", b"1", transaction_id=f"m{i}") for i in range(12_000)])
    partition = (await engine.queue("q")).lanes[0].id
    batch = await pop(engine, "q", 10)
    await settle(engine, batch, "completed", "m3")
    await engine.bury_message(partition, "m11500")
    await engine.bury_message(partition, "m5")  # leased
    await engine.bury_message(partition, "m20", group="other")
    for settled in ("m3", "m5", "m11500"):
        with pytest.raises(NotFound):
            await engine.bury_message(partition, settled)
    rest = [m for m in ids(batch) if m not in ("m3", "m5")]
    assert all(r.success for r in await settle(engine, batch, "completed", *rest))
    letters = {(d.group, d.transaction_id): d.attempts for d in (await engine.dead_letters()).rows}
    mode = "__QUEUE_MODE__"
    assert letters == {(mode, "m11500"): 0, (mode, "m5"): 0, ("other", "m20"): 0}
    assert await drain(engine, "q") == [f"m{i}" for i in range(10, 12_000) if i != 11_500]
    assert (await drain(engine, "q", "other"))[19:21] == ["m19", "m21"]


@with_engine
async def test_a_message_that_waits_for_its_retry_can_be_buried(engine: Engine) -> None:
    for retry in ("in_order", "parked"):
        await engine.configure(retry, {"retry": retry, "retryDelay": 3_600_000})
        await push(engine, retry, *"abc")
        batch = await pop(engine, retry)
        await settle(engine, batch, "failed", "b")
        await settle(engine, batch, "completed", "a", "c")
        assert (await pop(engine, retry)).empty
        await engine.bury_message(next(batch.messages()).partition_id, "b")
        (letter,) = (await engine.dead_letters(queue=retry)).rows
        assert (letter.transaction_id, letter.attempts) == ("b", 1)
        assert (await engine.groups(queue=retry))[0].total_lag == 0
        await push(engine, retry, "d")
        assert ids(await pop(engine, retry)) == ["d"]


@with_engine
async def test_listing_by_status_looks_past_the_newest_messages(engine: Engine) -> None:
    for start in range(0, 300, 10):
        await push(engine, "q", *(f"m{i}" for i in range(start, start + 10)))
    await push(engine, "r", *(f"r{i}" for i in range(5)))
    await settle(engine, await pop(engine, "q", 3), "dlq", "m1", error="bad")
    dead = await engine.messages(queue="q", status="dead_letter", limit=5)
    assert [(m.transaction_id, m.groups[0].attempts) for m in dead] == [("m1", 1)]
    everything = [m.transaction_id for m in await engine.messages(queue="q", limit=1000)]
    assert everything == [f"m{i}" for i in reversed(range(300))]
    paged = [
        m.transaction_id for at in (0, 130) for m in await engine.messages(queue="q", limit=130, offset=at)
    ]
    assert paged == everything[:260]


@with_engine
async def test_a_queue_may_drop_what_would_be_a_dead_letter_and_the_journal_tells(engine: Engine) -> None:
    await engine.configure("q", {"deadLetterQueue": False, "retryLimit": 1, "maxWaitTimeSeconds": 1})
    await push(engine, "q", *"abc")
    batch = await pop(engine, "q", 2)
    failed = await settle(engine, batch, "failed", "a", error="boom")
    rejected = await settle(engine, batch, "dlq", "b", error="bad")
    assert [(r.message, r.dlq, r.attempts) for r in (*failed, *rejected)] == [
        ("failed_dropped", False, 1)
    ] * 2
    await _age(engine, 2)
    while not await engine.tidy():
        await asyncio.sleep(0.01)
    assert (await engine.dead_letters()).total == 0
    assert (await pop(engine, "q")).empty
    dropped = [(e.error, e.attempts) for e in await engine.journal(queue="q") if e.kind == "dropped"]
    assert dropped == [("waited longer than maxWaitTimeSeconds (1 s)", 0), ("bad", 1), ("boom", 1)]


@with_engine
async def test_without_a_dead_letter_after_the_limit_a_message_is_tried_again_for_ever(
    engine: Engine,
) -> None:
    await engine.configure("q", {"dlqAfterMaxRetries": False, "retryLimit": 2, "retryDelay": 0})
    await push(engine, "q", "a")
    for attempt in range(1, 6):
        (result,) = await settle(engine, await pop(engine, "q"), "failed")
        assert (result.message, result.attempts) == ("failed_retry", attempt)
    (result,) = await settle(engine, await pop(engine, "q"), "dlq")
    assert (result.message, result.attempts) == ("failed_dlq", 6)


@with_engine
async def test_a_message_lives_as_long_as_its_ttl(engine: Engine) -> None:
    assert (await engine.configure("q", {})).options.ttl == 0
    await engine.configure("q", {"ttl": 1, "maxWaitTimeSeconds": 500})
    await push(engine, "q", "a")
    await _age(engine, 2)
    await push(engine, "q", "b")
    while not await engine.tidy():
        await asyncio.sleep(0.01)
    (letter,) = (await engine.dead_letters()).rows
    assert (letter.transaction_id, letter.error) == ("a", "waited longer than ttl (1 s)")
    assert letter.attempts == 0


@with_engine
async def test_figures_of_queues_add_up(engine: Engine) -> None:
    await push(engine, "q", *"abcde", partition="p1")
    await push(engine, "q", *"xy", partition="p2")
    batch = await engine.pop(PopRequest("q", "p1", batch=3))
    await settle(engine, batch, "completed", "a")
    await settle(engine, batch, "dlq", "b")
    stats = await engine.queue("q")
    assert (stats.total, stats.pending, stats.processing, stats.completed, stats.dead) == (7, 5, 1, 2, 1)
    assert [lane.name for lane in stats.lanes] == ["p1", "p2"]
    assert [q.name for q in await engine.queues()] == ["q"]
    with pytest.raises(NotFound):
        await engine.queue("nowhere")


@with_engine
async def test_a_deleted_queue_takes_everything_with_it(engine: Engine) -> None:
    await push(engine, "q", "a")
    await settle(engine, await pop(engine, "q"), "dlq")
    assert await engine.delete_queue("q")
    assert not await engine.delete_queue("q")
    assert await engine.queues() == []
    assert (await engine.dead_letters()).total == 0
    assert (await pop(engine, "q")).empty


def test_a_deleted_queue_takes_its_spark_readers_and_batches_with_it(dsn: str) -> None:
    async def body() -> None:
        async with await Engine.open(dsn) as engine:
            for queue in ("q", "kept"):
                await push(engine, queue, "a")
            readers = [Reader(dsn, queue, "spark", str(uuid4()), 60) for queue in ("q", "kept")]
            for reader in readers:
                reader.hold(streaming=False)
                assert reader.claim(10, None) == 1
            assert await engine.delete_queue("q")
            pool = engine._core.pool
            for table in ("reader", "manifest", "manifest_range", "lane", "consumer"):
                assert await pool.fetchval(f"select count(*) from {table}") == 1, table
            with pytest.raises(Conflict, match="deleted"):
                readers[0].serve(1)
            with pytest.raises(Conflict, match="deleted"):
                readers[0].hold(streaming=False)
            assert len(readers[1].serve(1)) == 1
            for reader in readers:
                reader.link.close()

    asyncio.run(body())


@with_engine
async def test_options_are_checked_by_name_and_merged(engine: Engine) -> None:
    first = await engine.configure("q", {"leaseTime": 5, "retry": "parked"}, namespace="n", task="t")
    assert (first.options.lease_time, first.options.retry, first.namespace) == (5, "parked", "n")
    second = await engine.configure("q", {"retryLimit": 7})
    assert (second.options.lease_time, second.options.retry_limit, second.queue_id) == (
        5,
        7,
        first.queue_id,
    )
    whole = await engine.configure("q", {"retryLimit": 8}, replace=True)
    assert (whole.options.lease_time, whole.options.retry, whole.namespace) == (300, "in_order", "")
    for bad in ({"leaseTime": 0}, {"retryLimit": -1}, {"retry": "never"}, {"priority": "high"}, {"colour": 1},
                {"retentionEnabled": 1}, {"maxSize": True}, {"encryptionEnabled": 1}):  # fmt: skip
        with pytest.raises(BadRequest, match=next(iter(bad))):
            await engine.configure("q", bad)


@with_engine
async def test_traces_are_kept_with_their_names(engine: Engine) -> None:
    await push(engine, "q", "a")
    partition = (await engine.queue("q")).lanes[0].id
    await engine.trace(partition, "a", b'{"n":1}', names=["order-1", "eu"], event_type="step")
    await engine.trace(partition, "a", b"2", names=["eu"])
    assert [t.event_type for t in await engine.traces(partition, "a")] == ["step", "info"]
    page = await engine.traces_by_name("eu", limit=1)
    assert (page.total, page.rows[0].data) == (2, b"2")
    names = {n.name: (n.traces, n.messages) for n in (await engine.trace_names()).rows}
    assert names == {"eu": (2, 1), "order-1": (1, 1)}
    with pytest.raises(NotFound):
        await engine.trace(partition, "nobody", b"1")
