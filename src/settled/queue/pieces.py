"""From a range of sequence numbers to runs of messages in their segments, and those dealt out to several."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from settled.queue.popped import Piece

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from settled.queue.segment import Segment


def cut(
    segments: Sequence[Segment],
    first: int,
    end: int,
    skip: Any,
    parked: Sequence[int] = (),
) -> list[Piece]:
    """Parked messages, then those of [first, end) that are not in `skip`, as runs of their segments."""
    pieces = []
    if parked:
        left = set(parked)
        for segment in dict.fromkeys(segments):
            found = [seq for seq in parked if segment.first_seq <= seq < segment.end_seq and seq in left]
            if found:
                left.difference_update(found)
                pieces.append(Piece(segment, [seq - segment.first_seq for seq in found]))
    bits = skip.to_int() if skip is not None and len(skip) else 0
    size = len(skip) if skip is not None else 0
    seen, reached = None, first
    for segment in segments:
        if segment is seen or segment.end_seq <= first or segment.first_seq >= end:
            continue
        seen = segment
        # A small segment that was cached before it was merged may come beside the merged one.
        low, high = max(first, reached, segment.first_seq), min(end, segment.end_seq)
        if low >= high:
            continue
        reached = high
        if not bits:
            pieces.append(Piece(segment, range(low - segment.first_seq, high - segment.first_seq)))
            continue
        offsets = [
            s - segment.first_seq
            for s in range(low, high)
            if s - first >= size or not bits >> (size - 1 - (s - first)) & 1
        ]
        if offsets:
            pieces.append(Piece(segment, offsets))
    return pieces


OVERHEAD = 400  # bytes of an answer that each message takes beside what it holds


def fit(pieces: list[Piece], limit: int, *, least: int = 1) -> list[Piece]:
    """The first messages whose bytes fit into `limit`, but at least so many; `pieces` itself if all do."""
    if sum([piece.segment.size + OVERHEAD * len(piece.offsets) for piece in pieces]) <= limit:
        return pieces
    kept: list[Piece] = []
    for piece in pieces:
        for taken, offset in enumerate(piece.offsets):
            limit -= piece.segment.weight(offset) + OVERHEAD
            if limit < 0 and least <= 0:
                return [*kept, Piece(piece.segment, piece.offsets[:taken])] if taken else kept
            least -= 1
        kept.append(piece)
    return pieces


def deal(pieces: Sequence[Piece], counts: Iterable[int]) -> list[list[Piece]]:
    """The first messages for the first of `counts`, the next for the next, as far as they go."""
    dealt: list[list[Piece]] = []
    at = offset = 0
    for count in counts:
        mine: list[Piece] = []
        while count and at < len(pieces):
            segment, offsets = pieces[at].segment, pieces[at].offsets
            taken = offsets[offset : offset + count]
            mine.append(Piece(segment, taken))
            count -= len(taken)
            offset += len(taken)
            if offset == len(offsets):
                at, offset = at + 1, 0
        dealt.append(mine)
    return dealt
