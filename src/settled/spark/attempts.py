"""Running a handler on rows: the same functions, signals and table as in a pump, and never a failed query."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from settled import codec
from settled.handlers.feature import features
from settled.handlers.layers import layers
from settled.message import DONE, Delivery, Message, Metadata, in_hand
from settled.queue.segment import PRODUCER_KEY, TRACE_KEY, TYPE_KEY
from settled.settlement import (
    Ack,
    Action,
    Leave,
    Nack,
    Raised,
    Reason,
    Reject,
    Requeue,
    Returned,
    Undecodable,
    decide,
    describe,
)
from settled.signals import ConfigurationError
from settled.spark.types import arrow_type, fitting, to_plain
from settled.subscriber import Subscription, subscribe
from settled.transports.base import Source

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from settled.policy import Policy

ACK, RETRY, RELEASE, DEAD, INVALID = "ack", "retry", "release", "dead", "invalid"
Outcome = tuple[str, float | None, str | None]
HELD: Outcome = (RELEASE, None, None)
NO_HEADERS: Mapping[str, str] = {}


@dataclass(frozen=True, slots=True)
class Job:
    """A handler and all it needs to know, as it travels to the executors."""

    handler: Callable[..., Any]
    policy: Policy
    names: dict[str, Any]
    queue: str
    group: str
    in_order: bool
    result: str | None = None
    """The result's Spark type as JSON; None for bytes of JSON."""
    lease_seconds: float = 60.0
    """How long a message that its handler left alone stays away."""
    flags: Mapping[str, Any] = field(default_factory=dict)
    """The driver's feature flags; a process that runs the handler has them too."""

    def subscription(self) -> Subscription:
        """The handler as a pump would run it; ConfigurationError if it cannot run here."""
        subscription = subscribe(
            self.handler, Source(channel=self.queue, group=self.group), self.policy, self.names
        )
        if subscription.is_async:
            raise ConfigurationError(
                f"handler {subscription.name}: Spark runs plain functions; write def, not async def"
            )
        for name, flag in self.flags.items():
            features[name] = flag
        for layer in layers(self.handler):
            if layer.check is not None:
                layer.check()
        return subscription


@dataclass(slots=True)
class Rows:
    """Messages to attempt, column by column; what is None is the same for all or not there."""

    lanes: Sequence[int] | int
    blob: bytes
    offsets: Sequence[int]
    seqs: Any
    attempts: Sequence[int] | None = None
    headers: Sequence[Mapping[str, str] | None] | None = None
    ids: Callable[[int], str] | None = None
    created: Callable[[int], datetime] | None = None
    partition: Callable[[int], str] | None = None
    given: Sequence[str | None] | None = None
    """Outcomes that rows have already; only those without one, or with `ack`, are attempted."""


@dataclass(slots=True)
class Attempted:
    """What came of rows: those that were not acknowledged, by place, and all results."""

    failed: dict[int, Outcome] = field(default_factory=dict)
    results: list[Any] = field(default_factory=list)
    fitted: pa.Array | None = None
    """The results as Arrow, if they have a type of their own."""

    def only_failed(self) -> Attempted:
        """Those that were not acknowledged, by themselves."""
        return Attempted(
            dict(enumerate(self.failed[i] for i in sorted(self.failed))), [None] * len(self.failed)
        )


class _RowDelivery(Delivery):
    """A row as a delivery; its facts are looked up when they are asked for."""

    __slots__ = ("_group", "_place", "_rows")

    def __init__(self, rows: Rows, place: int, queue: str, group: str) -> None:
        self._rows, self._place, self._group = rows, place, group
        self.subject = queue
        self.settled = False

    @property
    def id(self) -> str:  # type: ignore[override]
        rows, i = self._rows, self._place
        return rows.ids(i) if rows.ids is not None else f"{self.lane}/{rows.seqs[i]}"

    @property
    def data(self) -> bytes:  # type: ignore[override]
        rows, i = self._rows, self._place
        return rows.blob[rows.offsets[i] : rows.offsets[i + 1]]

    @property
    def headers(self) -> Mapping[str, str]:  # type: ignore[override]
        return headers_of(self._rows, self._place)

    @property
    def attempt(self) -> int:  # type: ignore[override]
        return self._rows.attempts[self._place] if self._rows.attempts is not None else 1

    @property
    def lane(self) -> str:  # type: ignore[override]
        rows = self._rows
        if rows.partition is not None:
            return rows.partition(self._place)
        return str(rows.lanes if isinstance(rows.lanes, int) else rows.lanes[self._place])

    def metadata(self) -> Metadata:
        rows, i = self._rows, self._place
        return Metadata(
            stream_sequence=int(rows.seqs[i]),
            timestamp=rows.created(i) if rows.created is not None else None,
            redelivery_count=self.attempt - 1,
            consumer=self._group,
            lane=self.lane,
        )


def headers_of(rows: Rows, place: int) -> Mapping[str, str]:
    """A message's headers as a handler sees them, with the content type under its usual name."""
    own = rows.headers[place] if rows.headers is not None else None
    if not own:
        return NO_HEADERS
    if TYPE_KEY in own or TRACE_KEY in own or PRODUCER_KEY in own:
        plain = {k: v for k, v in own.items() if not k.startswith(":")}
        return {**plain, "content-type": own[TYPE_KEY]} if TYPE_KEY in own else plain
    return own


class _Recorder:
    """Takes down what a handler asks for; the batch's transaction carries it out."""

    def __init__(self) -> None:
        self.action: Action | None = None

    def settle(self, delivery: Delivery, action: Action) -> Awaitable[None]:
        if delivery.claim():
            self.action = action
        return DONE

    def taken(self, delivery: Delivery) -> Action | None:
        """What was asked for, if anything was; the next row has the same delivery, open."""
        action, self.action = self.action, None
        delivery.reopen()
        return action

    def extend(self, delivery: Delivery) -> Awaitable[None]:
        return DONE  # the driver renews the lease of the whole batch


class Attempts:
    """One task's attempts; a lane that must wait is remembered from batch to batch."""

    def __init__(self, job: Job, encode: Callable[[Any], Any] | None = None) -> None:
        self._job = job
        self._subscription = job.subscription()
        self._policy = self._subscription.policy
        self._encode = encode or (to_plain if job.result is not None else json_encoder())
        self._kind = arrow_type(job.result) if job.result is not None else None
        self._held: set[int] = set()

    def run(self, rows: Rows) -> Attempted:
        """Attempt rows in their order."""
        done = Attempted(results=[None] * (len(rows.offsets) - 1))
        delivery = _RowDelivery(rows, 0, self._job.queue, self._job.group)
        message = Message.__new__(Message)
        message._delivery, message._settler = delivery, (recorder := _Recorder())
        token = in_hand.set(message)
        try:
            if self._policy.explicit:
                self._explicit(rows, done)
            else:
                self._implicit(rows, done, delivery, message, recorder)
        finally:
            in_hand.reset(token)
        if self._kind is not None and done.results.count(None) < len(done.results):
            done.fitted, misfits = fitting(done.results, self._kind)
            if misfits:
                self._refuse(rows, done, misfits)
                done.fitted = pa.array(done.results, self._kind)
        return done

    def _refuse(self, rows: Rows, done: Attempted, misfits: Mapping[int, Exception]) -> None:
        """Results that are not of their type fail their rows; in order, what came behind them comes again."""
        before = set(self._held)
        fresh: set[int] = set()
        for i in range(min(misfits), len(done.results)):
            if fresh and self._lane(rows, i) in fresh:
                done.failed[i], done.results[i] = HELD, None
            elif i in misfits:
                done.results[i] = None
                self._note_result(rows, done, i, misfits[i])
                fresh = self._held - before

    def _implicit(
        self,
        rows: Rows,
        done: Attempted,
        delivery: _RowDelivery,
        message: Message[Any],
        recorder: _Recorder,
    ) -> None:
        decode, handler, encode = self._subscription.decode, self._subscription.handler, self._encode
        blob, results, held, headers = rows.blob, done.results, self._held, rows.headers
        given = rows.given
        acks = self._policy.auto_ack
        bare = decode.bare if headers is None and isinstance(decode, codec.Decoder) else None
        start = rows.offsets[0]
        for i, end in enumerate(rows.offsets[1:]):
            data, start = blob[start:end], end
            if (held or given) and self._passes(rows, done, i):
                continue
            delivery._place = i
            try:
                payload = bare(data) if bare is not None else decode(data, headers_of(rows, i))
            except Exception as error:
                self._note(rows, done, i, Undecodable(error))
                continue
            message._payload = payload
            try:
                value = handler(payload)
                if value is not None:
                    results[i] = encode(value)
                if not acks or delivery.settled:  # the latter through current_message()
                    self._note(rows, done, i, Returned(), recorder.taken(delivery))
                    if i in done.failed and acks:
                        results[i] = None
            except BaseException as error:
                results[i] = None
                self._note(rows, done, i, Raised(error, delivery.settled), recorder.taken(delivery))

    def _explicit(self, rows: Rows, done: Attempted) -> None:
        subscription = self._subscription
        for i in range(len(rows.offsets) - 1):
            if (self._held or rows.given) and self._passes(rows, done, i):
                continue
            delivery, recorder = _RowDelivery(rows, i, self._job.queue, self._job.group), _Recorder()
            try:
                message: Message[Any] = Message(delivery, subscription.decode, recorder)
            except Exception as error:
                self._note(rows, done, i, Undecodable(error))
                continue
            token = in_hand.set(message)
            try:
                value = subscription.handler(message)
            except BaseException as error:
                self._note(rows, done, i, Raised(error, recorder.action is not None), recorder.action)
            else:
                self._note(rows, done, i, Returned(), recorder.action)
                if value is not None and i not in done.failed:
                    self._keep(rows, done, i, value)
            finally:
                in_hand.reset(token)

    def _keep(self, rows: Rows, done: Attempted, i: int, value: Any) -> None:
        try:
            done.results[i] = self._encode(value)
        except Exception as error:
            self._note_result(rows, done, i, error)

    def _passes(self, rows: Rows, done: Attempted, i: int) -> bool:
        """Whether a row is not attempted: its lane waits, or it has an outcome."""
        lane = self._lane(rows, i)
        if lane in self._held:
            done.failed[i] = HELD
            return True
        outcome = rows.given[i] if rows.given is not None else None
        if outcome is None or outcome == ACK:
            return False
        if self._job.in_order and outcome in (RETRY, RELEASE):
            self._held.add(lane)
        done.failed[i] = (outcome, None, None)
        return True

    @staticmethod
    def _lane(rows: Rows, i: int) -> int:
        return rows.lanes if isinstance(rows.lanes, int) else rows.lanes[i]

    def _note_result(self, rows: Rows, done: Attempted, i: int, error: Exception) -> None:
        """A result that cannot be kept fails its row by `on_error`, also if the handler has settled it."""
        self._note(rows, done, i, Raised(error), policy=replace(self._policy, explicit=False))

    def _note(
        self,
        rows: Rows,
        done: Attempted,
        i: int,
        what: Raised | Returned | Undecodable,
        asked: Action | None = None,
        policy: Policy | None = None,
    ) -> None:
        policy = policy or self._policy
        number = rows.attempts[i] if rows.attempts is not None else 1
        try:
            settlement = decide(what, policy, number, by_hand=asked)
            error = "; ".join(sorted({describe(e) for e in settlement.errors})) or None
        except Exception:  # an error that cannot even be shown
            kind = "Returned" if isinstance(what, Returned) else type(what.error).__name__
            error = f"{kind}, whose text cannot be had"
            settlement = decide(Raised(RuntimeError(error)), policy, number)
        if settlement.stop:
            raise settlement.errors[0]  # not the message's fault: nothing of this batch is settled
        action = asked if asked is not None else settlement.action
        if action == Requeue(None) and policy.backoff is not None:
            action = Requeue(policy.backoff.wait(number))  # before the queue's own, as in a pump
        # A pump pauses for a while, or the broker does: here it is the message that stays away so long.
        pause = self._job.lease_seconds if isinstance(action, Leave) else settlement.pause
        outcome = to_outcome(action, error, pause)
        if outcome[0] == ACK:
            return
        done.failed[i] = outcome
        if self._job.in_order and outcome[0] in (RETRY, RELEASE):
            self._held.add(self._lane(rows, i))


def to_outcome(action: Action, error: str | None, pause: float = 0.0) -> Outcome:
    """A settlement as the columns `outcome`, `delay` and `error`."""
    match action:
        case Ack():
            return (ACK, None, None)
        case Requeue(delay):
            return (RETRY, delay, error)
        case Reject(Reason.UNACCEPTABLE, why):
            return (INVALID, None, why or error)
        case Reject(_, why):
            return (DEAD, None, why or error)
        case Nack() | Leave():
            return (RELEASE, pause or None, error)


def json_encoder() -> Callable[[Any], bytes]:
    """What makes JSON of results; bytes are taken to be JSON already."""
    encode = codec.encoder(codec.JSON)
    return lambda value: value if isinstance(value, bytes) else encode(value)


def outcome_arrays(done: Attempted, result: pa.DataType) -> list[pa.Array]:
    """`outcome`, `delay`, `error` and `result` as Arrow; an acknowledged message has no outcome."""
    n, failed = len(done.results), done.failed
    kinds = (pa.string(), pa.float64(), pa.string())
    if failed:
        at = np.full(n, -1, np.int32)
        at[np.fromiter(failed, np.int64, len(failed))] = np.arange(len(failed))
        places = pa.array(at, mask=at < 0)
        columns = zip(*failed.values(), strict=True)
        outcomes = [pa.array(c, kind).take(places) for c, kind in zip(columns, kinds, strict=True)]
    else:
        outcomes = [pa.nulls(n, kind) for kind in kinds]
    if done.fitted is not None:
        return [*outcomes, done.fitted]
    bare = done.results.count(None) == n
    return [*outcomes, pa.nulls(n, result) if bare else pa.array(done.results, result)]
