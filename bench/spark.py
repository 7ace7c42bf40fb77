"""The pipeline on Spark against plain processes: python -m bench.spark [messages]."""

from __future__ import annotations

import asyncio
import multiprocessing
import sys
import tempfile
import time
import uuid
from pathlib import Path
from typing import Any

import msgspec

from settled import Reject
from settled.queue import Engine, PushItem
from settled.queue.embedded import EmbeddedPostgres
from settled.queue.manifest import Link, log_ranges
from settled.spark import attempt, read_queue, session, settle
from settled.spark.attempts import Attempts, Job
from settled.spark.fused import as_rows
from settled.spark.options import Options
from settled.spark.postgres import Reader
from settled.spark.rows import slices

LANES = 16
CHUNK = 100
NOTE = "x" * 130


class Order(msgspec.Struct):
    id: int
    customer: str
    amount: float
    note: str = ""


def handle(order: Order) -> None:
    if order.id % 100 == 99:
        raise Reject("one in a hundred")


def pass_on(order: Order) -> Order:
    return order


async def fill(dsn: str, queue: str, count: int) -> None:
    async with await Engine.open(dsn) as engine:
        await engine.configure(queue, {"retry": "parked"})
        for at in range(0, count, CHUNK * LANES * 10):
            items = [
                PushItem(
                    queue,
                    msgspec.json.encode(Order(i, f"c{i % 5000}", 9.5, NOTE)),
                    partition=f"l{i // CHUNK % LANES}",
                )
                for i in range(at, min(at + CHUNK * LANES * 10, count))
            ]
            # Segments of a hundred, as busy producers make them.
            await asyncio.gather(*(engine.push(items[i : i + CHUNK]) for i in range(0, len(items), CHUNK)))


def loop(dsn: str, queue: str, group: str, part: int, start: Any, done: Any) -> None:
    """What a user would compare with: a plain process over half of the lanes, decoding and handling."""
    from settled.policy import Policy

    start.wait()
    settings = Options.parse({"url": dsn, "queue": queue, "group": group, "holder": str(uuid.uuid4())})
    reader = Reader(settings)
    attempts = Attempts(Job(handle, Policy(), {}, queue, group, False))
    count = failed = 0
    for piece in slices(reader.link, log_ranges(reader.link, queue)[part::2]):
        result = attempts.run(as_rows(piece))
        count, failed = count + len(piece), failed + len(result.failed)
    done.put((count, failed))


def plain(dsn: str, queue: str) -> tuple[float, int]:
    start = multiprocessing.Event()
    done: Any = multiprocessing.Queue()
    workers = [
        multiprocessing.Process(target=loop, args=(dsn, queue, "plain", part, start, done))
        for part in range(2)
    ]
    for worker in workers:
        worker.start()
    time.sleep(1)
    began = time.monotonic()
    start.set()
    total = sum(done.get()[0] for _ in workers)
    seconds = time.monotonic() - began
    for worker in workers:
        worker.join()
    return seconds, total


def measure(
    spark: Any, dsn: str, queue: str, variant: str, folder: str, **options: Any
) -> tuple[float, float, int]:
    group = f"g-{uuid.uuid4().hex[:8]}"
    read = {"url": dsn, "max_rows": None, "tasks": 2, **options}
    to = None
    match variant:
        case "read and settle":
            df = read_queue(spark, queue, group, **read)
        case "handler as a UDF":
            df = read_queue(spark, queue, group, **read).transform(attempt(handle))
        case "handler fused":
            df = read_queue(spark, queue, group, handler=handle, **read)
        case "handler fused, failures only":
            df = read_queue(spark, queue, group, handler=handle, only_failures=True, **read)
        case "all pushed on, fused":
            df, to = read_queue(spark, queue, group, handler=pass_on, **read), f"out-{group}"
        case _:
            raise ValueError(variant)
    began = time.monotonic()
    query = (
        settle(df, to).option("checkpointLocation", f"{folder}/{group}").trigger(availableNow=True).start()
    )
    query.awaitTermination()
    wall = time.monotonic() - began
    batches = query.recentProgress
    with Link(dsn) as link:
        rows = link.rows("totals", queue=queue, group=group, after=0)[0]["messages"]
    return sum(p["durationMs"]["triggerExecution"] for p in batches) / 1000, wall, rows


def main() -> None:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000
    folder = tempfile.mkdtemp(prefix="settled-bench-")
    with EmbeddedPostgres.start(Path(folder) / "queue") as server:
        began = time.monotonic()
        asyncio.run(fill(server.dsn, "bench", count))
        print(f"filled with {count:,} messages in {time.monotonic() - began:.1f} s", flush=True)
        seconds, total = plain(server.dsn, "bench")
        print(f"two plain processes, no settling: {total / seconds / 1000:,.0f}k msg/s", flush=True)
        began = time.monotonic()
        spark = session("bench", "local[2,4]", log=Path(folder) / "spark.log")
        print(f"session {time.monotonic() - began:.1f} s", flush=True)
        print("| variant | batch, k msg/s | wall, k msg/s |\n|---|---|---|")
        for variant in (
            "read and settle",
            "handler as a UDF",
            "handler fused",
            "handler fused, failures only",
            "all pushed on, fused",
        ):
            runs = [measure(spark, server.dsn, "bench", variant, folder) for _ in range(3)]
            batch, wall, rows = min(runs[1:])
            print(f"| {variant} | {rows / batch / 1000:,.0f} | {rows / wall / 1000:,.0f} |", flush=True)
        for size in (10_000, 100_000, 250_000):
            batch, wall, rows = measure(spark, server.dsn, "bench", "handler fused", folder, max_rows=size)
            print(
                f"| fused, {size:,} a batch | {rows / batch / 1000:,.0f} | {rows / wall / 1000:,.0f} |",
                flush=True,
            )
        spark.stop()


if __name__ == "__main__":
    main()
