"""A stream on Spark, read and settled: python -m bench.spark_nats [messages]."""

from __future__ import annotations

import asyncio
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
from nats.js.api import StreamConfig

from bench.spark import NOTE, Order, handle, pass_on
from settled.spark import attempt, read_queue, session, settle
from settled.spark.jetstream.books import Piece
from settled.spark.jetstream.history import Watch
from settled.spark.jetstream.link import Link
from settled.spark.jetstream.messages import PieceReader
from settled.spark.jetstream.publishing import Outgoing, publish_all
from settled.transports.nats import Connection

STREAM = "BENCH"
VARIANTS = (
    "read and settle",
    "handler as a UDF",
    "handler fused",
    "handler fused, all rows used",
    "all pushed on, fused",
)


@contextmanager
def nats_server() -> Iterator[str]:
    """A server on a free port of this machine."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    folder = tempfile.mkdtemp(prefix="settled-bench-")
    binary = str(Path(sys.executable).with_name("nats-server"))
    process = subprocess.Popen(
        [binary, "-a", "127.0.0.1", "-p", str(port), "-js", "-sd", folder],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        yield f"nats://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(15)
        shutil.rmtree(folder, ignore_errors=True)


def fill(link: Link, count: int) -> None:
    async def make(connection: Connection) -> None:
        for name, subjects in ((STREAM, ["bench.>"]), ("OUT", ["out.>"])):
            await connection.jetstream.add_stream(
                StreamConfig(name=name, subjects=subjects, allow_direct=True)
            )

    link.run(make)
    for at in range(0, count, 10_000):
        some = [
            Outgoing(
                f"bench.{i % 16}",
                msgspec.json.encode(Order(i, f"c{i % 5000}", 9.5, NOTE)),
                {"Nats-Msg-Id": f"m{i}"},
            )
            for i in range(at, min(at + 10_000, count))
        ]
        link.run(lambda connection, some=some: publish_all(connection, some))  # type: ignore[misc]


def tell(what: str, count: int, began: float, cpu: float) -> None:
    """By the clock, and by the processor, which other work on the machine disturbs less."""
    wall, own = time.monotonic() - began, time.process_time() - cpu
    print(f"{what}: {count / wall / 1000:,.1f}k msg/s, {own / count * 1e6:,.1f} us of CPU each", flush=True)


async def bare(url: str, count: int) -> None:
    """The client by itself: fetch and ack in batches of 500, as a consumer would."""
    import nats

    client = await nats.connect(url)
    subscription = await client.jetstream().pull_subscribe("bench.>", "bare")
    seen = 0
    while seen < count:
        messages = await subscription.fetch(500)
        for message in messages:
            msgspec.json.decode(message.data, type=Order)
            await message.ack()
        seen += len(messages)
    await client.flush()
    await client.close()


def measure(spark: Any, url: str, variant: str, folder: str) -> tuple[float, float, int]:
    """Seconds by Spark's own count and by the clock, and how many messages."""
    group, to = f"g{uuid.uuid4().hex[:8]}", None
    read: dict[str, Any] = {"url": url, "stream": STREAM, "consumer": group}
    match variant:
        case "read and settle":
            df = read_queue(spark, **read)
        case "handler as a UDF":
            df = read_queue(spark, **read).where("true").transform(attempt(handle))
        case "handler fused":
            df = read_queue(spark, **read).transform(attempt(handle))
        case "handler fused, all rows used":
            df = read_queue(spark, **read).transform(attempt(handle)).where("true")
        case _:
            df, to = read_queue(spark, **read).transform(attempt(pass_on)), "out.done"
    began = time.monotonic()
    writer = settle(df, to).option("checkpointLocation", f"{folder}/{group}").trigger(availableNow=True)
    query = writer.start()
    query.awaitTermination()
    wall = time.monotonic() - began
    with Watch(url) as watch:
        rows = watch.totals(STREAM, group).messages
    return sum(p["durationMs"]["triggerExecution"] for p in query.recentProgress) / 1000, wall, rows


def main() -> None:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 200_000
    folder = tempfile.mkdtemp(prefix="settled-bench-")
    with nats_server() as url:
        link = Link(url)
        began = time.monotonic()
        fill(link, count)
        print(f"filled with {count:,} messages in {time.monotonic() - began:.1f} s", flush=True)
        began, cpu = time.monotonic(), time.process_time()
        asyncio.run(bare(url, count))
        tell("bare client, fetch and ack", count, began, cpu)
        began, cpu = time.monotonic(), time.process_time()
        for messages in PieceReader(link, STREAM, (), Piece(1, count + 1), {}):
            messages.arrays(1)
        tell("direct gets to Arrow, one process", count, began, cpu)
        spark = session("bench", "local[2,4]", log=Path(folder) / "spark.log")
        print("| variant | batch, k msg/s | wall, k msg/s |\n|---|---|---|")
        for variant in VARIANTS:
            runs = [measure(spark, url, variant, folder) for _ in range(2)]
            batch, wall, rows = min(runs)
            print(f"| {variant} | {rows / batch / 1000:,.1f} | {rows / wall / 1000:,.1f} |", flush=True)
        spark.stop()
        link.close()
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
