"""The pipeline on Spark against plain pumps of the same machine: python -m bench.spark [messages]."""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import os
import statistics
import sys
import tempfile
import threading
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import psutil

from settled import App, Reject
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
PUMPED_FOR = 20.0
VARIANTS = (
    "read and settle",
    "handler as a UDF",
    "handler fused",
    "handler fused, all rows used",
    "all pushed on, fused",
)
DRIVER_SIDE = ("python_streaming_source_runner", "python_streaming_sink_runner")


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


def loop(dsn: str, queue: str, part: int, start: Any, done: Any) -> None:
    """A plain process over half of the lanes, decoding and handling; it settles nothing."""
    from settled.policy import Policy

    start.wait()
    reader = Reader(options(dsn, queue, "plain"))
    attempts = Attempts(Job(handle, Policy(), {}, queue, "plain", False))
    count = 0
    for piece in slices(reader.link, log_ranges(reader.link, queue)[part::2]):
        attempts.run(as_rows(piece))
        count += len(piece)
    done.put(count)


def plain(dsn: str, queue: str) -> float:
    """Messages a second of two plain processes."""
    start = multiprocessing.Event()
    done: Any = multiprocessing.Queue()
    workers = [
        multiprocessing.Process(target=loop, args=(dsn, queue, part, start, done)) for part in range(2)
    ]
    for worker in workers:
        worker.start()
    time.sleep(1)
    began = time.monotonic()
    start.set()
    total = sum(done.get() for _ in workers)
    seconds = time.monotonic() - began
    for worker in workers:
        worker.join()
    return float(total / seconds)


def pump(dsn: str, queue: str, group: str) -> None:
    """What a user would compare with: the same handler, in a pump on the queue."""
    logging.disable()  # a line for each rejection is not what is measured
    app = App(dsn)
    app.subscriber(queue, group=group, buffer=1000)(handle)
    app.run()


def pumps(dsn: str, queue: str, count: int) -> float:
    """Messages a second of two pump processes, from their first settlement on, for a while at most."""
    group = f"pump-{uuid.uuid4().hex[:8]}"
    workers = [multiprocessing.Process(target=pump, args=(dsn, queue, group)) for _ in range(2)]
    for worker in workers:
        worker.start()

    def settled(link: Link) -> int:
        rows = link.rows("lag", queue=queue, group=group)
        return count - rows[0]["waiting"] if rows else 0

    with Link(dsn) as link:
        while not (first := settled(link)):
            time.sleep(0.01)
        began = time.monotonic()
        while (now := settled(link)) < count and time.monotonic() < began + PUMPED_FOR:
            time.sleep(0.05)
        speed = (now - first) / (time.monotonic() - began)
    for worker in workers:
        worker.terminate()
        worker.join()
    return speed


def options(dsn: str, queue: str, group: str) -> Options:
    return Options.parse({"url": dsn, "queue": queue, "group": group, "holder": str(uuid.uuid4())})


def settling(dsn: str, queue: str, count: int) -> float:
    """Seconds to settle a batch of so many messages, all acknowledged."""
    reader = Reader(options(dsn, queue, f"settle-{uuid.uuid4().hex[:8]}"))
    with reader.link:
        reader.hold(streaming=False)
        number = reader.claim(count, None)
        assert number is not None
        reader.serve(number)
        began = time.monotonic()
        done = reader.settle(number, [], 0, 0)
        seconds = time.monotonic() - began
        assert done.acked == count
        return seconds


def processes() -> list[psutil.Process]:
    """The processes that Spark has started; Postgres is one of the queue."""
    own = psutil.Process()
    servers = [each for each in own.children() if each.name() == "postgres"]
    left = {each.pid for server in servers for each in (server, *server.children(recursive=True))}
    return [each for each in own.children(recursive=True) if each.pid not in left]


def processor_time() -> dict[str, float]:
    """Seconds of processor time of this program's processes, by what they are."""
    used = {"JVM": 0.0, "Python": 0.0}
    for process in processes():
        try:
            times = process.cpu_times()
            kind = "JVM" if "java" in process.name() else "Python"
        except psutil.Error:
            continue
        used[kind] += times.user + times.system
        used["Python"] += times.children_user + times.children_system  # ended: Spark starts nothing else
    return used


class Memory:
    """The most that the Python processes beside the driver had, looked at while something runs."""

    def __init__(self) -> None:
        self.most = 0
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def _look(self) -> None:
        while not self._stopped.wait(0.2):
            total = 0
            for process in processes():
                try:
                    if any(name in " ".join(process.cmdline()) for name in DRIVER_SIDE):
                        total += process.memory_info().rss - process.memory_info().shared
                except psutil.Error:
                    continue
            self.most = max(self.most, total)

    def __enter__(self) -> Memory:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join()


@dataclass(frozen=True, slots=True)
class Measured:
    batch: float
    wall: float
    messages: int
    batches: list[float]
    processor: dict[str, float]
    memory: int
    steps: list[dict[str, int]]

    def row(self, name: str) -> str:
        each = ", ".join(f"{kind} {1e6 * s / self.messages:.1f}" for kind, s in self.processor.items())
        rates = [f"{self.messages / seconds / 1000:,.0f}" for seconds in (self.batch, self.wall)]
        return f"| {name} | {rates[0]} | {rates[1]} | {each} | {self.memory >> 20} |"


def measure(spark: Any, dsn: str, queue: str, variant: str, folder: str, **more: Any) -> Measured:
    group = f"g-{uuid.uuid4().hex[:8]}"
    read = {"url": dsn, "max_rows": None, "tasks": 2, **more}
    to = None
    match variant:
        case "read and settle":
            df = read_queue(spark, queue, group, **read)
        case "handler as a UDF":
            df = read_queue(spark, queue, group, **read).where("true").transform(attempt(handle))
        case "handler fused":
            df = read_queue(spark, queue, group, **read).transform(attempt(handle))
        case "handler fused, all rows used":
            df = read_queue(spark, queue, group, **read).transform(attempt(handle)).where("true")
        case "all pushed on, fused":
            df, to = read_queue(spark, queue, group, **read).transform(attempt(pass_on)), f"out-{group}"
        case _:
            raise ValueError(variant)
    writer = settle(df, to).option("checkpointLocation", f"{folder}/{group}").trigger(availableNow=True)
    before = processor_time()
    with Memory() as memory:
        began = time.monotonic()
        query = writer.start()
        query.awaitTermination()
        wall = time.monotonic() - began
    after = processor_time()
    times = [p["durationMs"]["triggerExecution"] / 1000 for p in query.recentProgress]
    with Link(dsn) as link:
        messages = link.rows("totals", queue=queue, group=group, after=0)[0]["messages"]
    processor = {kind: after[kind] - before[kind] for kind in after}
    steps = [p["durationMs"] for p in query.recentProgress]
    return Measured(sum(times), wall, messages, times, processor, memory.most, steps)


def main() -> None:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000
    folder = tempfile.mkdtemp(prefix="settled-bench-")
    print(f"load {', '.join(f'{load:.1f}' for load in os.getloadavg())}", flush=True)
    with EmbeddedPostgres.start(Path(folder) / "queue") as server:
        dsn = server.dsn
        began = time.monotonic()
        asyncio.run(fill(dsn, "bench", count))
        asyncio.run(fill(dsn, "small", 400))
        print(f"filled with {count:,} messages in {time.monotonic() - began:.1f} s", flush=True)
        print(f"two pump processes: {pumps(dsn, 'bench', count) / 1000:,.0f}k msg/s", flush=True)
        print(f"two plain processes, no settling: {plain(dsn, 'bench') / 1000:,.0f}k msg/s", flush=True)
        for size in (1_000, count):
            best = min(settling(dsn, "bench", size) for _ in range(3))
            print(f"settling {size:,} acknowledged: {1000 * best:.1f} ms", flush=True)
        began = time.monotonic()
        spark = session("bench", "local[2,4]", log=Path(folder) / "spark.log")
        print(f"session {time.monotonic() - began:.1f} s", flush=True)
        print("| variant | batch, k msg/s | wall, k msg/s | processor, µs a message | driver side, MiB |")
        print("|---|---|---|---|---|", flush=True)
        for variant in VARIANTS:
            # The JVM goes on compiling for a few million rows.
            runs = [measure(spark, dsn, "bench", variant, folder) for _ in range(8)]
            print(min(runs[3:], key=lambda run: run.batch).row(variant), flush=True)
        for size in (10_000, 100_000, 250_000):
            measured = measure(spark, dsn, "bench", "handler fused", folder, max_rows=size)
            print(measured.row(f"fused, {size:,} a batch"), flush=True)
        for _ in range(2):
            small = measure(spark, dsn, "small", "handler fused", folder, max_rows=10)
        floor, steps = statistics.median(small.batches[5:]), small.steps[5:]
        parts = ", ".join(f"{name} {statistics.median(s[name] for s in steps)} ms" for name in steps[0])
        print(f"floor, 10 messages a batch: {floor:.3f} s ({len(steps)} batches; {parts})", flush=True)
        spark.stop()
    print(f"load {', '.join(f'{load:.1f}' for load in os.getloadavg())}", flush=True)


if __name__ == "__main__":
    main()
