"""The `queen-mq` client from PyPI, unchanged, against our server."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable
from typing import Any

from queen import Queen
from queen.streams import Stream

from settled.server.testing import RunningServer


def run(server: RunningServer, work: Callable[[Any], Awaitable[None]]) -> None:
    async def main() -> None:
        async with asyncio.timeout(60):
            client = Queen(server.url, retry_attempts=1)
            try:
                await work(client)
            finally:
                await client.close()

    asyncio.run(main())


def test_push_pop_and_ack(server: RunningServer, queue: str) -> None:
    async def work(queen: Any) -> None:
        created = await queen.queue(queue).config({"leaseTime": 60}).create()
        assert created["configured"] is True
        results = await queen.queue(queue).partition("p1").push([{"data": {"n": 1}}, {"data": {"n": 2}}])
        assert [r["status"] for r in results] == ["queued", "queued"]
        messages = await queen.queue(queue).batch(2).wait(False).pop()
        assert [m["data"]["n"] for m in messages] == [1, 2]
        assert (await queen.ack(messages[0]))["success"] is True
        assert (await queen.ack(messages[1], True))["success"] is True
        assert await queen.queue(queue).batch(2).wait(False).pop() == []
        late = await queen.ack(messages[1])
        assert late["success"] is False
        assert late["error"]

    run(server, work)


def test_duplicates_are_reported(server: RunningServer, queue: str) -> None:
    async def work(queen: Any) -> None:
        seen: list[str] = []

        async def duplicate(items: list[Any], error: Exception) -> None:
            seen.append(items[0]["transactionId"])

        for _ in range(2):
            await queen.queue(queue).push([{"transactionId": "same", "data": 1}]).on_duplicate(duplicate)
        assert seen == ["same"]

    run(server, work)


def test_pop_with_broker_chosen_sizes_and_commit_on_delivery(server: RunningServer, queue: str) -> None:
    async def work(queen: Any) -> None:
        await queen.queue(queue).push([{"data": i} for i in range(10)])
        assert len(await queen.queue(queue).wait(False).commit_on_delivery().pop()) == 10
        assert await queen.queue(queue).wait(False).pop() == []

    run(server, work)


def test_consume_with_groups_and_acks_after_the_handler(server: RunningServer, queue: str) -> None:
    async def work(queen: Any) -> None:
        for partition in ("a", "b"):
            await queen.queue(queue).partition(partition).push([{"data": i} for i in range(5)])
        for group in ("emails", "analytics"):
            seen: list[int] = []

            async def handle(message: Any, seen: list[int] = seen) -> None:
                seen.append(message["data"])

            consumer = queen.queue(queue).group(group).batch(3).each().limit(10).idle_millis(3000)
            await consumer.consume(handle)
            assert sorted(seen) == sorted([*range(5), *range(5)])
            assert await queen.queue(queue).group(group).batch(10).wait(False).pop() == []

    run(server, work)


def test_consume_in_batches(server: RunningServer, queue: str) -> None:
    async def work(queen: Any) -> None:
        await queen.queue(queue).push([{"data": i} for i in range(20)])
        sizes: list[int] = []

        async def handle(messages: list[Any]) -> None:
            sizes.append(len(messages))

        await queen.queue(queue).batch(10).limit(20).consume(handle)
        assert sizes == [10, 10]
        assert await queen.queue(queue).batch(10).wait(False).pop() == []

    run(server, work)


def test_a_failing_handler_sends_to_the_dead_letters(server: RunningServer, queue: str) -> None:
    async def work(queen: Any) -> None:
        await queen.queue(queue).config({"retryLimit": 2, "retryDelay": 0}).create()
        await queen.queue(queue).push([{"transactionId": "poison", "data": {"x": 1}}])

        async def handle(message: Any) -> None:
            raise ValueError("cannot")

        await queen.queue(queue).group("g").batch(1).limit(2).idle_millis(4000).consume(handle)
        letters = await queen.queue(queue).dlq("g").limit(10).get()
        assert letters["total"] == 1
        [letter] = letters["messages"]
        assert (letter["transactionId"], letter["errorMessage"], letter["data"]) == (
            "poison",
            "cannot",
            {"x": 1},
        )
        assert (await queen.queue(queue).dlq("g").offset(1).get())["messages"] == []
        back = await queen.admin.retry_message(letter["partitionId"], letter["transactionId"])
        assert back["success"] is True
        assert len(await queen.queue(queue).group("g").batch(1).wait(False).pop()) == 1

    run(server, work)


def test_callbacks_settle_by_hand(server: RunningServer, queue: str) -> None:
    async def work(queen: Any) -> None:
        await queen.queue(queue).config({"retryDelay": 0}).create()
        await queen.queue(queue).push([{"data": "ok"}, {"data": "bad"}])

        async def handle(message: Any) -> None:
            if message["data"] == "bad":
                raise ValueError("no")

        async def good(message: Any, result: Any = None) -> None:
            assert (await queen.ack(message, True, {"group": "g"}))["success"] is True

        async def failed(message: Any, error: Exception) -> None:
            assert (await queen.ack(message, "dlq", {"group": "g", "error": str(error)}))["success"] is True

        consumer = queen.queue(queue).group("g").auto_ack(False).batch(2).each().limit(2)
        await consumer.consume(handle).on_success(good).on_error(failed)
        assert (await queen.queue(queue).dlq("g").get())["total"] == 1

    run(server, work)


def test_batch_acks_with_a_status_each(server: RunningServer, queue: str) -> None:
    async def work(queen: Any) -> None:
        await queen.queue(queue).config({"retryDelay": 0}).create()
        await queen.queue(queue).push([{"data": i} for i in range(3)])
        messages = await queen.queue(queue).batch(3).wait(False).pop()
        messages[1]["_status"] = False
        messages[1]["_error"] = "second"
        answer = await queen.ack(messages)
        assert answer["success"] is True
        assert len(answer["results"]) == 3
        [again] = await queen.queue(queue).batch(3).wait(True).timeout_millis(3000).pop()
        assert again["data"] == 1
        refused = await queen.ack([again, messages[0]])
        assert refused["success"] is False
        assert "acknowledgments[1]" in refused["error"]

    run(server, work)


def test_leases_are_renewed(server: RunningServer, queue: str) -> None:
    async def work(queen: Any) -> None:
        await queen.queue(queue).config({"leaseTime": 1}).create()
        await queen.queue(queue).push([{"data": "slow"}])
        [message] = await queen.queue(queue).batch(1).wait(False).pop()
        renewed = await queen.renew(message)
        assert renewed["success"] is True
        assert renewed["newExpiresAt"]
        await asyncio.sleep(1.3)
        assert (await queen.ack(message))["success"] is True
        gone = await queen.renew(message)
        assert gone["success"] is False

        await queen.queue(queue).push([{"data": "slower"}])
        handled: list[Any] = []

        async def handle(each: Any) -> None:
            await asyncio.sleep(1.6)
            handled.append(each["data"])

        await queen.queue(queue).batch(1).limit(1).renew_lease(True, 300).consume(handle)
        assert handled == ["slower"]
        assert await queen.queue(queue).batch(1).wait(False).pop() == []

    run(server, work)


def test_transactions_are_atomic(server: RunningServer, queue: str) -> None:
    async def work(queen: Any) -> None:
        await queen.queue(queue).push([{"data": "in"}])
        [message] = await queen.queue(queue).batch(1).wait(False).pop()
        done = await (
            queen.transaction()
            .ack(message)
            .queue(f"{queue}.out")
            .partition("w")
            .push([{"data": "out"}])
            .commit()
        )
        assert done["success"] is True
        assert [m["data"] for m in await queen.queue(f"{queue}.out").batch(1).wait(False).pop()] == ["out"]
        try:
            await queen.transaction().queue(f"{queue}.never").push([{"data": 1}]).ack(message).commit()
        except Exception as error:
            assert str(error)  # noqa: PT017 - the client raises a bare Exception
        else:
            raise AssertionError("a message cannot be acked twice in a transaction")
        assert await queen.queue(f"{queue}.never").batch(1).wait(False).pop() == []

    run(server, work)


def test_subscription_modes(server: RunningServer, queue: str) -> None:
    async def work(queen: Any) -> None:
        await queen.queue(queue).push([{"data": "old"}])

        def reader(group: str) -> Any:
            return queen.queue(queue).group(group).batch(10).wait(False)

        assert await reader("new").subscription_mode("new").pop() == []
        assert await reader("now").subscription_from("now").pop() == []
        assert [m["data"] for m in await reader("all").subscription_mode("all").pop()] == ["old"]
        past = reader("past").subscription_from("2020-01-01T00:00:00.000Z")
        assert [m["data"] for m in await past.pop()] == ["old"]
        await queen.queue(queue).push([{"data": "fresh"}])
        assert [m["data"] for m in await reader("new").pop()] == ["fresh"]
        assert [m["data"] for m in await reader("now").pop()] == ["fresh"]

    run(server, work)


def test_buffered_pushes_and_namespaces(server: RunningServer, queue: str) -> None:
    async def work(queen: Any) -> None:
        space = f"ns{uuid.uuid4().hex[:8]}"
        await queen.queue(queue).namespace(space).task("t").create()
        for i in range(25):
            await queen.queue(queue).buffer({"message_count": 10, "time_millis": 60_000}).push([{"data": i}])
        await queen.flush_all_buffers()
        messages = await queen.queue().namespace(space).batch(30).wait(False).pop()
        assert [m["data"] for m in messages] == list(range(25))

    run(server, work)


def test_traces_and_admin(server: RunningServer, queue: str) -> None:
    async def work(queen: Any) -> None:
        await queen.queue(queue).push([{"data": 1}])

        async def handle(message: Any) -> None:
            left = await message["trace"]({"traceName": f"trace-{queue}", "data": {"step": 1}})
            assert left["success"] is True

        await queen.queue(queue).group("g").batch(1).limit(1).consume(handle)
        assert len((await queen.admin.get_traces_by_name(f"trace-{queue}"))["traces"]) == 1
        admin = queen.admin
        assert (await admin.health())["status"] == "healthy"
        assert queue in {q["name"] for q in (await admin.list_queues())["queues"]}
        assert (await admin.get_queue(queue))["name"] == queue
        assert (await admin.get_queue_depth(queue, "g"))["pending"] == 0
        assert "g" in {g["name"] for g in (await admin.list_consumer_groups())["groups"]}
        moved = await admin.seek_consumer_group("g", queue, {"toEnd": True})
        assert moved["success"] is True
        assert (await queen.update_consumer_group_timestamp("g", "2024-01-01T00:00:00Z"))["success"] is True
        assert (await queen.delete_consumer_group("g"))["success"] is True
        assert await admin.get_overview()
        assert await admin.get_status()
        assert (await queen.queue(queue).delete())["deleted"] is True

    run(server, work)


def test_streams_count_in_windows_and_keep_state(server: RunningServer, queue: str) -> None:
    async def work(queen: Any) -> None:
        out = f"{queue}.out"
        stream = (
            Stream.from_(queen.queue(queue))
            .filter(lambda message: message["data"]["n"] % 2 == 0)
            .map(lambda message: {"double": message["data"]["n"] * 2})
            .to(queen.queue(out))
        )
        for partition in ("a", "b"):
            items = [{"data": {"n": i}} for i in range(10)]
            await queen.queue(queue).partition(partition).push(items)
        runner = await stream.run(query_id=f"s-{queue}", url=server.url, max_wait_millis=100, batch_size=7)
        try:
            seen: list[int] = []
            while len(seen) < 10:
                popped = await queen.queue(out).batch(50).timeout_millis(5000).commit_on_delivery().pop()
                assert popped, runner.metrics()
                seen += [m["data"]["double"] for m in popped]
        finally:
            await runner.stop()
        assert sorted(seen) == sorted([0, 4, 8, 12, 16] * 2)
        assert runner.metrics()["errorsTotal"] == 0

    run(server, work)


def test_stream_aggregates_keep_their_state_on_the_server(server: RunningServer, queue: str) -> None:
    async def work(queen: Any) -> None:
        out = f"{queue}.sums"
        stream = (
            Stream.from_(queen.queue(queue))
            .window_tumbling(seconds=1, idle_flush_ms=300)
            .aggregate({"count": lambda _: 1, "sum": lambda data: data["n"]})
            .to(queen.queue(out))
        )
        runner = await stream.run(query_id=f"w-{queue}", url=server.url, max_wait_millis=100)
        try:
            await queen.queue(queue).push([{"data": {"n": i}} for i in range(1, 5)])
            total = count = 0
            for _ in range(10):
                popped = await queen.queue(out).batch(50).timeout_millis(3000).commit_on_delivery().pop()
                total += sum(m["data"]["sum"] for m in popped)
                count += sum(m["data"]["count"] for m in popped)
                if count == 4:
                    break
        finally:
            await runner.stop()
        assert (count, total) == (4, 10), runner.metrics()

    run(server, work)
