"""Seeds 000 and 001: the annotation decides, when the function is decorated."""

from __future__ import annotations

import functools
import itertools
from typing import TYPE_CHECKING, Any, TypeVar

import pytest

from settled import App, ConfigurationError, DontAck, Message, Policy
from tests.conftest import Order, Stage, raising

if TYPE_CHECKING:
    from nowhere import Ghost  # type: ignore[import-not-found]

T = TypeVar("T")


class Opaque:
    def __init__(self, secret: object) -> None: ...


def no_parameter() -> None: ...


def no_annotation(order) -> None: ...  # type: ignore[no-untyped-def]


def bare_message(message: Message) -> None: ...  # type: ignore[type-arg]


def type_variable(message: Message[T]) -> None: ...


def opaque(order: Opaque) -> None: ...


def opaque_message(message: Message[Opaque]) -> None: ...


def two_parameters(order: Order, message: Message[Order]) -> None: ...


def only_checked(order: Ghost) -> None: ...


def generator(order: Order) -> Any:
    yield order


async def async_generator(order: Order) -> Any:
    yield order


def keyword_only(*, order: Order) -> None: ...


@pytest.mark.parametrize(
    ("handler", "fix"),
    [
        (no_parameter, r"takes no message; write def no_parameter\(order: Order\)"),
        (no_annotation, r"parameter 'order' has no annotation; write order: Order"),
        (bare_message, r"Message without a type; write Message\[Order\], or Message\[Any\]"),
        (type_variable, r"is not a type; write Message\[Order\]"),
        (opaque, r"Opaque cannot be decoded: .*make it a msgspec Struct"),
        (opaque_message, r"Opaque cannot be decoded: .*make it a msgspec Struct"),
        (two_parameters, r"takes one parameter.*give message a default"),
        (only_checked, r"annotation 'Ghost' cannot be resolved.*outside TYPE_CHECKING"),
        (generator, r"must not yield"),
        (async_generator, r"must not yield"),
        (keyword_only, r"takes no message"),
        ("not a function", r"not a function"),
    ],
)
def test_a_signature_that_cannot_work_is_refused_when_decorated_with_the_fix(handler: Any, fix: str) -> None:
    app = App()
    with pytest.raises(ConfigurationError, match=fix):
        app.subscriber("orders")(handler)
    assert app.subscriptions == []


@pytest.mark.parametrize("option", ["dead_letter", "invalid"])
def test_a_subscriber_may_not_read_its_own_dead_letters(option: str) -> None:
    """Defect P15: what it rejects would come again, as a letter of a letter of a letter."""
    with pytest.raises(ConfigurationError, match="'orders': it would read its own dead letters"):
        App().subscriber("orders", **{option: "orders"})  # type: ignore[arg-type]


def test_message_of_a_type_is_explicit_and_a_type_alone_is_implicit() -> None:
    app = App()

    @app.subscriber("orders")
    def explicit(message: Message[Order]) -> None: ...

    @app.subscriber("orders")
    async def implicit(order: Order) -> None: ...

    assert [(s.policy.explicit, s.is_async) for s in app.subscriptions] == [(True, False), (False, True)]


def test_the_function_stays_what_it_was() -> None:
    app = App()

    @app.subscriber("orders")
    def double(number: int) -> int:
        return 2 * number

    assert double(4) == 8


class Service:
    def method(self, order: Order) -> None: ...

    async def async_method(self, order: Order) -> None: ...


class Callable_:  # noqa: N801
    def __call__(self, order: Order) -> None: ...


class AsyncCallable:
    async def __call__(self, message: Message[Order]) -> None: ...


def with_default(order: Order, dry_run: bool = False) -> None: ...


def with_database(order: Order, database: object) -> None: ...


@pytest.mark.parametrize(
    ("handler", "is_async"),
    [
        (Service().method, False),
        (Service().async_method, True),
        (Callable_(), False),
        (AsyncCallable(), True),
        (with_default, False),
        (functools.partial(with_database, database=object()), False),
    ],
)
def test_methods_callables_and_partials_are_handlers_too(handler: Any, is_async: bool) -> None:
    app = App()
    app.subscriber("orders")(handler)
    (subscription,) = app.subscriptions
    assert subscription.is_async is is_async


def test_a_handler_inside_a_function_sees_the_types_it_closes_over() -> None:
    class Local(Order): ...

    app = App()

    @app.subscriber("orders")
    def handle(order: Local) -> None:
        assert isinstance(order, Local)

    assert len(app.subscriptions) == 1


def test_an_unknown_option_and_a_wrong_value_are_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"no option perfomers; there are .*performers"):
        App().subscriber("orders", perfomers=2)  # type: ignore[call-arg]
    with pytest.raises(ConfigurationError, match=r"subscriber 'orders': policy: buffer must be .*got 0"):
        App().subscriber("orders", buffer=0)
    with pytest.raises(ConfigurationError, match="channel must be a name, got ''"):
        App().subscriber("")


def test_options_go_over_the_subscribers_policy_over_the_apps() -> None:
    app = App(policy=Policy(buffer=7))

    @app.subscriber("a")
    def one(order: Order) -> None: ...

    @app.subscriber("b", policy=Policy(buffer=8, performers=2), performers=3)
    def two(order: Order) -> None: ...

    assert [(s.policy.buffer, s.policy.performers) for s in app.subscriptions] == [(7, 1), (8, 3)]


# Seed 001, the table of decisions.


def test_001_parameter_decides_explicit_mode_ignores_auto_ack(stage: Stage) -> None:
    stage.explicit(lambda m: None, auto_ack=True)
    stage.publish(1)
    stage.run()
    stage.rehearsal.assert_settled("m1")
    assert stage.rehearsal.counts.left == 1


def test_001_auto_ack_acks_on_success(stage: Stage) -> None:
    stage.implicit(lambda _: None)
    stage.publish(1)
    stage.run()
    stage.rehearsal.assert_settled("m1", "ack")


def test_001_auto_ack_naks_on_exception_with_the_brokers_delay(stage: Stage) -> None:
    times: list[float] = []

    def behave(_: Order) -> None:
        times.append(stage.rehearsal.clock.now())
        if len(times) < 3:
            raise ValueError("boom")

    stage.implicit(behave)
    stage.publish(1)
    stage.run()
    stage.rehearsal.assert_settled("m1", "requeue", "requeue", "ack")
    assert [b - a for a, b in itertools.pairwise(times)] == [1, 2]


@pytest.mark.parametrize("behave", [lambda _: None])
def test_001_auto_ack_off_leaves_the_message_pending(stage: Stage, behave: Any) -> None:
    stage.implicit(behave, auto_ack=False)
    stage.publish(1)
    stage.run()
    stage.rehearsal.assert_settled("m1")
    assert stage.rehearsal.transport.depth("orders") == 1
    stage.rehearsal.advance(301)
    stage.run()
    assert len(stage.calls) == 2


def test_001_an_ack_before_an_exception_is_not_rolled_back(stage: Stage) -> None:
    async def acks_then_raises(message: Message[Order]) -> None:
        await message.ack()
        raise ValueError("oops")

    def acks_then_raises_sync(message: Message[Order]) -> None:
        message.ack()
        raise ValueError("oops")

    stage.app.subscriber("orders")(acks_then_raises if stage.kind == "proactor" else acks_then_raises_sync)
    stage.publish(1)
    stage.run()
    stage.rehearsal.assert_settled("m1", "ack")
    assert stage.rehearsal.transport.depth("orders") == 0


def test_what_an_explicit_handler_did_is_counted_as_what_it_did(stage: Stage) -> None:
    def settle(message: Any) -> Any:
        by_id = {1: message.ack, 2: message.release, 3: message.term}
        return by_id.get(message.payload.id, lambda: None)()

    async def settle_async(message: Message[Order]) -> None:
        done = settle(message)
        if done is not None:
            await done

    def settle_sync(message: Message[Order]) -> None:
        settle(message)

    stage.app.subscriber("orders", unacceptable_limit=0)(
        settle_async if stage.kind == "proactor" else settle_sync
    )
    for number in (1, 3, 4):
        stage.publish(number)
    stage.run()
    counts = stage.rehearsal.counts
    assert (counts.received, counts.acked, counts.rejected, counts.left) == (3, 1, 1, 1)


def test_001_explicit_mode_leaves_a_failed_message_to_the_brokers_timeout(stage: Stage) -> None:
    stage.explicit(raising(ValueError("boom")))
    stage.publish(1)
    stage.run()
    stage.rehearsal.assert_settled("m1")
    assert stage.rehearsal.counts.left == 1


def test_001_a_signal_in_explicit_mode_settles_what_the_handler_has_not(stage: Stage) -> None:
    stage.explicit(raising(lambda: DontAck("off")), unacceptable_limit=1)
    stage.publish(1)
    stage.run()
    stage.rehearsal.assert_settled("m1", "nack")


def test_001_existing_code_keeps_working_when_it_asks_for_the_message(stage: Stage) -> None:
    stage.implicit(lambda _: None, group="old")
    stage.explicit(lambda m: m.ack(), group="new")
    stage.publish(1)
    stage.run()
    stage.rehearsal.assert_settled("m1", "ack", group="old")
    stage.rehearsal.assert_settled("m1", "ack", group="new")
