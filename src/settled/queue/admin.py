"""Queues and groups: configured, cleared, deleted, moved."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from settled.queue import sealing
from settled.queue.db import sql
from settled.queue.errors import NotFound
from settled.queue.lanes import check_name
from settled.queue.options import QueueOptions, parse_options
from settled.queue.poll import parse_time
from settled.queue.types import DEFAULT_PARTITION, Configured, Maintenance

if TYPE_CHECKING:
    from collections.abc import Mapping
    from datetime import datetime

    from settled.queue.core import Core
    from settled.queue.lanes import Queue


async def configure(
    core: Core,
    name: str,
    options: Mapping[str, Any] | None,
    namespace: str | None,
    task: str | None,
    replace: bool,
) -> Configured:
    """Create a queue or change its configuration."""
    check_name("queue", name)
    for field, value in (("namespace", namespace), ("task", task)):
        if value:
            check_name(field, value)
    changes = parse_options(name, options or {})
    if changes.get("encryptionEnabled"):
        sealing.check(name)
    await core.pool.fetch(
        "select configure($1, $2, $3, $4, $5, $6, $7)",
        core.worker,
        name,
        namespace,
        task,
        QueueOptions().to_json().decode(),
        msgspec.json.encode(changes).decode(),
        replace,
    )
    queue = await core.registry.queue(name, fresh=True)
    lane = await core.registry.lane(name, DEFAULT_PARTITION)
    if queue is not None:
        _reset(core, queue.id)  # what was held back may be ready now
    core.registry.announce()
    if queue is None or lane is None:
        raise NotFound("queue", name)  # deleted by somebody else this very moment
    created = await core.pool.fetchval("select created_at from queue where id = $1", queue.id)
    return Configured(queue.uid, lane.uid, name, queue.namespace, queue.task, queue.options, created)


async def delete_queue(core: Core, name: str) -> bool:
    """Delete a queue and all under it."""
    check_name("queue", name)
    known = core.registry.queues.get(name)
    existed = bool(await core.pool.fetchval("select delete_queue($1, $2)", core.worker, name))
    if known is not None:
        for lane in [lane for lane in core.registry.lanes_by_id.values() if lane.queue is known]:
            core.cache.forget_lane(lane.id)
        core.registry.forget(known)
        _reset(core, known.id)
    core.activity.ring()
    return existed


async def clear_queue(core: Core, name: str, partition: str | None) -> int:
    """Drop all messages."""
    queue = await _queue(core, name)
    if partition is not None and await core.registry.lane(name, partition) is None:
        raise NotFound("partition", f"{name}/{partition}")
    count = int(await core.pool.fetchval("select clear_queue($1, $2, $3)", core.worker, queue.id, partition))
    for lane in core.registry.lanes_by_id.values():
        if lane.queue is queue and partition in (None, lane.name):
            core.cache.forget_lane(lane.id)
    _reset(core, queue.id)
    return count


async def seek(core: Core, group: str, name: str, to: str | datetime, partition: str | None) -> int:
    """Move a group's cursors."""
    queue = await _queue(core, name)
    group_id = await core.registry.group(group)
    if partition is not None and await core.registry.lane(name, partition) is None:
        raise NotFound("partition", f"{name}/{partition}")
    place, at = (to, None) if to in ("end", "beginning") else ("time", parse_time("timestamp", to))
    moved = await core.pool.fetchval(
        "select seek($1, $2, $3, $4, $5, $6)", core.worker, group_id, queue.id, partition, place, at
    )
    _reset(core, queue.id)
    return int(moved)


async def subscribe(core: Core, group: str, name: str | None, at: str | datetime) -> int:
    """Change where a group starts on lanes it has not touched yet."""
    group_id = await core.registry.group(group)
    queue = await _queue(core, name) if name is not None else None
    time = parse_time("subscriptionTimestamp", at)
    moved = await core.pool.fetchval(
        "select move_subscription($1, $2, $3, $4)", core.worker, group_id, queue.id if queue else None, time
    )
    for queue_id in moved:
        _reset(core, queue_id)
    return len(moved)


async def delete_group(core: Core, group: str, name: str | None, metadata: bool) -> int:
    """Forget a group."""
    group_id = await core.registry.group(group)
    queue = await _queue(core, name) if name is not None else None
    row = await core.pool.fetchrow(
        "select * from forget_group($1, $2, $3, $4)",
        core.worker,
        group_id,
        queue.id if queue else None,
        metadata,
    )
    for queue_id in [key[0] for key in core.ready.sets if key[1] == group_id]:
        _reset(core, queue_id)
    core.poller.forget_subscriptions(group_id=group_id)
    core.activity.ring()
    return int(row["partitions"])


async def _queue(core: Core, name: str) -> Queue:
    queue = await core.registry.queue(check_name("queue", name), fresh=True)
    if queue is None:
        raise NotFound("queue", name)
    return queue


def _reset(core: Core, queue_id: int) -> None:
    core.reset_queue(queue_id)
    core.activity.ring()


async def maintenance(core: Core, push: bool | None, pop: bool | None) -> Maintenance:
    """Read or set the maintenance switches."""
    for name, value in (("push", push), ("pop", pop)):
        if value is not None:
            await core.pool.fetch(sql("switch_set"), name, value)
    await core.read_switches()
    return Maintenance(core.switches.get("push", False), core.switches.get("pop", False))
