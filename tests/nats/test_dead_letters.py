"""Exactly one dead letter a message, with its body and the reason, and the original settled after it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace

import msgspec
import pytest
from nats.js.api import DiscardPolicy, RetentionPolicy

from settled import App, Invalid, Message, Reject
from settled.transports.nats import DeadLetters
from tests.nats.conftest import Desk, running, until

OnDesk = Callable[..., None]


class Order(msgspec.Struct):
    id: int


async def one_letter(desk: Desk, data: bytes, *words: str, consumer: str = "worker") -> dict[str, str]:
    """Wait for the letter; then be sure that there is no second one, and that the original is settled."""

    async def there() -> bool:
        return bool(await desk.letters(consumer))

    async def empty() -> bool:
        return await desk.kept() == 0

    await until(there)
    await until(empty)
    await asyncio.sleep(0.5)
    (letter,) = await desk.letters(consumer)
    assert letter.data == data
    headers = dict(letter.headers or {})
    assert headers["settled-subject"] == desk.subject()
    assert (headers["settled-stream"], headers["settled-group"]) == (desk.stream, consumer)
    for word in words:
        assert word in headers["settled-error"]
    return headers


def test_a_rejected_message_is_one_dead_letter_with_body_headers_and_reason(on_desk: OnDesk) -> None:
    async def test(desk: Desk) -> None:
        app = desk.app()

        @app.subscriber(desk.subject(), source=desk.durable())
        async def handle(order: Order) -> None:
            raise Reject("no such customer")

        await desk.put(b'{"id": 7}', Nats_Msg_Id="order-7", tenant="t1")
        async with running(app):
            headers = await one_letter(desk, b'{"id": 7}', "no such customer")
        assert (headers["tenant"], headers["settled-id"]) == ("t1", "order-7")
        assert (headers["settled-reason"], headers["settled-attempts"]) == ("delivery error", "1")

    on_desk(test, retention=RetentionPolicy.WORK_QUEUE)


@pytest.mark.parametrize("data", [b"not json", b'{"id": "seven"}', b'{"id": 0}'])
def test_an_invalid_message_is_one_dead_letter_and_never_retried(on_desk: OnDesk, data: bytes) -> None:
    async def test(desk: Desk) -> None:
        app, calls = desk.app(), []

        @app.subscriber(desk.subject(), source=desk.durable())
        async def handle(order: Order) -> None:
            calls.append(order)
            raise Invalid("an id is at least 1")

        await desk.put(data)
        async with running(app):
            headers = await one_letter(desk, data)
        assert headers["settled-reason"] == "unacceptable"
        assert len(calls) == (data == b'{"id": 0}')

    on_desk(test, retention=RetentionPolicy.WORK_QUEUE)


def test_a_message_that_failed_max_deliver_times_is_one_dead_letter_with_the_last_error(
    on_desk: OnDesk,
) -> None:
    async def test(desk: Desk) -> None:
        app, attempts = desk.app(), []

        @app.subscriber(desk.subject(), source=desk.durable(max_deliver=3, backoff=[0.1, 0.1]))
        async def handle(order: Order) -> None:
            attempts.append(order.id)
            raise ValueError("the till is closed")

        await desk.put(b'{"id": 7}')
        async with running(app):
            headers = await one_letter(desk, b'{"id": 7}', "no attempts left after 3", "the till is closed")
        assert attempts == [7, 7, 7]
        assert headers["settled-attempts"] == "3"

    on_desk(test, retention=RetentionPolicy.WORK_QUEUE)


def test_an_explicit_nak_of_the_last_delivery_is_one_dead_letter(on_desk: OnDesk) -> None:
    async def test(desk: Desk) -> None:
        app = desk.app()

        @app.subscriber(desk.subject(), source=desk.durable(max_deliver=2, ack_wait=1))
        async def handle(message: Message[Order]) -> None:
            await message.nak(0)

        await desk.put(b'{"id": 7}')
        async with running(app):
            await one_letter(desk, b'{"id": 7}', "failed on delivery 2", "max_deliver is 2")

    on_desk(test, retention=RetentionPolicy.WORK_QUEUE)


def test_a_terminated_message_is_one_dead_letter_with_the_reason(on_desk: OnDesk) -> None:
    async def test(desk: Desk) -> None:
        app = desk.app()

        @app.subscriber(desk.subject(), source=desk.durable())
        def handle(message: Message[Order]) -> None:
            message.term("sold out")

        await desk.put(b'{"id": 7}')
        async with running(app):
            await one_letter(desk, b'{"id": 7}', "sold out")

    on_desk(test, retention=RetentionPolicy.WORK_QUEUE)


def test_a_message_that_died_without_a_nak_is_one_dead_letter(on_desk: OnDesk) -> None:
    async def test(desk: Desk) -> None:
        app, attempts = desk.app(), []

        @app.subscriber(desk.subject(), source=desk.durable(max_deliver=2, ack_wait=0.4))
        async def handle(message: Message[Order]) -> None:
            attempts.append(message.attempt)

        await desk.put(b'{"id": 7}', tenant="t1")
        async with running(app):
            headers = await one_letter(desk, b'{"id": 7}', "no deliveries left after 2")
        assert attempts == [1, 2]
        assert headers["tenant"] == "t1"

    on_desk(test, retention=RetentionPolicy.WORK_QUEUE)


def test_a_message_that_somebody_else_terminated_is_one_dead_letter(on_desk: OnDesk) -> None:
    async def test(desk: Desk) -> None:
        app = desk.app()

        @app.subscriber(desk.subject("other"), source=desk.durable(filter_subjects=[desk.subject(">")]))
        async def handle(message: Message[Order]) -> None:
            # As a client that knows nothing of us would do it.
            await desk.client.publish(message.metadata.lease or "", b"+TERM by hand")

        await desk.put(b'{"id": 7}')
        async with running(app):

            async def there() -> bool:
                return bool(await desk.letters())

            await until(there)
            await asyncio.sleep(0.3)
        (letter,) = await desk.letters()
        assert letter.data == b'{"id": 7}'
        assert "by hand" in (letter.headers or {})["settled-error"]

    on_desk(test)


def test_what_died_while_nobody_was_there_is_found_at_the_next_start(on_desk: OnDesk) -> None:
    async def test(desk: Desk) -> None:
        app, again = desk.app(), desk.app()

        @app.subscriber(desk.subject(), source=desk.durable(max_deliver=1, ack_wait=0.3))
        async def handle(message: Message[Order]) -> None: ...

        @again.subscriber(desk.subject(), source=desk.durable())
        async def handle_again(message: Message[Order]) -> None:
            await message.ack()

        async with running(app):
            pass
        await desk.put(b'{"id": 7}')
        subscription = await desk.jetstream.pull_subscribe_bind("worker", desk.stream)
        (taken,) = await subscription.fetch(1)
        assert taken.data == b'{"id": 7}'
        with pytest.raises(TimeoutError):
            await subscription.fetch(1, timeout=1)
        assert await desk.letters() == []
        async with running(again):
            await one_letter(desk, b'{"id": 7}', "no deliveries left after 1")

    on_desk(test, retention=RetentionPolicy.WORK_QUEUE)


def test_a_crash_between_letter_and_settlement_does_not_write_a_second_letter(on_desk: OnDesk) -> None:
    async def test(desk: Desk) -> None:
        app, attempts = desk.app(), []

        @app.subscriber(desk.subject(), source=desk.durable(ack_wait=0.5))
        async def handle(message: Message[Order]) -> None:
            attempts.append(message.attempt)
            raise Reject("broken")

        channel = app.transport.async_channel
        lost = []

        def forgetful(source: object) -> object:
            """The first termination is lost on its way, as if the process had died before it."""
            found = channel(source)  # type: ignore[arg-type]
            tell = found._tell  # type: ignore[attr-defined]

            async def once(delivery: object, what: bytes) -> None:
                if what.startswith(b"+TERM") and not lost:
                    lost.append(what)
                else:
                    await tell(delivery, what)

            found._tell = once  # type: ignore[attr-defined]
            return found

        app.transport.async_channel = forgetful  # type: ignore[method-assign, assignment]
        await desk.put(b'{"id": 7}')
        async with running(app):
            await until(lambda: len(attempts) == 2)
            await one_letter(desk, b'{"id": 7}', "broken")
        assert lost

    on_desk(test, retention=RetentionPolicy.WORK_QUEUE)


def test_letters_go_to_the_subjects_the_subscription_names(on_desk: OnDesk) -> None:
    async def test(desk: Desk) -> None:
        app = desk.app()
        dead = f"{desk.stream}-DEAD"
        await desk.jetstream.add_stream(name=dead, subjects=[f"{dead}.*"], duplicate_window=120)

        @app.subscriber(
            desk.subject(), source=desk.durable(), dead_letter=f"{dead}.failed", invalid=f"{dead}.invalid"
        )
        async def handle(order: Order) -> None:
            raise Reject("broken")

        await desk.put(b'{"id": 7}')
        await desk.put(b"nonsense")
        async with running(app):
            await until(desk.settled)
        (failed,) = await desk.all_of(dead, f"{dead}.failed")
        (invalid,) = await desk.all_of(dead, f"{dead}.invalid")
        assert (failed.data, invalid.data) == (b'{"id": 7}', b"nonsense")
        assert await desk.letters() == []

    on_desk(test)


def test_a_letter_that_cannot_be_stored_leaves_the_message_where_it_is(
    on_desk: OnDesk, caplog: pytest.LogCaptureFixture
) -> None:
    async def test(desk: Desk) -> None:
        app, attempts = desk.app(timeout=1), []
        dead = f"{desk.stream}-DEAD"
        await desk.jetstream.add_stream(
            name=dead, subjects=[f"{dead}.x"], max_msgs=1, discard=DiscardPolicy.NEW, duplicate_window=120
        )
        await desk.jetstream.publish(f"{dead}.x", b"full")

        @app.subscriber(desk.subject(), source=desk.durable(ack_wait=0.5), dead_letter=f"{dead}.x")
        async def handle(message: Message[Order]) -> None:
            attempts.append(message.attempt)
            raise Reject("broken")

        await desk.put(b'{"id": 7}')
        async with running(app):
            await until(lambda: len(attempts) >= 2)
            assert await desk.kept() == 1
            assert app.status().counts.settle_failed >= 1
            await desk.jetstream.purge_stream(dead)

            async def empty() -> bool:
                return await desk.kept() == 0

            await until(empty)
        (letter,) = await desk.all_of(dead, f"{dead}.x")
        assert letter.data == b'{"id": 7}'

    with caplog.at_level(logging.CRITICAL):
        on_desk(test, retention=RetentionPolicy.WORK_QUEUE)


def test_two_consumers_of_a_stream_each_have_their_own_letter(on_desk: OnDesk) -> None:
    async def test(desk: Desk) -> None:
        app = desk.app()

        @app.subscriber(desk.subject(), source=desk.durable("one"))
        async def first(order: Order) -> None:
            raise Reject("one says no")

        @app.subscriber(desk.subject(), source=desk.durable("two"))
        async def second(order: Order) -> None:
            raise Reject("two says no")

        async with running(app):
            await desk.put(b'{"id": 7}')
            await one_letter(desk, b'{"id": 7}', "one says no", consumer="one")
            await one_letter(desk, b'{"id": 7}', "two says no", consumer="two")

    on_desk(test, retention=RetentionPolicy.INTEREST)


def test_without_advisories_nothing_of_the_kind_is_made(on_desk: OnDesk) -> None:
    async def test(desk: Desk) -> None:
        settings = DeadLetters(stream=f"{desk.stream}-DL", subject=f"dl.{desk.stream}", advisories=None)
        app = desk.app(dead_letters=settings)

        @app.subscriber(desk.subject(), source=desk.durable())
        async def handle(order: Order) -> None:
            raise Reject("broken")

        await desk.put(b'{"id": 7}')
        async with running(app):
            await until(desk.settled)
        (letter,) = await desk.all_of(f"{desk.stream}-DL", f"dl.{desk.stream}.>")
        assert letter.data == b'{"id": 7}'
        assert replace(settings, replicas=3).replicas == 3

    on_desk(test)


@pytest.mark.parametrize("retention", [RetentionPolicy.LIMITS, RetentionPolicy.WORK_QUEUE])
def test_a_message_that_fills_the_server_by_itself_is_not_lost_and_costs_nobody_the_connection(
    on_desk: OnDesk, retention: RetentionPolicy, caplog: pytest.LogCaptureFixture
) -> None:
    async def test(desk: Desk) -> None:
        app, handled = desk.app(), []

        @app.subscriber(desk.subject(), source=desk.durable(ack_wait=1))
        async def handle(body: bytes) -> None:
            handled.append(body[:1])
            raise Reject("no such customer")

        await desk.put(b"x" * (1024 * 1024 - 100))
        await desk.put(b"y")
        async with running(app):
            if retention is RetentionPolicy.LIMITS:
                await until(desk.settled)
            else:  # its letter would be all there is of it, and has no room for it
                await until(lambda: handled.count(b"x") > 1)
            letters = await desk.letters()
        if retention is RetentionPolicy.LIMITS:
            assert [one.data or b"" for one in letters] == [b"", b"y"]
            assert (letters[0].headers or {})["settled-error"] == (
                f"no such customer (too large to be copied: message 1 of stream {desk.stream})"
            )
        else:
            assert ([one.data for one in letters], await desk.kept()) == ([b"y"], 1)
            assert "a message must be 1048576 bytes at most (max_payload), got 104" in caplog.text
        assert "lost the connection" not in caplog.text

    on_desk(test, retention=retention)


def test_create_makes_a_stream_for_the_dead_letters_too(on_desk: OnDesk) -> None:
    async def test(desk: Desk) -> None:
        app, to = App(f"{desk.url}?create=true"), f"{desk.stream}-letters"

        @app.subscriber(desk.subject(), group="worker", dead_letter=to)
        async def handle(order: Order) -> None:
            raise Reject("no such customer")

        async def there() -> bool:
            return bool(await desk.all_of(to, to))

        await desk.put(b'{"id": 7}')
        async with running(app):
            await until(there)

    on_desk(test)
