"""A task's messages: sequences of a stream, got directly and in batches, laid out as Arrow."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import msgspec
import nats.errors
import nats.js.errors
import numpy as np
import pyarrow as pa
from nats.aio.msg import Msg

from settled.spark.attempts import Rows
from settled.spark.jetstream.link import RECONNECT_FOR, Away, Link
from settled.spark.rows import ARROW
from settled.transports.nats import Connection
from settled.transports.nats.delivery import MSG_ID
from settled.transports.nats.sources import overlap

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from settled.spark.jetstream.books import Piece

FETCH, FETCH_BYTES = 5_000, 16_000_000
_SILENCE = 5.0
_NEAR = 8
_TOGETHER = 128
# What the server adds to a message that is got directly.
_ADDED = frozenset(
    f"Nats-{name}"
    for name in (
        "Stream",
        "Subject",
        "Sequence",
        "Time-Stamp",
        "Num-Pending",
        "Last-Sequence",
        "UpTo-Sequence",
    )
)


class Found(msgspec.Struct):
    """Some messages of a stream, and whether there are more behind them as far as this server knows."""

    messages: list[Msg]
    more: bool = False


def sequence_of(message: Msg) -> int:
    """A message's place in its stream."""
    return int((message.headers or {})["Nats-Sequence"])


async def fetch(connection: Connection, stream: str, **request: Any) -> Found:
    """Get messages directly: `seq` or `start_time`, `batch`, and perhaps `next_by_subj`.

    Any server with a copy of the stream answers, which spares the leader.
    """
    client = await connection.open()
    messages: list[Msg] = []
    ended = asyncio.Event()

    async def take(message: Msg) -> None:
        messages.append(message)
        if "Status" in (message.headers or ()):
            ended.set()

    inbox = client.new_inbox()
    subscription = await client.subscribe(inbox, cb=take, pending_msgs_limit=-1, pending_bytes_limit=-1)
    try:
        asked = msgspec.json.encode({"max_bytes": FETCH_BYTES, **request})
        await client.publish(f"$JS.API.DIRECT.GET.{stream}", asked, reply=inbox)
        seen = -1
        while not ended.is_set():
            try:
                await asyncio.wait_for(ended.wait(), _SILENCE)
            except TimeoutError:
                if len(messages) == seen:
                    raise nats.errors.TimeoutError from None
                seen = len(messages)
    finally:
        await subscription.unsubscribe()
    last = messages.pop()
    facts = last.headers or {}
    match facts["Status"]:
        case "204" if (
            messages and facts["Nats-Last-Sequence"] == (messages[-1].headers or {})["Nats-Sequence"]
        ):
            return Found(messages, facts["Nats-Num-Pending"] != "0")
        case "404":
            return Found([])
        case "503":
            raise nats.errors.NoRespondersError
        case "204":
            raise nats.errors.TimeoutError  # something got lost on the way
        case status:
            raise Away(f"stream {stream!r}: a direct get of {request} was answered {status}: {facts}")


async def next_sequence(connection: Connection, stream: str, at: int, subject: str) -> int | None:
    """The first message from a sequence on, as the stream's leader knows it, which knows all."""
    try:
        found = await connection.jetstream.get_msg(stream, seq=at, subject=subject, next=True)
    except nats.js.errors.NotFoundError:
        return None
    return found.seq


@dataclass(frozen=True, slots=True)
class Messages:
    """Messages as columns."""

    stream: str
    items: Sequence[Msg]
    seqs: NDArray[np.int64]
    attempts: list[int] | None

    def __len__(self) -> int:
        return len(self.items)

    def rows(self) -> Rows:
        items = self.items
        created = self._created()
        offsets = np.zeros(len(items) + 1, np.int64)
        np.cumsum([len(m.data) for m in items], out=offsets[1:])
        return Rows(
            lanes=0,
            blob=b"".join([m.data for m in items]),
            offsets=offsets.tolist(),
            seqs=self.seqs,
            attempts=self.attempts,
            headers=[_own(m) for m in items],
            ids=self._id,
            created=lambda i: datetime.fromtimestamp(int(created[i]) / 1e6, UTC),
            partition=lambda i: (items[i].headers or {})["Nats-Subject"],
        )

    def only(self, places: list[int]) -> Messages:
        attempts = None if self.attempts is None else [self.attempts[i] for i in places]
        return Messages(self.stream, [self.items[i] for i in places], self.seqs[places], attempts)

    def arrays(self, batch: int) -> list[pa.Array]:
        n, items = len(self), self.items
        ids = pa.array([self._id(i) for i in range(n)], pa.string())
        headers = [list(_own(m).items()) or None for m in items]
        return [
            pa.repeat(pa.scalar(self.stream), n),
            pa.array([(m.headers or {})["Nats-Subject"] for m in items], pa.string()),
            pa.array(self.seqs),
            ids,
            ids,
            pa.repeat(pa.scalar(1, pa.int32()), n)
            if self.attempts is None
            else pa.array(self.attempts, pa.int32()),
            pa.array(self._created()).cast(pa.timestamp("us", "UTC")),
            pa.array(headers, ARROW.field("headers").type),
            pa.array([m.data for m in items], pa.binary()),
            pa.repeat(pa.scalar(0, pa.int64()), n),
            pa.repeat(pa.scalar(batch, pa.int64()), n),
        ]

    def _id(self, place: int) -> str:
        return (self.items[place].headers or {}).get(MSG_ID) or f"{self.stream}:{self.seqs[place]}"

    def _created(self) -> NDArray[np.int64]:
        texts = [(m.headers or {})["Nats-Time-Stamp"].rstrip("Z") for m in self.items]
        return np.array(texts, "datetime64[us]").astype(np.int64)


def _own(message: Msg) -> dict[str, str]:
    return {name: value for name, value in (message.headers or {}).items() if name not in _ADDED}


class PieceReader:
    """Reads one task's piece, and counts what of it is not there any more."""

    def __init__(
        self, link: Link, stream: str, subjects: Sequence[str], piece: Piece, attempts: dict[int, int]
    ) -> None:
        self._link = link
        self._stream = stream
        self._subjects = subjects
        self._piece = piece
        self._attempts = attempts
        self.found = 0
        self.removed = 0

    def __iter__(self) -> Iterator[Messages]:
        piece = self._piece
        for at in range(0, len(piece.due), FETCH):
            wanted = piece.due[at : at + FETCH]
            found = self._link.run(lambda c, wanted=wanted: singly(c, self._stream, wanted))  # type: ignore[misc]
            self.removed += len(wanted) - len(found)
            yield from self._messages(found)
        before = self.found
        for messages in self._range(piece.first, piece.end):
            yield from self._messages(messages)
        if not self._subjects:
            self.removed += piece.end - piece.first - (self.found - before)

    def _messages(self, found: list[Msg]) -> Iterator[Messages]:
        if not found:
            return
        self.found += len(found)
        seqs = np.array([sequence_of(m) for m in found], np.int64)
        failed = self._attempts
        attempts = [failed.get(seq, 0) + 1 for seq in seqs.tolist()] if failed else None
        yield Messages(self._stream, found, seqs, attempts)

    def _range(self, at: int, end: int) -> Iterator[list[Msg]]:
        one = self._subjects[0] if len(self._subjects) == 1 else None
        chosen: dict[str, bool] = {}
        deadline: float | None = None
        while at < end:
            request: dict[str, Any] = {"seq": at, "batch": min(FETCH, end - at)}
            if one is not None:
                request["next_by_subj"] = one
            found = self._link.run(lambda c, request=request: fetch(c, self._stream, **request))  # type: ignore[misc]
            if found.messages:
                at, deadline = sequence_of(found.messages[-1]) + 1, None
                inside = [m for m in found.messages if sequence_of(m) < end] if at > end else found.messages
                yield [m for m in inside if self._wants(m, chosen)] if len(self._subjects) > 1 else inside
            if found.more or at >= end:
                continue
            # The server that answered has no more: is it the end, or is its copy behind?
            subject = one or ">"
            following = self._link.run(
                lambda c, at=at, subject=subject: next_sequence(c, self._stream, at, subject)  # type: ignore[misc]
            )
            if following is None or following >= end:
                return
            deadline = deadline or time.monotonic() + RECONNECT_FOR
            if time.monotonic() > deadline:
                raise Away(f"stream {self._stream!r}: sequence {following} cannot be got from any copy")
            time.sleep(0.05)

    def _wants(self, message: Msg, chosen: dict[str, bool]) -> bool:
        subject = (message.headers or {})["Nats-Subject"]
        if subject not in chosen:
            chosen[subject] = any(overlap(subject, pattern) for pattern in self._subjects)
        return chosen[subject]


async def singly(connection: Connection, stream: str, sequences: Sequence[int]) -> list[Msg]:
    """Messages by their sequences, in order; those that are not there any more are left out."""
    groups: list[list[int]] = []
    for sequence in sequences:
        if groups and sequence - groups[-1][-1] <= _NEAR and sequence - groups[-1][0] < FETCH:
            groups[-1].append(sequence)
        else:
            groups.append([sequence])
    found: list[Msg] = []
    for at in range(0, len(groups), _TOGETHER):
        tasks = (_group(connection, stream, group) for group in groups[at : at + _TOGETHER])
        for messages in await asyncio.gather(*tasks):
            found += messages
    return found


async def _between(connection: Connection, stream: str, at: int, last: int) -> list[Msg]:
    messages: list[Msg] = []
    while at <= last:
        found = await fetch(connection, stream, seq=at, batch=last - at + 1)
        messages += found.messages
        if not found.more:
            break
        at = sequence_of(messages[-1]) + 1
    return messages


async def _group(connection: Connection, stream: str, group: list[int]) -> list[Msg]:
    first, last = group[0], group[-1]
    if first == last:
        client = await connection.open()
        asked = msgspec.json.encode({"seq": first})
        answer = await client.request(f"$JS.API.DIRECT.GET.{stream}", asked, timeout=_SILENCE)
        messages = [] if (answer.headers or {}).get("Status") == "404" else [answer]
    else:
        messages = await _between(connection, stream, first, last)
    wanted = set(group)
    found = [m for m in messages if sequence_of(m) in wanted]
    missing = wanted - {sequence_of(m) for m in found}
    for sequence in missing:
        # A copy may be behind; the leader is not.
        if await next_sequence(connection, stream, sequence, ">") == sequence:
            raise nats.errors.TimeoutError
    return found
