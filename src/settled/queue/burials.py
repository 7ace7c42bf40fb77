"""Burials: dead letters of messages that nobody may get any more, made before a group goes on."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from settled.queue.asks import Ask
from settled.queue.deadletters import BURY, bury
from settled.queue.types import AckItem, PopRequest

if TYPE_CHECKING:
    from settled.queue.core import Core
    from settled.queue.lanes import Lane
    from settled.queue.options import QueueOptions

BATCH = 500


def longest_wait(options: QueueOptions) -> tuple[int, str]:
    """Seconds after which a message is too old for a group, 0 for never, and the option that says so."""
    waits = [(options.max_wait_time_seconds, "maxWaitTimeSeconds"), (options.ttl, "ttl")]
    return min((wait for wait in waits if wait[0]), default=(0, ""))


async def bury_overdue(core: Core, lane: Lane, group_id: int, seconds: float, option: str) -> int:
    """Make dead letters of the oldest messages of a lane that waited too long; returns how many."""
    group = await core.registry.group_name(group_id)
    request = PopRequest(lane.queue.name, lane.name, group=group, batch=BATCH, lease_seconds=60)
    ask = Ask(request, group_id, [], lane)
    ask.older_than = seconds
    await core.popper.claim_alone(ask)
    if ask.popped is None:
        return 0
    error = f"waited longer than {option} ({seconds:.0f} s)"
    items = [
        AckItem(m.transaction_id, m.partition_id, "dlq", m.lease_id, error) for m in ask.popped.messages()
    ]
    return await bury(core, items, group)


async def bury_unsettled(core: Core, link: Any, lane: Lane, group_id: int, seq: int) -> None:
    """Make a dead letter of a message that was handed out too often without a verdict."""
    segment = await core.cache.message(link, lane.id, seq)
    if segment is None:  # removed by retention meanwhile
        return
    at = seq - segment.first_seq
    times = (await link.fetch("select unsettled_of($1, $2, $3)", lane.id, group_id, seq))[0][0]
    limit = lane.queue.options.unsettled_limit
    error = (
        f"delivered {times} times without a verdict (unsettledLimit {limit}): each time its lease expired, "
        "as when a consumer crashes, hangs or takes too long"
    )
    created = datetime.fromtimestamp(segment.created(at) / 1e6, UTC)
    copy = (segment.id(at), segment.tx(at), created, *segment.stored(at))
    await link.fetch(BURY, core.worker, lane.id, group_id, seq, *copy, error)


async def clear_the_way(core: Core, link: Any, lane_id: int, group_id: int, status: str, seq: int) -> None:
    """Bury what a claim found in its way: a message that is `overdue`, or one that is `unsettled`."""
    await core.registry.lanes_of([lane_id])
    lane = core.registry.lanes_by_id.get(lane_id)
    if lane is None:
        return
    if status == "unsettled":
        await bury_unsettled(core, link, lane, group_id, seq)
        return
    seconds, option = longest_wait(lane.queue.options)
    if not seconds:  # another worker has configured the queue
        await core.registry.refresh([lane.queue.id])
        seconds, option = longest_wait(lane.queue.options)
    if seconds:
        await bury_overdue(core, lane, group_id, float(seconds), option)
