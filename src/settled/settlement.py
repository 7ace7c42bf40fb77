"""The one table: from what happened to a message to how it is settled."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TypeAlias, assert_never

from settled import signals
from settled.policy import OnError, Policy

LONGEST_DELAY = 365 * 86_400.0
ERROR_LIMIT = 10_000
"""Characters that are kept of an error."""


class Reason(StrEnum):
    """Why a message is rejected, as the dead letter records it."""

    DELIVERY_ERROR = "delivery error"
    UNACCEPTABLE = "unacceptable"


def one_line(text: str, most: int = 2000) -> str:
    r"""A text that any broker takes as a header: printable, and of so many bytes at most.

    >>> one_line("no such\ncustomer\0"), one_line("no such customer", most=10)
    ('no such customer', 'no such...')
    """
    printable = "".join(one if one.isprintable() else " " for one in text[:most])
    line = " ".join(printable.split())
    if len(text) <= most and len(line.encode()) <= most:
        return line
    return line.encode()[: most - 3].decode(errors="ignore").rstrip() + "..."


@dataclass(frozen=True, slots=True)
class Ack:
    """Done: it does not come again."""


@dataclass(frozen=True, slots=True)
class Nack:
    """Released: given back at once, to anyone, with no attempt counted where the broker allows that."""


@dataclass(frozen=True, slots=True)
class Requeue:
    """Failed: counts an attempt and comes again after `delay`, or after the backoff if None.

    >>> Requeue(1e12) == Requeue(LONGEST_DELAY)
    True
    """

    delay: float | None = None
    """In seconds, at most a year: what is longer brokers refuse, or take for no delay at all."""
    error: str = field(default="", compare=False)
    """Why, for brokers that record it."""

    def __post_init__(self) -> None:
        if self.delay is not None and self.delay > LONGEST_DELAY:
            object.__setattr__(self, "delay", LONGEST_DELAY)


@dataclass(frozen=True, slots=True)
class Reject:
    """Never again: dead letter, or the invalid-message channel if the message is unacceptable."""

    reason: Reason = Reason.DELIVERY_ERROR
    error: str = ""
    """In one line, and short: no broker may refuse a dead letter because of what it says of itself."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "error", one_line(self.error))


@dataclass(frozen=True, slots=True)
class Leave:
    """Nothing: the handler's own business, or the broker's timeout."""


Action: TypeAlias = Ack | Nack | Requeue | Reject | Leave


@dataclass(frozen=True, slots=True)
class Returned:
    """The handler came back."""


@dataclass(frozen=True, slots=True)
class Raised:
    """The handler raised; `settled` says whether it had settled the message before."""

    error: BaseException
    settled: bool = False


@dataclass(frozen=True, slots=True)
class Undecodable:
    """The payload is not what the handler takes; the handler was not called."""

    error: BaseException
    letter: bool = False
    """It is a dead letter, written because it could not be decoded where it came from."""


@dataclass(frozen=True, slots=True)
class Overdelivered:
    """The broker delivered it more often than the policy's `delivery_limit`; the handler was not called."""


@dataclass(frozen=True, slots=True)
class Cancelled:
    """The pump is shutting down and the message is in hand or buffered."""


Outcome: TypeAlias = Returned | Raised | Undecodable | Overdelivered | Cancelled


@dataclass(frozen=True, slots=True)
class Settlement:
    """A row of the table: what to do with the message, and what that means for the pump."""

    action: Action
    strike: bool = False
    level: int = logging.DEBUG
    pause: float = 0.0
    stop: bool = False
    signal: str = ""
    errors: tuple[BaseException, ...] = ()


ACKED = Settlement(Ack(), signal="returned")
LEFT = Settlement(Leave(), signal="returned")
RELEASED = Settlement(Nack(), level=logging.INFO, signal="cancelled")


def _never(_: Action) -> bool:
    return False


def decide(
    outcome: Outcome,
    policy: Policy,
    attempt: int = 1,
    gives_up: Callable[[Action], bool] = _never,
    by_hand: Action | None = None,
) -> Settlement:
    """How a message is settled after its `attempt`-th delivery came to `outcome`.

    What the broker would give up if it was settled so is rejected instead: then its dead letter says why.
    `by_hand` is how the handler has settled it itself.

    >>> decide(Returned(), Policy())
    Settlement(action=Ack(), strike=False, level=10, pause=0.0, stop=False, signal='returned', errors=())
    >>> decide(Raised(signals.Defer(5)), Policy(requeue_count=3), attempt=3).action
    Reject(reason=<Reason.DELIVERY_ERROR: 'delivery error'>, error='Defer: no attempts left after 3')
    """
    match outcome:
        case Returned():
            if isinstance(by_hand, Nack):
                return replace(LEFT, pause=_pace(by_hand, policy))
            left = by_hand or policy.explicit or policy.ack_on_delivery or not policy.auto_ack
            return LEFT if left else ACKED
        case Overdelivered():
            return _overdelivered(policy, attempt)
        case Cancelled():
            return RELEASED
        case Undecodable(error, letter):
            settlement, settled = _undecodable(error, letter, policy, attempt), False
        case Raised(error, settled):
            settlement = _raised(tuple(_leaves(error)), policy, attempt)
        case _:
            assert_never(outcome)
    if gives_up(settlement.action):
        settlement = _given_up(settlement, attempt)
    if settled or policy.ack_on_delivery:
        return _only_for_the_pump(settlement, _pace(by_hand, policy))
    return settlement


def _pace(by_hand: Action | None, policy: Policy) -> float:
    """The pause after a message that its handler gave back: it comes again at once."""
    return policy.dont_ack_delay if isinstance(by_hand, Nack) else 0.0


def _overdelivered(policy: Policy, attempt: int) -> Settlement:
    error = (
        f"delivered {attempt} times and not settled for good; the delivery_limit is {policy.delivery_limit}"
    )
    reject = Reject(Reason.DELIVERY_ERROR, error)
    return Settlement(reject, strike=True, level=logging.ERROR, signal="delivery_limit")


def _undecodable(error: BaseException, letter: bool, policy: Policy, attempt: int) -> Settlement:
    leaves = tuple(_leaves(error))
    if any(isinstance(leaf, (signals.Signal, signals.ConfigurationError)) for leaf in leaves):
        # A decoder may raise a signal of its own: it means what it means anywhere else.
        return _raised(leaves, policy, attempt)
    text = _text(leaves)
    if letter and _attempts_left(policy, attempt):
        # To reject it again would only move it to a place where nobody looks.
        why = f"a dead letter cannot be decoded here either, and stays; read it as bytes: {text}"
        told = (signals.Invalid(why),)
        return Settlement(Requeue(error=why), True, logging.WARNING, signal="Invalid", errors=told)
    reject = Reject(Reason.UNACCEPTABLE, text)
    return Settlement(reject, strike=True, level=logging.WARNING, signal="Invalid", errors=leaves)


def _raised(leaves: tuple[BaseException, ...], policy: Policy, attempt: int) -> Settlement:
    for rule in _PRECEDENCE:
        found = tuple(leaf for leaf in leaves if isinstance(leaf, rule.kinds))
        if found:
            return rule.settle(found, leaves, policy, attempt)
    return _plain(leaves, policy, attempt)


def _only_for_the_pump(settlement: Settlement, pause: float) -> Settlement:
    return Settlement(
        Leave(),
        strike=settlement.strike,
        level=max(settlement.level, logging.WARNING),
        pause=pause,
        stop=settlement.stop,
        signal=settlement.signal,
        errors=settlement.errors,
    )


Leaves: TypeAlias = tuple[BaseException, ...]


def _interrupted(found: Leaves, leaves: Leaves, policy: Policy, attempt: int) -> Settlement:
    return Settlement(Nack(), level=logging.INFO, stop=True, signal=_names(found), errors=leaves)


def _misconfigured(found: Leaves, leaves: Leaves, policy: Policy, attempt: int) -> Settlement:
    return Settlement(
        Nack(), strike=True, level=logging.CRITICAL, stop=True, signal=_names(found), errors=leaves
    )


def _deferred(found: Leaves, leaves: Leaves, policy: Policy, attempt: int) -> Settlement:
    if not _attempts_left(policy, attempt):
        return _exhausted("Defer", leaves, attempt)
    # The longest wait asked for: whoever asked for less is not harmed by more.
    delays = [leaf.delay for leaf in found if isinstance(leaf, signals.Defer)]
    delay = max(policy.requeue_delay if asked is None else asked for asked in delays)
    return Settlement(Requeue(delay, _text(leaves)), signal="Defer", errors=leaves)


def _dont_ack(found: Leaves, leaves: Leaves, policy: Policy, attempt: int) -> Settlement:
    return Settlement(
        Nack(),
        strike=True,
        level=logging.WARNING,
        pause=policy.dont_ack_delay,
        signal="DontAck",
        errors=leaves,
    )


def _rejected(found: Leaves, leaves: Leaves, policy: Policy, attempt: int) -> Settlement:
    reject = Reject(Reason.DELIVERY_ERROR, _text(found))
    return Settlement(reject, strike=True, level=logging.WARNING, signal="Reject", errors=leaves)


def _invalid(found: Leaves, leaves: Leaves, policy: Policy, attempt: int) -> Settlement:
    reject = Reject(Reason.UNACCEPTABLE, _text(found))
    return Settlement(reject, strike=True, level=logging.WARNING, signal="Invalid", errors=leaves)


def _plain(leaves: Leaves, policy: Policy, attempt: int) -> Settlement:
    signal, error = _names(leaves), logging.ERROR
    if policy.explicit or not policy.auto_ack:
        return Settlement(Leave(), strike=True, level=error, signal=signal, errors=leaves)
    match policy.on_error:
        case OnError.NAK if not _attempts_left(policy, attempt):
            return _exhausted(signal, leaves, attempt)
        case OnError.NAK:
            again = Requeue(error=_text(leaves))
            return Settlement(again, strike=True, level=error, signal=signal, errors=leaves)
        case OnError.ACK:
            return Settlement(Ack(), strike=True, level=error, signal=signal, errors=leaves)
        case OnError.DONT_ACK:
            return Settlement(
                Nack(), strike=True, level=error, pause=policy.dont_ack_delay, signal=signal, errors=leaves
            )
        case OnError.REJECT:
            reject = Reject(Reason.DELIVERY_ERROR, _text(leaves))
            return Settlement(reject, strike=True, level=error, signal=signal, errors=leaves)
        case _:
            assert_never(policy.on_error)


def _exhausted(signal: str, leaves: Leaves, attempt: int) -> Settlement:
    text, why = f"{signal}: no attempts left after {attempt}", _text(leaves)
    reject = Reject(Reason.DELIVERY_ERROR, text if why == signal else f"{text}; {why}")
    return Settlement(reject, strike=True, level=logging.ERROR, signal=signal, errors=leaves)


def _given_up(settlement: Settlement, attempt: int) -> Settlement:
    signal, why = settlement.signal, _text(settlement.errors)
    text = f"{signal}: no attempts left after {attempt}, by the broker's own limit"
    return replace(
        settlement,
        action=Reject(Reason.DELIVERY_ERROR, text if why == signal else f"{text}; {why}"),
        strike=settlement.strike or isinstance(settlement.action, Requeue),
        level=max(settlement.level, logging.ERROR),
        pause=0.0,
    )


@dataclass(frozen=True, slots=True)
class _Rule:
    kinds: type[BaseException] | tuple[type[BaseException], ...]
    settle: Callable[[Leaves, Leaves, Policy, int], Settlement]


# The first kind that is present among the leaves of what was raised decides; the rest are only logged.
_PRECEDENCE = (
    _Rule((KeyboardInterrupt, SystemExit), _interrupted),
    _Rule(signals.ConfigurationError, _misconfigured),
    _Rule(signals.Defer, _deferred),
    _Rule(signals.DontAck, _dont_ack),
    _Rule(signals.Reject, _rejected),
    _Rule(signals.Invalid, _invalid),
)


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from _leaves(inner)
    else:
        yield error


def _attempts_left(policy: Policy, attempt: int) -> bool:
    return policy.requeue_count < 0 or attempt < policy.requeue_count


def _names(errors: Leaves) -> str:
    return ", ".join(sorted({type(error).__name__ for error in errors}))


def _text(errors: Leaves) -> str:
    """One line for the dead letter, the same whatever order a group came in."""
    return "; ".join(sorted({describe(error) for error in errors}))


def describe(error: BaseException) -> str:
    """An error in one line: a signal's reason, else its cause, else the class and text.

    >>> describe(ValueError("no such customer"))
    'ValueError: no such customer'
    """
    if isinstance(error, signals.Signal):
        if error.reason:
            return storable(error.reason)
        return type(error).__name__ if error.cause is None else describe(error.cause)
    name = type(error).__name__
    try:
        text = str(error)
    except Exception:  # it must be settled all the same
        return f"{name}, whose text cannot be had"
    return storable(f"{name}: {text}") if text else name


def storable(text: str, limit: int = ERROR_LIMIT) -> str:
    """Text that every broker and database takes: not too long, no NUL, and no half of a character.

    >>> storable("no such \\0customer \\ud800")
    'no such customer \\\\ud800'
    """
    return text[:limit].encode("utf-8", "backslashreplace").decode().replace("\0", "")
