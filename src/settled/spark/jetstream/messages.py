"""A task's messages: its piece of a stream, read to the end and laid out as Arrow."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from settled.spark.attempts import Rows
from settled.spark.jetstream.gets import FETCH, Stored, fetch, next_sequence, singly
from settled.spark.jetstream.link import RECONNECT_FOR, Away, Link
from settled.spark.rows import ARROW
from settled.transports.nats.sources import overlap

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from settled.spark.jetstream.books import Piece


@dataclass(frozen=True, slots=True)
class Messages:
    """Messages as columns."""

    stream: str
    items: Sequence[Stored]
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
            headers=[m.headers for m in items],
            ids=self._id,
            created=lambda i: datetime.fromtimestamp(int(created[i]) / 1e6, UTC),
            partition=lambda i: items[i].subject,
        )

    def only(self, places: list[int]) -> Messages:
        attempts = None if self.attempts is None else [self.attempts[i] for i in places]
        return Messages(self.stream, [self.items[i] for i in places], self.seqs[places], attempts)

    def arrays(self, batch: int) -> list[pa.Array]:
        n, items = len(self), self.items
        ids = pa.array([self._id(i) for i in range(n)], pa.string())
        headers = [list(m.headers.items()) if m.headers else None for m in items]
        return [
            pa.repeat(pa.scalar(self.stream), n),
            pa.array([m.subject for m in items], pa.string()),
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
        return self.items[place].own_id or f"{self.stream}:{self.seqs[place]}"

    def _created(self) -> NDArray[np.int64]:
        return np.array([m.time for m in self.items], "datetime64[us]").astype(np.int64)


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

    def _messages(self, found: list[Stored]) -> Iterator[Messages]:
        if not found:
            return
        self.found += len(found)
        seqs = np.array([m.sequence for m in found], np.int64)
        failed = self._attempts
        attempts = [failed.get(seq, 0) + 1 for seq in seqs.tolist()] if failed else None
        yield Messages(self._stream, found, seqs, attempts)

    def _range(self, at: int, end: int) -> Iterator[list[Stored]]:
        one = self._subjects[0] if len(self._subjects) == 1 else None
        chosen: dict[str, bool] = {}
        deadline: float | None = None
        while at < end:
            request: dict[str, Any] = {"seq": at, "batch": min(FETCH, end - at)}
            if one is not None:
                request["next_by_subj"] = one
            found = self._link.run(lambda c, request=request: fetch(c, self._stream, **request))  # type: ignore[misc]
            if found.messages:
                at, deadline = found.messages[-1].sequence + 1, None
                inside = [m for m in found.messages if m.sequence < end] if at > end else found.messages
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

    def _wants(self, message: Stored, chosen: dict[str, bool]) -> bool:
        subject = message.subject
        if subject not in chosen:
            chosen[subject] = any(overlap(subject, pattern) for pattern in self._subjects)
        return chosen[subject]
