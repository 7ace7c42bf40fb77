"""Both faces of the client against a real server."""

from __future__ import annotations

import asyncio
import dataclasses
import sys
import tempfile
import time
import uuid
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pydantic
import pytest

from settled.client import (
    CircuitOpen,
    Client,
    InvalidPayload,
    Message,
    Refused,
    Resilience,
    SyncClient,
    Unreachable,
    Unsettled,
)
from settled.server.testing import RunningServer, running_server


class Order(msgspec.Struct):
    id: int
    kind: str = "good"


def run(server: RunningServer, work: Callable[[Client], Awaitable[None]], **options: Any) -> None:
    async def main() -> None:
        async with asyncio.timeout(40), Client(server.url, **options) as client:
            await work(client)

    asyncio.run(main())


def test_the_async_client_pushes_pops_and_acks(server: RunningServer, queue: str) -> None:
    async def work(client: Client) -> None:
        pushed = (
            await client.queue(queue).partition("p").push({"n": 1}, transaction_id="t1", headers={"h": "v"})
        )
        assert (pushed.status, pushed.transaction_id) == ("queued", "t1")
        again = await client.queue(queue).partition("p").push({"n": 1}, transaction_id="t1")
        assert (again.status, again.message_id) == ("duplicate", pushed.message_id)
        [message] = await client.queue(queue).pop()
        assert (message.data, message.transaction_id, message.partition) == ({"n": 1}, "t1", "p")
        assert (message.headers, message.queue, message.attempt) == ({"h": "v"}, queue, 1)
        assert message.created_at.tzinfo is not None
        settled = await client.ack(message)
        assert (settled.success, settled.message, settled.lease_released) == (True, "acknowledged", True)
        assert await client.queue(queue).wait(0).pop() == []

    run(server, work)


def test_the_blocking_client_does_the_same(sync: SyncClient, queue: str) -> None:
    results = sync.queue(queue).push_all([1, 2, 3])
    assert [r.status for r in results] == ["queued"] * 3
    messages = sync.queue(queue).batch(3).pop()
    assert [m.data for m in messages] == [1, 2, 3]
    assert [s.success for s in sync.ack_batch(messages)] == [True] * 3
    assert sync.queue(queue).wait(0).pop() == []


def test_typed_payloads_are_encoded_and_decoded(sync: SyncClient, queue: str) -> None:
    orders = sync.queue(queue, Order)
    orders.push(Order(7, "rush"))
    sync.queue(queue).push({"id": "seven"})
    good, bad = orders.batch(2).pop()
    assert good.data == Order(7, "rush")
    assert good.data is good.data
    with pytest.raises(InvalidPayload, match=bad.transaction_id):
        _ = bad.data
    assert bad.raw == b'{"id":"seven"}'


class Person(pydantic.BaseModel):
    name: str
    age: int = 0


@dataclasses.dataclass
class Point:
    x: int


@pytest.mark.parametrize(
    ("payload", "type_"),
    [
        (Person(name="Ada", age=36), Person),
        ([Person(name="Ada")], list[Person]),
        (Point(3), Point),
        (b"\x00\xff", bytes),
        (b"\x00\xff", Any),
        ("grün", str),
        ("grün", Any),
    ],
)
def test_payloads_of_any_type_come_back_as_they_were(
    sync: SyncClient, queue: str, payload: Any, type_: Any
) -> None:
    sync.queue(queue, type_).push(payload)
    [message] = sync.queue(queue, type_).pop()
    assert message.data == payload
    results = sync.transaction().ack(message).queue(f"{queue}-next").push(payload).commit()
    assert [r["success"] for r in results] == [True, True]
    sync.queue(f"{queue}-next", type_).buffer().push(payload)
    sync.flush()
    assert [m.data for m in sync.queue(f"{queue}-next", type_).batch(2).pop()] == [payload] * 2


def test_a_model_that_does_not_validate_is_an_invalid_payload(sync: SyncClient, queue: str) -> None:
    sync.queue(queue).push({"name": "Ada", "age": "old"})
    sync.queue(queue).push(b"\x00")
    for message in sync.queue(queue, Person).batch(2).pop():
        with pytest.raises(InvalidPayload, match=message.transaction_id):
            _ = message.data


def test_a_nacked_message_comes_again_then_goes_to_the_dead_letters(sync: SyncClient, queue: str) -> None:
    orders = sync.queue(queue)
    orders.create(retry_limit=2, retry_delay=0)
    orders.push("x", transaction_id="t")
    [message] = orders.pop()
    assert sync.nack(message, "first").message == "failed_retry"
    [message] = orders.pop()
    assert message.attempt == 2
    assert sync.nack(message, "second").message == "failed_dlq"
    page = orders.get_dlq()
    assert (page.total, page.limit) == (1, 100)
    [letter] = page.messages
    assert (letter.data, letter.error_message, letter.retry_count) == ("x", "second", 2)
    sync.retry_dead_letter(letter.id)
    [message] = orders.pop()
    assert message.data == "x"
    assert sync.reject(message, "never").dlq is True


def test_release_gives_back_without_counting(sync: SyncClient, queue: str) -> None:
    sync.queue(queue).push(1)
    [message] = sync.queue(queue).pop()
    assert sync.release(message).message == "released"
    [again] = sync.queue(queue).pop()
    assert (again.id, again.attempt) == (message.id, 1)


def test_a_lost_lease_raises_unsettled(sync: SyncClient, queue: str) -> None:
    sync.queue(queue).create(lease_time=1)
    sync.queue(queue).push(1)
    [late] = sync.queue(queue).pop()
    [message] = sync.queue(queue).wait(5).pop()
    with pytest.raises(Unsettled) as refused:
        sync.ack(late)
    assert (refused.value.status, refused.value.message) == (409, "invalid_lease")
    sync.extend(message, 30)
    sync.ack(message)
    with pytest.raises(Refused):
        sync.extend(message, 30)


@pytest.mark.parametrize("how", ["nack", "reject", "batch", "transaction"])
def test_an_error_of_any_text_is_recorded(sync: SyncClient, queue: str, how: str) -> None:
    error = "nul \0 and half a character \ud800"
    sync.queue(queue).create(retry_limit=1)
    sync.queue(queue).push(1)
    [message] = sync.queue(queue).pop()
    match how:
        case "nack":
            sync.nack(message, error)
        case "reject":
            sync.reject(message, error)
        case "batch":
            sync.ack_batch([(message, error)])
        case "transaction":
            sync.transaction().nack(message, error=error).commit()
    [letter] = sync.queue(queue).get_dlq().messages
    assert letter.error_message == "nul  and half a character \\ud800"


def test_a_batch_ack_settles_all_or_nothing(sync: SyncClient, queue: str) -> None:
    sync.queue(queue).create(retry_delay=0)
    sync.queue(queue).push_all([1, 2, 3])
    one, two, three = sync.queue(queue).batch(3).pop()
    results = sync.ack_batch([one, (two, "no"), three])
    assert [r.message for r in results] == ["acknowledged", "failed_retry", "acknowledged"]
    [again] = sync.queue(queue).pop()
    assert again.data == 2
    with pytest.raises(Unsettled):
        sync.ack_batch([again, one])
    assert [r.success for r in sync.ack_batch([again, one], atomic=False)] == [True, False]


def test_a_transaction_acks_and_pushes_together(sync: SyncClient, queue: str) -> None:
    sync.queue(queue).push("in")
    [message] = sync.queue(queue).pop()
    results = (
        sync.transaction().ack(message).queue(f"{queue}.next").partition("w").push({"done": True}, 2).commit()
    )
    assert [r["type"] for r in results] == ["ack", "push", "push"]
    assert [m.data for m in sync.queue(f"{queue}.next").batch(5).pop()] == [{"done": True}, 2]
    with pytest.raises(Unsettled):
        sync.transaction().queue(f"{queue}.never").push(1).ack(message).commit()
    assert sync.queue(f"{queue}.never").wait(0).pop() == []


def test_groups_and_where_they_start(sync: SyncClient, queue: str) -> None:
    sync.queue(queue).push("old")
    fresh = sync.queue(queue).group("fresh").from_new().wait(0)
    assert fresh.pop() == []
    sync.queue(queue).push("new")
    assert [m.data for m in fresh.batch(5).pop()] == ["new"]
    assert [m.data for m in sync.queue(queue).group("all").from_all().batch(5).pop()] == ["old", "new"]
    with pytest.raises(Refused, match="subscriptionFrom"):
        sync.queue(queue).group("odd").from_time("soon").pop()
    assert {g["name"] for g in sync.groups() if g["queueName"] == queue} >= {"fresh", "all"}
    sync.seek("all", queue, "beginning")
    assert len(sync.queue(queue).group("all").batch(5).pop()) == 2


def test_consume_calls_back_and_stops_at_the_limit(server: RunningServer, queue: str) -> None:
    async def work(client: Client) -> None:
        jobs = client.queue(queue, Order)
        await jobs.create(retry_delay=0, retry_limit=0)
        await jobs.push_all([Order(1), Order(2, "bad"), Order(3)])
        handled: list[int] = []

        async def handle(message: Message[Order]) -> None:
            handled.append(message.data.id)
            if message.data.kind == "bad":
                raise ValueError("no good")

        async def failed(message: Message[Order], error: Exception) -> None:
            await client.nack(message, str(error))

        count = (
            await jobs.group("w")
            .each()
            .batch(10)
            .limit(3)
            .consume(handle)
            .on_success(client.ack)
            .on_error(failed)
        )
        assert (count, handled) == (3, [1, 2, 3])
        page = await jobs.group("w").get_dlq()
        assert [m.error_message for m in page.messages] == ["no good"]
        assert await jobs.group("w").wait(0).pop() == []

    run(server, work)


def test_consume_goes_on_after_an_error_with_a_nul_and_one_larger_than_a_request(
    server: RunningServer, queue: str
) -> None:
    """Defect Q18."""

    async def work(client: Client) -> None:
        jobs = client.queue(queue, int)
        await jobs.create(retry_limit=1)
        await jobs.push_all([1, 2, 3])
        errors = {1: "a \0 b", 2: "x" * 17_000_000}

        async def handle(message: Message[int]) -> None:
            if message.data in errors:
                raise ValueError(errors[message.data])

        async def failed(message: Message[int], error: Exception) -> None:
            await client.nack(message, str(error))

        consumer = jobs.group("w").limit(3).consume(handle).on_success(client.ack).on_error(failed)
        assert await consumer == 3
        page = await jobs.group("w").get_dlq()
        assert sorted(len(m.error_message or "") for m in page.messages) == [4, 10_000]

    run(server, work)


def test_errors_of_a_batch_are_shortened_together(server: RunningServer, queue: str) -> None:
    """Defect Q18."""

    async def work(client: Client) -> None:
        jobs = client.queue(queue, int)
        await jobs.create(retry_limit=1)
        await jobs.push_all(range(1700))
        messages = await jobs.batch(1700).pop()
        await client.ack_batch([(message, "x" * 10_000) for message in messages])
        assert (await jobs.get_dlq()).total == 1700

    run(server, work)


def test_consume_a_batch_at_a_time_until_idle(server: RunningServer, queue: str) -> None:
    async def work(client: Client) -> None:
        await client.queue(queue).push_all(range(25))
        sizes: list[int] = []

        async def handle(messages: list[Message[int]]) -> None:
            sizes.append(len(messages))

        taken = await client.queue(queue, int).auto_ack().batch(10).idle(0.3).consume(handle)
        assert (taken, sizes) == (25, [10, 10, 5])

    run(server, work)


def test_a_blocking_consumer_runs_plain_functions(sync: SyncClient, queue: str) -> None:
    sync.queue(queue).push_all([1, 2, 3])
    seen: list[int] = []

    def handle(message: Message[int]) -> None:
        seen.append(message.data)
        sync.ack(message)

    assert sync.queue(queue, int).limit(3).consume(handle).run() == 3
    assert seen == [1, 2, 3]


def test_stop_ends_a_consumer_that_waits(server: RunningServer, queue: str) -> None:
    async def work(client: Client) -> None:
        consumption = client.queue(queue).consume(client.ack)
        running = asyncio.ensure_future(consumption.run())
        await asyncio.sleep(0.2)
        started = time.monotonic()
        consumption.stop()
        assert await running == 0
        assert time.monotonic() - started < 10

    run(server, work)


def test_a_handler_that_raises_without_on_error_ends_the_consumer(server: RunningServer, queue: str) -> None:
    async def work(client: Client) -> None:
        await client.queue(queue).push(1)

        async def handle(_: Message[Any]) -> None:
            raise LookupError("mine")

        with pytest.raises(LookupError, match="mine"):
            await client.queue(queue).consume(handle)

    run(server, work)


def test_a_long_handler_keeps_its_lease(server: RunningServer, queue: str) -> None:
    async def work(client: Client) -> None:
        jobs = client.queue(queue)
        await jobs.create(lease_time=1)
        await jobs.push("slow")

        async def handle(message: Message[Any]) -> None:
            await asyncio.sleep(2.5)

        kept = jobs.renew_lease(every=0.3, seconds=2).limit(1).consume(handle).on_success(client.ack)
        assert await kept == 1
        assert await jobs.wait(0).pop() == []

    run(server, work)


def test_buffered_pushes_arrive_in_order_and_flush_waits_for_them(server: RunningServer, queue: str) -> None:
    async def work(client: Client) -> None:
        buffered = client.queue(queue).buffer(count=40, seconds=5)
        for i in range(100):
            assert (await buffered.push(i)).status == "buffered"
        await client.flush()
        seen: list[int] = []
        while len(seen) < 100:
            seen += [m.data for m in await client.queue(queue, int).auto_ack().batch(100).pop()]
        assert seen == list(range(100))
        await client.queue(queue).buffer(seconds=0.05).push("soon")
        assert [m.data for m in await client.queue(queue).pop()] == ["soon"]

    run(server, work)


def test_a_refused_buffered_message_does_not_take_others_with_it(server: RunningServer, queue: str) -> None:
    async def work(client: Client) -> None:
        await client.queue(queue).buffer(count=10, seconds=5).push("good")
        await client.queue(queue).partition("x" * 300).buffer(count=10, seconds=5).push("bad")
        await client.queue(queue).buffer(count=10, seconds=5).push("fine")
        with pytest.raises(Refused, match="1 buffered messages refused"):
            await client.flush()
        assert [m.data for m in await client.queue(queue).batch(5).pop()] == ["good", "fine"]

    run(server, work)


def test_calls_are_retried_while_the_server_is_away() -> None:
    async def work(url: str, data: str) -> None:
        patient = Resilience(retries=40, first_delay=0.1, longest_delay=0.3, threshold=1000)
        async with Client(url, resilience=patient) as client:
            pushing = asyncio.create_task(client.queue("q").push("later", transaction_id="once"))
            await asyncio.sleep(0.3)
            assert not pushing.done()
            port = url.rsplit(":", 1)[1]
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "settled.server.command", "serve", "--port", port, "--data", data
            )
            try:
                assert (await pushing).status == "queued"
                assert [m.data for m in await client.queue("q").pop()] == ["later"]
            finally:
                process.terminate()
                await process.wait()

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as data:
        with running_server(data=data) as server:
            url = server.url
        asyncio.run(asyncio.wait_for(work(url, data), 60))


def test_a_server_that_stays_away_opens_the_circuit() -> None:
    async def work() -> None:
        rules = Resilience(retries=1, first_delay=0.01, threshold=4, open_for=60)
        async with Client("http://127.0.0.1:9", resilience=rules) as client:
            for _ in range(2):
                with pytest.raises(Unreachable):
                    await client.health()
            with pytest.raises(CircuitOpen):
                await client.health()

    asyncio.run(work())


def test_a_4xx_is_not_retried_and_carries_the_servers_words(sync: SyncClient) -> None:
    with pytest.raises(Refused) as refused:
        sync.queue("q" * 300).push(1)
    assert refused.value.status == 400
    assert "items[0].queue" in refused.value.error


def test_names_that_need_encoding(sync: SyncClient) -> None:
    name = f"a/b ü?&{uuid.uuid4().hex}"
    sync.queue(name).partition("p/ü").push("x")
    [message] = sync.queue(name).partition("p/ü").group("g&h").pop()
    assert message.data == "x"
    assert sync.ack(message).success
    sync.queue(name).delete()
