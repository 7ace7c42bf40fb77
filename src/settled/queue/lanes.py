"""What a worker remembers of queues, lanes (partitions) and groups, and how it finds or makes others."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any
from uuid import UUID

import msgspec

from settled.queue.db import Pool, sql
from settled.queue.dedup import Memory, Remembered
from settled.queue.errors import BadRequest, Unavailable
from settled.queue.options import QueueOptions

if TYPE_CHECKING:
    from collections.abc import Iterable

    from settled.queue.batch import Chunk

NAME_LIMIT = 255
ATTEMPTS = 20


class Queue:
    """A queue as this worker knows it."""

    __slots__ = ("id", "name", "namespace", "options", "task", "uid")

    def __init__(self, row: Any) -> None:
        self.id: int = row["id"]
        self.uid = str(row["uid"])
        self.name: str = row["name"]
        self.update(row)

    def update(self, row: Any) -> None:
        """Take over what may have been configured anew."""
        self.namespace: str = row["namespace"]
        self.task: str = row["task"]
        self.options = msgspec.json.decode(row["options"], type=QueueOptions)


class Lane:
    """A lane as this worker knows it, with what waits to be appended to it."""

    __slots__ = ("busy", "id", "later", "name", "pending", "queue", "remembered", "uid")

    def __init__(self, lane_id: int, uid: str, name: str, queue: Queue, memory: Memory) -> None:
        self.id = lane_id
        self.uid = uid
        self.name = name
        self.queue = queue
        self.remembered = Remembered(memory)
        self.pending: list[Chunk] = []
        self.busy = False
        self.later = False
        """Whether ids wait for their time in it, as far as is known."""


def check_name(field: str, value: object) -> str:
    """A queue's, partition's or group's name: 1 to 255 characters that Postgres can store."""
    if not isinstance(value, str) or not 0 < len(value) <= NAME_LIMIT or "\0" in value:
        raise BadRequest(field, value, f"must be text of 1..{NAME_LIMIT} characters without NUL")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise BadRequest(field, value, "must be valid Unicode") from None
    return value


def check_uuid(field: str, value: object) -> str:
    """A UUID in any usual spelling, as the 36 characters we use."""
    try:
        return str(UUID(value))  # type: ignore[arg-type]
    except (ValueError, AttributeError, TypeError):
        raise BadRequest(field, value, "must be a UUID") from None


class Registry:
    """Queues, lanes and groups by name and id; other workers' news come through `forget` and `refresh`."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self.memory = Memory()
        self.queues: dict[str, Queue] = {}
        self.queues_by_id: dict[int, Queue] = {}
        self.lanes: dict[tuple[str, str], Lane] = {}
        self.lanes_by_id: dict[int, Lane] = {}
        self.lanes_by_uid: dict[str, Lane] = {}
        self.groups: dict[str, int] = {}
        self.group_names: dict[int, str] = {}
        self.version = 0
        """How often new queues or partitions were announced."""
        self.waiting: dict[asyncio.Future[None], None] = {}
        self._wanted: set[tuple[str, str]] = set()
        self._making = asyncio.Lock()

    def announce(self) -> None:
        """Wake whoever waits for a queue or partition that did not exist."""
        self.version += 1
        for waiter in self.waiting:
            if not waiter.done():
                waiter.set_result(None)

    async def queue(self, name: str, *, fresh: bool = False) -> Queue | None:
        """A queue by name, or None."""
        found = self.queues.get(name)
        if found is None or fresh:
            row = await self._pool.fetchrow(sql("queue_by_name"), name)
            if row is None:
                if found is not None:
                    self.forget(found)
                return None
            if found is not None and found.id != row["id"]:
                self.forget(found)
            found = self._keep_queue(row)
        return found

    async def queues_of(self, namespace: str | None, task: str | None) -> list[Queue]:
        """The queues of a namespace and/or task, highest priority first."""
        rows = await self._pool.fetch(sql("queues_of"), namespace, task)
        found = [self._keep_queue(row) for row in rows]
        return sorted(found, key=lambda q: (-q.options.priority, q.name))

    def _keep_queue(self, row: Any) -> Queue:
        known = self.queues_by_id.get(row["id"])
        if known is None:
            known = self.queues[row["name"]] = self.queues_by_id[row["id"]] = Queue(row)
        else:
            known.update(row)
        return known

    async def refresh(self, queue_ids: Iterable[int]) -> None:
        """Read changed configurations again; what is gone is forgotten."""
        ids = list(queue_ids)
        rows = {row["id"]: row for row in await self._pool.fetch(sql("queues_by_id"), ids)}
        for queue_id in ids:
            if queue_id in rows:
                self._keep_queue(rows[queue_id])
            elif queue_id in self.queues_by_id:
                self.forget(self.queues_by_id[queue_id])

    def forget(self, queue: Queue) -> None:
        """Drop a deleted queue and its lanes."""
        self.queues_by_id.pop(queue.id, None)
        if self.queues.get(queue.name) is queue:
            del self.queues[queue.name]
        for lane in [lane for lane in self.lanes_by_id.values() if lane.queue is queue]:
            self.forget_lane(lane)

    def forget_lane(self, lane: Lane) -> None:
        """Drop a deleted lane."""
        self.lanes_by_id.pop(lane.id, None)
        self.lanes_by_uid.pop(lane.uid, None)
        lane.remembered.forget()
        if self.lanes.get((lane.queue.name, lane.name)) is lane:
            del self.lanes[(lane.queue.name, lane.name)]

    async def ensure(self, names: set[tuple[str, str]]) -> None:
        """Find these or make them; they are known when this returns, whoever deletes them meanwhile."""
        for _ in range(ATTEMPTS):
            if names <= self.lanes.keys():
                return
            await self.make_once(names)
        raise Unavailable("the queue is deleted again and again", 0.1)

    async def make_once(self, names: set[tuple[str, str]]) -> None:
        """Find these or make them, in one go for all who ask: a first push is often one of a crowd."""
        for queue, partition in names:
            check_name("queue", queue)
            check_name("partition", partition)
        self._wanted |= names
        async with self._making:
            if names - self.lanes.keys():
                wanted, self._wanted = (self._wanted | names) - self.lanes.keys(), set()
                await self.make(wanted)

    async def make(self, names: Iterable[tuple[str, str]]) -> None:
        """Find these (queue, partition) or make them, in bulk."""
        wanted = sorted(set(names))
        queues, partitions = [q for q, _ in wanted], [p for _, p in wanted]
        for queue, partition in wanted:
            check_name("queue", queue)
            check_name("partition", partition)
        dotted = [(*q.split(".", 2), "")[:2] if "." in q else ("", "") for q in queues]
        rows = await self._pool.fetch(
            "select * from resolve($1, $2, $3, $4, $5)",
            queues,
            partitions,
            [d[0] for d in dotted],
            [d[1] for d in dotted],
            QueueOptions().to_json().decode(),
        )
        await self.refresh({r["queue_id"] for r in rows if r["queue_id"] not in self.queues_by_id})
        for row in rows:
            self._keep_lane(row)
        self.announce()

    def _keep_lane(self, row: Any) -> Lane | None:
        lane = self.lanes_by_id.get(row["lane_id"])
        queue = self.queues_by_id.get(row["queue_id"])
        if lane is None and queue is not None:
            lane = Lane(row["lane_id"], str(row["lane_uid"]), row["partition"], queue, self.memory)
            self.lanes_by_id[lane.id] = self.lanes_by_uid[lane.uid] = lane
        if lane is not None:
            self.lanes[(lane.queue.name, lane.name)] = lane
        return lane

    async def lane(self, queue: str, partition: str) -> Lane | None:
        """A lane by its names, or None."""
        found = self.lanes.get((queue, partition))
        if found is None:
            found = await self._load_lane(sql("lane_by_name"), queue, partition)
        return found

    async def lane_by_uid(self, uid: str) -> Lane | None:
        """A lane by the partition id the API shows, or None."""
        found = self.lanes_by_uid.get(uid)
        if found is None:
            found = await self._load_lane(sql("lane_by_uid"), check_uuid("partitionId", uid))
        return found

    async def _load_lane(self, query: str, *args: Any) -> Lane | None:
        row = await self._pool.fetchrow(query, *args)
        if row is None:
            return None
        if row["queue_id"] not in self.queues_by_id:
            await self.refresh([row["queue_id"]])
        return self._keep_lane(row)

    async def lanes_of(self, ids: Iterable[int]) -> None:
        """Make sure these lanes are known by id."""
        missing = [i for i in ids if i not in self.lanes_by_id]
        if missing:
            rows = await self._pool.fetch(sql("lanes_by_id"), missing)
            await self.refresh({r["queue_id"] for r in rows if r["queue_id"] not in self.queues_by_id})
            for row in rows:
                self._keep_lane(row)

    async def group(self, name: str) -> int:
        """A group's number; it gets one when it is first heard of."""
        number = self.groups.get(name)
        if number is None:
            check_name("consumerGroup", name)
            number = await self._pool.fetchval(sql("group_by_name"), name)
            if number is None:
                await self._pool.fetch(sql("group_make"), name)
                number = await self._pool.fetchval(sql("group_by_name"), name)
            assert number is not None  # noqa: S101
            self.groups[name] = number
            self.group_names[number] = name
        return number

    async def group_name(self, number: int) -> str:
        """A group's name by its number."""
        name = self.group_names.get(number)
        if name is None:
            name = str(await self._pool.fetchval("select name from consumer_group where id = $1", number))
            self.groups[name] = number
            self.group_names[number] = name
        return name
