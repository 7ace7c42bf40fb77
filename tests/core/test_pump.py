"""Seed 004 on both drivers; a test that carries a number proves that requirement or criterion."""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
import time
from dataclasses import replace
from typing import Any

import pytest

from settled import (
    App,
    ConfigurationError,
    Defer,
    DontAck,
    Invalid,
    Message,
    Reject,
    Status,
    current_message,
    feature_switch,
)
from settled.clock import SystemClock, VirtualClock
from settled.message import Delivery
from settled.pump import Proactor, Reactor
from settled.settlement import Reject as Rejection
from settled.testing import NotIdle, Rehearsal
from settled.transports import memory
from settled.transports.base import Channel, LeaseLost, Outgoing, Source
from settled.transports.lanes import QueueOptions
from settled.transports.memory import MemoryTransport
from tests.conftest import Order, Stage, raising


def test_ac_1_dont_ack_leaves_the_message_and_the_pump_goes_on(stage: Stage) -> None:
    stage.implicit(lambda o: raising(DontAck("later"))(o) if len(stage.calls) == 1 else None)
    stage.publish(1, 2)
    stage.run()
    stage.rehearsal.assert_settled("m1", "nack", "ack")
    stage.rehearsal.assert_settled("m2", "ack")


@pytest.mark.parametrize("limit", [1, 2, 5])
def test_ac_2_and_fr_5_a_dont_ack_counts_towards_the_unacceptable_limit(stage: Stage, limit: int) -> None:
    stage.implicit(raising(DontAck()), unacceptable_limit=limit)
    stage.publish(1)
    stage.run()
    assert len(stage.calls) == limit
    stage.rehearsal.assert_settled("m1", *["nack"] * limit)


def test_ac_3_and_nfr_2_the_inner_exception_is_logged_with_the_message_and_its_traceback(
    stage: Stage, log: pytest.LogCaptureFixture
) -> None:
    stage.implicit(raising(DontAck("blocked", cause=OSError("disk full"))), unacceptable_limit=1)
    stage.publish(1)
    stage.run()
    warning, error = [r for r in log.records if r.levelno >= logging.WARNING][:2]
    assert (warning.levelname, error.levelname) == ("WARNING", "ERROR")
    assert warning.settled == {  # type: ignore[attr-defined]
        "event": "released",
        "message_id": "m1",
        "channel": "orders",
        "attempt": 1,
        "signal": "DontAck",
        "cause": "blocked",
    }
    assert error.exc_info is not None
    assert repr(error.exc_info[1]) == "OSError('disk full')"
    assert "message_id=m1 channel=orders" in error.getMessage()


def test_ac_4_and_fr_4_the_delay_is_applied_before_the_next_iteration(stage: Stage) -> None:
    times: list[float] = []

    def behave(_: Order) -> None:
        times.append(stage.rehearsal.clock.now())
        if len(times) < 3:
            raise DontAck

    stage.implicit(behave, dont_ack_delay=7.5)
    stage.publish(1)
    stage.run()
    assert [b - a for a, b in itertools.pairwise(times)] == [7.5, 7.5]


def test_nfr_1_the_default_delay_is_a_second(stage: Stage) -> None:
    stage.implicit(raising(DontAck()), unacceptable_limit=4)
    stage.publish(1)
    start = stage.rehearsal.clock.now()
    stage.run()
    assert stage.rehearsal.clock.now() - start == 3


def test_ac_7_both_drivers_settle_alike() -> None:
    script: dict[int, Any] = {
        1: None,
        2: DontAck("d"),
        3: Defer(3),
        4: Reject("r"),
        5: Invalid("i"),
        6: ValueError("v"),
        7: ExceptionGroup("g", [ValueError("v"), Reject("r")]),
        8: ConfigurationError("c"),
    }

    def play(kind: str) -> list[tuple[str, int, str, float]]:
        stage = Stage(kind)

        def behave(order: Order) -> None:
            error = script[order.id]
            if error is not None and sum(call.id == order.id for call in stage.calls) == 1:
                raise error

        stage.implicit(behave)
        stage.publish(*script)
        stage.run()
        return [
            (line.id, line.attempt, type(line.action).__name__, line.at)
            for line in stage.rehearsal.settlements()
        ]

    assert play("reactor") == play("proactor")
    assert len(play("reactor")) > len(script)


def test_ac_8_two_messages_and_limit_two_end_the_pump_and_both_stay(stage: Stage) -> None:
    stage.implicit(raising(DontAck()), unacceptable_limit=2)
    stage.publish(1, 2)
    stage.run()
    assert len(stage.calls) == 2
    assert stage.rehearsal.transport.depth("orders") == 2


@pytest.mark.parametrize("limit", [0, -1])
def test_fr_5_a_limit_of_zero_or_less_blocks_for_ever(stage: Stage, limit: int) -> None:
    stage.implicit(raising(DontAck()), unacceptable_limit=limit)
    stage.publish(1)
    with pytest.raises(NotIdle, match=r"not idle after 50 deliveries; the last one was settled \['nack'\]"):
        stage.run(limit=50)
    assert len(stage.calls) == 50
    assert stage.rehearsal.transport.depth("orders") == 1


@pytest.mark.parametrize("depth", [1, 3])
def test_ac_9_and_fr_8_a_dont_ack_inside_exception_groups_is_handled(stage: Stage, depth: int) -> None:
    error: Exception = DontAck("inside")
    for _ in range(depth):
        error = ExceptionGroup("g", [ValueError("beside it"), error])
    stage.implicit(raising(error), unacceptable_limit=1)
    stage.publish(1)
    stage.run()
    stage.rehearsal.assert_settled("m1", "nack")


def test_every_leaf_of_a_group_is_logged(stage: Stage, log: pytest.LogCaptureFixture) -> None:
    stage.implicit(raising(ExceptionGroup("g", [ValueError("a"), Reject("b")])))
    stage.publish(1)
    stage.run()
    signals = [r.settled["signal"] for r in log.records if hasattr(r, "settled")]
    assert signals == ["ValueError", "Reject"]


def test_fr_9_a_signal_raised_while_the_payload_is_decoded_means_what_it_means(stage: Stage) -> None:
    class Grumpy(Order):
        def __post_init__(self) -> None:
            raise DontAck("the schema registry is away")

    seen: list[Any] = []
    if stage.kind == "proactor":

        async def handle_async(order: Grumpy) -> None:
            seen.append(order)

        stage.app.subscriber("orders", unacceptable_limit=1)(handle_async)
    else:

        def handle(order: Grumpy) -> None:
            seen.append(order)

        stage.app.subscriber("orders", unacceptable_limit=1)(handle)
    stage.publish(1)
    stage.run()
    assert seen == []
    stage.rehearsal.assert_settled("m1", "nack")


def test_ac_10_ac_11_fr_10_and_fr_11_channels_have_a_nack_in_both_forms() -> None:
    transport = MemoryTransport()
    source = Source(channel="orders")
    assert callable(transport.channel(source).nack)
    assert asyncio.iscoroutinefunction(transport.async_channel(source).nack)


class Spy:
    """A channel that notes what is called, in front of a real one."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.inner, name)
        if name in ("ack", "nack", "requeue", "reject"):
            self.calls.append(name)
        return found


def test_ac_12_and_fr_12_the_pump_calls_nack_on_the_channel_and_does_not_ack(stage: Stage) -> None:
    stage.implicit(raising(DontAck()), unacceptable_limit=1)
    stage.publish(1)
    (subscription,) = stage.app.subscriptions
    transport, clock = stage.rehearsal.transport, stage.rehearsal.clock
    if stage.kind == "proactor":
        spy = Spy(transport.async_channel(subscription.source))

        async def main() -> None:
            await Proactor(subscription, spy, clock, until_idle=True).run()  # type: ignore[arg-type]

        asyncio.run(main())
    else:
        spy = Spy(transport.channel(subscription.source))
        Reactor(subscription, spy, clock, until_idle=True).run()  # type: ignore[arg-type]
    assert spy.calls == ["nack"]


def test_fr_2_and_fr_3_dont_ack_is_nack_strike_log_delay_and_go_on(
    stage: Stage, log: pytest.LogCaptureFixture
) -> None:
    stage.implicit(lambda _: raising(DontAck("x"))(_) if len(stage.calls) < 3 else None, unacceptable_limit=3)
    stage.publish(1)
    start = stage.rehearsal.clock.now()
    stage.run()
    stage.rehearsal.assert_settled("m1", "nack", "nack", "ack")
    assert stage.rehearsal.clock.now() - start == 2
    assert sum(r.getMessage().startswith("released") for r in log.records) == 2


def test_ac_17_in_memory_nack_unlocks_and_puts_the_message_back(stage: Stage) -> None:
    stage.implicit(raising(DontAck()), unacceptable_limit=1)
    stage.publish(1)
    stage.run()
    (subscription,) = stage.app.subscriptions
    channel = stage.rehearsal.transport.immediate(subscription.source)
    (again,) = channel.take(10)
    assert (again.id, again.attempt) == ("m1", 1)


def test_nack_of_the_first_of_two_brings_the_first_again_before_the_second(stage: Stage) -> None:
    stage.implicit(lambda _: raising(DontAck())(_) if len(stage.calls) == 1 else None)
    stage.publish(1, 2)
    stage.run()
    assert [call.id for call in stage.calls] == [1, 1, 2]


@pytest.mark.parametrize("lane", ["eu", None])
@pytest.mark.parametrize("buffer", [1, 2, 10])
def test_with_a_buffer_the_next_thing_handled_is_still_the_nacked_message(
    stage: Stage, lane: str | None, buffer: int
) -> None:
    stage.implicit(lambda _: raising(DontAck())(_) if len(stage.calls) < 3 else None, buffer=buffer)
    stage.publish(1, 2, 3, 4, lane=lane)
    stage.run()
    assert [call.id for call in stage.calls] == [1, 1, 1, 2, 3, 4]


@pytest.fixture
def counting(monkeypatch: pytest.MonkeyPatch) -> None:
    """A broker that gives a message up after one delivery, however it was settled."""
    can = replace(memory.CAPABILITIES, max_attempts=1, counts_untried=True)
    monkeypatch.setattr(memory, "CAPABILITIES", can)


@pytest.mark.usefixtures("counting")
def test_what_is_given_back_on_its_last_delivery_is_a_dead_letter(stage: Stage) -> None:
    def behave(message: Message[Order]) -> Any:
        match message.payload.id:
            case 1:
                return message.release()
            case 2:
                return message.nak(5)
            case _:
                raise ConfigurationError("no bank")

    stage.explicit(behave, buffer=10)
    stage.publish(1, 2, 3, 4)
    stage.run()
    assert [call.payload.id for call in stage.calls] == [1, 2, 3]
    assert {dead.id: dead.error for dead in stage.rehearsal.dead_letters("orders")} == {
        "m1": "released on delivery 1; the broker gives a message up after 1",
        "m2": "failed on delivery 1; the broker gives a message up after 1",
        "m3": "ConfigurationError: no attempts left after 1, by the broker's own limit; "
        "ConfigurationError: no bank",
        "m4": "released on delivery 1; the broker gives a message up after 1",
    }


@pytest.mark.parametrize("error", [Defer(5), ValueError("boom")])
def test_on_an_ordered_lane_what_is_buffered_waits_for_a_failed_message(
    stage: Stage, error: Exception
) -> None:
    stage.implicit(lambda o: raising(error)(o) if o.id == 2 and len(stage.calls) == 2 else None, buffer=10)
    stage.publish(1, 2, 3, 4, lane="eu")
    stage.run()
    assert [call.id for call in stage.calls] == [1, 2, 2, 3, 4]


def test_on_a_parked_queue_the_lane_goes_on_without_the_failed_message(stage: Stage) -> None:
    stage.options = QueueOptions(retry="parked")
    stage.implicit(lambda o: raising(Defer(5))(o) if o.id == 2 and len(stage.calls) == 2 else None)
    stage.publish(1, 2, 3, 4, lane="eu")
    stage.run()
    assert [call.id for call in stage.calls] == [1, 2, 3, 4, 2]


def test_other_lanes_go_on_while_one_blocks(stage: Stage) -> None:
    stage.implicit(lambda o: raising(Defer(5))(o) if o.id == 1 and len(stage.calls) < 2 else None, buffer=10)
    stage.publish(1, 2, lane="eu")
    stage.publish(3, 4, lane="us")
    stage.run()
    assert [call.id for call in stage.calls] == [1, 3, 4, 1, 2]


def test_defer_comes_again_after_its_delay_then_dies_when_attempts_run_out(stage: Stage) -> None:
    times: list[float] = []

    def behave(_: Order) -> None:
        times.append(stage.rehearsal.clock.now())
        raise Defer(4, "bank away")

    stage.implicit(behave, requeue_count=3)
    stage.publish(1)
    stage.run()
    assert [b - a for a, b in itertools.pairwise(times)] == [4, 4]
    stage.rehearsal.assert_settled("m1", "requeue", "requeue", "reject")
    (dead,) = stage.rehearsal.dead_letters("orders")
    assert (dead.attempts, dead.error) == (3, "Defer: no attempts left after 3; bank away")


def test_rejects_go_to_the_dead_letter_channel_and_invalid_ones_to_theirs(stage: Stage) -> None:
    stage.implicit(
        lambda o: raising(Reject("r") if o.id == 1 else Invalid("i"))(o), dead_letter="dead", invalid="bad"
    )
    seen: list[tuple[str, int, str, str]] = []

    def note(message: Message[Order]) -> Any:
        headers = message.headers
        seen.append(
            (message.subject, message.payload.id, headers["settled-reason"], headers["settled-error"])
        )
        return message.ack()

    stage.explicit(note, channel="dead")
    stage.explicit(note, channel="bad")
    stage.publish(1, 2)
    stage.run()
    assert seen == [("dead", 1, "delivery error", "r"), ("bad", 2, "unacceptable", "i")]
    assert stage.rehearsal.dead_letters("orders") == []


def test_without_an_invalid_channel_invalid_ones_go_to_the_dead_letter(stage: Stage) -> None:
    stage.implicit(raising(Invalid("i")), dead_letter="dead")
    stage.publish(1)
    stage.run()
    assert stage.rehearsal.transport.depth("dead") == 1


def test_a_dead_letter_that_does_not_decode_stays_where_letters_are_read_and_keeps_its_reason(
    stage: Stage, log: pytest.LogCaptureFixture
) -> None:
    """Defect P15: it became a letter of a letter, and why it had died was overwritten."""
    stage.options = QueueOptions(retry_limit=4)
    stage.implicit(lambda _: None, dead_letter="dead")
    stage.implicit(lambda _: None, channel="dead")
    stage.rehearsal.publish("orders", {"id": "no number"}, id="m1")
    start = stage.rehearsal.clock.now()
    stage.run()
    assert stage.calls == []
    # After 1, 2 and 4 s again; then the queue's own limit ends it, and its first reason is still there.
    stage.rehearsal.assert_settled("m1:__QUEUE_MODE__", "requeue", "requeue", "requeue", "reject")
    assert stage.rehearsal.clock.now() - start == 7
    (dead,) = stage.rehearsal.dead_letters("dead")
    assert dead.headers["settled-subject"] == "orders"
    assert dead.headers["settled-reason"] == "unacceptable"
    assert "a dead letter cannot be decoded here either, and stays; read it as bytes" in log.text


def test_a_message_sent_back_to_its_channel_with_the_headers_of_its_letter_is_rejected_as_any_other(
    stage: Stage,
) -> None:
    stage.implicit(lambda _: None)
    headers = {"settled-reason": "unacceptable", "settled-subject": "orders"}
    stage.rehearsal.publish("orders", {"id": "no number"}, id="m1", headers=headers)
    stage.run()
    stage.rehearsal.assert_settled("m1", "reject")


def test_what_is_released_by_hand_is_paced_as_a_dont_ack_is(stage: Stage) -> None:
    """Defect P4, NFR-1."""
    times: list[float] = []

    def release(message: Message[Order]) -> Any:
        times.append(stage.rehearsal.clock.now())
        return message.release() if len(times) < 4 else message.ack()

    stage.explicit(release)
    stage.publish(1)
    stage.run()
    assert [b - a for a, b in itertools.pairwise(times)] == [1, 1, 1]


def test_what_is_released_by_hand_comes_again_before_what_was_buffered_behind_it(stage: Stage) -> None:
    seen: list[int] = []

    def release(message: Message[Order]) -> Any:
        seen.append(message.payload.id)
        return message.release() if len(seen) == 1 else message.ack()

    stage.explicit(release, buffer=10)
    stage.publish(1, 2, 3)
    stage.run()
    assert seen == [1, 1, 2, 3]


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_handler_of_payloads_that_settles_by_hand_is_counted_as_it_did(kind: str) -> None:
    """Defect P10: it was counted as acknowledged."""
    app = App()

    def handle(order: Order) -> None:
        message = current_message()
        if message is not None and message.attempt == 1:
            message.nak(0)

    async def handle_async(order: Order) -> None:
        message = current_message()
        if message is not None and message.attempt == 1:
            await message.nak(0)

    app.subscriber("orders")(handle if kind == "sync" else handle_async)
    rehearsal = Rehearsal(app)
    rehearsal.publish("orders", Order(1))
    rehearsal.run_until_idle()
    counts = rehearsal.counts
    assert (counts.acked, counts.requeued, counts.received) == (1, 1, 2)


def test_a_message_delivered_more_often_than_the_limit_is_rejected_unseen(stage: Stage) -> None:
    stage.implicit(raising(ValueError("boom")), delivery_limit=3)
    stage.publish(1)
    stage.run()
    assert len(stage.calls) == 3
    stage.rehearsal.assert_settled("m1", "requeue", "requeue", "requeue", "reject")
    (dead,) = stage.rehearsal.dead_letters("orders")
    assert dead.error == "delivered 4 times and not settled for good; the delivery_limit is 3"


def test_what_is_delivered_too_often_is_a_strike_and_the_rest_of_its_batch_goes_back(stage: Stage) -> None:
    stage.implicit(raising(Defer(0)), delivery_limit=1, unacceptable_limit=1, buffer=10)
    stage.publish(1, 2)
    stage.run()
    assert len(stage.calls) == 2
    stage.rehearsal.assert_settled("m1", "requeue", "reject")
    stage.rehearsal.assert_settled("m2", "requeue", "nack")


def test_a_configuration_error_releases_the_message_and_stops(stage: Stage) -> None:
    stage.implicit(raising(ConfigurationError("no database")))
    stage.publish(1, 2)
    stage.run()
    assert len(stage.calls) == 1
    stage.rehearsal.assert_settled("m1", "nack")


def test_acknowledged_on_delivery_runs_the_handler_once(stage: Stage) -> None:
    stage.implicit(raising(ValueError("boom")), ack_on_delivery=True)
    stage.publish(1)
    stage.run()
    stage.rehearsal.assert_settled("m1", "ack")
    assert len(stage.calls) == 1


def test_what_is_acknowledged_on_delivery_is_handled_though_the_pump_is_told_to_stop_meanwhile(
    stage: Stage,
) -> None:
    stage.implicit(lambda _: None, ack_on_delivery=True, buffer=2)
    stage.publish(1, 2)
    (subscription,) = stage.app.subscriptions
    transport, clock = stage.rehearsal.transport, stage.rehearsal.clock
    if stage.kind == "proactor":
        channel = transport.async_channel(subscription.source)

        async def main() -> None:
            pump = Proactor(subscription, channel, clock, until_idle=True)
            acknowledge = channel.ack

            async def ack(delivery: Delivery) -> None:
                await acknowledge(delivery)
                pump.stop()

            channel.ack = ack  # type: ignore[method-assign]
            await pump.run()

        asyncio.run(main())
    else:
        blocking = transport.channel(subscription.source)
        pump = Reactor(subscription, blocking, clock, until_idle=True)
        acknowledge = blocking.ack

        def ack(delivery: Delivery) -> None:
            acknowledge(delivery)
            pump.stop()

        blocking.ack = ack  # type: ignore[method-assign]
        pump.run()
    assert [call.id for call in stage.calls] == [1]


# The window of the limit, and every delay, on a clock of the test's own.


def test_the_window_forgets_old_strikes(stage: Stage) -> None:
    def behave(order: Order) -> None:
        stage.rehearsal.advance(10 if order.id < 4 else 1)
        raise Reject("no")

    stage.implicit(behave, unacceptable_limit=3, unacceptable_window=11)
    stage.publish(1, 2, 3, 4, 5, 6)
    stage.run()
    assert [call.id for call in stage.calls] == [1, 2, 3, 4, 5]


def test_without_a_window_all_strikes_count(stage: Stage) -> None:
    def behave(_: Order) -> None:
        stage.rehearsal.advance(1_000_000)
        raise Reject("no")

    stage.implicit(behave, unacceptable_limit=3)
    stage.publish(1, 2, 3, 4, 5, 6)
    stage.run()
    assert len(stage.calls) == 3


@pytest.mark.parametrize("error", [Reject(), Invalid(), ValueError(), DontAck()])
def test_what_counts_as_a_strike(stage: Stage, error: Exception) -> None:
    stage.implicit(raising(error), unacceptable_limit=1)
    stage.publish(1, 2)
    stage.run()
    assert len(stage.calls) == 1


def test_a_defer_with_attempts_left_is_no_strike(stage: Stage) -> None:
    stage.implicit(lambda _: raising(Defer())(_) if len(stage.calls) < 4 else None, unacceptable_limit=1)
    stage.publish(1)
    stage.run()
    assert len(stage.calls) == 4


# Failing channels.


class Failing:
    """A channel in front of a real one; each call fails as often as it was told to."""

    def __init__(self, inner: Any, **failures: int) -> None:
        self.inner = inner
        self.failures = failures

    def __getattr__(self, name: str) -> Any:
        if self.failures.get(name, 0) > 0:
            self.failures[name] -= 1
            if asyncio.iscoroutinefunction(getattr(self.inner, name)):

                async def fail_async(*args: Any) -> Any:
                    raise ConnectionError(f"{name} failed")

                return fail_async

            def fail(*args: Any) -> Any:
                raise ConnectionError(f"{name} failed")

            return fail
        return getattr(self.inner, name)


def run_on(stage: Stage, **failures: int) -> Any:
    (subscription,) = stage.app.subscriptions
    transport, clock = stage.rehearsal.transport, stage.rehearsal.clock
    if stage.kind == "proactor":
        channel = Failing(transport.async_channel(subscription.source), **failures)

        async def main() -> Proactor:
            pump = Proactor(subscription, channel, clock, until_idle=True)  # type: ignore[arg-type]
            await pump.run()
            return pump

        return asyncio.run(main())
    channel = Failing(transport.channel(subscription.source), **failures)
    pump = Reactor(subscription, channel, clock, until_idle=True)  # type: ignore[arg-type]
    pump.run()
    return pump


def test_a_failed_receive_is_tried_again_after_the_channel_failure_delay(
    stage: Stage, log: pytest.LogCaptureFixture
) -> None:
    stage.implicit(lambda _: None, channel_failure_delay=3)
    stage.publish(1)
    start = stage.rehearsal.clock.now()
    pump = run_on(stage, receive=4)
    assert stage.rehearsal.clock.now() - start == 12
    assert pump.counts.receive_failed == 4
    stage.rehearsal.assert_settled("m1", "ack")
    assert sum("receive failed" in r.getMessage() and r.levelname == "WARNING" for r in log.records) == 4


@pytest.mark.parametrize(
    ("call", "error"),
    [("ack", None), ("nack", DontAck()), ("requeue", Defer(0)), ("reject", Reject())],
)
def test_a_settle_call_that_fails_leaves_the_message_to_the_broker_and_the_pump_lives(
    stage: Stage, log: pytest.LogCaptureFixture, call: str, error: Exception | None
) -> None:
    stage.implicit(lambda o: raising(error)(o) if error and o.id == 1 and len(stage.calls) == 1 else None)
    stage.publish(1, 2)
    pump = run_on(stage, **{call: 1})
    assert pump.counts.settle_failed == 1
    stage.rehearsal.assert_settled("m1")
    stage.rehearsal.assert_settled("m2", "ack")
    assert any("settle failed, left to the broker" in r.getMessage() for r in log.records)
    stage.rehearsal.advance(301)
    stage.run()
    stage.rehearsal.assert_settled("m1", "ack")


def test_counts_are_of_settlements_that_happened(stage: Stage) -> None:
    stage.implicit(lambda o: raising({1: DontAck(), 2: Defer(), 3: Reject()}[o.id])(o) if o.id < 4 and
                   sum(c.id == o.id for c in stage.calls) == 1 else None)  # fmt: skip
    stage.publish(1, 2, 3, 4)
    stage.run()
    counts = stage.rehearsal.counts
    assert (counts.nacked, counts.requeued, counts.rejected, counts.acked) == (1, 1, 1, 3)
    assert counts.received == 6


# Stopping, on the real clock.


def on_real_time(kind: str, app: App, transport: MemoryTransport) -> tuple[Any, threading.Thread]:
    """A pump of the app's only subscription, running in a thread."""
    (subscription,) = app.subscriptions
    ready = threading.Event()
    holder: list[Any] = []

    def reactor() -> None:
        holder.append(Reactor(subscription, transport.channel(subscription.source), SystemClock()))
        ready.set()
        holder[0].run()

    async def proactor() -> None:
        holder.append(Proactor(subscription, transport.async_channel(subscription.source), SystemClock()))
        ready.set()
        await holder[0].run()

    thread = threading.Thread(target=reactor if kind == "reactor" else lambda: asyncio.run(proactor()))
    thread.start()
    ready.wait(5)
    return holder[0], thread


def wait_for(condition: Any) -> None:
    until = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < until, "it did not happen"
        time.sleep(0.005)


def test_a_pause_ends_at_once_when_the_pump_is_told_to_stop(stage: Stage) -> None:
    transport = MemoryTransport()
    stage.app.transport = transport
    stage.implicit(raising(DontAck()), dont_ack_delay=3600)
    stage.app.publish("orders", Order(1))
    pump, thread = on_real_time(stage.kind, stage.app, transport)
    wait_for(lambda: pump.counts.nacked)
    started = time.monotonic()
    pump.stop()
    thread.join(10)
    assert not thread.is_alive()
    assert time.monotonic() - started < 5
    assert (pump.status, pump.why) == (Status.STOPPED, "told to stop")


def test_a_receive_that_waits_ends_at_once_too(stage: Stage) -> None:
    transport = MemoryTransport()
    stage.app.transport = transport
    stage.implicit(lambda _: None, receive_timeout=3600)
    pump, thread = on_real_time(stage.kind, stage.app, transport)
    wait_for(lambda: pump.status is Status.STARTED)
    time.sleep(0.05)
    pump.stop()
    thread.join(10)
    assert not thread.is_alive()


def test_a_waiting_receive_wakes_when_a_message_arrives(stage: Stage) -> None:
    transport = MemoryTransport()
    stage.app.transport = transport
    stage.implicit(lambda _: None, receive_timeout=3600)
    pump, thread = on_real_time(stage.kind, stage.app, transport)
    time.sleep(0.05)
    stage.app.publish("orders", Order(1))
    wait_for(lambda: pump.counts.acked == 1)
    stage.app.publish("orders", Order(2), delay=0.05)
    wait_for(lambda: pump.counts.acked == 2)
    pump.stop()
    thread.join(10)


def test_what_is_buffered_at_the_stop_is_released_in_order(stage: Stage) -> None:
    transport = MemoryTransport()
    stage.app.transport = transport
    entered = threading.Event()
    go_on = threading.Event()

    def behave(_: Order) -> None:
        entered.set()
        go_on.wait(5)

    stage.implicit(behave, buffer=10)
    for number in range(5):
        stage.app.publish("orders", Order(number), lane="eu")
    pump, thread = on_real_time(stage.kind, stage.app, transport)
    entered.wait(5)
    pump.stop()
    go_on.set()
    thread.join(10)
    assert (pump.counts.acked, pump.counts.nacked) == (1, 4)
    (subscription,) = stage.app.subscriptions
    left = transport.immediate(subscription.source).take(10)
    assert [delivery.data for delivery in left] == [
        b'{"id":%d,"kind":"good"}' % number for number in range(1, 5)
    ]


def test_a_cancelled_proactor_releases_what_it_holds() -> None:
    transport = MemoryTransport()
    app = App(transport=transport)

    @app.subscriber("orders", buffer=3)
    async def handle(order: Order) -> None:
        await asyncio.sleep(3600)

    for number in range(3):
        app.publish("orders", Order(number))

    async def main() -> Proactor:
        (subscription,) = app.subscriptions
        pump = Proactor(subscription, transport.async_channel(subscription.source), SystemClock())
        task = asyncio.create_task(pump.run())
        while pump.in_hand is None:
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return pump

    pump = asyncio.run(main())
    assert pump.counts.nacked == 3
    assert pump.status is Status.STOPPED
    (subscription,) = app.subscriptions
    assert len(transport.immediate(subscription.source).take(10)) == 3


def test_a_proactor_cancelled_while_it_acks_leaves_that_message_to_the_broker_and_releases_the_rest() -> None:
    transport = MemoryTransport()
    app = App(transport=transport)

    @app.subscriber("orders", buffer=3)
    async def handle(order: Order) -> None: ...

    for number in range(3):
        app.publish("orders", Order(number))

    async def main() -> Proactor:
        (subscription,) = app.subscriptions
        channel = transport.async_channel(subscription.source)
        acking = asyncio.Event()

        async def ack(_: Delivery) -> None:
            acking.set()
            await asyncio.sleep(3600)

        channel.ack = ack  # type: ignore[method-assign]
        pump = Proactor(subscription, channel, SystemClock())
        task = asyncio.create_task(pump.run())
        await acking.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return pump

    counts = asyncio.run(main()).counts
    # Whether the broker has heard of the ack is not known, so it must not hear of a release.
    assert (counts.acked, counts.settle_failed, counts.nacked) == (0, 1, 2)


def test_a_cancellation_that_a_handler_lets_through_is_an_error_of_its_own() -> None:
    app = App()

    @app.subscriber("orders")
    async def handle(order: Order) -> None:
        task = asyncio.create_task(asyncio.sleep(3600))
        await asyncio.sleep(0)
        task.cancel()
        await task

    rehearsal = Rehearsal(app, QueueOptions(retry_limit=2))
    rehearsal.publish("orders", Order(1), id="m1")
    rehearsal.run_until_idle()
    rehearsal.assert_settled("m1", "requeue", "reject")


def test_keyboard_interrupt_in_a_handler_releases_and_goes_on_up() -> None:
    stage = Stage("reactor")
    stage.implicit(raising(KeyboardInterrupt()))
    stage.publish(1)
    with pytest.raises(KeyboardInterrupt):
        stage.run()
    stage.rehearsal.assert_settled("m1", "nack")


def test_virtual_time_does_not_go_back() -> None:
    with pytest.raises(ValueError, match="time does not go back, got -1"):
        VirtualClock().advance(-1)


def test_a_late_settlement_is_refused_by_the_channel() -> None:
    transport = MemoryTransport(clock=(clock := VirtualClock()))
    transport.put(Outgoing(subject="orders", data=b"1"))
    channel: Channel = transport.channel(Source(channel="orders"))
    (delivery,) = channel.receive(1, 0)
    clock.advance(301)
    for call in (
        lambda: channel.ack(delivery),
        lambda: channel.nack(delivery),
        lambda: channel.requeue(delivery, 0),
        lambda: channel.reject(delivery, Rejection()),
        lambda: channel.extend(delivery),
    ):
        with pytest.raises(LeaseLost):
            call()
    assert transport.depth("orders") == 1


def test_a_rehearsal_raises_what_would_stop_the_app(stage: Stage) -> None:
    stage.implicit(raising(ConfigurationError("no bank")))
    stage.publish(1)
    with pytest.raises(ConfigurationError, match="no bank"):
        stage.rehearsal.run_until_idle()
    app = App()

    @app.subscriber("orders")
    @feature_switch("nobody knows it")
    def handle(order: Order) -> None: ...

    with pytest.raises(ConfigurationError, match="nobody knows it"):
        Rehearsal(app).run_until_idle()
