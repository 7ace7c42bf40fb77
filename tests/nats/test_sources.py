"""Durable and ephemeral consumers, pulled and pushed, and what is said when they do not fit."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable

import msgspec
import pytest
from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy

from settled import ConfigurationError, Message, dont_ack_on_error
from settled.transports.nats import Durable, Ephemeral
from tests.nats.conftest import Desk, running, until

OnDesk = Callable[..., None]


class Order(msgspec.Struct):
    id: int


def test_a_durable_consumer_must_exist(on_desk: OnDesk) -> None:
    async def test(desk: Desk) -> None:
        app = desk.app()

        @app.subscriber(desk.subject(), source=Durable(stream=desk.stream, consumer="absent"))
        async def handle(order: Order) -> None: ...

        with pytest.raises(ConfigurationError, match=r"no consumer 'absent'.*create=True"):
            await app.serve()

    on_desk(test)


def test_create_makes_the_consumer_with_the_config_given_and_leaves_an_existing_one(on_desk: OnDesk) -> None:
    async def test(desk: Desk) -> None:
        for wait in (7, 9):
            app = desk.app()

            @app.subscriber(desk.subject(), source=desk.durable(ack_wait=wait, max_deliver=5))
            async def handle(order: Order) -> None: ...

            async with running(app):
                config = (await desk.info()).config
        assert (config.ack_wait, config.max_deliver, config.filter_subject) == (7, 5, desk.subject())

    on_desk(test)


def test_a_config_the_server_refuses_reaches_the_caller(on_desk: OnDesk) -> None:
    async def test(desk: Desk) -> None:
        app = desk.app()

        @app.subscriber(desk.subject(), source=desk.durable(max_deliver=1, backoff=[1, 2, 3]))
        async def handle(order: Order) -> None: ...

        with pytest.raises(Exception, match="max deliver"):
            await app.serve()

    on_desk(test)


def test_a_group_is_a_durable_consumer_that_exists(on_desk: OnDesk) -> None:
    async def test(desk: Desk) -> None:
        await desk.jetstream.add_consumer(desk.stream, ConsumerConfig(durable_name="billing"))
        app, seen = desk.app(), []

        @app.subscriber(desk.subject(), group="billing")
        async def handle(order: Order) -> None:
            seen.append(order.id)

        await desk.put(b'{"id": 1}')
        async with running(app):
            await until(lambda: seen == [1])

    on_desk(test)


def test_a_subscriber_on_a_subject_its_consumer_does_not_read_is_refused(on_desk: OnDesk) -> None:
    async def test(desk: Desk) -> None:
        await desk.jetstream.add_consumer(
            desk.stream, ConsumerConfig(durable_name="w", filter_subject=desk.subject("new"))
        )
        app = desk.app()

        @app.subscriber(desk.subject("old"), source=Durable(stream=desk.stream, consumer="w"))
        async def handle(order: Order) -> None: ...

        with pytest.raises(ConfigurationError, match=r"reads .*\.new"):
            await app.serve()

    on_desk(test)


def test_an_ephemeral_subscriber_finds_its_stream_by_the_subject(on_desk: OnDesk) -> None:
    async def test(desk: Desk) -> None:
        app, seen = desk.app(), []

        @app.subscriber(desk.subject(), performers=3)
        async def handle(order: Order) -> None:
            seen.append(order.id)

        for number in range(30):
            await desk.put(b'{"id": %d}' % number)
        async with running(app):
            await until(lambda: len(seen) >= 30)
            await asyncio.sleep(0.2)
        assert sorted(seen) == list(range(30))

    on_desk(test)


def test_a_subject_that_no_stream_takes_is_an_error_at_the_start(on_desk: OnDesk) -> None:
    async def test(desk: Desk) -> None:
        app = desk.app()

        @app.subscriber("nowhere.at.all")
        async def handle(order: Order) -> None: ...

        with pytest.raises(ConfigurationError, match=r"no stream takes this subject"):
            await app.serve()

    on_desk(test)


def test_an_ephemeral_consumer_that_is_gone_is_made_anew_where_it_was(on_desk: OnDesk) -> None:
    async def test(desk: Desk) -> None:
        app, seen = desk.app(), []

        @app.subscriber(desk.subject(), source=Ephemeral(), channel_failure_delay=0.1)
        async def handle(message: Message[Order]) -> None:
            seen.append(message.payload.id)
            await (message.nak(1) if seen.count(2) == 1 and message.payload.id == 2 else message.ack())

        for number in range(4):
            await desk.put(b'{"id": %d}' % number)
        async with running(app):
            await until(lambda: len(seen) == 4)
            (info,) = await desk.jetstream.consumers_info(desk.stream)
            await desk.jetstream.delete_consumer(desk.stream, info.name)
            await desk.put(b'{"id": 4}')
            await until(lambda: 4 in seen)
        assert seen.count(2) == 2
        assert seen.count(0) == seen.count(1) == 1

    on_desk(test)


def test_a_push_consumer_with_a_deliver_group_shares_its_messages(on_desk: OnDesk) -> None:
    async def test(desk: Desk) -> None:
        apps, seen = [desk.app(), desk.app()], []
        config = {"deliver_subject": f"push.{desk.stream}", "deliver_group": "workers"}

        for number, app in enumerate(apps):

            @app.subscriber(desk.subject(), source=desk.durable(**config), performers=2)
            async def handle(order: Order, number: int = number) -> None:
                seen.append((number, order.id))
                await asyncio.sleep(0.001)

        async with running(apps[0]), running(apps[1]):
            for number in range(200):
                await desk.put(b'{"id": %d}' % number)
            await until(lambda: len(seen) >= 200)
            await until(desk.settled)
        assert sorted(order for _, order in seen) == list(range(200))
        assert min(Counter(number for number, _ in seen).values()) > 20

    on_desk(test)


def test_a_push_consumer_answers_flow_control_and_naks_come_again(on_desk: OnDesk) -> None:
    async def test(desk: Desk) -> None:
        app, seen = desk.app(), Counter[int]()
        config = {"deliver_subject": f"push.{desk.stream}", "flow_control": True, "idle_heartbeat": 0.5}

        @app.subscriber(desk.subject(), source=desk.durable(max_ack_pending=64, **config), buffer=16)
        async def handle(order: Order) -> None:
            seen[order.id] += 1
            if order.id % 50 == 0 and seen[order.id] == 1:
                raise ValueError("once more")

        for number in range(300):
            await desk.put(b'{"id": %d, "pad": "%s"}' % (number, b"x" * 2000))
        async with running(app):
            await until(desk.settled)
        assert len(seen) == 300
        assert {number for number, count in seen.items() if count == 2} == {0, 50, 100, 150, 200, 250}

    on_desk(test)


def test_a_push_consumer_without_a_group_that_is_read_already_is_refused(on_desk: OnDesk) -> None:
    async def test(desk: Desk) -> None:
        first, second = desk.app(), desk.app()
        for app in (first, second):

            @app.subscriber(desk.subject(), source=desk.durable(deliver_subject=f"push.{desk.stream}"))
            async def handle(order: Order) -> None: ...

        async with running(first):

            async def bound() -> bool:
                return bool((await desk.info()).push_bound)

            await until(bound)
            with pytest.raises(ConfigurationError, match="deliver_group"):
                await second.serve()

    on_desk(test)


@pytest.mark.parametrize("push", [False, True])
def test_a_durable_consumer_that_is_deleted_is_reported_until_it_is_back(on_desk: OnDesk, push: bool) -> None:
    async def test(desk: Desk) -> None:
        app, seen = desk.app(), []
        config = {"deliver_subject": f"push.{desk.stream}"} if push else {}
        source = desk.durable(**config)

        @app.subscriber(desk.subject(), source=source, channel_failure_delay=0.1)
        async def handle(order: Order) -> None:
            seen.append(order.id)

        async with running(app):
            await desk.put(b'{"id": 1}')
            await until(lambda: seen == [1])
            await desk.jetstream.delete_consumer(desk.stream, "worker")
            await until(lambda: app.status().counts.receive_failed > 0, 20)
            assert source.config is not None
            await desk.jetstream.add_consumer(
                desk.stream, source.config.evolve(durable_name="worker", deliver_policy=DeliverPolicy.NEW)
            )
            await desk.put(b'{"id": 2}')
            await until(lambda: 2 in seen)

    on_desk(test)


@pytest.mark.parametrize("how", ["raise", "nak", "release"])
def test_what_fails_under_ack_policy_none_is_not_said_to_come_again(
    on_desk: OnDesk, log: pytest.LogCaptureFixture, how: str
) -> None:
    """Defect P10: it counted as requeued, and was gone."""

    async def test(desk: Desk) -> None:
        app = desk.app()

        async def fail(order: dict[str, int]) -> None:
            raise ValueError("no")

        async def settle(message: Message[dict[str, int]]) -> None:
            await (message.nak() if how == "nak" else message.release())

        source = desk.durable(ack_policy=AckPolicy.NONE)
        app.subscriber(desk.subject(), source=source)(fail if how == "raise" else settle)
        await desk.put()
        async with running(app):
            await until(lambda: app.status().counts.received == 1)
            await until(lambda: "was acknowledged on delivery and does not come again" in log.text)
        counts = app.status().counts
        assert (counts.requeued, counts.nacked, counts.acked) == (0, 0, 0)
        assert counts.settle_failed == (how == "raise")

    on_desk(test)


@pytest.mark.parametrize(("policy", "word"), [(AckPolicy.NONE, "none"), (AckPolicy.ALL, "all")])
def test_what_the_server_ignores_in_silence_is_said_once_at_the_start(
    on_desk: OnDesk, caplog: pytest.LogCaptureFixture, policy: AckPolicy, word: str
) -> None:
    async def test(desk: Desk) -> None:
        app, seen = desk.app(), []

        @app.subscriber(desk.subject(), source=desk.durable(ack_policy=policy), performers=2)
        async def handle(order: Order) -> None:
            seen.append(order.id)

        for number in range(3):
            await desk.put(b'{"id": %d}' % number)
        async with running(app):
            await until(lambda: len(seen) == 3)

    with caplog.at_level(logging.WARNING):
        on_desk(test)
    assert len([r for r in caplog.records if f"AckPolicy {word}" in r.getMessage()]) == 1


def test_blocking_on_a_message_that_the_server_gives_up_is_said_at_the_start(
    on_desk: OnDesk, caplog: pytest.LogCaptureFixture
) -> None:
    async def test(desk: Desk) -> None:
        app = desk.app()

        @app.subscriber(desk.subject(), source=desk.durable(max_deliver=3))
        @dont_ack_on_error
        async def handle(order: Order) -> None: ...

        async with running(app):
            pass

    with caplog.at_level(logging.WARNING):
        on_desk(test)
    assert any("gives a message up after 3 deliveries" in r.getMessage() for r in caplog.records)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Durable(stream="a.b", consumer="c"), "stream must be a name"),
        (lambda: Durable(stream="a", consumer=""), "consumer must be a name"),
        (lambda: Durable(stream="a", consumer="c", config=ConsumerConfig()), "only for create=True"),
        (
            lambda: Durable(stream="a", consumer="c", create=True, config=ConsumerConfig(name="d")),
            "names another consumer, d",
        ),
        (lambda: Durable(stream="a", consumer="c", jitter=1.5), "jitter must be"),
        (lambda: Ephemeral(config=ConsumerConfig(durable_name="d")), "write Durable"),
    ],
)
def test_a_source_that_cannot_be_meant_is_refused(make: Callable[[], object], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        make()


def test_a_source_of_another_kind_is_refused(on_desk: OnDesk) -> None:
    async def test(desk: Desk) -> None:
        app = desk.app()

        @app.subscriber(desk.subject(), source="ORDERS")
        async def handle(order: Order) -> None: ...

        with pytest.raises(ConfigurationError, match="must be a Durable or an Ephemeral, got 'ORDERS'"):
            await app.serve()

    on_desk(test)
