"""The calls that hand out messages: a short one for the usual case, a careful one for the rest."""

from __future__ import annotations

from datetime import UTC, datetime
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from settled.queue.db import listed

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from settled.queue.asks import Share

    Clear = Callable[[Any, int, int, str, int], Awaitable[None]]

CLAIM = "select * from claim($1, $2, $3, $4, $5, $6, $7, $8, $9)"
CLAIM_MANY = (
    "select * from claim_many($1, $2::text::bigint[], $3::text::int[], $4::text::int[], $5::text::uuid[], "
    "$6::text::int[])"
)
_place = attrgetter("lane_id", "group_id")
MANY = 3  # lanes; for fewer the careful call is quicker
UNDELIVERABLE = ("overdue", "unsettled")
BURIALS = 10
"""Rounds of burials in one claim; what is left then is for the next one."""


class Claimed(NamedTuple):
    """What one lane gave, or why it gave nothing."""

    status: str
    first_seq: int
    end_seq: int
    until: datetime | None
    head: int
    skip: Any = None
    parked: Sequence[int] = ()
    failed_seqs: Sequence[int] = ()
    failed_counts: Sequence[int] = ()


async def claim(
    link: Any, worker: str, given: list[Share], older_than: float | None, clear: Clear
) -> list[tuple[Share, Claimed]]:
    """Hand out messages to shares, to those of one request in the order in which they are given.

    A share that is missing in the answer was not asked: its request had enough from other lanes. A message
    that may not be handed out any more is buried by `clear`, and its lane is asked again.
    """
    claimed = await _claim(link, worker, given, older_than)
    for _ in range(BURIALS):
        buried = [(share, found) for share, found in claimed if found.status in UNDELIVERABLE]
        if not buried:
            return claimed
        claimed = [(share, found) for share, found in claimed if found.status not in UNDELIVERABLE]
        served = {ask for share, found in claimed if found.status == "ok" for ask in share.asks}
        again = []
        for share, found in buried:
            await clear(link, share.lane_id, share.group_id, found.status, found.first_seq)
            if served.isdisjoint(share.asks):
                again.append(share)
            else:
                claimed.append((share, _later(found)))
        claimed += await _claim(link, worker, again, older_than)
    return [(share, _later(found) if found.status in UNDELIVERABLE else found) for share, found in claimed]


def _later(found: Claimed) -> Claimed:
    """A lane with more to bury, to be asked again at once."""
    return found._replace(status="blocked", until=datetime.now(UTC))


async def _claim(
    link: Any, worker: str, given: list[Share], older_than: float | None
) -> list[tuple[Share, Claimed]]:
    if not given:
        return []
    shares = sorted(given, key=_place)
    if any(share.asks[0].request.partitions > 1 for share in shares):
        return await _carefully(link, worker, shares, older_than, given)
    if len(shares) < MANY or older_than is not None or _twice(shares):
        return await _carefully(link, worker, shares, older_than)
    rows = await link.fetch(
        CLAIM_MANY,
        worker,
        listed([s.lane_id for s in shares]),
        listed([s.group_id for s in shares]),
        listed([s.want for s in shares]),
        listed([s.lease or "null" for s in shares]),
        listed([s.asks[0].request.lease_seconds or "null" for s in shares]),
    )
    got: list[tuple[Share, Claimed]] = []
    left = dict.fromkeys(shares)
    columns = rows[0][:6]
    for place, *found in zip(*columns, strict=True) if columns[0] else ():
        if found[0] != "odd":
            share = shares[place - 1]
            del left[share]
            got.append((share, Claimed(*found)))
    if left:
        got += await _carefully(link, worker, list(left), None)
    return got


def handed_out(found: Claimed) -> list[int]:
    """The messages a lane gave, by their sequence numbers."""
    skipped = found.skip or ()
    fresh = (
        found.first_seq + i
        for i in range(found.end_seq - found.first_seq)
        if i >= len(skipped) or not skipped[i]
    )
    return [*found.parked, *fresh]


def _twice(shares: list[Share]) -> bool:
    """Whether a lane has several requests of a group."""
    return len(set(map(_place, shares))) < len(shares)


async def _carefully(
    link: Any, worker: str, shares: list[Share], older_than: float | None, turns: Sequence[Share] = ()
) -> list[tuple[Share, Claimed]]:
    places = {id(share): place for place, share in enumerate(shares, 1)}
    numbers: dict[int, int] = {}  # of each request, by the ask that made it
    for share in shares:
        numbers.setdefault(id(share.asks[0]), len(numbers))
    rows = await link.fetch(
        CLAIM,
        worker,
        [numbers[id(s.asks[0])] for s in shares],
        [s.lane_id for s in shares],
        [s.group_id for s in shares],
        [s.want for s in shares],
        [s.lease for s in shares],
        [s.asks[0].request.lease_seconds for s in shares],
        older_than,
        [places[id(share)] for share in turns] or None,
    )
    queued: dict[tuple[int, int], list[Share]] = {}
    for share in shares:
        queued.setdefault((share.lane_id, numbers[id(share.asks[0])]), []).append(share)
    return [
        (
            queued[(row["lane_id"], row["request"])].pop(),
            Claimed(
                row["status"],
                row["first_seq"],
                row["end_seq"],
                row["until"],
                row["head"],
                row["skip"],
                row["parked"] or (),
                row["failed_seqs"] or (),
                row["failed_counts"] or (),
            ),
        )
        for row in rows
    ]
