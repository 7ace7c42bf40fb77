from __future__ import annotations

import inspect
import itertools
from typing import Any

import pytest
import stamina

from settled import (
    App,
    Backoff,
    ConfigurationError,
    Defer,
    DontAck,
    Invalid,
    Reject,
    defer_on_error,
    dont_ack_on_error,
    feature_switch,
    features,
    reject_on_error,
    retry,
)
from settled.handlers import Features
from tests.conftest import Order, Stage, raising

SIGNALS = [
    DontAck("d"),
    Defer(3, "f"),
    Reject("r"),
    Invalid("i"),
    ExceptionGroup("g", [Reject("in a group")]),
]
ON_ERROR = [dont_ack_on_error, defer_on_error(5), reject_on_error]


# Feature switch.


def test_ac_5_and_fr_6_a_feature_that_is_off_with_dont_ack_blocks_on_the_message(stage: Stage) -> None:
    stage.implicit(lambda _: None, feature_switch(False, dont_ack=True), unacceptable_limit=1)
    stage.publish(1)
    stage.run()
    assert stage.calls == []
    stage.rehearsal.assert_settled("m1", "nack")


def test_a_feature_that_is_off_skips_and_acks(stage: Stage) -> None:
    stage.implicit(lambda _: None, feature_switch(False))
    stage.publish(1)
    stage.run()
    assert stage.calls == []
    stage.rehearsal.assert_settled("m1", "ack")


def test_a_message_is_handled_once_the_feature_is_on_again(stage: Stage) -> None:
    asked: list[int] = []

    def flag() -> bool:
        asked.append(1)
        return len(asked) > 2

    stage.implicit(lambda _: None, feature_switch(flag, dont_ack=True))
    stage.publish(1)
    stage.run()
    stage.rehearsal.assert_settled("m1", "nack", "nack", "ack")
    assert len(stage.calls) == 1


def test_an_async_flag_is_awaited_on_an_async_handler_and_refused_on_a_sync_one() -> None:
    async def flag() -> bool:
        return False

    stage = Stage("proactor")
    stage.implicit(lambda _: None, feature_switch(flag))
    stage.publish(1)
    stage.run()
    assert stage.calls == []
    with pytest.raises(ConfigurationError, match="is async, the handler is not"):
        Stage("reactor").implicit(lambda _: None, feature_switch(flag))


def test_a_flag_by_name_may_change_while_the_app_runs(stage: Stage) -> None:
    features["billing"] = False
    stage.implicit(lambda _: None, feature_switch("billing", dont_ack=True), unacceptable_limit=1)
    stage.publish(1)
    stage.run()
    assert stage.calls == []
    features["billing"] = lambda: True
    stage.run()
    assert len(stage.calls) == 1


def test_an_unknown_flag_is_a_configuration_error_when_the_app_starts(stage: Stage) -> None:
    app = App()

    @app.subscriber("orders")
    @feature_switch("biling")
    def handle(order: Order) -> None: ...

    app.publish("orders", Order(1))
    with pytest.raises(ConfigurationError, match=r"feature 'biling' is unknown; define it before"):
        app.run()


@pytest.mark.parametrize("flag", [None, 3])
def test_a_flag_that_is_none_is_refused_when_declared(flag: Any) -> None:
    with pytest.raises(ConfigurationError, match="must be a bool"):
        feature_switch(flag)
    with pytest.raises(ConfigurationError, match="must be a bool or a callable"):
        Features(x=flag)


def test_a_flag_that_gives_no_bool_stops_the_pump(stage: Stage) -> None:
    stage.implicit(lambda _: None, feature_switch(lambda: "no"))  # type: ignore[arg-type, return-value]
    stage.publish(1, 2)
    stage.run()
    assert stage.calls == []
    stage.rehearsal.assert_settled("m1", "nack")


# On-error decorators.


def test_ac_6_and_fr_7_dont_ack_on_error_keeps_the_original_as_the_cause() -> None:
    error = OSError("disk full")

    @dont_ack_on_error
    def handle(order: Order) -> None:
        raise error

    with pytest.raises(DontAck, match="OSError: disk full") as raised:
        handle(Order(1))
    assert raised.value.cause is error


@pytest.mark.parametrize(
    ("decorate", "history"),
    [
        (dont_ack_on_error, ["nack", "ack"]),
        (defer_on_error(), ["requeue", "ack"]),
        (defer_on_error(5), ["requeue", "ack"]),
        (reject_on_error, ["reject"]),
    ],
)
def test_an_error_becomes_the_signal_asked_for(stage: Stage, decorate: Any, history: list[str]) -> None:
    stage.implicit(lambda _: raising(OSError("x"))(_) if len(stage.calls) == 1 else None, decorate)
    stage.publish(1)
    stage.run()
    stage.rehearsal.assert_settled("m1", *history)


@pytest.mark.parametrize("signal", SIGNALS)
@pytest.mark.parametrize("decorate", [*ON_ERROR, retry(3)])
def test_signals_go_through_untouched(decorate: Any, signal: Exception) -> None:
    @decorate  # type: ignore[untyped-decorator]
    def handle(order: Order) -> None:
        raise signal

    with pytest.raises(type(signal)) as raised:
        handle(Order(1))
    assert raised.value is signal


def test_defer_along_a_backoff_follows_the_brokers_count(stage: Stage) -> None:
    times: list[float] = []

    def behave(_: Order) -> None:
        times.append(stage.rehearsal.clock.now())
        if len(times) < 5:
            raise OSError("x")

    stage.implicit(behave, defer_on_error(Backoff(initial=1, maximum=5, jitter=0)))
    stage.publish(1)
    stage.run()
    assert [b - a for a, b in itertools.pairwise(times)] == [1, 2, 4, 5]


def test_a_reject_keeps_the_errors_text_in_the_dead_letter(stage: Stage) -> None:
    stage.implicit(raising(KeyError("sku")), reject_on_error)
    stage.publish(1)
    stage.run()
    assert stage.rehearsal.dead_letters("orders")[0].error == "KeyError: 'sku'"


# Retry.


def test_retry_calls_again_in_place_and_settles_once(stage: Stage) -> None:
    waits: list[float] = []

    async def sleep_async(seconds: float) -> None:
        waits.append(seconds)

    decorate = retry(4, Backoff(initial=1, maximum=3, jitter=0), sleep=waits.append, sleep_async=sleep_async)
    stage.implicit(lambda _: raising(OSError("x"))(_) if len(stage.calls) < 4 else None, decorate)
    stage.publish(1)
    stage.run()
    stage.rehearsal.assert_settled("m1", "ack")
    assert (len(stage.calls), waits) == (4, [1, 2, 3])


def test_retry_gives_up_with_the_last_error(stage: Stage) -> None:
    async def sleep_async(seconds: float) -> None: ...

    decorate = retry(2, sleep=lambda _: None, sleep_async=sleep_async)
    stage.implicit(raising(OSError("x")), reject_on_error, decorate)
    stage.publish(1)
    stage.run()
    assert len(stage.calls) == 2
    stage.rehearsal.assert_settled("m1", "reject")


def test_retry_extends_the_lease_while_it_waits(stage: Stage) -> None:
    def sleep(seconds: float) -> None:
        stage.rehearsal.advance(seconds)

    async def sleep_async(seconds: float) -> None:
        stage.rehearsal.advance(seconds)

    wait = Backoff(initial=250, maximum=1000, jitter=0)
    stage.implicit(
        lambda _: raising(OSError("x"))(_) if len(stage.calls) < 3 else None,
        retry(3, wait, sleep=sleep, sleep_async=sleep_async),
    )
    stage.publish(1)
    start = stage.rehearsal.clock.now()
    stage.run()
    assert stage.rehearsal.clock.now() - start == 750
    stage.rehearsal.assert_settled("m1", "ack")


def test_retry_only_on_the_errors_asked_for() -> None:
    calls: list[int] = []

    @retry(3, on=OSError, sleep=lambda _: None)
    def handle(order: Order) -> None:
        calls.append(1)
        raise ValueError("not this")

    with pytest.raises(ValueError, match="not this"):
        handle(Order(1))
    assert calls == [1]


def test_the_backoff_is_staminas() -> None:
    theirs: list[float] = []
    with pytest.raises(ValueError, match="for ever"):
        for attempt in stamina.retry_context(
            on=ValueError, attempts=7, wait_initial=0.001, wait_max=0.016, wait_jitter=0
        ):
            theirs.append(attempt.next_wait)
            with attempt:
                raise ValueError("for ever")
    ours = Backoff(initial=0.001, maximum=0.016, jitter=0)
    assert theirs == [ours.wait(attempt) for attempt in range(1, 8)]
    assert theirs[-3:] == [0.016] * 3


@pytest.mark.parametrize("bad", [{"initial": -1}, {"maximum": -1}, {"jitter": -1}, {"base": 0.5}])
def test_a_bad_backoff_is_refused(bad: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        Backoff(**bad)


def test_a_backoff_stays_within_its_bounds() -> None:
    backoff = Backoff()
    waits = [backoff.wait(attempt) for attempt in (1, 5, 10_000) for _ in range(50)]
    assert all(0.1 <= wait <= 5 for wait in waits)
    assert max(waits) == 5


@pytest.mark.parametrize("attempts", [0, -1, 1.5])
def test_retry_needs_an_attempt(attempts: Any) -> None:
    with pytest.raises(ConfigurationError, match="attempts must be at least 1"):
        retry(attempts)


# Order, checked when declared.


@pytest.mark.parametrize("on_error", ON_ERROR)
def test_an_on_error_decorator_inside_a_retry_is_refused(on_error: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"so nothing is ever retried; put .* above retry"):

        @retry(3)
        @on_error  # type: ignore[untyped-decorator]
        def handle(order: Order) -> None: ...


def test_two_on_error_decorators_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="dont_ack_on_error inside it leaves no error for it"):

        @reject_on_error
        @dont_ack_on_error
        def handle(order: Order) -> None: ...


def test_the_same_decorator_twice_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="it is there already; use it once"):

        @retry(3)
        @retry(3)
        def handle(order: Order) -> None: ...


def test_a_decorator_above_the_subscriber_is_refused() -> None:
    app = App()
    with pytest.raises(ConfigurationError, match=r"put @app.subscriber on top, above reject_on_error"):

        @reject_on_error
        @app.subscriber("orders")
        def handle(order: Order) -> None: ...


def test_defer_on_error_has_to_be_called() -> None:
    with pytest.raises(ConfigurationError, match="call it"):

        @defer_on_error  # type: ignore[arg-type]
        def handle(order: Order) -> None: ...

    with pytest.raises(ConfigurationError, match="delay must be 0 or more seconds, got -1"):
        defer_on_error(-1)


def test_a_decorated_handler_keeps_its_name_signature_and_result() -> None:
    @feature_switch(True)
    @reject_on_error
    @retry(2)
    async def handle(order: Order) -> int:
        """Doubles."""
        return order.id * 2

    assert handle.__name__ == "handle"
    assert handle.__doc__ == "Doubles."
    assert inspect.iscoroutinefunction(handle)
    assert list(inspect.signature(handle).parameters) == ["order"]
