"""Acknowledging, sending round again and keeping a message, on a real server."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import Callable
from dataclasses import replace

import msgspec
import pytest
from nats.aio.msg import Msg
from nats.js.api import RetentionPolicy

from settled import App, CloudEvent, Message
from settled.transports.nats import feeds
from tests.nats.conftest import Desk, running, until

OnDesk = Callable[..., None]


class Order(msgspec.Struct):
    id: int


def test_an_implicit_handler_acknowledges_by_returning(on_desk: OnDesk) -> None:
    async def test(desk: Desk) -> None:
        app, seen = desk.app(), []

        @app.subscriber(desk.subject(), source=desk.durable())
        async def handle(order: Order) -> None:
            seen.append(order.id)

        for number in range(3):
            await desk.put(b'{"id": %d}' % number)
        async with running(app):
            await until(desk.settled)
        assert seen == [0, 1, 2]
        assert app.status().counts.acked == 3

    on_desk(test)


def test_a_sync_handler_runs_in_its_thread_and_acknowledges(on_desk: OnDesk) -> None:
    async def test(desk: Desk) -> None:
        app, seen = desk.app(), []

        @app.subscriber(desk.subject(), source=desk.durable(), buffer=50)
        def handle(order: Order) -> None:
            seen.append(order.id)

        for number in range(120):
            await desk.put(b'{"id": %d}' % number)
        async with running(app):
            await until(lambda: len(seen) == 120)
        assert await desk.settled()
        assert seen == list(range(120))

    on_desk(test)


def test_an_explicit_handler_settles_and_sees_all_metadata(on_desk: OnDesk) -> None:
    async def test(desk: Desk) -> None:
        app, seen = desk.app(), []

        @app.subscriber(desk.subject(), source=desk.durable())
        async def handle(message: Message[Order]) -> None:
            seen.append((message.metadata, message.id, message.subject, dict(message.headers)))
            if message.attempt == 1:
                await message.nak(0)
            else:
                await message.ack()

        await desk.put(b'{"id": 1}', Nats_Msg_Id="order-1", tenant="t1")
        async with running(app):
            await until(lambda: len(seen) == 2)
            await until(desk.settled)
        first, again = seen
        assert first[1:] == ("order-1", desk.subject(), {"Nats-Msg-Id": "order-1", "tenant": "t1"})
        assert (first[0].stream_sequence, first[0].consumer_sequence) == (1, 1)
        assert (first[0].redelivery_count, first[0].pending, first[0].consumer) == (0, 0, "worker")
        assert abs(first[0].timestamp.timestamp() - time.time()) < 30
        assert (again[0].stream_sequence, again[0].consumer_sequence) == (1, 2)
        assert again[0].redelivery_count == 1

    on_desk(test)


def test_settling_twice_is_safe_and_the_first_counts(on_desk: OnDesk) -> None:
    async def test(desk: Desk) -> None:
        app, attempts = desk.app(), []

        @app.subscriber(desk.subject(), source=desk.durable(ack_wait=1))
        async def handle(message: Message[Order]) -> None:
            attempts.append(message.attempt)
            await message.ack()
            await message.ack()
            await message.nak(0)

        await desk.put(b'{"id": 1}')
        async with running(app):
            await until(desk.settled)
            await asyncio.sleep(1.3)
        assert attempts == [1]

    on_desk(test)


def test_an_ack_stands_though_the_handler_raises_after_it(on_desk: OnDesk) -> None:
    async def test(desk: Desk) -> None:
        app, attempts = desk.app(), []

        @app.subscriber(desk.subject(), source=desk.durable(ack_wait=1))
        async def handle(message: Message[Order]) -> None:
            attempts.append(message.attempt)
            await message.ack()
            raise RuntimeError("too late")

        await desk.put(b'{"id": 1}')
        async with running(app):
            await until(desk.settled)
            await asyncio.sleep(1.3)
        assert attempts == [1]

    on_desk(test)


def test_an_implicit_nak_waits_for_the_backoff_of_its_delivery(on_desk: OnDesk) -> None:
    async def test(desk: Desk) -> None:
        app, at = desk.app(random=lambda: 0.5), []

        @app.subscriber(desk.subject(), source=desk.durable(max_deliver=4, backoff=[0.3, 0.6, 0.9]))
        async def handle(order: Order) -> None:
            at.append(time.monotonic())
            if len(at) < 4:
                raise ValueError("not yet")

        await desk.put(b'{"id": 1}')
        async with running(app):
            await until(lambda: len(at) == 4)
        gaps = [later - earlier for earlier, later in itertools.pairwise(at)]
        assert gaps == pytest.approx([0.3, 0.6, 0.9], abs=0.25)
        assert gaps[0] < gaps[1] < gaps[2]

    on_desk(test)


async def _requests(desk: Desk) -> list[dict[str, int]]:
    """The pull requests that the server gets from now on."""
    asked: list[dict[str, int]] = []

    async def note(message: Msg) -> None:
        asked.append(json.loads(message.data))

    await desk.client.subscribe(f"$JS.API.CONSUMER.MSG.NEXT.{desk.stream}.>", cb=note)
    return asked


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_without_a_word_on_the_buffer_a_quick_handler_is_given_many_at_a_time(
    on_desk: OnDesk, kind: str
) -> None:
    """Defect P14: each message was asked for by itself."""

    async def test(desk: Desk) -> None:
        app, seen = desk.app(), []

        def handle(order: Order) -> None:
            seen.append(order.id)

        async def handle_async(order: Order) -> None:
            seen.append(order.id)

        app.subscriber(desk.subject(), source=desk.durable())(handle if kind == "sync" else handle_async)
        for number in range(400):
            await desk.put(b'{"id": %d}' % number)
        asked = await _requests(desk)
        async with running(app):
            await until(desk.settled)
        assert seen == list(range(400))
        assert max(request["batch"] for request in asked) > 16
        assert len(asked) < 100

    on_desk(test)


def test_slow_handlers_of_two_apps_share_what_there_is(on_desk: OnDesk) -> None:
    """Defect P14: what one buffers, the other cannot have."""

    async def test(desk: Desk) -> None:
        seen: dict[int, int] = {0: 0, 1: 0}

        def worker(number: int) -> App:
            app = desk.app()

            @app.subscriber(desk.subject(), source=desk.durable())
            async def handle(order: Order) -> None:
                seen[number] += 1
                await asyncio.sleep(0.2)

            return app

        async with running(worker(0)), running(worker(1)):
            for number in range(12):
                await desk.put(b'{"id": %d}' % number)
            await until(desk.settled)
        assert min(seen.values()) >= 4

    on_desk(test)


def test_a_batch_is_bounded_by_its_bytes_and_a_larger_message_comes_alone(
    on_desk: OnDesk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feeds, "MOST_BYTES", 10_000)

    async def test(desk: Desk) -> None:
        app, seen = desk.app(), []

        @app.subscriber(desk.subject(), source=desk.durable(), buffer=50)
        async def handle(order: Order) -> None:
            seen.append(order.id)

        for number, size in enumerate([10, 4_000, 4_000, 4_000, 30_000, 30_000, 10]):
            await desk.put(b'{"id": %d, "more": "%s"}' % (number, b"x" * size))
        asked = await _requests(desk)
        began = time.monotonic()
        async with running(app):
            await until(desk.settled)
        assert seen == list(range(7))
        assert time.monotonic() - began < 5
        assert {request.get("max_bytes") for request in asked if request["batch"] > 1} == {10_000}
        assert any(request["batch"] == 1 for request in asked)

    on_desk(test)


@pytest.mark.parametrize("explicit", [False, True], ids=["implicit", "explicit"])
def test_on_a_consumer_without_a_backoff_a_failed_message_waits_a_second_then_two(
    on_desk: OnDesk, explicit: bool
) -> None:
    """Defect P1: it was called thousands of times a second."""

    async def test(desk: Desk) -> None:
        app, at = App(f"{desk.url}?create=true"), []

        async def fail(order: Order) -> None:
            at.append(time.monotonic())
            raise ValueError("never")

        async def nak(message: Message[Order]) -> None:
            at.append(time.monotonic())
            await message.nak()

        app.subscriber(desk.subject(), group="worker")(nak if explicit else fail)
        await desk.put(b'{"id": 1}')
        async with running(app):
            await until(lambda: len(at) >= 3)
        assert [later - earlier for earlier, later in itertools.pairwise(at)] == pytest.approx(
            [1, 2], abs=0.5
        )

    on_desk(test)


@pytest.mark.parametrize(("random", "wait"), [(0.0, 0.64), (1.0, 0.96)])
def test_the_backoff_varies_by_the_jitter(on_desk: OnDesk, random: float, wait: float) -> None:
    async def test(desk: Desk) -> None:
        app, at = desk.app(random=lambda: random), []

        @app.subscriber(desk.subject(), source=desk.durable(max_deliver=4, backoff=[0.8]))
        async def handle(order: Order) -> None:
            at.append(time.monotonic())
            if len(at) < 2:
                raise ValueError("not yet")

        await desk.put(b'{"id": 1}')
        async with running(app):
            await until(lambda: len(at) == 2)
        assert at[1] - at[0] == pytest.approx(wait, abs=0.12)

    on_desk(test)


def test_a_nak_with_a_delay_waits_as_asked_also_where_there_is_a_backoff(on_desk: OnDesk) -> None:
    async def test(desk: Desk) -> None:
        app, at = desk.app(), []

        @app.subscriber(desk.subject(), source=desk.durable(max_deliver=5, backoff=[0.5, 1.5, 3]))
        async def handle(message: Message[Order]) -> None:
            at.append(time.monotonic())
            await (message.nak(0.7) if len(at) < 4 else message.ack())

        await desk.put(b'{"id": 1}')
        async with running(app):
            await until(lambda: len(at) == 4)
        gaps = [later - earlier for earlier, later in itertools.pairwise(at)]
        assert gaps == pytest.approx([0.7] * 3, abs=0.25)

    on_desk(test)


def test_a_nak_of_zero_comes_back_at_once_whatever_the_backoff(on_desk: OnDesk) -> None:
    async def test(desk: Desk) -> None:
        app, at = desk.app(), []

        @app.subscriber(desk.subject(), source=desk.durable(max_deliver=4, backoff=[2, 4, 6]))
        async def handle(message: Message[Order]) -> None:
            at.append(time.monotonic())
            await (message.nak(0) if len(at) < 4 else message.ack())

        await desk.put(b'{"id": 1}')
        async with running(app):
            await until(lambda: len(at) == 4)
        assert at[3] - at[0] < 1.5

    on_desk(test)


@pytest.mark.parametrize("kept", [True, False])
def test_a_handler_slower_than_ack_wait_keeps_its_message_unless_told_not_to(
    on_desk: OnDesk, kept: bool
) -> None:
    async def test(desk: Desk) -> None:
        app, began = desk.app(), []

        @app.subscriber(
            desk.subject(), source=replace(desk.durable(ack_wait=0.6), in_progress=kept), performers=2
        )
        async def handle(order: Order) -> None:
            began.append(time.monotonic())
            await asyncio.sleep(2)

        await desk.put(b'{"id": 1}')
        async with running(app):
            await until(lambda: bool(began))
            await asyncio.sleep(1.7)
            assert (len(began) == 1) is kept
            await until(desk.settled)

    on_desk(test)


def test_what_is_buffered_behind_a_slow_handler_is_kept_too(on_desk: OnDesk) -> None:
    async def test(desk: Desk) -> None:
        app, seen = desk.app(), []

        @app.subscriber(desk.subject(), source=desk.durable(ack_wait=0.6), buffer=4)
        def handle(message: Message[Order]) -> None:
            seen.append((message.payload.id, message.attempt))
            time.sleep(0.5)
            message.ack()

        for number in range(4):
            await desk.put(b'{"id": %d}' % number)
        async with running(app):
            await until(desk.settled)
        assert seen == [(0, 1), (1, 1), (2, 1), (3, 1)]

    on_desk(test)


def test_a_message_nobody_settles_comes_again_after_ack_wait(on_desk: OnDesk) -> None:
    async def test(desk: Desk) -> None:
        app, at = desk.app(), []

        @app.subscriber(desk.subject(), source=desk.durable(ack_wait=0.8))
        async def handle(message: Message[Order]) -> None:
            at.append(time.monotonic())
            if message.attempt > 1:
                await message.ack()

        await desk.put(b'{"id": 1}')
        async with running(app):
            await until(lambda: len(at) == 2)
        assert at[1] - at[0] == pytest.approx(0.8, abs=0.4)

    on_desk(test)


def test_a_confirmed_ack_is_at_the_server_when_it_returns(on_desk: OnDesk) -> None:
    async def test(desk: Desk) -> None:
        app, found = desk.app(), []

        @app.subscriber(desk.subject(), source=replace(desk.durable(), confirm=True), buffer=1)
        async def handle(message: Message[Order]) -> None:
            await message.ack()
            found.append((await desk.info()).num_ack_pending)

        for _ in range(20):
            await desk.put(b'{"id": 1}')
        async with running(app):
            await until(lambda: len(found) == 20)
        assert found == [0] * 20

    on_desk(test)


def test_what_is_acknowledged_leaves_a_work_queue(on_desk: OnDesk) -> None:
    async def test(desk: Desk) -> None:
        app = desk.app()

        @app.subscriber(desk.subject(), source=desk.durable(), buffer=10)
        async def handle(order: Order) -> None: ...

        for number in range(10):
            await desk.put(b'{"id": %d}' % number)
        async with running(app):

            async def empty() -> bool:
                return await desk.kept() == 0

            await until(empty)

    on_desk(test, retention=RetentionPolicy.WORK_QUEUE)


def test_cloudevents_travel_in_headers_and_in_one_document(on_desk: OnDesk) -> None:
    async def test(desk: Desk) -> None:
        app, events = desk.app(), []

        @app.subscriber(desk.subject(), source=desk.durable())
        async def handle(message: Message[Order]) -> None:
            events.append((message.event, message.payload))
            await message.ack()

        event = CloudEvent(id="e1", source="/shop", type="order.placed")
        async with running(app):
            await app.publish(desk.subject(), Order(1), event=event)
            await app.publish(desk.subject(), Order(2), event=event, structured=True)
            await until(lambda: len(events) == 2)
        assert [found.type for found, _ in events] == ["order.placed"] * 2
        assert [order.id for _, order in events] == [1, 2]

    on_desk(test)
