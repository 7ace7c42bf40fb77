"""The table of decisions, row by row, and what holds for every exception tree."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from settled import ConfigurationError, Defer, DontAck, Invalid, OnError, Policy, Reject, settlement
from settled.settlement import (
    Ack,
    Cancelled,
    Leave,
    Nack,
    Outcome,
    Overdelivered,
    Raised,
    Reason,
    Requeue,
    Returned,
    Settlement,
    Undecodable,
    decide,
)
from settled.signals import Signal

IMPLICIT = Policy()
EXPLICIT = Policy(explicit=True)


def rejected(reason: Reason, error: str) -> settlement.Reject:
    return settlement.Reject(reason, error)


def test_implicit_return_is_an_ack_at_debug() -> None:
    assert decide(Returned(), IMPLICIT) == Settlement(Ack(), level=logging.DEBUG, signal="returned")


@pytest.mark.parametrize("policy", [Policy(auto_ack=False), EXPLICIT, Policy(explicit=True, auto_ack=False)])
def test_return_without_auto_ack_or_in_explicit_mode_settles_nothing(policy: Policy) -> None:
    decided = decide(Returned(), policy)
    assert decided.action == Leave()
    assert not decided.strike


@pytest.mark.parametrize("policy", [IMPLICIT, EXPLICIT, Policy(auto_ack=False)])
def test_dont_ack_releases_counts_a_strike_and_pauses(policy: Policy) -> None:
    decided = decide(Raised(DontAck("off")), replace(policy, dont_ack_delay=7))
    assert decided.action == Nack()
    assert decided.strike
    assert decided.pause == 7
    assert decided.level == logging.WARNING
    assert not decided.stop


def test_defer_with_attempts_left_requeues_after_its_delay_without_a_strike() -> None:
    decided = decide(Raised(Defer(4)), Policy(requeue_count=3, requeue_delay=9), attempt=2)
    assert decided.action == Requeue(4)
    assert not decided.strike
    assert decided.level == logging.DEBUG


def test_defer_without_a_delay_takes_the_policys() -> None:
    assert decide(Raised(Defer()), Policy(requeue_delay=9)).action == Requeue(9)
    assert decide(Raised(Defer(0)), Policy(requeue_delay=9)).action == Requeue(0)


@pytest.mark.parametrize("attempt", [3, 4, 100])
def test_defer_with_no_attempts_left_is_a_delivery_error(attempt: int) -> None:
    decided = decide(Raised(Defer(1, "bank away")), Policy(requeue_count=3), attempt)
    assert decided.action == rejected(
        Reason.DELIVERY_ERROR, f"Defer: no attempts left after {attempt}; bank away"
    )
    assert decided.strike
    assert decided.level == logging.ERROR


def test_unlimited_attempts_never_run_out() -> None:
    assert decide(Raised(Defer()), Policy(), attempt=10**9).action == Requeue(0.0)


def test_reject_is_a_delivery_error_at_warning() -> None:
    decided = decide(Raised(Reject("no such customer")), IMPLICIT)
    assert decided.action == rejected(Reason.DELIVERY_ERROR, "no such customer")
    assert (decided.strike, decided.level) == (True, logging.WARNING)


def test_invalid_is_unacceptable_at_warning() -> None:
    decided = decide(Raised(Invalid("no id")), IMPLICIT)
    assert decided.action == rejected(Reason.UNACCEPTABLE, "no id")
    assert (decided.strike, decided.level) == (True, logging.WARNING)


def test_a_payload_that_does_not_decode_is_unacceptable_with_the_decoders_error() -> None:
    decided = decide(Undecodable(ValueError("bad JSON")), EXPLICIT)
    assert decided.action == rejected(Reason.UNACCEPTABLE, "ValueError: bad JSON")
    assert decided.signal == "Invalid"
    assert decided.strike


@pytest.mark.parametrize(
    ("on_error", "action", "pause"),
    [
        (OnError.NAK, Requeue(None), 0),
        (OnError.ACK, Ack(), 0),
        (OnError.DONT_ACK, Nack(), 1),
        (OnError.REJECT, rejected(Reason.DELIVERY_ERROR, "ValueError: boom"), 0),
    ],
)
def test_a_plain_exception_in_implicit_mode_goes_by_the_policy(
    on_error: OnError, action: settlement.Action, pause: float
) -> None:
    decided = decide(Raised(ValueError("boom")), Policy(on_error=on_error))
    assert (decided.action, decided.pause) == (action, pause)
    assert (decided.strike, decided.level, decided.signal) == (True, logging.ERROR, "ValueError")


def test_a_plain_exception_with_no_attempts_left_is_rejected() -> None:
    decided = decide(Raised(ValueError("boom")), Policy(requeue_count=2), attempt=2)
    error = "ValueError: no attempts left after 2; ValueError: boom"
    assert decided.action == rejected(Reason.DELIVERY_ERROR, error)


@pytest.mark.parametrize("settled", [True, False])
def test_a_plain_exception_in_explicit_mode_settles_nothing(settled: bool) -> None:
    decided = decide(Raised(ValueError("boom"), settled), EXPLICIT)
    assert decided.action == Leave()
    assert (decided.strike, decided.level >= logging.WARNING) == (True, True)


def test_without_auto_ack_a_plain_exception_settles_nothing_and_is_a_strike() -> None:
    """Defect P6: the seed's `autoAck=false` does nothing, also then."""
    decided = decide(Raised(ValueError("boom")), Policy(auto_ack=False))
    assert (decided.action, decided.strike, decided.level) == (Leave(), True, logging.ERROR)


@pytest.mark.parametrize("outcome", [Returned(), Raised(ValueError(), settled=True), Raised(DontAck(), True)])
@pytest.mark.parametrize("policy", [IMPLICIT, EXPLICIT])
def test_what_a_handler_releases_by_hand_is_followed_by_a_pause(outcome: Outcome, policy: Policy) -> None:
    """Defect P4."""
    released = decide(outcome, replace(policy, dont_ack_delay=7), by_hand=Nack())
    assert (released.action, released.pause) == (Leave(), 7)
    assert decide(outcome, policy, by_hand=Requeue(5)).pause == 0


def test_a_message_delivered_too_often_is_rejected_with_the_reason() -> None:
    decided = decide(Overdelivered(), Policy(delivery_limit=5), attempt=6)
    error = "delivered 6 times and not settled for good; the delivery_limit is 5"
    assert decided.action == rejected(Reason.DELIVERY_ERROR, error)
    assert (decided.strike, decided.level) == (True, logging.ERROR)


def test_a_dead_letter_that_cannot_be_decoded_here_either_is_not_rejected_again() -> None:
    """Defect P15."""
    outcome = Undecodable(ValueError("no id"), letter=True)
    decided = decide(outcome, IMPLICIT)
    assert (decided.action, decided.strike, decided.level) == (Requeue(None), True, logging.WARNING)
    assert "read it as bytes: ValueError: no id" in str(decided.errors[0])
    # A budget of attempts is the user's own word.
    assert isinstance(decide(outcome, Policy(requeue_count=3), attempt=3).action, settlement.Reject)


@pytest.mark.parametrize("error", [DontAck(), Defer(), Reject(), Invalid(), ValueError()])
def test_an_ack_before_an_exception_stands(error: Exception) -> None:
    assert decide(Raised(error, settled=True), EXPLICIT).action == Leave()
    assert decide(Raised(error, settled=True), IMPLICIT).action == Leave()


@pytest.mark.parametrize(
    ("error", "kind"),
    [(DontAck(), Nack), (Defer(), Requeue), (Reject(), settlement.Reject), (Invalid(), settlement.Reject)],
)
def test_a_signal_settles_in_explicit_mode_what_the_handler_has_not(
    error: Exception, kind: type[settlement.Action]
) -> None:
    assert isinstance(decide(Raised(error), EXPLICIT).action, kind)


def test_a_configuration_error_releases_and_stops() -> None:
    decided = decide(Raised(ConfigurationError("no database")), IMPLICIT)
    assert decided.action == Nack()
    assert decided.stop
    assert (decided.strike, decided.level) == (True, logging.CRITICAL)


def test_cancellation_releases_without_a_strike() -> None:
    assert decide(Cancelled(), IMPLICIT) == Settlement(Nack(), level=logging.INFO, signal="cancelled")


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3)])
def test_an_interrupt_releases_and_stops(error: BaseException) -> None:
    decided = decide(Raised(error), IMPLICIT)
    assert decided.action == Nack()
    assert decided.stop
    assert not decided.strike


def test_acknowledged_on_delivery_leaves_nothing_to_settle() -> None:
    policy = Policy(ack_on_delivery=True)
    outcomes = [Returned(), Raised(ValueError()), Raised(Defer()), Undecodable(ValueError())]
    assert [decide(outcome, policy).action for outcome in outcomes] == [Leave()] * 4


PRECEDENCE: list[Callable[[], BaseException]] = [
    lambda: ConfigurationError("c"),
    lambda: Defer(1),
    lambda: DontAck("d"),
    lambda: Reject("r"),
    lambda: Invalid("i"),
    lambda: ValueError("v"),
]


@pytest.mark.parametrize("first", range(len(PRECEDENCE)))
def test_ac_9_in_a_group_the_first_kind_of_the_order_decides_at_any_depth(first: int) -> None:
    leaves = [make() for make in PRECEDENCE[first:]]
    nested: BaseException = leaves[-1]
    for leaf in reversed(leaves[:-1]):
        nested = BaseExceptionGroup("g", [nested, leaf])
    alone = decide(Raised(PRECEDENCE[first]()), IMPLICIT)
    decided = decide(Raised(nested), IMPLICIT)
    assert (decided.action, decided.strike, decided.stop) == (alone.action, alone.strike, alone.stop)
    assert len(decided.errors) == len(leaves)


def test_fr_8_a_dont_ack_in_a_group_is_found() -> None:
    group = ExceptionGroup("tasks", [ValueError("a"), ExceptionGroup("inner", [DontAck("blocked")])])
    assert decide(Raised(group), IMPLICIT).action == Nack()


def test_of_two_defers_in_a_group_the_longer_delay_counts() -> None:
    group = ExceptionGroup("g", [Defer(1), Defer(5), Defer()])
    assert decide(Raised(group), Policy(requeue_delay=3)).action == Requeue(5)


leaf = st.one_of(
    st.builds(DontAck, st.text(max_size=3)),
    st.builds(Defer, st.none() | st.floats(0, 100), st.text(max_size=3)),
    st.builds(Reject, st.text(max_size=3)),
    st.builds(Invalid, st.text(max_size=3)),
    st.builds(ConfigurationError, st.text(max_size=3)),
    st.builds(ValueError, st.text(max_size=3)),
    st.builds(OSError, st.text(max_size=3)),
    st.builds(KeyboardInterrupt),
)
trees = st.recursive(
    leaf, lambda inner: st.lists(inner, min_size=1, max_size=4).map(lambda es: BaseExceptionGroup("g", es))
)
policies = st.builds(
    Policy,
    explicit=st.booleans(),
    auto_ack=st.booleans(),
    on_error=st.sampled_from(OnError),
    requeue_count=st.sampled_from([-1, 1, 2, 5]),
)


def leaves_of(tree: BaseException) -> list[BaseException]:
    if isinstance(tree, BaseExceptionGroup):
        return [found for inner in tree.exceptions for found in leaves_of(inner)]
    return [tree]


@given(trees, policies, st.integers(1, 10))
def test_any_exception_tree_settles_exactly_one_way(
    tree: BaseException, policy: Policy, attempt: int
) -> None:
    decided = decide(Raised(tree), policy, attempt)
    assert isinstance(decided.action, (Ack, Nack, Requeue, settlement.Reject, Leave))
    assert decided == decide(Raised(tree), policy, attempt)


@given(st.lists(leaf, min_size=1, max_size=6), st.randoms(), policies, st.integers(1, 10))
def test_order_inside_a_group_does_not_matter(
    errors: list[BaseException], chance: object, policy: Policy, attempt: int
) -> None:
    shuffled = list(errors)
    chance.shuffle(shuffled)  # type: ignore[attr-defined]
    one = decide(Raised(BaseExceptionGroup("g", errors)), policy, attempt)
    other = decide(Raised(BaseExceptionGroup("g", shuffled)), policy, attempt)
    assert replace(one, errors=()) == replace(other, errors=())


@given(trees, policies, st.integers(1, 10))
def test_a_signal_never_becomes_a_plain_error(tree: BaseException, policy: Policy, attempt: int) -> None:
    errors = leaves_of(tree)
    if not any(isinstance(error, Signal) for error in errors):
        return
    meant = [error for error in errors if isinstance(error, (Signal, ConfigurationError, KeyboardInterrupt))]
    with_noise = decide(Raised(tree), policy, attempt)
    without = decide(Raised(BaseExceptionGroup("g", meant)), policy, attempt)
    assert type(with_noise.action) is type(without.action)
    assert not isinstance(with_noise.action, (Ack, Leave))


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (DontAck("bank away"), "DontAck: no attempts left after 4, by the broker's own limit; bank away"),
        (Defer(5), "Defer: no attempts left after 4, by the broker's own limit"),
    ],
)
def test_what_the_broker_would_give_up_is_rejected_with_the_reason(error: Exception, words: str) -> None:
    decided = decide(Raised(error), Policy(), 4, gives_up=lambda action: isinstance(action, (Nack, Requeue)))
    assert decided.action == settlement.Reject(Reason.DELIVERY_ERROR, words)
    assert (decided.strike, decided.level, decided.pause) == (True, logging.ERROR, 0)


def test_an_app_that_is_set_up_wrongly_stops_also_if_its_message_is_rejected() -> None:
    decided = decide(Raised(ConfigurationError("no bank")), Policy(), gives_up=lambda _: True)
    assert isinstance(decided.action, settlement.Reject)
    assert decided.stop
    assert decided.level == logging.CRITICAL
