"""A group's books: how far it is, which batch is out, what comes again and when; and what settling does."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Sequence
from typing import NamedTuple

import msgspec

from settled.backoff import AFTER_NAK
from settled.queue.errors import Conflict
from settled.spark.attempts import DEAD, INVALID, RELEASE, RETRY

EXHAUSTED = "exhausted"
"""A retry that had no attempt left: a dead letter too."""
ATTEMPTS = 3
ROWS_A_TASK = 5_000


class Terms(msgspec.Struct, frozen=True, kw_only=True):
    """What the consumer, or else the query, says of the group's messages."""

    subjects: tuple[str, ...] = ()
    max_deliver: int | None = ATTEMPTS
    backoff: tuple[float, ...] = ()
    dead_letter: str = ""

    def delay(self, attempts: int) -> float:
        """How long to wait after so many attempts: the consumer's backoff, or the default."""
        if self.backoff:
            return self.backoff[min(attempts, len(self.backoff)) - 1]
        return AFTER_NAK.wait(attempts)

    def exhausted(self, attempts: int) -> bool:
        """Whether there is no attempt after so many."""
        return self.max_deliver is not None and attempts >= self.max_deliver


class Piece(msgspec.Struct, frozen=True):
    """What one task reads: sequences [first, end), and single ones that failed before."""

    first: int
    end: int
    due: tuple[int, ...] = ()

    def __len__(self) -> int:
        return self.end - self.first + len(self.due)


class Manifest(msgspec.Struct, frozen=True):
    """A batch, written down before it is read."""

    number: int
    first: int
    end: int
    pieces: tuple[Piece, ...]
    claimed_at: float
    missed: int = 0
    """Messages before it that were removed from the stream before anyone claimed them."""
    repeated: bool = False
    """Whether it was read more than once: an earlier run may have published results of it."""

    def due(self) -> set[int]:
        """The single messages in it."""
        return {seq for piece in self.pieces for seq in piece.due}


class Failure(NamedTuple):
    """A message that was not acknowledged: what became of it, after how many attempts, and why."""

    sequence: int
    outcome: str
    attempts: int
    error: int
    """Its place among the settlement's errors."""


class Settlement(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a batch. Its letters follow once it is written down."""

    number: int
    first: int
    end: int
    claimed_at: float
    at: float
    messages: int = 0
    acked: int = 0
    retried: int = 0
    dead: int = 0
    released: int = 0
    pushed: int = 0
    removed: int = 0
    errors: tuple[str, ...] = ()
    failures: tuple[Failure, ...] = ()


class Totals(msgspec.Struct, frozen=True, kw_only=True):
    """All settled batches together."""

    batches: int = 0
    messages: int = 0
    acked: int = 0
    retried: int = 0
    dead: int = 0
    released: int = 0
    pushed: int = 0
    removed: int = 0

    def plus(self, one: Settlement) -> Totals:
        names = [name for name in self.__struct_fields__ if name != "batches"]
        sums = {name: getattr(self, name) + getattr(one, name) for name in names}
        return Totals(batches=self.batches + 1, **sums)


class Doubt(NamedTuple):
    """Messages [first, end) that come again although a run that died may have published their results."""

    first: int
    end: int
    since: float
    until: float
    """Such a result is in its target from `since` to `until`."""


class Books(msgspec.Struct, frozen=True, kw_only=True):
    """All that is known of a group on a stream, as one value."""

    name: str
    """Of these books: others of the same group, begun anew, have another."""
    write: str
    """A name for this version, so that a writer knows its own again."""
    holder: str
    epoch: int
    born: str
    """When the stream was made: one that was made anew counts from 1."""
    cursor: int
    """The first sequence that no batch has been settled over."""
    terms: Terms = Terms()
    newest: int = 0
    serving: int = 0
    retries: dict[int, tuple[int, float]] = {}
    """By sequence, how often it was attempted and when it is due."""
    doubts: tuple[Doubt, ...] = ()
    open: Manifest | None = None
    last: Settlement | None = None
    totals: Totals = Totals()


def forgetting(books: Books) -> Books:
    """The books without what was needed only to send the last settlement's letters."""
    if books.last is None:
        return books
    return msgspec.structs.replace(books, last=msgspec.structs.replace(books.last, failures=(), errors=()))


class Outcome(NamedTuple):
    """What a task says of a message that was not acknowledged."""

    sequence: int
    outcome: str
    delay: float | None
    error: str | None


class Read(NamedTuple):
    """What a task found of its piece."""

    messages: int
    removed: int


class Span(NamedTuple):
    """What the stream has for the group: from `first` on to `last`, if that is not before it."""

    first: int
    last: int
    missed: int = 0
    """Sequences before it that the stream does not have any more."""


def claim(
    books: Books, span: Span, *, limit: int | None, now: float, as_of: float, in_order: bool, tasks: int
) -> Manifest | None:
    """The next batch: what is due again, then what is new; None if there is neither.

    In order, a message that is to come again holds back everything behind it.
    """
    most = limit if limit is not None else 2**62
    parked = ((due, seq) for seq, (_, due) in books.retries.items() if seq < span.first and due <= as_of)
    due = sorted(seq for _, seq in sorted(parked)[:most])
    end = min(span.last + 1, span.first + most - len(due))
    if in_order and books.retries.get(span.first, (0, 0.0))[1] > as_of:
        end = span.first
    if end <= span.first:
        end = span.first
        if not due:
            return None
    pieces = cut(span.first, end, due, 1 if in_order else tasks)
    missed = 0 if books.terms.subjects else span.missed
    return Manifest(books.newest + 1, span.first, end, pieces, now, missed)


def skip(books: Books, span: Span) -> Books | None:
    """The books after messages that are gone and that nothing came behind; None if there are none.

    Under a filter nobody knows how many of them were the group's.
    """
    if books.terms.subjects or not span.missed:
        return None
    totals = msgspec.structs.replace(books.totals, removed=books.totals.removed + span.missed)
    return msgspec.structs.replace(books, cursor=books.cursor + span.missed, totals=totals)


def cut(first: int, end: int, due: list[int], tasks: int) -> tuple[Piece, ...]:
    """A batch in pieces of about the same size."""
    total = end - first + len(due)
    wanted = max(1, min(tasks, math.ceil(total / ROWS_A_TASK)))
    at = [first + (end - first) * i // wanted for i in range(wanted + 1)]
    of = [len(due) * i // wanted for i in range(wanted + 1)]
    pieces = (Piece(at[i], at[i + 1], tuple(due[of[i] : of[i + 1]])) for i in range(wanted))
    return tuple(piece for piece in pieces if len(piece))


def settle(
    books: Books,
    batch: Manifest,
    outcomes: Sequence[Outcome],
    read: Read,
    *,
    pushed: int,
    now: float,
    in_order: bool,
    repeated: Collection[int] = (),
) -> Books:
    """The books after the batch: the cursor behind it, and what comes again, as one change.

    `repeated` are sequences of tasks that ran more than once, although the batch did not.
    """
    due = batch.due()
    _check(batch, due, outcomes)
    cursor, held = batch.end, 0
    if in_order:
        again = [o.sequence for o in outcomes if o.sequence not in due and o.outcome in (RETRY, RELEASE)]
        if again:
            cursor = min(again)
            behind = [o for o in outcomes if o.sequence > cursor and o.sequence not in due]
            held = len(behind) if books.terms.subjects else batch.end - cursor - 1
            outcomes = [o for o in outcomes if o.sequence <= cursor or o.sequence in due]
    done = {seq for seq in books.retries if seq in due or batch.first <= seq < cursor}
    retries = {seq: entry for seq, entry in books.retries.items() if seq not in done}
    errors: dict[str, int] = {}
    failures = []
    for sequence, outcome, delay, error in outcomes:
        before = books.retries.get(sequence, (0, 0.0))[0]
        attempts = before if outcome == RELEASE else before + 1
        if outcome == RETRY and books.terms.exhausted(attempts):
            outcome = EXHAUSTED
        if outcome == RETRY:
            wait = books.terms.delay(attempts) if delay is None else delay
            retries[sequence] = (attempts, now + wait)
        elif outcome == RELEASE:
            retries[sequence] = (attempts, now + (delay or 0.0))
        place = errors.setdefault(error or ("" if outcome == RELEASE else "no error given"), len(errors))
        failures.append(Failure(sequence, outcome, attempts, place))
    counts = Counter(failure.outcome for failure in failures)
    one = Settlement(
        number=batch.number,
        first=batch.first,
        end=batch.end,
        claimed_at=batch.claimed_at,
        at=now,
        messages=read.messages,
        acked=max(read.messages - len(failures) - held, 0),
        retried=counts[RETRY],
        dead=sum(counts[kind] for kind in (DEAD, INVALID, EXHAUSTED)),
        released=counts[RELEASE] + held,
        pushed=pushed,
        removed=read.removed + batch.missed,
        errors=tuple(errors),
        failures=tuple(failures),
    )
    doubts = _doubts(books, batch, cursor, retries, repeated, now)
    return msgspec.structs.replace(
        books,
        cursor=cursor,
        retries=retries,
        doubts=doubts,
        open=None,
        last=one,
        totals=books.totals.plus(one),
    )


def _doubts(
    books: Books,
    batch: Manifest,
    cursor: int,
    retries: Collection[int],
    repeated: Collection[int],
    now: float,
) -> tuple[Doubt, ...]:
    """Of the messages that come again, those whose results may be in the target already."""
    waiting = sorted(retries)
    kept = [
        d for d in books.doubts
        if d.end > cursor or bisect_left(waiting, d.first) < bisect_left(waiting, d.end)
    ]  # fmt: skip
    ours = batch.due() | {seq for seq in retries if batch.first <= seq < batch.end}
    again = sorted(seq for seq in ours if seq in retries and (batch.repeated or seq in repeated))
    since, fresh = batch.claimed_at, list[Doubt]()
    if cursor < batch.end and (batch.repeated or repeated):
        fresh.append(Doubt(cursor, batch.end, since, now))
        again = [seq for seq in again if not cursor <= seq < batch.end]
    for seq in again:
        if fresh and fresh[-1].end == seq:
            fresh[-1] = fresh[-1]._replace(end=seq + 1)
        else:
            fresh.append(Doubt(seq, seq + 1, since, now))
    return (*kept, *fresh)


def _check(batch: Manifest, due: set[int], outcomes: Sequence[Outcome]) -> None:
    seen: set[int] = set()
    for outcome in outcomes:
        if not (batch.first <= outcome.sequence < batch.end or outcome.sequence in due):
            raise Conflict(
                f"sequence {outcome.sequence} does not belong to batch {batch.number}: settle rows of one "
                "stream, with their own sequence"
            )
        if outcome.sequence in seen:
            raise Conflict(
                f"sequence {outcome.sequence} of batch {batch.number} has two outcomes: settle each row once"
            )
        seen.add(outcome.sequence)
