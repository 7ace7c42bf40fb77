"""What one request and one flush bring to a lane, laid out for a segment."""

from __future__ import annotations

from itertools import repeat
from typing import TYPE_CHECKING, Self

from settled.queue import dedup, sealing, segment
from settled.queue.errors import BadRequest
from settled.queue.soon import deliver

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from settled.queue.lanes import Lane
    from settled.queue.types import PushItem

TX_LIMIT = 255


class Duplicate(Exception):
    """A transaction pushes an id that its partition has already."""

    def __init__(self, lane: Lane, transaction_id: str, message_id: str) -> None:
        super().__init__(
            f"transactionId {transaction_id!r} is already in partition {lane.name!r} of {lane.queue.name!r}"
        )
        self.transaction_id = transaction_id
        self.message_id = message_id


class Gone(Exception):
    """A lane was deleted since this worker last saw it."""

    def __init__(self, queue: str, partition: str) -> None:
        super().__init__(f"partition {partition!r} of {queue!r} was deleted")


def _nobody(_: Chunk) -> None:
    """Nobody waits for this chunk."""


class Chunk:
    """The items of one request for one lane; `results` are filled in and `done` is called with it, once."""

    __slots__ = ("done", "error", "hashes", "headers", "ids", "lane", "payloads", "results", "tx")

    def __init__(
        self, lane: Lane, tx: list[bytes] | None = None, payloads: list[bytes] | None = None
    ) -> None:
        """With plain JSON messages, an empty transaction id standing for none; or empty, to be extended."""
        self.lane = lane
        self.ids: list[bytes] | None = None  # only where messages got their ids before, as scheduled ones
        self.tx = tx or []
        self.payloads = payloads or []
        self.headers: list[bytes] = [b""] * len(self.tx)
        self.hashes: list[int] = (dedup.fingerprints(tx) if tx[0] else [0] * len(tx)) if tx else []
        self.results: list[tuple[str, bool]] = []  # message id, is a duplicate
        self.error: Exception | None = None
        self.done: Callable[[Chunk], None] = _nobody

    def rows(self) -> Iterator[tuple[bytes, int, bytes, bytes]]:
        """Transaction id, its hash, payload and headers of each item."""
        return zip(self.tx, self.hashes, self.payloads, self.headers, strict=True)

    def finish(self) -> None:
        """Tell the caller, once; it is forgotten then, or the two would keep each other in memory."""
        done, self.done = self.done, _nobody
        deliver(done, self)

    def extend(self, items: Sequence[PushItem]) -> Self:
        """Take items; a bad one is refused before anybody else's is touched."""
        if self.lane.queue.options.encryption_enabled:
            sealing.check(self.lane.queue.name)
        fingerprint, plain = dedup.fingerprint, segment.JSON
        tx, hashes, payloads, headers = self.tx, self.hashes, self.payloads, self.headers
        for item in items:
            own = item.transaction_id
            if own is None:
                tx.append(b"")
                hashes.append(0)
            else:
                raw = check_transaction_id(own)
                tx.append(raw)
                hashes.append(fingerprint(raw))
            payload = item.payload
            payloads.append(payload if type(payload) is bytes else bytes(payload))
            if item.headers or item.trace_id or item.producer or item.content_type != plain:
                given = dict(item.headers) if item.headers else None
                headers.append(segment.pack_headers(given, item.content_type, item.trace_id, item.producer))
            else:
                headers.append(b"")
        return self


def plain_ids(given: Sequence[str | None]) -> list[bytes] | None:
    """Transaction ids as UTF-8, or all empty where none was given; None if one needs a closer look."""
    if given[0] is None:
        return [b""] * len(given) if all(tx is None for tx in given) else None
    try:
        ids = "\0".join(given).encode().split(b"\0")  # type: ignore[arg-type]
    except (TypeError, UnicodeEncodeError):
        return None
    # Counted in bytes, so there are no more characters than that.
    fine = len(ids) == len(given) and all(ids) and max(map(len, ids)) <= TX_LIMIT
    return ids if fine else None


def check_transaction_id(tx: object) -> bytes:
    """A transaction id as UTF-8."""
    if not isinstance(tx, str) or not 0 < len(tx) <= TX_LIMIT or "\0" in tx:
        raise BadRequest("transactionId", tx, f"must be text of 1..{TX_LIMIT} characters without NUL")
    try:
        return tx.encode()
    except UnicodeEncodeError:
        raise BadRequest("transactionId", tx, "must be valid Unicode") from None


class Batch:
    """What one flush appends to one lane."""

    __slots__ = (
        "answered",
        "base",
        "body",
        "chunks",
        "hashes",
        "lane",
        "places",
        "tx",
        "whole",
    )

    def __init__(self, lane: Lane, chunks: list[Chunk]) -> None:
        self.lane = lane
        self.chunks = chunks
        self.base = segment.new_base()
        self.answered = False

    def meets(self) -> bool:
        """Whether the lane may have one of these ids already."""
        remembered = self.lane.remembered
        return any(remembered.meets(chunk.hashes) for chunk in self.chunks)

    def fill(self, duplicates: dict[bytes, str]) -> None:
        """Lay out the chunks, leaving out what the lane has already and what comes twice."""
        chunk = self.chunks[0]
        if len(self.chunks) == 1 and not duplicates and chunk.ids is None:
            hashes = chunk.hashes
            if len(hashes) == 1 or len(set(hashes)) == len(hashes) or not any(hashes):
                self.whole = True  # one chunk, as it came
                self.tx, self.hashes = chunk.tx, hashes
                self.body = segment.encode(self.base, chunk.tx, chunk.payloads, chunk.headers)
                self._seal()
                return
        self.whole = False
        self.tx, self.hashes, payloads, all_headers = [], [], [], []
        # For each chunk's item: its place here, or the first message's id.
        self.places: list[list[int | str]] = []
        ids: list[bytes] | None = None
        seen: dict[bytes, int] = {}
        for chunk in self.chunks:
            places: list[int | str] = []
            if chunk.ids is not None:
                ids = []
            for at, (tx, key, payload, headers) in enumerate(chunk.rows()):
                if tx and tx in duplicates:
                    places.append(duplicates[tx])
                elif tx and tx in seen:
                    places.append(~seen[tx])
                else:
                    if tx:
                        seen[tx] = len(self.tx)
                    places.append(len(self.tx))
                    self.tx.append(tx)
                    self.hashes.append(key)
                    payloads.append(payload)
                    all_headers.append(headers)
                    if chunk.ids is not None and ids is not None:
                        ids.append(chunk.ids[at])
            self.places.append(places)
        own = b"".join(ids) if ids is not None else None
        self.body = segment.encode(self.base, self.tx, payloads, all_headers, own) if self.tx else b""
        self._seal()

    @property
    def left_out(self) -> int:
        """How many of its items are duplicates."""
        return 0 if self.whole else sum(map(len, self.places)) - len(self.tx)

    def _seal(self) -> None:
        if self.lane.queue.options.encryption_enabled and self.body:
            self.body = sealing.seal(self.body, len(self.tx))

    def finish(self) -> None:
        """Tell each caller what became of its items."""
        self.answered = True
        ids = segment.id_texts(self.base, len(self.tx))
        if self.whole:
            self.chunks[0].results = [(ids[0], False)] if len(ids) == 1 else [*zip(ids, repeat(False))]
            self.chunks[0].finish()
            return
        for chunk, places in zip(self.chunks, self.places, strict=True):
            chunk.results = [
                (place, True)
                if isinstance(place, str)
                else (ids[place], False)
                if place >= 0
                else (ids[~place], True)
                for place in places
            ]
            chunk.finish()

    def fail(self, error: Exception) -> None:
        """Tell each caller that nothing of it was appended, or that nobody knows."""
        self.answered = True
        for chunk in self.chunks:
            chunk.error = error
            chunk.finish()
