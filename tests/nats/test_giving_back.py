"""Messages that are given back: in the old order, and at no cost to those that nobody has tried."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import msgspec
import pytest

from settled import DontAck, Message, Status, current_message
from tests.nats.conftest import Desk, running, until

OnDesk = Callable[..., None]


class Order(msgspec.Struct):
    id: int


def test_what_is_released_by_hand_goes_back_to_the_server_for_anyone(on_desk: OnDesk) -> None:
    """Defect P4: it was kept, and handled again by the same consumer at once."""

    async def test(desk: Desk) -> None:
        first, second = desk.app(), desk.app()
        seen: list[tuple[str, int]] = []

        @first.subscriber(desk.subject(), source=desk.durable(), dont_ack_delay=30)
        async def release(message: Message[dict[str, int]]) -> None:
            seen.append(("first", message.attempt))
            await message.release()

        @second.subscriber(desk.subject(), source=desk.durable())
        async def ack(message: Message[dict[str, int]]) -> None:
            seen.append(("second", message.attempt))
            await message.ack()

        await desk.put()
        async with running(first):
            await until(lambda: len(seen) == 1)
            async with running(second):
                await until(desk.settled)
        assert seen == [("first", 1), ("second", 2)]
        counts = first.status().counts
        assert (counts.nacked, counts.left, counts.acked) == (1, 0, 0)

    on_desk(test)


def test_dont_ack_gives_the_message_back_and_what_was_behind_it_after_it(on_desk: OnDesk) -> None:
    async def test(desk: Desk) -> None:
        app, seen = desk.app(), []

        @app.subscriber(desk.subject(), source=desk.durable(), buffer=3, dont_ack_delay=0.05)
        async def handle(order: Order) -> None:
            message = current_message()
            assert message is not None
            seen.append((order.id, message.attempt))
            if len(seen) <= 2:
                raise DontAck("not now")

        for number in range(5):
            await desk.put(b'{"id": %d}' % number)
        async with running(app):
            await until(desk.settled)
        assert seen == [(0, 1), (0, 2), (0, 3), (1, 1), (2, 1), (3, 1), (4, 1)]

    on_desk(test)


@pytest.mark.parametrize("push", [False, True])
def test_a_message_that_is_not_acked_to_its_end_costs_those_behind_it_nothing(
    on_desk: OnDesk, push: bool
) -> None:
    async def test(desk: Desk) -> None:
        app, seen = desk.app(), []
        config = {"deliver_subject": f"push.{desk.stream}"} if push else {}

        @app.subscriber(
            desk.subject(), source=desk.durable(max_deliver=3, **config), buffer=10, dont_ack_delay=0.05
        )
        async def handle(order: Order) -> None:
            message = current_message()
            assert message is not None
            seen.append((order.id, message.attempt))
            if order.id == 0:
                raise DontAck("not now")

        for number in range(20):
            await desk.put(b'{"id": %d}' % number)
        async with running(app):
            await until(desk.settled)
        assert seen == [(0, 1), (0, 2), (0, 3), *((number, 1) for number in range(1, 20))]
        (letter,) = await desk.letters()
        assert letter.data == b'{"id": 0}'

    on_desk(test)


def test_what_a_stopped_pump_had_buffered_goes_to_others_though_the_app_runs_on(on_desk: OnDesk) -> None:
    async def test(desk: Desk) -> None:
        app, other, seen = desk.app(), desk.app(), []

        @app.subscriber(desk.subject(), source=desk.durable(ack_wait=60), buffer=5, unacceptable_limit=1)
        async def fragile(order: Order) -> None:
            raise DontAck("no more of this")

        @app.subscriber(desk.subject("else"), source=desk.durable("else"))
        async def unconcerned(order: Order) -> None: ...

        @other.subscriber(desk.subject(), source=desk.durable(ack_wait=60), buffer=5)
        async def sturdy(order: Order) -> None:
            seen.append(order.id)

        for number in range(5):
            await desk.put(b'{"id": %d}' % number)
        async with running(app, wait=False):
            await until(lambda: app.status().subscriptions[0].status is Status.LIMIT_EXCEEDED)
            async with running(other):
                await until(lambda: sorted(seen) == [0, 1, 2, 3, 4])

    on_desk(test)


def test_a_stopped_app_gives_back_what_it_had_buffered(on_desk: OnDesk) -> None:
    async def test(desk: Desk) -> None:
        first, second = desk.app(), desk.app()
        began, seen = asyncio.Event(), []

        @first.subscriber(desk.subject(), source=desk.durable(ack_wait=60), buffer=10)
        async def slow(order: Order) -> None:
            began.set()
            await asyncio.sleep(0.3)

        @second.subscriber(desk.subject(), source=desk.durable(ack_wait=60), buffer=10)
        async def quick(message: Message[Order]) -> None:
            seen.append(message.payload.id)
            await message.ack()

        for number in range(10):
            await desk.put(b'{"id": %d}' % number)
        async with running(first):
            await began.wait()
        started = time.monotonic()
        async with running(second):
            await until(desk.settled)
        assert time.monotonic() - started < 10
        assert sorted(seen) == list(range(1, 10))

    on_desk(test)
