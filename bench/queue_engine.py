"""Rates of the queue engine in one process, without HTTP: `python -P bench/queue_engine.py [seconds]`."""

from __future__ import annotations

import asyncio
import itertools
import resource
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import uvloop

from settled.queue.embedded import EmbeddedPostgres
from settled.queue.engine import Engine
from settled.queue.types import AckItem, PopRequest, PushItem

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

LANES = 50
PAYLOAD = b'"' + b"x" * 98 + b'"'
_ids = itertools.count()


async def load(name: str, callers: int, seconds: float, work: Callable[[int], Awaitable[int]]) -> None:
    """Call `work` from many callers for a while and print what came of it."""
    end = time.perf_counter() + seconds
    times: list[float] = []
    total = 0

    async def caller(number: int) -> None:
        nonlocal total
        while (before := time.perf_counter()) < end:
            done = await work(number)
            if not done:
                return
            total += done
            times.append(time.perf_counter() - before)

    started = time.perf_counter()
    await asyncio.gather(*(caller(i) for i in range(callers)))
    took = time.perf_counter() - started
    times.sort()
    p99 = times[int(len(times) * 0.99)] * 1000 if times else 0
    rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"{name:38s} {total / took:10,.0f} msg/s   p99 {p99:6.1f} ms   max rss {rss:4.0f} MiB", flush=True)


def items(queue: str, lane: int, count: int) -> list[PushItem]:
    """New messages with ids of their own."""
    return [PushItem(queue, PAYLOAD, f"p{lane}", f"t-{next(_ids):012d}") for _ in range(count)]


async def push(engine: Engine, queue: str, count: int) -> int:
    """Push one batch to some lane."""
    return len(await engine.push(items(queue, next(_ids) % LANES, count)))


def start() -> EmbeddedPostgres:
    """A server of our own, in a directory its account can reach."""
    directory = Path(tempfile.mkdtemp())
    directory.chmod(0o755)
    return EmbeddedPostgres.start(directory)


async def main(seconds: float) -> None:
    """Run every case once."""
    server = start()
    try:
        async with await Engine.open(server.dsn) as engine:
            await load("push 1, 50 callers", 50, seconds, lambda _: push(engine, "one", 1))
            await load("push 1, 256 callers", 256, seconds, lambda _: push(engine, "one", 1))
            await load("push 100, 10 callers", 10, seconds, lambda _: push(engine, "many", 100))
            auto = PopRequest("many", batch=100, auto_ack=True)
            await load("pop 100 auto-ack, 10 callers", 10, seconds, lambda _: answer(engine, auto))
            single = PopRequest("one", batch=1, auto_ack=True)
            await load("pop 1 auto-ack, 50 callers", 50, seconds, lambda _: answer(engine, single))
            await fill(engine, "acks")
            await load("ack 1, 50 callers", 50, seconds, acker(engine, await leased(engine, "acks", 1)))
            await fill(engine, "acks2")
            await load("ack 100, 10 callers", 10, seconds, acker(engine, await leased(engine, "acks2", 100)))
            await fill(engine, "both")
            await load("pop 100 + ack 100, 10 callers", 10, seconds, lambda _: pop_and_ack(engine, "both"))
    finally:
        server.stop()


async def answer(engine: Engine, request: PopRequest) -> int:
    """Pop and make the JSON answer."""
    popped = await engine.pop(request)
    popped.json_messages()
    return len(popped)


async def fill(engine: Engine, queue: str) -> None:
    """Two thousand messages in every lane."""
    for _ in range(10):
        await asyncio.gather(*(engine.push(items(queue, lane, 400)) for lane in range(LANES)))


async def leased(engine: Engine, queue: str, size: int) -> list[list[AckItem]]:
    """Lease everything and answer the acks for it."""
    acks: list[list[AckItem]] = []
    for _ in range(LANES):
        popped = await engine.pop(PopRequest(queue, batch=4000))
        found = [
            AckItem(m.transaction_id, m.partition_id, lease_id=popped.lease_id) for m in popped.messages()
        ]
        acks += [found[i : i + size] for i in range(0, len(found), size)]
    return [acks[i] for start in range(64) for i in range(start, len(acks), 64)]


def acker(engine: Engine, acks: list[list[AckItem]]) -> Callable[[int], Awaitable[int]]:
    """Settle one prepared batch a call."""

    async def ack(_: int) -> int:
        return sum(r.success for r in await engine.ack(acks.pop())) if acks else 0

    return ack


async def pop_and_ack(engine: Engine, queue: str) -> int:
    """A batch under a lease, and its acks."""
    popped = await engine.pop(PopRequest(queue, batch=100))
    found = [AckItem(m.transaction_id, m.partition_id, lease_id=popped.lease_id) for m in popped.messages()]
    return sum(r.success for r in await engine.ack(found)) if found else 0


if __name__ == "__main__":
    uvloop.run(main(float(sys.argv[1]) if len(sys.argv) > 1 else 4.0))
