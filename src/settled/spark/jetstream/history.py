"""What happened on JetStream: batches from their books, dead letters from their streams, as tables."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Any, Self

import msgspec
import nats.errors
import nats.js.errors
from nats.aio.msg import Msg
from nats.js.api import AckPolicy, ConsumerConfig

from settled.queue.errors import NotFound
from settled.spark.attempts import RELEASE, RETRY
from settled.spark.jetstream import setting
from settled.spark.jetstream.books import Books, Settlement, Totals
from settled.spark.jetstream.bucket import STREAM, Bucket, subject_of
from settled.spark.jetstream.gets import Stored, singly
from settled.spark.jetstream.link import Link
from settled.spark.jetstream.outbox import LETTERS
from settled.transports.nats import Connection

Row = dict[str, Any]
_FETCH = 1_000
_KINDS = {RETRY: "failed", RELEASE: "released"}


class Watch:
    """Looks at the books without holding them."""

    def __init__(self, url: str) -> None:
        self.link = Link(url)
        self._bucket = Bucket(self.link)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.link.close()

    def books(self, stream: str, group: str) -> Books | None:
        """A group's books; None if it has not read yet."""
        value = self._bucket.get(f"{stream}.{group}")
        return msgspec.json.decode(value.data, type=Books) if value.data else None

    def totals(self, stream: str, group: str) -> Totals:
        """All that a group has settled."""
        found = self.books(stream, group)
        return found.totals if found is not None else Totals()

    def progress(self, stream: str, group: str, after: Totals) -> dict[str, int]:
        """What a group has settled since, and what it has before it."""
        books = self.books(stream, group)
        if books is None:
            return {**_minus(after, after), "waiting": 1, "failing": 0}
        counts = {**_minus(books.totals, after), **self._lag(stream, books)}
        counts["removed"] += self._missed(stream, books)
        return counts

    def _missed(self, stream: str, books: Books) -> int:
        """Messages before the group that are gone, and that its books do not know of yet."""

        async def work(connection: Connection) -> int:
            try:
                info = await connection.jetstream.stream_info(stream)
            except nats.js.errors.NotFoundError:
                return 0
            return max(info.state.first_seq - books.cursor, 0)

        return 0 if books.terms.subjects or books.open is not None else self.link.run(work)

    def _lag(self, stream: str, books: Books) -> dict[str, int]:
        cursor, subjects = books.cursor, books.terms.subjects
        try:
            count = self.link.run(lambda c: setting.waiting(c, stream, cursor, subjects))
        except nats.js.errors.NotFoundError:  # the stream is gone, its history is not
            count = 0
        return {"waiting": count, "failing": len(books.retries)}

    def groups(self, stream: str | None) -> list[tuple[str, str]]:
        """The groups that have books."""
        prefix = subject_of("")
        found = (name.removeprefix(prefix).split(".") for name in self._keys(f"{stream or '*'}.*"))
        return sorted((one, group) for one, group in found)

    def _keys(self, pattern: str) -> list[str]:
        async def work(connection: Connection) -> list[str]:
            try:
                info = await connection.jetstream.stream_info(STREAM, subjects_filter=subject_of(pattern))
            except nats.js.errors.NotFoundError:
                return []
            return list(info.state.subjects or ())

        return self.link.run(work)

    def lag(self, stream: str | None) -> list[Row]:
        """What each group has before it."""
        rows = []
        for one, group in self.groups(stream):
            books = self.books(one, group)
            if books is not None:
                row = {"queue": one, "consumer_group": group, "partitions": 1}
                rows.append({**row, **self._lag(one, books)})
        return rows

    def settlements(self, stream: str | None, since: datetime) -> Iterator[tuple[str, str, Settlement]]:
        """The settled batches that are still in the books."""
        prefix = subject_of("")
        for one, group in self.groups(stream):
            for key in self._keys(f"{one}.{group}.batch.*"):
                value = self._bucket.get(key.removeprefix(prefix))
                entry = msgspec.json.decode(value.data, type=Settlement) if value.data else None
                if entry is not None and entry.at >= since.timestamp():
                    yield one, group, entry

    def letters(self, stream: str | None, streams: Sequence[str], since: datetime) -> list[Row]:
        """Dead letters: of our own stream, of those that groups name, and of those that are asked for."""
        names = set(streams)
        for one, group in self.groups(stream):
            books = self.books(one, group)
            if books is not None and books.terms.dead_letter:
                subject = books.terms.dead_letter
                names.add(self.link.run(lambda c, s=subject: _stream_of(c, s)))  # type: ignore[misc]
        found = [
            m for name in sorted({*names, LETTERS.stream})
            for m in self.link.run(lambda c, name=name: _all_of(c, name, missing_ok=name not in streams))  # type: ignore[misc]
        ]  # fmt: skip
        rows = [_letter(m) for m in found if "settled-stream" in (m.headers or {})]
        return [row for row in rows if row["at"] >= since and stream in (None, row["queue"])]

    def originals(self, stream: str, sequences: Sequence[int]) -> dict[int, Stored]:
        """Messages that are still there."""
        try:
            found = self.link.run(lambda c: singly(c, stream, sorted(sequences)))
        except nats.js.errors.NotFoundError:
            return {}
        return {m.sequence: m for m in found}

    def limit(self, stream: str, group: str) -> int | None:
        """After how many deliveries a message of a group is given up."""
        books = self.books(stream, group)
        if books is not None:
            return books.terms.max_deliver

        async def work(connection: Connection) -> int | None:
            try:
                info = await connection.jetstream.consumer_info(stream, group)
            except nats.js.errors.NotFoundError:
                return None
            return info.config.max_deliver if info.config else None

        found = self.link.run(work)
        return found if found is not None and found > 0 else None


def tables(
    watch: Watch, stream: str | None, since: datetime, dead_letters: Sequence[str]
) -> dict[str, list[Row]]:
    """The tables of a report, as the queue has them."""
    settled = [row for one in watch.settlements(stream, since) for row in _settlement(*one)]
    letters = watch.letters(stream, dead_letters, since)
    booked = {_place(row) for row in settled if row["kind"] == "dead"}
    unbooked = [_death(row) for row in letters if _place(row) not in booked]
    return {"settlements": settled + unbooked, "dead_letters": letters}


def _minus(now: Totals, before: Totals) -> dict[str, int]:
    return {name: getattr(now, name) - getattr(before, name) for name in now.__struct_fields__}


def lane_of(stream: str) -> int:
    """A number for a stream, as the queue has one for a lane."""
    return zlib.crc32(stream.encode())


def _settlement(stream: str, group: str, one: Settlement) -> Iterator[Row]:
    base = {
        "at": datetime.fromtimestamp(one.at, UTC), "worker": "spark", "queue": stream, "partition": stream,
        "consumer_group": group, "lane_id": lane_of(stream), "seconds": None, "attempts": None, "error": None,
    }  # fmt: skip
    if one.acked:
        yield {
            **base, "kind": "settled", "first_sequence": one.first, "last_sequence": one.end - 1,
            "messages": one.acked, "seconds": one.at - one.claimed_at,
        }  # fmt: skip
    for sequence, outcome, attempts, error in one.failures:
        yield {
            **base, "kind": _KINDS.get(outcome, "dead"), "first_sequence": sequence, "messages": 1,
            "last_sequence": sequence, "attempts": attempts, "error": one.errors[error] or None,
        }  # fmt: skip
    held = one.released - sum(f.outcome == RELEASE for f in one.failures)
    if held > 0:
        yield {
            **base, "kind": "released", "first_sequence": one.first, "last_sequence": one.end - 1,
            "messages": held,
        }  # fmt: skip


def _place(row: Row) -> tuple[str, str, int]:
    sequence = row["first_sequence"] if "first_sequence" in row else row["sequence"]
    return row["queue"], row["consumer_group"], sequence


def _death(letter: Row) -> Row:
    """A dead letter that is in no books, as the settlement that it was."""
    names = ("at", "queue", "partition", "consumer_group", "lane_id", "attempts", "error")
    return {
        **{name: letter[name] for name in names}, "kind": "dead", "worker": "", "messages": 1,
        "first_sequence": letter["sequence"], "last_sequence": letter["sequence"], "seconds": None,
    }  # fmt: skip


def _letter(message: Msg) -> Row:
    headers = message.headers or {}
    facts = message.metadata
    published = headers.get("settled-published")
    return {
        "at": facts.timestamp.astimezone(UTC),
        "id": str(facts.sequence.stream),
        "queue": headers["settled-stream"],
        "partition": headers.get("settled-subject", ""),
        "consumer_group": headers.get("settled-group", ""),
        "lane_id": lane_of(headers["settled-stream"]),
        "sequence": int(headers.get("settled-sequence", 0)),
        "message_id": headers.get("settled-id"),
        "transaction_id": headers.get("settled-id"),
        "error": headers.get("settled-error"),
        "attempts": int(headers.get("settled-attempts", 0)),
        "headers": msgspec.json.encode(headers),
        "payload": message.data,
        "created_at": datetime.fromisoformat(published) if published else None,
    }


async def _stream_of(connection: Connection, subject: str) -> str:
    return await connection.jetstream.find_stream_name_by_subject(subject)


async def _all_of(connection: Connection, stream: str, *, missing_ok: bool) -> list[Msg]:
    """All messages of a stream, which need not allow direct gets."""
    jetstream = connection.jetstream
    try:
        left = (await jetstream.stream_info(stream)).state.messages
    except nats.js.errors.NotFoundError as error:
        if missing_ok:
            return []
        raise NotFound("stream", f"{stream} on {connection.where}, named for its dead letters") from error
    config = ConsumerConfig(ack_policy=AckPolicy.NONE, inactive_threshold=60.0, mem_storage=True)
    subscription = await jetstream.pull_subscribe("", stream=stream, config=config)
    found: list[Msg] = []
    try:
        while len(found) < left:
            try:
                found += await subscription.fetch(min(_FETCH, left - len(found)), timeout=5)
            except nats.errors.TimeoutError:
                break  # some were removed meanwhile
    finally:
        await subscription.unsubscribe()
    return found
