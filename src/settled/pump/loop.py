"""The pump's logic, without I/O: a generator that yields what to do and is sent what came of it."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from typing import Any, TypeAlias

import msgspec

from settled.message import Delivery
from settled.policy import Policy
from settled.pump.log import SettlementLog
from settled.settlement import (
    ACKED,
    LEFT,
    RELEASED,
    Ack,
    Action,
    Leave,
    Nack,
    Outcome,
    Overdelivered,
    Reason,
    Reject,
    Requeue,
    Returned,
    Settlement,
    Undecodable,
    decide,
    describe,
)
from settled.transports.base import Capabilities
from settled.transports.letters import is_undecodable_letter

RETURNED = Returned()
_LEAVE = Leave()


class Receive(msgspec.Struct, frozen=True, gc=False):
    """Wait for messages; answered with a sequence of deliveries, or with the error."""

    limit: int
    timeout: float


class Handle(msgspec.Struct, frozen=True):
    """Take message by message from the left: decode its payload, run the handler and, if that returns and
    `acks` says so, acknowledge it and count that. The first is handled in any case.

    Answered with None when none is left or the pump is to stop; else with the first message that went another
    way, and the error of its acknowledgement or the outcome that is still to be decided on.
    """

    buffered: deque[Delivery]
    acks: bool


class Settle(msgspec.Struct, frozen=True):
    """Settle a message; answered with None, or with the error."""

    delivery: Delivery
    action: Action


class Pause(msgspec.Struct, frozen=True, gc=False):
    """Let time pass; over at once when the pump is told to stop."""

    seconds: float


Effect: TypeAlias = Receive | Handle | Settle | Pause


class Status(StrEnum):
    """What a pump is doing."""

    CREATED = "created"
    STARTED = "started"
    STOPPED = "stopped"
    LIMIT_EXCEEDED = "limit exceeded"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Stopped:
    """How a pump ended, and why."""

    status: Status
    why: str
    error: BaseException | None = None


@dataclass(slots=True)
class Counts:
    """How deliveries ended; counted where it happens, once each."""

    received: int = 0
    acked: int = 0
    nacked: int = 0
    requeued: int = 0
    rejected: int = 0
    left: int = 0
    settle_failed: int = 0
    receive_failed: int = 0

    def __add__(self, other: Counts) -> Counts:
        return Counts(*(getattr(self, name) + getattr(other, name) for name in self.__slots__))

    def count(self, action: Action) -> None:
        match action:
            case Ack():
                self.acked += 1
            case Nack():
                self.nacked += 1
            case Requeue():
                self.requeued += 1
            case Reject():
                self.rejected += 1
            case Leave():
                self.left += 1


class Strikes:
    """Counts what should not go on for ever, over all performers of a subscription."""

    def __init__(self, policy: Policy, now: Callable[[], float]) -> None:
        self._limit = policy.unacceptable_limit
        self._window = policy.unacceptable_window
        self._now = now
        self._lock = threading.Lock()
        self._times: deque[float] = deque()
        self._total = 0

    def add(self) -> bool:
        """Count one; True when that reaches the limit."""
        with self._lock:
            self._total += 1
            if self._limit <= 0:
                return False
            now = self._now()
            self._times.append(now)
            while self._window is not None and self._times[0] <= now - self._window:
                self._times.popleft()
            while len(self._times) > self._limit:
                self._times.popleft()
            return len(self._times) >= self._limit

    @property
    def total(self) -> int:
        """All strikes so far, whatever the window."""
        return self._total

    def __str__(self) -> str:
        window = "" if self._window is None else f" within {self._window:g} s"
        return f"{self._limit} unacceptable messages{window}"


class Room:
    """How many messages the next receive may take.

    Where the policy does not say, it takes one, and then twice as many each time, as long as a handler is
    through with them in a tenth of a second: what waits here, others could have handled meanwhile.
    """

    def __init__(self, policy: Policy, can: Callable[[], Capabilities], now: Callable[[], float]) -> None:
        self._policy = policy
        self._can = can
        self._now = now
        self._quick = 1
        self._size = 0
        self._largest = 0
        self._since = 0.0

    def took(self, messages: Sequence[Delivery]) -> None:
        """These came; the next question is asked when all of them are handled."""
        self._size = len(messages)
        self._largest = max([len(delivery.data) for delivery in messages])
        self._since = self._now()

    def limit(self) -> int:
        """The number for the next receive."""
        most = self._policy.buffer
        if most is None:
            most = min(self._can().buffer, self._judge())
        if most == 1 or not self._largest:
            return most
        return max(1, min(most, self._policy.buffer_bytes // self._largest))

    def _judge(self) -> int:
        if self._size:
            took, size, self._size = self._now() - self._since, self._size, 0
            fitting = int(_BUFFER_LASTS * size / took) if took > 0 else 2 * self._quick
            self._quick = max(1, min(fitting, 2 * self._quick, _MOST))
        return self._quick


# How long, in seconds, what one receive takes may keep a handler busy.
_BUFFER_LASTS = 0.1
_MOST = 1_000_000


def pump(
    policy: Policy,
    *,
    counts: Counts,
    strikes: Strikes,
    stopping: Callable[[], bool],
    log: SettlementLog,
    can: Callable[[], Capabilities],
    now: Callable[[], float],
    until_idle: bool = False,
) -> Generator[Effect, Any, Stopped]:
    """Receive, handle and settle until told to stop, or until the limit is reached.

    What the channel `can` do may be known only when messages have come.
    `until_idle` ends it at the first empty receive, for tests and one-off runs.
    """
    buffered: deque[Delivery] = deque()
    receive = Receive(1, 0 if until_idle else policy.receive_timeout)
    room = None if policy.buffer == 1 else Room(policy, can, now)
    stopped = Stopped(Status.STOPPED, "told to stop")
    # The way nearly all messages go is known beforehand: nothing to log, to count as a strike or to wait for.
    acks, leaves = (decide(RETURNED, policy) is one for one in (ACKED, LEFT))
    while not stopping():
        if not buffered:
            if room is not None and (limit := room.limit()) != receive.limit:
                receive = Receive(limit, receive.timeout)
            got: Sequence[Delivery] | BaseException = yield receive
            if isinstance(got, BaseException):
                counts.receive_failed += 1
                log.receive_failed(got, policy.channel_failure_delay)
                yield Pause(policy.channel_failure_delay)
            elif got:
                counts.received += len(got)
                buffered.extend(got)
                if room is not None:
                    room.took(got)
                if policy.delivery_limit:
                    ended_by = yield from _reject_overdelivered(buffered, policy, counts, strikes, log)
                    if ended_by is not None:
                        stopped = ended_by
                        break
            elif until_idle:
                return Stopped(Status.STOPPED, "idle")
            elif not can().wakes:
                yield Pause(policy.empty_delay)
            continue
        if policy.ack_on_delivery and (failed := (yield Settle(buffered[0], Ack()))) is not None:
            # Not ours to handle: at most once would become twice.
            counts.settle_failed += 1
            log.settle_failed(buffered.popleft(), Ack(), failed)
            continue
        ended: tuple[Delivery, Outcome | BaseException] | None = yield Handle(buffered, acks)
        if ended is None:
            continue
        delivery, outcome = ended
        if isinstance(outcome, BaseException):
            counts.settle_failed += 1
            log.settle_failed(delivery, ACKED.action, outcome)
            continue
        # Leave: somebody is settling it at this very moment, or it was released while its handler went on.
        by_hand = (getattr(delivery, "settled_as", None) or _LEAVE) if delivery.settled else None
        if outcome is RETURNED and leaves and (by_hand is None or isinstance(by_hand, Ack)):
            _account(delivery, counts)
            continue
        if isinstance(outcome, Undecodable) and is_undecodable_letter(delivery):
            outcome = replace(outcome, letter=True)
        gives_up = partial(can().gives_up, delivery)
        settlement = decide(outcome, policy, delivery.attempt, gives_up, by_hand)
        if buffered and _blocks_its_lane(delivery, by_hand or settlement.action, can()):
            yield from _release([d for d in buffered if d.lane == delivery.lane], counts, log)
            buffered = deque(d for d in buffered if d.lane != delivery.lane)
        ended_by = yield from _conclude(delivery, settlement, counts, strikes, log)
        if ended_by is not None:
            stopped = ended_by
            break
        if settlement.pause:
            yield Pause(settlement.pause)
    yield from _release(buffered, counts, log)
    return stopped


def _reject_overdelivered(
    buffered: deque[Delivery], policy: Policy, counts: Counts, strikes: Strikes, log: SettlementLog
) -> Generator[Effect, Any, Stopped | None]:
    """Reject what came more often than the policy allows; how the pump ends by that, if it does."""
    for delivery in [d for d in buffered if d.attempt > policy.delivery_limit]:
        buffered.remove(delivery)
        settlement = decide(Overdelivered(), policy, delivery.attempt)
        ended_by = yield from _conclude(delivery, settlement, counts, strikes, log)
        if ended_by is not None:
            return ended_by
    return None


def _conclude(
    delivery: Delivery, settlement: Settlement, counts: Counts, strikes: Strikes, log: SettlementLog
) -> Generator[Effect, Any, Stopped | None]:
    """Settle a message, and count its strike; how the pump ends by that, if it does."""
    yield from _settle(delivery, settlement, counts, log)
    if settlement.strike and strikes.add():
        return Stopped(Status.LIMIT_EXCEEDED, f"{strikes}; the last one: {_why(settlement)}")
    return _stop_for(settlement) if settlement.stop else None


def _blocks_its_lane(delivery: Delivery, action: Action, can: Capabilities) -> bool:
    """Whether what is buffered behind this message has to wait for it, and so must be given back.

    Where order does not ask for it, it must cost those messages nothing: a broker that counts what is given
    back would in the end give them up, though nobody has tried them.
    """
    match action:
        case Nack():
            return delivery.ordered or not can.counts_untried
        case Requeue():
            return delivery.ordered
        case _:
            return False


def _release(
    deliveries: Sequence[Delivery], counts: Counts, log: SettlementLog
) -> Generator[Effect, Any, None]:
    # Last first, so that a broker which gives back to the head ends up with the old order.
    for delivery in reversed(deliveries):
        yield from _settle(delivery, RELEASED, counts, log)


def _settle(
    delivery: Delivery, settlement: Settlement, counts: Counts, log: SettlementLog
) -> Generator[Effect, Any, None]:
    action = settlement.action
    if not isinstance(action, Leave):
        failed: BaseException | None = yield Settle(delivery, action)
        if failed is not None:
            counts.settle_failed += 1
            log.settle_failed(delivery, action, failed)
            return
        if isinstance(action, Requeue) and delivery.is_given_up():
            action = Reject(Reason.DELIVERY_ERROR, action.error)
            settlement = replace(settlement, action=action)
        counts.count(action)
    else:
        _account(delivery, counts)
    log.settled(delivery, settlement)


def _account(delivery: Delivery, counts: Counts) -> None:
    """Count what its handler has done, or may still do; not what was released while the handler went on."""
    action = delivery.account(_LEAVE)
    if action is not None:
        counts.count(action)


def _stop_for(settlement: Settlement) -> Stopped:
    asked = next((e for e in settlement.errors if not isinstance(e, Exception)), None)
    if asked is not None:
        return Stopped(Status.STOPPED, f"the handler raised {describe(asked)}", asked)
    return Stopped(Status.ERROR, _why(settlement), settlement.errors[0])


def _why(settlement: Settlement) -> str:
    errors = "; ".join(describe(error) for error in settlement.errors)
    return errors or (settlement.action.error if isinstance(settlement.action, Reject) else settlement.signal)
