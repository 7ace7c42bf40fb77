"""The pipeline, start to end: orders of every kind are charged on Spark, and the books are checked."""

from __future__ import annotations

import asyncio
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from settled import Reject, current_message
from settled.queue import Engine, PushItem
from settled.queue.embedded import EmbeddedPostgres, temporary_directory
from settled.spark.jobs.report import write_report
from settled.spark.jobs.run import live, run
from settled.spark.startup import session

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

LANES = 16
QUEUE, GROUP, NEXT = "orders", "billing", "invoices"
SHARES = {"good": 0.94, "transient": 0.02, "poison": 0.015, "malformed": 0.01, "duplicate": 0.015}


class Order(msgspec.Struct):
    """What a shop sells."""

    id: int
    customer: str
    amount: float
    kind: str = "good"
    note: str = ""


class Invoice(msgspec.Struct):
    """What it charges."""

    order: int
    customer: str
    total: float


class BankAway(Exception):
    """The bank does not answer now."""


def charge(order: Order) -> Invoice:
    """Charge an order: the function that a pump would run too."""
    if order.kind == "poison":
        raise Reject(f"customer {order.customer} has no card")
    if order.kind == "transient":
        message = current_message()
        if message is not None and message.attempt <= 1 + order.id % 2:
            raise BankAway(f"no answer from bank {order.id % 7}")
    return Invoice(order.id, order.customer, round(order.amount * 1.19, 2))


def make_orders(count: int, seed: int = 7) -> tuple[list[PushItem], Counter[str]]:
    """Orders of every kind, and how many of each there are; a duplicate repeats an earlier transaction id."""
    chance = random.Random(seed)  # noqa: S311 - sample data
    items: list[PushItem] = []
    kinds: Counter[str] = Counter()
    names, weights = list(SHARES), list(SHARES.values())
    encode = msgspec.json.encode
    for number, kind in enumerate(chance.choices(names, weights, k=count)):
        if kind == "duplicate" and not items:
            kind = "good"
        kinds[kind] += 1
        if kind == "duplicate":
            items.append(items[chance.randrange(len(items))])
            continue
        lane = f"shop-{number % LANES:02d}"
        order = Order(
            number, f"c{chance.randrange(5000):04d}", chance.randrange(100, 90_000) / 100, kind, "x" * 80
        )
        payload = encode(order) if kind != "malformed" else b'{"id": "%d", "customer": ' % number
        items.append(PushItem(QUEUE, payload, partition=lane, transaction_id=f"order-{number}"))
    return items, kinds


async def fill(dsn: str, items: list[PushItem]) -> Counter[str]:
    """Push everything and count what the queue answers."""
    answers: Counter[str] = Counter()
    async with await Engine.open(dsn) as engine:
        await engine.configure(QUEUE, {"retry": "parked", "retryDelay": 500, "retryLimit": 5})
        await engine.configure(NEXT)
        for at in range(0, len(items), 10_000):
            answers.update(result.status for result in await engine.push(items[at : at + 10_000]))
    return answers


def demo(count: int, folder: Path, report: Path) -> bool:
    """Run everything; True if the books are right. Only the report and the table beside it are left."""
    table = report.parent / "settled-invoices"
    shutil.rmtree(table, ignore_errors=True)
    started = time.monotonic()
    say(f"filling queue {QUEUE!r} with {count:,} orders")
    items, kinds = make_orders(count)
    with temporary_directory() as data, EmbeddedPostgres.start(data) as server:
        answers = asyncio.run(fill(server.dsn, items))
        took = time.monotonic() - started
        queued, twice = answers["queued"], answers["duplicate"]
        say(f"queued {queued:,}, duplicates {twice:,} in {took:.1f} s; starting Spark")
        spark = session("settled demo", quick=True, log=folder / "spark.log")

        def to_parquet(rows: DataFrame, number: int) -> None:
            acked = rows.where("outcome = 'ack'").select("result.*", "created_at")
            acked.coalesce(2).write.mode("overwrite").parquet(str(table / f"batch={number}"))

        try:
            say(f"Spark is up after {time.monotonic() - started:.1f} s")
            end = run(
                spark,
                charge,
                QUEUE,
                GROUP,
                str(folder / "checkpoint"),
                url=server.dsn,
                to=NEXT,
                write=to_parquet,
                until_empty=True,
                result=Invoice,
                on_progress=live(sys.stderr),
                max_rows=100_000,
            )
            sys.stderr.write("\n" if sys.stderr.isatty() else "")
            invoices = spark.read.parquet(str(table)).agg({"order": "count", "total": "sum"}).first()
            figures = write_report(spark, server.dsn, report)
        finally:
            spark.stop()
        pushed_on = asyncio.run(count_queue(server.dsn, NEXT))
    queued = answers["queued"]
    good = kinds["good"] + kinds["transient"]
    written = invoices["count(order)"] if invoices is not None else 0
    expected = {
        "queued": (queued, count - kinds["duplicate"]),
        "duplicates refused": (answers["duplicate"], kinds["duplicate"]),
        "charged": (end.acked, good),
        "dead letters": (end.dead, kinds["poison"] + kinds["malformed"]),
        "retries": (end.retried, sum(1 + o % 2 for o in transients(items))),
        "invoices in the next queue": (pushed_on, good),
        "invoices in Parquet": (written, good),
        "dead letters in the report": (sum(e["count"] for e in figures["dead_letters"]["errors"]), end.dead),
    }
    for name, (found, wanted) in expected.items():
        say(f"  {name:28} {found:>9,}  {'ok' if found == wanted else f'should be {wanted:,}'}")
    say(f"report: {report}   table: {table}   {time.monotonic() - started:.1f} s in all")
    lost = queued - end.acked - end.dead
    sys.stdout.write(f"pushed={count} acked={end.acked} retried={end.retried} dead={end.dead} lost={lost}\n")
    return lost == 0 and all(found == wanted for found, wanted in expected.values())


def transients(items: list[PushItem]) -> list[int]:
    """The ids of the orders that fail at first, each once."""
    found = {i.transaction_id: i.payload for i in items if b'"transient"' in bytes(i.payload)}
    return [msgspec.json.decode(payload)["id"] for payload in found.values()]


async def count_queue(dsn: str, queue: str) -> int:
    """How many messages a queue holds."""
    async with await Engine.open(dsn) as engine:
        return (await engine.queue(queue, limit=0)).total


def say(text: str) -> None:
    """A line for the reader; the last line of all is the result."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def main() -> int:
    """As a program: the count may be given."""
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 200_000
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # what is temporary is removed then, too
    try:
        with tempfile.TemporaryDirectory(prefix="settled-demo-", ignore_cleanup_errors=True) as folder:
            done = demo(count, Path(folder), Path("settled-report.html").resolve())
    except KeyboardInterrupt:
        say("stopped")
        return 130
    return 0 if done else 1


if __name__ == "__main__":
    sys.exit(main())
