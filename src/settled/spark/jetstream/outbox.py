"""What follows a settlement: its dead letters, each once, and its entry in the history."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np

from settled.settlement import Reason
from settled.spark.attempts import DEAD, INVALID
from settled.spark.jetstream.books import EXHAUSTED, Books, Failure, Settlement, Terms
from settled.spark.jetstream.bucket import NOTHING, Bucket
from settled.spark.jetstream.gets import Stored, singly
from settled.spark.jetstream.link import Link
from settled.spark.jetstream.publishing import Outgoing, publish_all
from settled.transports.nats import Connection, DeadLetters, Letter
from settled.transports.nats.delivery import MSG_ID
from settled.transports.nats.letters import Office

if TYPE_CHECKING:
    from settled.spark.options import Options

LETTERS = DeadLetters(advisories=None)
KEPT = 1_000
"""So many settlements are kept, for reports."""
_AT_ONCE = 1_000
REMOVED = "removed from the stream before its dead letter was written"


def prepare(link: Link, terms: Terms, replicas: int) -> None:
    """Make the stream of dead letters, if it is ours and not there."""
    if not terms.dead_letter:
        link.run(lambda connection: Office(connection, LETTERS).make(replicas))


def deliver(link: Link, settings: Options, books: Books) -> None:
    """Write the last settlement's letters and its entry; whoever finds the entry missing does so."""
    last, bucket = books.last, Bucket(link)
    if last is None:
        return
    key = f"{settings.queue}.{settings.group}.batch.{last.number}"
    if bucket.get(key).revision:
        return
    dead = [f for f in last.failures if f.outcome in (DEAD, INVALID, EXHAUSTED)]
    for at in range(0, len(dead), _AT_ONCE):
        some = dead[at : at + _AT_ONCE]
        link.run(lambda c, some=some: _write_letters(c, settings, books, last, some))  # type: ignore[misc]
    bucket.replace(key, msgspec.json.encode(last), NOTHING)
    if last.number > KEPT:
        bucket.remove(f"{settings.queue}.{settings.group}.batch.{last.number - KEPT}")
        bucket.remove(f"{settings.queue}.{settings.group}.batch.{last.number - KEPT}.>")


async def _write_letters(
    connection: Connection, settings: Options, books: Books, last: Settlement, dead: list[Failure]
) -> None:
    failures = {failure.sequence: failure for failure in dead}
    found = {m.sequence: m for m in await singly(connection, settings.queue, sorted(failures))}
    letters = [
        _letter(settings, failure, last.errors[failure.error], found.get(sequence))
        for sequence, failure in failures.items()
    ]
    limit = (await connection.open()).max_payload
    await publish_all(connection, [_fitting(letter, books.terms, limit) for letter in letters])


def _letter(settings: Options, failure: Failure, error: str, message: Stored | None) -> Letter:
    headers = message.headers if message is not None else {}
    return Letter(
        stream=settings.queue,
        consumer=settings.group,
        sequence=failure.sequence,
        stored_ns=int(np.datetime64(message.time, "ns").astype(np.int64)) if message is not None else 0,
        id=headers.get(MSG_ID) or f"{settings.queue}:{failure.sequence}",
        subject=message.subject if message is not None else "",
        data=message.data if message is not None else b"",
        headers=headers,
        attempts=failure.attempts,
        reason=Reason.UNACCEPTABLE if failure.outcome == INVALID else Reason.DELIVERY_ERROR,
        error=error if message is not None else f"{error} ({REMOVED})",
    )


def _fitting(letter: Letter, terms: Terms, limit: int) -> Outgoing:
    """What the server takes of a letter: facts come on top of a message that may fill it by itself."""
    whole = _outgoing(letter, terms)
    if whole.size <= limit:
        return whole
    return _outgoing(letter.without_body(), terms)


def _outgoing(letter: Letter, terms: Terms) -> Outgoing:
    headers = letter.wire_headers()
    if terms.dead_letter:
        return Outgoing(terms.dead_letter, letter.data, headers)
    # One letter a subject, however long ago the first one was written.
    headers["Nats-Expected-Last-Subject-Sequence"] = "0"
    return Outgoing(f"{LETTERS.subject}.{letter.identity}", letter.data, headers)
