"""The life of one pop: where it may look, where its group starts, and how long it waits."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from settled.queue import sealing
from settled.queue.asks import Ask
from settled.queue.db import sql
from settled.queue.errors import BadRequest
from settled.queue.popped import Empty, Popped
from settled.queue.types import QUEUE_MODE, PopRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from settled.queue.activity import Activity
    from settled.queue.auditor import Auditor
    from settled.queue.db import Clock, Pool
    from settled.queue.lanes import Lane, Queue, Registry
    from settled.queue.pop import Popper
    from settled.queue.ready import ReadySet, ReadySets
    from settled.queue.soon import Done

TRIES = 100
PATIENCE = 3
"""Lanes that had nothing after all, before those that are ready are compared with the tables."""
MAX_BATCH = 10_000
MAX_PARTITIONS = 1_000
_MODES = {None: "all", "": "all", "all": "all", "from_beginning": "all", "new": "new", "new-only": "new"}


def parse_time(field: str, value: str | datetime) -> datetime:
    """ISO 8601 (a date is enough; UTC unless it says otherwise) as a time."""
    try:
        at = value if isinstance(value, datetime) else datetime.fromisoformat(value)
    except (ValueError, TypeError):
        raise BadRequest(field, value, "must be a time in ISO 8601, like 2026-01-31T12:00:00Z") from None
    return at if at.tzinfo is not None else at.replace(tzinfo=UTC)


def parse_start(request: PopRequest) -> tuple[str, datetime | None]:
    """Where a new group starts: ("all" | "new" | "timestamp", time)."""
    mode = request.subscription_mode
    if mode not in _MODES:
        raise BadRequest("subscriptionMode", mode, "must be all or new")
    if request.subscription_from and request.subscription_from != "now":
        return "timestamp", parse_time("subscriptionFrom", request.subscription_from)
    return ("new" if request.subscription_from == "now" else _MODES[mode]), None


def check_request(request: PopRequest) -> None:
    """Refuse what can never work."""
    if not 1 <= request.batch <= MAX_BATCH:
        raise BadRequest("batch", request.batch, f"must be 1..{MAX_BATCH}")
    if not 1 <= request.partitions <= MAX_PARTITIONS:
        raise BadRequest("partitions", request.partitions, f"must be 1..{MAX_PARTITIONS}")
    if not 0 <= request.wait <= 86_400:
        raise BadRequest("wait", request.wait, "must be 0..86400 s")
    if request.lease_seconds is not None and not 1 <= request.lease_seconds <= 86_400:
        raise BadRequest("leaseSeconds", request.lease_seconds, "must be 1..86400 s")
    if request.queue is None and request.namespace is None and request.task is None:
        raise BadRequest("queue", None, "name a queue, a namespace or a task")
    if request.partition is not None and request.queue is None:
        raise BadRequest("partition", request.partition, "a partition needs its queue")


def _nothing(request: PopRequest, why: Empty) -> Popped:
    """The answer where there is nothing: a poll that waited for it timed out."""
    return Popped(request.group, empty=why if not request.wait or why == "window_buffer" else "timeout")


class Poller:
    """Answers pops, at once or when something comes."""

    def __init__(
        self,
        pool: Pool,
        registry: Registry,
        ready: ReadySets,
        popper: Popper,
        activity: Activity,
        auditor: Auditor,
        clock: Clock,
        paused: Callable[[], bool],
    ) -> None:
        self._pool = pool
        self._registry = registry
        self._ready = ready
        self._popper = popper
        self._activity = activity
        self._auditor = auditor
        self._clock = clock
        self._paused = paused
        self._subscribed: set[tuple[int, int]] = set()
        self._checked: PopRequest | None = None

    def forget_subscriptions(self, queue_id: int | None = None, group_id: int | None = None) -> None:
        """Look subscriptions to a queue, or of a group, up again: the group may have been deleted."""
        self._subscribed = {
            (group, queue) for group, queue in self._subscribed if queue != queue_id and group != group_id
        }

    async def pop(self, request: PopRequest) -> Popped:
        """Hand out what there is, or wait for it."""
        check_request(request)
        start = parse_start(request)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + request.wait
        group_id = await self._registry.group(request.group)
        looked, tries = False, 0
        while not self._popper.closing:
            if self._paused():  # also while it waited
                return Popped(request.group, empty="paused")
            version = self._registry.version
            ask = await self._ask(request, group_id, start)
            if ask is not None and ask.lane is not None:
                popped = await self._pop_lane(request, ask, ask.lane, deadline)
                if popped is not None:
                    return popped
                continue
            if ask is not None:
                await self._popper.ask(ask)
                if ask.popped is not None:
                    self._pass_on(ask.sets)
                    return ask.popped
                tries += 1
                if tries < TRIES and any(ready.ready for ready in ask.sets):
                    if tries % PATIENCE == 0:
                        await self._auditor.sift(ask.sets)
                    continue  # that lane had nothing, but others may
                if not looked:  # memory is a hint
                    looked = True
                    await self._activity.read()
                    await self._auditor.check(ask.sets)
                    if any(ready.ready or ready.dropped for ready in ask.sets):
                        continue
            left = deadline - loop.time()
            if left <= 0:
                absent: Empty = "partition_not_found" if request.partition else "no_available_partition"
                return _nothing(request, ask.why if ask is not None else absent)
            names = self._registry.waiting if ask is None or request.queue is None else None
            if names is None or self._registry.version == version:
                await self._ready.wait(ask.sets if ask is not None else (), left, names=names)
            tries = 0
        return Popped(request.group, empty="timeout")

    async def _pop_lane(self, request: PopRequest, ask: Ask, lane: Lane, deadline: float) -> Popped | None:
        """Pop from a lane that was named, which is always asked; None if it should be tried again."""
        with self._ready.watch(lane.id) as waiter:
            await self._popper.ask(ask)
            if ask.popped is not None:
                return ask.popped
            if ask.why == "partition_not_found":  # deleted; it may have been made again
                await self._registry.refresh([lane.queue.id])
                self._registry.forget_lane(lane)
                return None
            left = deadline - asyncio.get_running_loop().time()
            if left <= 0:
                return _nothing(request, ask.why)
            closed = None
            if ask.until is not None:
                closed = ask.group_id
                left = min(left, max(0.001, ask.until - self._clock.now()))
            await self._ready.wait_lane(lane.id, waiter, closed, left)
        return None

    def pop_soon(self, request: PopRequest, done: Done[Popped]) -> bool:
        """Try once to hand out messages of a queue this worker knows to have some.

        False, and nothing is done, where it takes `pop`; if there was nothing to be had after all, `done` is
        told None.
        """
        group_id = self._registry.groups.get(request.group)
        queue = self._registry.queues.get(request.queue or "")
        if group_id is None or queue is None or request.partition is not None or self._popper.closing:
            return False
        if request.group != QUEUE_MODE and not (
            (group_id, queue.id) in self._subscribed and self._auditor.recent()
        ):
            return False
        ready = self._ready.sets.get((queue.id, group_id))
        if ready is None or not ready.ready or ready.loaded is None or not ready.loaded.done():
            return False
        if request is not self._checked:  # consumers repeat themselves
            check_request(request)
            self._checked = request
        ready.used = self._clock.now()
        ask = Ask(request, group_id, [ready], None)

        def answered(ask: Ask) -> None:
            if ask.popped is not None and ready.ready:
                ready.wake()  # somebody else may take what is left
            done(ask.error or ask.popped)

        ask.done = answered
        self._popper.submit(ask)
        return True

    async def _ask(
        self, request: PopRequest, group_id: int, start: tuple[str, datetime | None]
    ) -> Ask | None:
        """Where to look now; None if there is no such queue or partition yet."""
        lane: Lane | None = None
        queues: list[Queue] = []
        if request.queue is None:
            queues = await self._registry.queues_of(request.namespace, request.task)
        elif request.partition is not None:
            lane = await self._registry.lane(request.queue, request.partition)
            queues = [lane.queue] if lane is not None else []
        else:
            queue = await self._registry.queue(request.queue)
            queues = [queue] if queue is not None else []
        if not queues:
            return None
        for queue in queues:
            if queue.options.encryption_enabled:
                sealing.check(queue.name)
            await self._subscribe(request.group, group_id, queue, start)
        if lane is not None:
            return Ask(request, group_id, [], lane)
        return Ask(request, group_id, [await self._ready.get(queue.id, group_id) for queue in queues], None)

    async def _subscribe(
        self, group: str, group_id: int, queue: Queue, start: tuple[str, datetime | None]
    ) -> None:
        """Note where the group starts; the first choice wins and holds for partitions that come later."""
        if group == QUEUE_MODE:
            return
        if (group_id, queue.id) in self._subscribed and not self._auditor.recent():
            await self._auditor.check(())
        if (group_id, queue.id) in self._subscribed:
            return
        await self._pool.fetch(sql("subscribe"), group_id, queue.id, *start)
        self._subscribed.add((group_id, queue.id))

    def _pass_on(self, sets: Sequence[ReadySet]) -> None:
        """Somebody else may take what is left."""
        for ready in sets:
            if ready.ready:
                ready.wake()
