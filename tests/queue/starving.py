"""Producers, leases, acks, nacks, seeks, expiries and long polls over several workers, and a checker.

The checker reads the tables. A partition is open to a group if it has a message that nobody has leased and
nothing blocks; a consumer starves if it waits while the same partition stays open and nobody touches it.

    python -m tests.queue.starving --runs 100 --seconds 3 --workers 2

Starving is measured in the servers' time: in each tick the checker asks every worker and the database, and a
tick counts for at most `TICK_COUNTS` seconds. So a machine that gives nobody any time starves nobody.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import shutil
import sys
import uuid
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import asyncpg

from settled.queue.embedded import EmbeddedPostgres
from settled.queue.engine import Engine
from settled.queue.errors import QueueError
from settled.queue.types import AckItem, PopRequest, PushItem
from settled.server.testing import running_server
from tests.queue.conftest import reachable_directory
from tests.queue.lost import late_and_shuffled, lose_everything
from tests.server.workers import pinned

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    import aiohttp

BOUND = 1.0
TICK = 0.05
TICK_COUNTS = 0.1
PARTITIONS = 12
CONSUMERS = 6
PRODUCERS = 2
WORK, REPLAY = "work", "replay"
OPTIONS: dict[str, Any] = {"retryDelay": 50, "retryLimit": 1000, "leaseTime": 300}
DRAIN_WITHIN = 30.0

OPEN = """
select l.name, g.name as grp, coalesce(c.xmin::text, '') as version
  from settled.queue q join settled.lane l on l.queue_id = q.id
 cross join settled.consumer_group g
  left join settled.consumer c on c.lane_id = l.id and c.group_id = g.id
  left join settled.subscription s on s.queue_id = q.id and s.group_id = g.id
 where (c.lane_id is not null or s.starts_at is null or l.newest_at > s.starts_at)
   and q.name = $1 || '-' || g.name and g.name in ('work', 'replay')
   and l.next_seq > greatest(coalesce(c.cursor, 0), l.first_seq)
   and (c.lease_until is null or c.lease_until <= clock_timestamp())
   and not exists (select from settled.exception e
                    where e.lane_id = l.id and e.group_id = g.id and e.due > clock_timestamp())
"""


class Got(NamedTuple):
    """A delivered message, as far as settling it goes."""

    id: str
    partition_id: str
    lease_id: str | None


class Client(Protocol):
    """One worker, over a connection that stays on it."""

    async def configure(self, queue: str) -> None: ...
    async def push(self, queue: str, partition: str, ids: Sequence[str]) -> None: ...
    async def pop(self, queue: str, group: str, batch: int, wait: float, lease: int) -> list[Got]: ...
    async def settle(self, group: str, messages: Sequence[Got], status: str) -> list[str]: ...
    async def extend(self, lease_id: str, seconds: int) -> None: ...
    async def seek(self, queue: str, group: str, to: str) -> None: ...
    async def alive(self) -> None: ...


class OfEngine:
    """A worker in this process."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def configure(self, queue: str) -> None:
        await self._engine.configure(queue, OPTIONS)

    async def push(self, queue: str, partition: str, ids: Sequence[str]) -> None:
        await self._engine.push([PushItem(queue, b"1", partition, each) for each in ids])

    async def pop(self, queue: str, group: str, batch: int, wait: float, lease: int) -> list[Got]:
        popped = await self._engine.pop(
            PopRequest(queue, group=group, batch=batch, wait=wait, lease_seconds=lease)
        )
        return [Got(m.transaction_id, m.partition_id, m.lease_id) for m in popped.messages()]

    async def settle(self, group: str, messages: Sequence[Got], status: str) -> list[str]:
        items = [AckItem(m.id, m.partition_id, status, m.lease_id) for m in messages]
        return [r.transaction_id for r in await self._engine.ack(items, group) if r.success]

    async def extend(self, lease_id: str, seconds: int) -> None:
        await self._engine.extend(lease_id, seconds)

    async def seek(self, queue: str, group: str, to: str) -> None:
        at: str | datetime = to
        if to == "recent":
            at = datetime.now(UTC) - timedelta(seconds=1)
        await self._engine.seek(group, queue, at)

    async def alive(self) -> None:
        await self._engine.ping()


class OfServer:
    """A worker process, over HTTP."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session

    async def _call(self, method: str, path: str, **more: Any) -> Any:
        async with self._session.request(method, path, **more) as answer:
            assert answer.status < 300 or answer.status in (404, 409), await answer.text()
            return await answer.json() if answer.status != 204 else {}

    async def configure(self, queue: str) -> None:
        await self._call("POST", "/api/v1/configure", json={"queue": queue, "options": OPTIONS})

    async def push(self, queue: str, partition: str, ids: Sequence[str]) -> None:
        items = [{"queue": queue, "partition": partition, "payload": 1, "transactionId": i} for i in ids]
        await self._call("POST", "/api/v1/push", json={"items": items})

    async def pop(self, queue: str, group: str, batch: int, wait: float, lease: int) -> list[Got]:
        params = {"consumerGroup": group, "batch": batch, "leaseSeconds": lease}
        if wait:
            params |= {"wait": "true", "timeout": int(wait * 1000)}
        body = await self._call("GET", f"/api/v1/pop/queue/{queue}", params=params)
        return [Got(m["transactionId"], m["partitionId"], m["leaseId"]) for m in body.get("messages", [])]

    async def settle(self, group: str, messages: Sequence[Got], status: str) -> list[str]:
        acks = [
            {"transactionId": m.id, "partitionId": m.partition_id, "leaseId": m.lease_id, "status": status}
            for m in messages
        ]
        body = {"consumerGroup": group, "acknowledgments": acks}
        answer = await self._call("POST", "/api/v1/ack/batch", json=body)
        rows = answer if isinstance(answer, list) else answer.get("results", [])
        return [row["transactionId"] for row in rows if row["success"]]

    async def extend(self, lease_id: str, seconds: int) -> None:
        await self._call("POST", f"/api/v1/lease/{lease_id}/extend", json={"seconds": seconds})

    async def seek(self, queue: str, group: str, to: str) -> None:
        body: dict[str, Any] = {"toBeginning": True} if to == "beginning" else {"toEnd": True}
        if to == "recent":
            body = {"timestamp": (datetime.now(UTC) - timedelta(seconds=1)).isoformat()}
        await self._call("POST", f"/api/v1/consumer-groups/{group}/queues/{queue}/seek", json=body)

    async def alive(self) -> None:
        await self._call("GET", "/health")


@dataclass
class Run:
    """One run: what was pushed and settled, who waits, and who starved."""

    queue: str
    rng: random.Random
    pushed: set[str] = field(default_factory=set)
    acked: set[str] = field(default_factory=set)
    waiting: dict[int, tuple[str, float]] = field(default_factory=dict)
    time: float = 0.0
    longest: float = 0.0
    starved: list[str] = field(default_factory=list)
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    finish: asyncio.Event = field(default_factory=asyncio.Event)

    def of(self, group: str) -> str:
        """A group's own queue: workers read all of a queue again after a seek, which would hide a miss."""
        return f"{self.queue}-{group}"

    async def produce(self, number: int, clients: Sequence[Client]) -> None:
        """Push a few messages now and then; sometimes to every partition, sometimes nothing for a while."""
        counter = itertools.count()
        while not self.stop.is_set():
            for _ in range(self.rng.choice((1, 1, 1, 1, PARTITIONS))):
                ids = [f"{number}-{next(counter)}" for _ in range(self.rng.choice((1, 1, 2, 7)))]
                self.pushed.update(ids)
                partition = f"p{self.rng.randrange(PARTITIONS)}"
                for group in (WORK, REPLAY):
                    await self.rng.choice(clients).push(self.of(group), partition, ids)
            await asyncio.sleep(self.rng.choice((0.005, 0.03, 0.1, 0.4)))

    async def consume(self, number: int, group: str, mine: Client, acks: Sequence[Client]) -> None:
        """Pop through one worker, settle through others."""
        rng = random.Random(self.rng.random())
        while not self.finish.is_set():
            self.waiting.setdefault(number, (group, self.time))
            wait = rng.choice((0, 0.5, 2)) if number % 2 else rng.choice((1, 2))
            lease = rng.choice((2, 60, 300))
            got = await mine.pop(self.of(group), group, rng.choice((1, 3, 10)), wait, lease)
            if not got:
                await asyncio.sleep(rng.random() * 0.05)
                continue
            del self.waiting[number]
            await self.work(rng, group, got, lease, acks)
        self.waiting.pop(number, None)  # who has gone waits for nothing

    async def work(
        self, rng: random.Random, group: str, got: list[Got], lease: int, acks: Sequence[Client]
    ) -> None:
        """Settle in random order, in parts; some fail, some are given back, some are left to expire."""
        await asyncio.sleep(rng.random() * 0.01)
        if lease == 2 and rng.random() < 0.1:
            return
        rng.shuffle(got)
        while got:
            part = [got.pop() for _ in range(min(len(got), rng.choice((1, 2, 9))))]
            status = rng.choices(("completed", "failed", "retry"), (85, 10, 5))[0]
            settling = [self.settle(rng.choice(acks), group, part, status)]
            if part[0].lease_id is not None and rng.random() < 0.3:
                settling.append(self.extend(rng.choice(acks), part[0].lease_id))
                rng.shuffle(settling)
            await asyncio.gather(*settling)

    async def settle(self, client: Client, group: str, part: list[Got], status: str) -> None:
        settled = await client.settle(group, part, status)
        if group == WORK and status == "completed":
            self.acked.update(settled)

    async def extend(self, client: Client, lease_id: str) -> None:
        await client.extend(lease_id, 600)

    async def seek(self, clients: Sequence[Client]) -> None:
        """Move the group that replays to and fro."""
        while not self.stop.is_set():
            await asyncio.sleep(self.rng.random())
            with suppress(QueueError):
                to = self.rng.choice(("beginning", "recent", "recent", "end"))
                await self.rng.choice(clients).seek(self.of(REPLAY), REPLAY, to)

    async def check(self, dsn: str, clients: Sequence[Client]) -> None:
        """Compare who waits with what the tables have, for ever."""
        connection = await asyncpg.connect(dsn)
        loop = asyncio.get_running_loop()
        since: dict[tuple[str, str], tuple[str, float]] = {}
        last = loop.time()
        try:
            while True:
                await asyncio.gather(*(client.alive() for client in clients))
                rows = await connection.fetch(OPEN, self.queue)
                now = loop.time()
                self.time += min(now - last, TICK_COUNTS)
                last = now
                before, since = since, {}
                for row in rows:
                    key, version = (row["name"], row["grp"]), row["version"]
                    known = before.get(key)
                    since[key] = known if known is not None and known[0] == version else (version, self.time)
                self.judge(since)
                await asyncio.sleep(TICK)
        finally:
            await connection.close()

    def judge(self, since: dict[tuple[str, str], tuple[str, float]]) -> None:
        for (partition, group), (_, opened) in since.items():
            for number, (own, began) in self.waiting.items():
                spent = self.time - max(opened, began)
                if own == group and spent > self.longest:
                    self.longest = spent
                    if spent > BOUND:
                        self.starved.append(
                            f"consumer {number} of {group}: {partition} open for {spent:.2f} s"
                        )


async def run(
    dsn: str, probes: Sequence[Client], pops: Sequence[Sequence[Client]], acks: Sequence[Client],
    *, seconds: float, seed: int,
) -> Run:  # fmt: skip
    """One run over workers: consumer i pops through `pops[i]`, and settles through any of `acks`."""
    one = Run(f"q-{uuid.uuid4().hex[:12]}", random.Random(seed))
    for group in (WORK, REPLAY):
        await probes[-1].configure(one.of(group))
        await probes[0].push(one.of(group), "p0", ["first"])
    one.pushed.add("first")
    tasks = [asyncio.create_task(one.check(dsn, probes))]
    tasks += [
        asyncio.create_task(one.consume(i, WORK if i % 3 else REPLAY, mine[0], mine[1:] or acks))
        for i, mine in enumerate(pops)
    ]
    ending = [asyncio.create_task(one.produce(i, acks)) for i in range(PRODUCERS)]
    ending.append(asyncio.create_task(one.seek(acks)))
    try:
        began = asyncio.get_running_loop().time()
        while asyncio.get_running_loop().time() - began < seconds:
            await asyncio.sleep(0.1)
            _fail_early(tasks + ending)
        one.stop.set()
        await asyncio.gather(*ending)
        drained = one.time + DRAIN_WITHIN
        while one.pushed - one.acked and one.time < drained:
            await asyncio.sleep(0.05)
            _fail_early(tasks)
        one.finish.set()
        if lost := one.pushed - one.acked:
            one.starved.append(f"{len(lost)} of {len(one.pushed)} messages were not delivered")
        await asyncio.gather(*tasks[1:])
    finally:
        for task in tasks + ending:
            task.cancel()
        await asyncio.gather(*tasks, *ending, return_exceptions=True)
    return one


def _fail_early(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        if task.done() and not task.cancelled():
            task.result()


async def run_engines(dsn: str, workers: int, news: str, seconds: float, seed: int) -> Run:
    """Engines in this process; acks and pushes reach only workers that no pop reaches."""
    async with AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(await Engine.open(dsn)) for _ in range(workers)]
        if news == "lost":
            await lose_everything(dsn, *engines)
        elif news == "late":
            await stack.enter_async_context(late_and_shuffled(dsn))
        clients = [OfEngine(engine) for engine in engines]
        popping, others = clients[: workers // 2], clients[workers // 2 :]
        pops = [[popping[i % len(popping)]] for i in range(CONSUMERS)]
        return await run(dsn, clients, pops, others, seconds=seconds, seed=seed)


async def run_server(dsn: str, url: str, workers: int, news: str, seconds: float, seed: int) -> Run:
    """Worker processes; acks and pushes reach only workers that no pop reaches."""
    async with AsyncExitStack() as stack:
        if news == "lost":
            await lose_everything(dsn)
        elif news == "late":
            await stack.enter_async_context(late_and_shuffled(dsn))
        sessions = await pinned(stack, url, workers, CONSUMERS + 1)
        clients = [[OfServer(session) for session in own] for own in sessions]
        popping, others = clients[: workers // 2], clients[workers // 2 :]
        pops: list[list[Client]] = []
        for i in range(CONSUMERS):
            own = others[i % len(others)][i]  # a connection of its own to settle over
            pops.append([popping[i % len(popping)][i], own])
        probes = [own[-1] for own in clients]
        return await run(dsn, probes, pops, [own[-1] for own in others], seconds=seconds, seed=seed)


@asynccontextmanager
async def database() -> AsyncIterator[str]:
    """An embedded Postgres of its own."""
    directory = reachable_directory()
    server = EmbeddedPostgres.start(directory)
    try:
        yield server.dsn
    finally:
        server.stop()
        shutil.rmtree(directory, ignore_errors=True)


async def main() -> int:
    """Many short runs; returns how many starved somebody."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=3)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--how", choices=["engines", "server"], default="engines")
    parser.add_argument("--news", choices=["told", "lost", "late"], default="told")
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    given = parser.parse_args()
    bad = 0
    async with AsyncExitStack() as stack:
        dsn = await stack.enter_async_context(database())
        async with await Engine.open(dsn):
            pass
        server = running_server(dsn=dsn, workers=given.workers) if given.how == "server" else None
        url = stack.enter_context(server).url if server is not None else ""
        for number in range(given.runs):
            seed, news = given.seed + number, given.news if not number else "told"  # the database keeps it
            one = await (
                run_server(dsn, url, given.workers, news, given.seconds, seed)
                if server is not None
                else run_engines(dsn, given.workers, news, given.seconds, seed)
            )
            bad += bool(one.starved)
            print(
                f"run {number}, seed {seed}: {len(one.pushed)} messages, longest wait {one.longest:.2f} s",
                *one.starved[-3:],
                flush=True,
            )
    print(f"{bad} of {given.runs} runs starved somebody")
    return bad


if __name__ == "__main__":
    sys.exit(1 if asyncio.run(main()) else 0)
