"""One engine on its own Postgres, told by lines of JSON what to do; `bench.scale` runs two of these."""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import os
import shutil
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import asyncpg
import uvloop

from bench.queue_engine import LANES, PAYLOAD, start
from settled.queue import janitor
from settled.queue.engine import Engine
from settled.queue.types import AckItem, PopRequest, PushItem

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from settled.queue.embedded import EmbeddedPostgres

QUEUE = "q"
IDLE_LANES = 100_000
GROUPS = 10
CALLERS = {1: 50, 100: 10}
TICK = os.sysconf("SC_CLK_TCK")


def processor(pids: set[int], root: int | None = None) -> float:
    """Processor time of these processes; of `root` with all its children, ended ones too."""
    total = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        pid, parent = int(stat.parent.name), int(fields[1])
        if pid in pids or (root is not None and parent == root):
            total += int(fields[11]) + int(fields[12])
        elif pid == root:
            total += sum(map(int, fields[11:15]))
    return total / TICK


def resident_mib() -> float:
    """This process's resident memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


class Side:
    """An engine, and the work that is measured on it."""

    def __init__(self, server: EmbeddedPostgres, engine: Engine) -> None:
        self._server = server
        self._engine = engine
        self._ids = itertools.count()

    def _spent(self) -> tuple[float, float]:
        found = self._server.postmaster()
        return time.process_time(), processor(set(), found.pid if found else None)

    def _items(self, count: int) -> list[PushItem]:
        number = next(self._ids)
        return [PushItem(QUEUE, PAYLOAD, f"p{number % LANES}", f"t-{number}-{i}") for i in range(count)]

    async def open(self) -> dict[str, float]:
        """Use the partitions until the engine's memory is full of messages, as it is after a while."""
        for _ in range(IDLE_LANES // LANES):
            await self._engine.push([item for _ in range(LANES) for item in self._items(1)])
        await self._drain()
        return {}

    async def _drain(self) -> None:
        while len(await self._engine.pop(PopRequest(QUEUE, batch=10_000, partitions=1000, auto_ack=True))):
            pass

    async def fill(self, kind: str, retained: int) -> dict[str, float]:
        """Become the large one."""
        began = time.perf_counter()
        if kind == "idle":  # each has been used once
            for at in range(0, IDLE_LANES, 1000):
                await self._engine.push([PushItem(QUEUE, b"0", f"idle{i}") for i in range(at, at + 1000)])
            await self._drain()
        elif kind == "groups":
            for group in range(GROUPS):
                request = PopRequest(QUEUE, group=f"g{group}", batch=1000, partitions=1000, auto_ack=True)
                await self._engine.pop(request)
        else:
            for _ in range(0, retained, 20_000):
                await asyncio.gather(*(self._engine.push(self._items(1000)) for _ in range(20)))
            await self._engine.seek("__QUEUE_MODE__", QUEUE, "end")
        # What Postgres does once about so many new rows is not what is measured.
        connection = await asyncpg.connect(self._server.dsn)
        for statement in ("vacuum analyze", "checkpoint"):
            await connection.execute(statement)
        await connection.close()
        gc.collect()
        gc.freeze()
        return {"seconds": time.perf_counter() - began}

    async def push(self, size: int, count: int) -> dict[str, float]:
        """Pushes to the 50 partitions."""

        async def work() -> int:
            return len(await self._engine.push(self._items(size)))

        return await self._measure(work, CALLERS[size], count)

    async def pop(self, size: int, count: int) -> dict[str, float]:
        """Pops of any partition, until what was put in before is gone."""
        for _ in range(0, count, 20 * size):
            await asyncio.gather(*(self._engine.push(self._items(size)) for _ in range(20)))

        async def work() -> int:
            popped = await self._engine.pop(PopRequest(QUEUE, batch=size, auto_ack=True))
            popped.json_messages()
            return len(popped)

        return await self._measure(work, CALLERS[size], 2 * count)

    async def cycle(self, size: int, count: int) -> dict[str, float]:
        """A push, a pop of any partition, and its acks: as much goes out as comes in."""

        async def work() -> int:
            await self._engine.push(self._items(size))
            popped = await self._engine.pop(PopRequest(QUEUE, batch=size))
            acks = [
                AckItem(m.transaction_id, m.partition_id, lease_id=popped.lease_id) for m in popped.messages()
            ]
            return len(await self._engine.ack(acks)) if acks else -1

        figures = await self._measure(work, 10, count)
        await self._drain()
        return figures

    async def _measure(self, work: Callable[[], Awaitable[int]], callers: int, most: int) -> dict[str, float]:
        done = 0

        async def caller() -> None:
            nonlocal done
            while done < most:
                count = await work()
                if not count:
                    return
                done += max(0, count)

        before, began = self._spent(), time.perf_counter()
        await asyncio.gather(*(caller() for _ in range(callers)))
        took, after = time.perf_counter() - began, self._spent()
        return {
            "rate": done / took,
            "server_us": 1e6 * (after[0] - before[0]) / max(1, done),
            "postgres_us": 1e6 * (after[1] - before[1]) / max(1, done),
        }

    async def rest(self, seconds: float) -> dict[str, float]:
        """What is spent when nobody asks for anything, in seconds a second."""
        before = self._spent()
        await asyncio.sleep(seconds)
        after = self._spent()
        return {
            "server": (after[0] - before[0]) / seconds,
            "postgres": (after[1] - before[1]) / seconds,
        }

    async def memory(self) -> dict[str, float]:
        """Resident memory of the engine's process."""
        return {"mib": resident_mib()}

    async def reopen(self) -> dict[str, float]:
        """How long a second engine takes for its first pushes, and what reading all ids costs."""
        began, before = time.perf_counter(), self._spent()
        async with await Engine.open(self._server.dsn, maintain=False) as engine:
            await engine.push(self._items(1))
            one = time.perf_counter() - began
            began = time.perf_counter()
            await asyncio.gather(*(engine.push(self._items(1)) for _ in range(LANES)))
            took, after = time.perf_counter() - began, self._spent()
            return {"one": one, "all": took, "cpu": sum(after) - sum(before), "partitions": LANES}


async def main() -> None:
    """Do what the lines say until there are no more."""
    # Merging small segments costs what was pushed a minute before: the side that is longer at it pays more.
    janitor.COMPACT_EVERY = 10**9
    server = start()
    loop = asyncio.get_running_loop()
    try:
        async with await Engine.open(server.dsn) as engine:
            gc.collect()
            gc.freeze()
            gc.set_threshold(20_000, 20, 50)  # as a server's worker does
            side = Side(server, engine)
            while line := await loop.run_in_executor(None, sys.stdin.readline):
                given: dict[str, Any] = json.loads(line)
                answer = await getattr(side, given.pop("command"))(**given)
                print(json.dumps(answer), flush=True)
    finally:
        server.stop()
        shutil.rmtree(server.directory, ignore_errors=True)


if __name__ == "__main__":
    uvloop.run(main())
