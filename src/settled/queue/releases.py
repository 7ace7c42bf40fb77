"""Ends leases early: gives back what is unsettled of a partition's batch."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import asyncpg

from settled.queue.db import sql
from settled.queue.errors import Unavailable
from settled.queue.names import ends_on_nack

if TYPE_CHECKING:
    from collections.abc import Sequence

    from settled.queue.core import Core
    from settled.queue.lanes import Lane
    from settled.queue.types import AckItem, AckResult

log = logging.getLogger("settled.queue")
NACKS = ("failed", "retry")


async def release(core: Core, connection: Any, lane: Lane, group_id: int, lease_id: str) -> bool:
    """End a lease on one lane, in a transaction; False if it was over. Call `released` after the commit."""
    if not await connection.fetch(sql("release_lease"), lane.id, group_id, lease_id):
        return False
    await connection.fetch(sql("close_lease"), lane.id, group_id)
    await connection.fetch(sql("tell_release"), core.worker, lane.queue.id, lane.id, group_id)
    return True


def released(core: Core, lane: Lane, group_id: int, lease_id: str) -> None:
    """Let the pops of this worker know that a lane is free."""
    lease = core.leases.known(lease_id, lane.id, group_id)
    if lease is not None:
        core.leases.drop(lease)
    core.ready.released(lane.queue.id, lane.id, group_id, None)
    core.activity.ring()


async def release_rest(
    core: Core, items: Sequence[AckItem], group: str, results: Sequence[AckResult]
) -> None:
    """Give back the rest of the batch in each partition where a settled item asks for it.

    An item asks by `release_rest`; a nack also asks where its lease was popped with `release_rest`, or where
    its queue has the option `releaseRest`.
    """
    wanted: dict[tuple[str, str, str], list[AckResult]] = {}
    for item, result in zip(items, results, strict=True):
        if result.success and not result.lease_released and _asks(core, item):
            key = item.partition_id, item.lease_id or "", item.group or group
            wanted.setdefault(key, []).append(result)
    for (partition_id, lease_id, own), asking in wanted.items():
        lane = await core.registry.lane_by_uid(partition_id)
        if lane is None:
            continue
        group_id = await core.registry.group(own)
        try:
            async with core.pool.transaction() as connection:
                held = lease_id or await _holder(connection, lane, group_id)
                over = held is None or not await release(core, connection, lane, group_id, held)
        except (Unavailable, asyncpg.PostgresError) as error:
            # The item itself is settled; the rest comes again when the lease runs out.
            log.warning("queue %r: the rest of a batch was not given back: %s", lane.queue.name, error)
            continue
        if held is None or over:
            continue
        released(core, lane, group_id, held)
        for result in asking:
            result.lease_released = True


async def _holder(connection: Any, lane: Lane, group_id: int) -> str | None:
    """The lease that holds a lane, for an item that named none."""
    rows = await connection.fetch(sql("lease_row"), lane.id, group_id)
    return str(rows[0]["lease"]) if rows and rows[0]["lease"] is not None else None


def _asks(core: Core, item: AckItem) -> bool:
    if item.release_rest:
        return True
    if item.status not in NACKS:
        return False
    if item.lease_id and ends_on_nack(item.lease_id):
        return True
    lane = core.registry.lanes_by_uid.get(item.partition_id)
    return lane is not None and lane.queue.options.release_rest
