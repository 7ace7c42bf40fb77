"""Does the queue engine slow down with size? `python -m bench.scale [seconds] [messages retained]`.

Each case is measured small, large and small again in turns, so that a busy machine hurts both alike; what is
printed is the ratio large to small of messages a second of processor time (this process and Postgres) and of
wall time.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import statistics
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import uvloop

from bench.queue_engine import LANES, PAYLOAD, start
from settled.queue.engine import Engine
from settled.queue.types import AckItem, PopRequest, PushItem

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from settled.queue.embedded import EmbeddedPostgres

TURNS = 3
IDLE_LANES = 100_000
_ids = itertools.count()


def processor_seconds(root: int | None) -> float:
    """Processor time of this process and of Postgres, its ended children too."""
    tick = os.sysconf("SC_CLK_TCK")
    total = 0
    parents: dict[int, int] = {}
    spent: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        pid = int(stat.parent.name)
        parents[pid] = int(fields[1])
        spent[pid] = int(fields[11]) + int(fields[12])
        if pid == root:
            spent[pid] += int(fields[13]) + int(fields[14])
    for pid, ticks in spent.items():
        if pid in (root, os.getpid()) or parents[pid] == root:
            total += ticks
    return total / tick


async def rate(
    server: EmbeddedPostgres, callers: int, seconds: float, work: Callable[[], Awaitable[int]]
) -> tuple[float, float]:
    """Messages a second of processor time, and of wall time."""
    end = time.perf_counter() + seconds
    done = 0

    async def caller() -> None:
        nonlocal done
        while time.perf_counter() < end:
            done += await work()

    before, began = processor_seconds(server._pid()), time.perf_counter()
    await asyncio.gather(*(caller() for _ in range(callers)))
    took = time.perf_counter() - began
    return done / max(0.01, processor_seconds(server._pid()) - before), done / took


async def compare(
    server: EmbeddedPostgres,
    name: str,
    seconds: float,
    small: Callable[[], Awaitable[int]],
    large: Callable[[], Awaitable[int]],
    callers: int = 10,
) -> None:
    """Print how the large case does against the small one."""
    for work in (small, large):
        await rate(server, callers, seconds / 2, work)  # warm
    ratios: list[tuple[float, float]] = []
    rates: list[float] = []
    for _ in range(TURNS):
        a = await rate(server, callers, seconds, small)
        b = await rate(server, callers, seconds, large)
        c = await rate(server, callers, seconds, small)
        ratios.append((2 * b[0] / (a[0] + c[0]), 2 * b[1] / (a[1] + c[1])))
        rates.append(b[1])
    processor, wall = (statistics.median(r[i] for r in ratios) for i in (0, 1))
    print(f"{name:58s} {processor:5.2f} {wall:5.2f}   {statistics.median(rates):10,.0f} msg/s", flush=True)


def items(queue: str, count: int) -> list[PushItem]:
    """New messages of one lane, with ids of their own."""
    number = next(_ids)
    return [PushItem(queue, PAYLOAD, f"p{number % LANES}", f"t-{number}-{i}") for i in range(count)]


def pusher(engine: Engine, queue: str, count: int) -> Callable[[], Awaitable[int]]:
    """Pushes to the 50 busy lanes."""

    async def push() -> int:
        return len(await engine.push(items(queue, count)))

    return push


def popper(engine: Engine, queue: str, batch: int) -> Callable[[], Awaitable[int]]:
    """A push, a pop of any partition, and its acks: as much goes out as comes in."""

    async def pop() -> int:
        await engine.push(items(queue, batch))
        popped = await engine.pop(PopRequest(queue, batch=batch))
        acks = [
            AckItem(m.transaction_id, m.partition_id, lease_id=popped.lease_id) for m in popped.messages()
        ]
        return len(await engine.ack(acks)) if acks else 0

    return pop


async def fill(engine: Engine, queue: str, total: int) -> None:
    """Retain so many messages, settled by nobody."""
    sent = 0
    while sent < total:
        await asyncio.gather(*(engine.push(items(queue, 1000)) for _ in range(20)))
        sent += 20_000


async def main(seconds: float, retained: int) -> None:
    """Run every case once."""
    server = start()
    try:
        async with await Engine.open(server.dsn) as engine:
            print(f"{'large against small':58s} {'cpu':>5s} {'wall':>5s}")
            for at in range(0, IDLE_LANES, 1000):  # each has been used once
                await engine.push([PushItem("wide", b"0", f"idle{i}") for i in range(at, at + 1000)])
            while len(await engine.pop(PopRequest("wide", batch=10_000, partitions=1000, auto_ack=True))):
                pass
            for batch in (1, 100):
                small, large = popper(engine, "narrow", batch), popper(engine, "wide", batch)
                await compare(
                    server, f"push, pop any, ack {batch}: 100,000 idle partitions / 0", seconds, small, large
                )
            for queue, groups in (("one", 1), ("ten", 10)):
                for group in range(groups):
                    await engine.push(items(queue, 1))
                    await engine.pop(PopRequest(queue, group=f"g{group}", auto_ack=True))
            for count in (1, 100):
                small, large = pusher(engine, "one", count), pusher(engine, "ten", count)
                await compare(server, f"push {count}: 10 groups / 1", seconds, small, large)
            began = time.perf_counter()
            await fill(engine, "full", retained)
            size = await engine._core.pool.fetchval("select pg_total_relation_size('segment')")
            print(
                f"{retained:,} messages retained after {time.perf_counter() - began:.0f} s, "
                f"{size / 2**20:,.0f} MiB"
            )
            await engine.seek("__QUEUE_MODE__", "full", "end")
            for count in (1, 100):
                small, large = pusher(engine, "empty", count), pusher(engine, "full", count)
                await compare(server, f"push {count}: {retained:,} retained / few", seconds, small, large)
            small, large = popper(engine, "narrow", 100), popper(engine, "full", 100)
            await compare(server, f"push, pop, ack 100: {retained:,} retained / 0", seconds, small, large)
    finally:
        server.stop()


if __name__ == "__main__":
    given = [*sys.argv[1:], *("2.0", "1000000")[len(sys.argv) - 1 :]]
    uvloop.run(main(float(given[0]), int(given[1])))
