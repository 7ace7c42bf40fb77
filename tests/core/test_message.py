from __future__ import annotations

import asyncio
import itertools
import sys
import threading
from typing import Any

import pytest

from settled import Backoff, Message
from settled.message import current_message
from settled.pump.settlers import AwaitableSettler, BlockingSettler
from settled.settlement import Leave
from settled.testing import Rehearsal
from settled.transports.base import LeaseLost, Outgoing, Source
from settled.transports.memory import MemoryTransport
from tests.conftest import Order, Stage


def test_payload_subject_data_headers_and_metadata_are_there(stage: Stage) -> None:
    seen: list[Message[Order]] = []

    def behave(message: Message[Order]) -> Any:
        seen.append(message)
        metadata = message.metadata
        assert message.payload == Order(1)
        assert message.subject == "orders"
        assert message.data == b'{"id":1,"kind":"good"}'
        assert message.headers == {"tenant": "acme", "content-type": "application/json"}
        assert metadata.stream_sequence == 1
        assert metadata.consumer_sequence == 1
        assert metadata.timestamp is not None
        assert metadata.timestamp.timestamp() == stage.rehearsal.clock.now()
        assert metadata.pending == 1
        assert metadata.redelivery_count == 0
        assert metadata.consumer == "billing"
        assert metadata.lane == "eu"
        assert metadata.lease
        return message.ack()

    stage.explicit(lambda m: behave(m) if m.payload.id == 1 else m.ack(), group="billing")
    stage.rehearsal.publish("orders", Order(1), id="m1", lane="eu", headers={"tenant": "acme"})
    stage.rehearsal.publish("orders", Order(2), lane="eu")
    stage.run()
    assert len(seen) == 1


def test_headers_are_read_only(stage: Stage) -> None:
    def behave(message: Message[Order]) -> Any:
        with pytest.raises(TypeError):
            message.headers["x"] = "y"  # type: ignore[index]
        return message.ack()

    stage.explicit(behave)
    stage.publish(1)
    stage.run()
    stage.rehearsal.assert_settled("m1", "ack")


@pytest.mark.parametrize(
    ("settle", "history"),
    [
        (lambda m: m.ack(), ["ack"]),
        (lambda m: m.nak() if m.attempt == 1 else m.ack(), ["requeue", "ack"]),
        (lambda m: m.nak(30) if m.attempt == 1 else m.ack(), ["requeue", "ack"]),
        (lambda m: m.term("no such customer"), ["reject"]),
    ],
)
def test_a_handler_settles(stage: Stage, settle: Any, history: list[str]) -> None:
    stage.explicit(settle)
    stage.publish(1)
    stage.run()
    stage.rehearsal.assert_settled("m1", *history)


def test_nak_comes_again_after_its_delay_and_after_the_backoff_without_one(stage: Stage) -> None:
    times: list[float] = []

    def behave(message: Message[Order]) -> Any:
        times.append(stage.rehearsal.clock.now())
        delays = {1: 30.0, 2: None, 3: None, 4: 0.0}
        return message.ack() if message.attempt == 5 else message.nak(delays[message.attempt])

    stage.explicit(behave)
    stage.publish(1)
    stage.run()
    gaps = [b - a for a, b in itertools.pairwise(times)]
    assert gaps == [30, 2, 4, 0]


@pytest.mark.parametrize("explicit", [False, True], ids=["implicit", "explicit"])
def test_the_subscribers_own_backoff_goes_before_that_of_the_broker(stage: Stage, explicit: bool) -> None:
    """Defect P1."""
    times: list[float] = []

    def fail(_: Order) -> None:
        times.append(stage.rehearsal.clock.now())
        if len(times) < 4:
            raise ValueError("not yet")

    def nak(message: Message[Order]) -> Any:
        times.append(stage.rehearsal.clock.now())
        return message.ack() if message.attempt == 4 else message.nak()

    backoff = Backoff(initial=10, maximum=30, jitter=0)
    stage.explicit(nak, backoff=backoff) if explicit else stage.implicit(fail, backoff=backoff)
    stage.publish(1)
    stage.run()
    assert [b - a for a, b in itertools.pairwise(times)] == [10, 20, 30]


def test_term_keeps_the_reason(stage: Stage) -> None:
    stage.explicit(lambda m: m.term("no such customer"))
    stage.publish(1)
    stage.run()
    (dead,) = stage.rehearsal.dead_letters("orders")
    assert dead.error == "no such customer"
    assert dead.data == b'{"id":1,"kind":"good"}'


@pytest.mark.parametrize(
    "twice",
    [
        lambda m: (m.ack(), m.ack()),
        lambda m: (m.ack(), m.nak(5), m.term("no")),
    ],
)
def test_settling_twice_is_safe_and_the_first_counts(stage: Stage, twice: Any) -> None:
    stage.explicit(twice)
    stage.publish(1)
    stage.run()
    stage.rehearsal.assert_settled("m1", "ack")


def test_a_nak_after_which_an_ack_does_nothing(stage: Stage) -> None:
    stage.explicit(lambda m: (m.nak(0), m.ack()) if m.attempt == 1 else (m.ack(),))
    stage.publish(1)
    stage.run()
    stage.rehearsal.assert_settled("m1", "requeue", "ack")


def one_delivery() -> tuple[MemoryTransport, Any]:
    transport = MemoryTransport()
    transport.subscribe("orders")
    transport.put(Outgoing(subject="orders", data=b"1"))
    return transport, transport.immediate(Source(channel="orders"))


def test_one_of_many_threads_settles() -> None:
    _, channel = one_delivery()
    (delivery,) = channel.take(1)
    calls: list[int] = []

    class Counting:
        def ack(self, delivery: Any) -> None:
            calls.append(1)

    message: Message[Any] = Message(delivery, lambda d, h: d, BlockingSettler(Counting()))  # type: ignore[arg-type]
    start = threading.Barrier(8)

    def settle() -> None:
        start.wait()
        message.ack()

    threads = [threading.Thread(target=settle) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert calls == [1]


def test_an_async_message_is_settled_from_another_thread_without_await() -> None:
    transport, _ = one_delivery()

    async def main() -> bool:
        channel = transport.async_channel(Source(channel="orders"))
        (delivery,) = await channel.receive(1, 0)
        message: Message[Any] = Message(delivery, lambda d, h: d, AwaitableSettler(channel))
        await asyncio.to_thread(message.in_progress)
        await asyncio.to_thread(message.ack)
        return message.settled

    assert asyncio.run(main())
    assert transport.depth("orders") == 0


@pytest.mark.filterwarnings("ignore:coroutine")
def test_an_ack_that_is_not_awaited_is_not_one() -> None:
    transport, _ = one_delivery()

    async def main() -> None:
        channel = transport.async_channel(Source(channel="orders"))
        (delivery,) = await channel.receive(1, 0)
        message: Message[Any] = Message(delivery, lambda d, h: d, AwaitableSettler(channel))
        message.ack()
        assert not message.settled
        await message.nak(0)

    asyncio.run(main())
    assert transport.depth("orders") == 1


def test_the_brokers_error_reaches_the_caller_and_the_message_stays_open() -> None:
    transport, channel = one_delivery()
    (delivery,) = channel.take(1)
    message: Message[Any] = Message(
        delivery, lambda d, h: d, BlockingSettler(transport.channel(Source(channel="orders")))
    )
    delivery.lease_id = -1
    with pytest.raises(LeaseLost, match="is not leased to this consumer any more"):
        message.ack()
    assert not message.settled
    with pytest.raises(LeaseLost):
        message.in_progress()


def test_leaving_alone_is_not_an_action() -> None:
    _, channel = one_delivery()
    (delivery,) = channel.take(1)
    with pytest.raises(ValueError, match="is not settled"):
        BlockingSettler(channel).settle(delivery, Leave())


def test_in_progress_starts_the_lease_anew(stage: Stage) -> None:
    def behave(message: Message[Order]) -> Any:
        for _ in range(3):
            stage.rehearsal.advance(200)
            if stage.kind == "reactor":
                message.in_progress()
        return message.ack()

    if stage.kind == "proactor":

        async def handle(message: Message[Order]) -> None:
            for _ in range(3):
                stage.rehearsal.advance(200)
                await message.in_progress()
            await message.ack()

        stage.app.subscriber("orders")(handle)
    else:
        stage.explicit(behave)
    stage.publish(1)
    stage.run()
    stage.rehearsal.assert_settled("m1", "ack")


def test_without_in_progress_the_lease_is_lost(stage: Stage) -> None:
    lost: list[int] = []

    def behave(order: Order) -> None:
        if not lost:
            lost.append(1)
            stage.rehearsal.advance(301)

    stage.implicit(behave)
    stage.publish(1)
    stage.run()
    assert stage.rehearsal.counts.settle_failed == 1
    stage.rehearsal.assert_settled("m1", "ack")


def test_a_payload_that_does_not_decode_never_reaches_the_handler(stage: Stage) -> None:
    stage.explicit(lambda m: m.ack())
    stage.rehearsal.publish("orders", {"id": "seven"}, id="m")
    stage.run()
    assert stage.calls == []
    stage.rehearsal.assert_settled("m", "reject")
    (dead,) = stage.rehearsal.dead_letters("orders")
    assert dead.reason == "unacceptable"
    assert "Expected `int`, got `str` - at `$.id`" in dead.error


def test_a_nak_delay_that_is_none_is_refused(stage: Stage) -> None:
    def behave(message: Message[Order]) -> Any:
        for delay in (-1, float("inf"), float("nan")):
            with pytest.raises(ValueError, match=f"nak: delay must be 0 or more seconds, got {delay}"):
                message.nak(delay)
        return message.ack()

    stage.explicit(behave)
    stage.publish(1)
    stage.run()
    stage.rehearsal.assert_settled("m1", "ack")


def test_the_message_in_hand_is_at_hand_in_implicit_mode(stage: Stage) -> None:
    seen: list[Any] = []

    def behave(order: Order) -> None:
        message = current_message()
        assert message is not None
        seen.append((message.id, message.payload))

    stage.implicit(behave)
    stage.publish(1, 2)
    stage.run()
    assert seen == [("m1", Order(1)), ("m2", Order(2))]
    assert current_message() is None


def test_a_message_weighs_little() -> None:
    _, channel = one_delivery()
    (delivery,) = channel.take(1)
    message: Message[Any] = Message(delivery, lambda d, h: d, None)  # type: ignore[arg-type]
    assert not hasattr(message, "__dict__")
    assert sys.getsizeof(message) + sys.getsizeof(delivery) <= 220


def test_a_message_shows_itself(stage: Stage) -> None:
    shown: list[str] = []
    stage.explicit(lambda m: (shown.append(repr(m)), m.ack())[1:])
    stage.publish(1)
    stage.run()
    assert shown == ["<Message 'm1' on 'orders', attempt 1>"]


def test_a_rehearsal_says_how_it_was_settled() -> None:
    stage = Stage("reactor")
    stage.implicit(lambda _: None)
    stage.publish(1)
    stage.run()
    with pytest.raises(AssertionError, match=r"message 'm1' was settled \['ack'\], not \['reject'\]"):
        stage.rehearsal.assert_settled("m1", "reject")
    assert isinstance(stage.rehearsal, Rehearsal)
