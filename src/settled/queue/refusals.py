"""Explains refused acks from the tables: a lease may be over because its message is settled."""

from __future__ import annotations

from typing import TYPE_CHECKING

from settled.queue.acks import HANDLED
from settled.queue.cache import micros
from settled.queue.db import sql
from settled.queue.marks import SETTLED_BEFORE
from settled.queue.segment import Segment
from settled.queue.states import States
from settled.queue.types import AckResult

if TYPE_CHECKING:
    from collections.abc import Sequence

    from settled.queue.core import Core
    from settled.queue.lanes import Lane
    from settled.queue.types import AckItem

SETTLED = ("completed", "dead_letter")


async def explain(core: Core, items: Sequence[AckItem], group: str, results: list[AckResult]) -> None:
    """Change `invalid_lease` to `not_found` for messages that their group settled before.

    Looks through the newest segments of the partition only, so an ack that comes very late stays
    `invalid_lease`.
    """
    refused: dict[tuple[str, str], list[int]] = {}
    for at, (item, result) in enumerate(zip(items, results, strict=True)):
        if result.message in ("invalid_lease", "not_found") and not result.noop:
            refused.setdefault((item.partition_id, item.group or group), []).append(at)
    for (partition_id, own), places in refused.items():
        lane = await core.registry.lane_by_uid(partition_id)
        if lane is None:
            continue
        settled = await _settled(core, lane, own, {items[at].transaction_id for at in places})
        for at in places:
            item = items[at]
            if item.transaction_id in settled:
                results[at] = AckResult(
                    item.transaction_id,
                    False,
                    "not_found",
                    SETTLED_BEFORE,
                    lane.queue.name,
                    lane.name,
                    noop=item.status in HANDLED,
                )


async def _settled(core: Core, lane: Lane, group: str, wanted: set[str]) -> set[str]:
    """Which of these messages of a lane the group has settled."""
    found: dict[str, int] = {}
    for row in await core.pool.fetch(sql("newest_of_lane"), lane.id):
        segment = Segment(row["first_seq"], micros(row["created_at"]), row["body"])
        for at, transaction_id in enumerate(segment.txs()):
            if transaction_id in wanted:
                found.setdefault(transaction_id, segment.first_seq + at)
        if len(found) == len(wanted):
            break
    if not found:
        return set()
    states = await States.read(core, {lane.id: (min(found.values()), max(found.values()))})
    return {
        transaction_id
        for transaction_id, seq in found.items()
        for state in states.of(lane.id, seq)
        if state.group == group and state.status in SETTLED
    }
