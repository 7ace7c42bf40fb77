"""Reading and settling on every transport: Settled beside the broker's bare client, in one run.

python -m bench.transports [nats rabbitmq ...] [--messages 5000] [--rounds 3] [--json FILE] [--write]
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import os
import platform
import statistics
import sys
from dataclasses import dataclass
from importlib import import_module
from itertools import count
from pathlib import Path

import msgspec

from bench.contenders import NAMES, Contender, Meter, Order, Span
from settled import App

RESULTS = Path(__file__).with_name("RESULTS-transports.md")
GOAL = 0.8
PATIENCE = 120.0
_queues = count()


@dataclass(frozen=True, slots=True)
class Result:
    """What one broker came to: messages a second, a figure a round."""

    name: str
    client: str
    messages: int
    raw: list[float]
    settled: list[float]
    raw_cpu: list[float]
    settled_cpu: list[float]

    @property
    def ratio(self) -> float:
        """Of the medians."""
        return statistics.median(self.settled) / statistics.median(self.raw)

    @property
    def cpu_ratio(self) -> float:
        """How the processor time of this process, a message, compares; less is better for Settled."""
        return statistics.median(self.settled_cpu) / statistics.median(self.raw_cpu)


async def fill(one: Contender, queue: str, messages: int) -> None:
    """Put orders into a new queue, by Settled's own hand whoever reads them."""
    await one.make(queue)
    app = App(one.url)
    await app.transport.open()
    for start in range(0, messages, 50):
        orders = [
            Order(i, f"customer-{i % 97}", i * 1.5, ["tea", "milk"])
            for i in range(start, min(start + 50, messages))
        ]
        await asyncio.gather(*(app.publish(queue, order) for order in orders))
    await app.transport.close()


async def read_raw(one: Contender, queue: str, messages: int) -> Span:
    meter = Meter(messages)
    await one.raw(queue, meter)
    return meter.span


async def read_settled(one: Contender, queue: str, messages: int) -> Span:
    """An async handler in implicit mode; the span ends when the last message is settled."""
    app, left, span, handled = App(one.url), messages, Span(), asyncio.Event()

    @app.subscriber(queue, buffer=one.batch, **one.subscription(queue))
    async def handle(order: Order) -> None:
        nonlocal left
        if not span.began:
            span.begin()
        left -= 1
        if not left:
            handled.set()

    stop = asyncio.Event()
    serving = asyncio.create_task(app.serve(stop))
    waiting = asyncio.create_task(handled.wait())
    await asyncio.wait({serving, waiting}, return_when=asyncio.FIRST_COMPLETED)
    while app.status().counts.acked < messages:
        if serving.done():
            raise SystemExit(f"{queue}: the app ended with {left} messages left: {await serving}")
        await asyncio.sleep(0.001)
    await _sent(app)
    span.end()
    stop.set()
    await serving
    return span


async def _sent(app: App) -> None:
    """Wait for the acks that a channel has on its way when the pump is through with them."""
    for crew in app._runner.crews if app._runner is not None else ():
        for pump in crew.pumps:
            sending = getattr(pump.channel, "_sending", None)
            if sending is not None:
                await asyncio.wait([sending])
            while any(lane.uncommitted() for lane in getattr(pump.channel, "_lanes", {}).values()):  # noqa: ASYNC110
                await asyncio.sleep(0.0005)


async def race(name: str, messages: int, rounds: int) -> Result:
    """Both, in turn, each on a new queue with the same messages."""
    contender = import_module(f"bench.contenders.{name}")
    readers = {"raw": read_raw, "settled": read_settled}
    rates: dict[str, list[float]] = {who: [] for who in readers}
    cpu: dict[str, list[float]] = {who: [] for who in readers}
    async with contender.start() as one:
        messages = min(messages, one.most)
        # The first round warms up caches, connections and just-in-time queues, and does not count.
        for number in range(rounds + 1):
            for who, read in readers.items():
                queue = f"bench-{next(_queues)}"
                await fill(one, queue, messages)
                gc.collect()
                async with asyncio.timeout(PATIENCE):
                    span = await read(one, queue, messages)
                if number:
                    rates[who].append(messages / span.seconds)
                    cpu[who].append(span.cpu / messages * 1e6)
        client = one.client
    return Result(name, client, messages, rates["raw"], rates["settled"], cpu["raw"], cpu["settled"])


def report(results: list[Result], skipped: dict[str, str]) -> str:
    lines = [
        "| broker | bare client | messages | bare, msg/s | Settled, msg/s | ratio | bare, µs | Settled, µs |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for result in results:
        raw, settled = statistics.median(result.raw), statistics.median(result.settled)
        mark = "" if result.ratio >= GOAL else " (below the goal)"
        lines.append(
            f"| {NAMES[result.name]} | {result.client} | {result.messages:,} | {raw:,.0f} | {settled:,.0f} | "
            f"{result.ratio:.2f}{mark} | {statistics.median(result.raw_cpu):,.0f} | "
            f"{statistics.median(result.settled_cpu):,.0f} |"
        )
    lines += [f"\nNot run: {NAMES[name]}: {why}" for name, why in skipped.items()]
    rounds = len(results[0].raw) if results else 0
    lines.append(
        f"\nMessages of about 80 bytes, medians of {rounds} rounds; "
        f"Python {platform.python_version()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}."
    )
    return "\n".join(lines)


def write(text: str) -> None:
    """Put the table into the results page, between its marks."""
    before, begin, rest = RESULTS.read_text().partition("<!-- results -->\n")
    after = rest.partition("<!-- /results -->")[2]
    RESULTS.write_text(f"{before}{begin}{text}\n<!-- /results -->{after}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*", metavar="BROKER", help=f"of {', '.join(NAMES)}; all by default")
    parser.add_argument("--messages", type=int, default=5_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--write", action="store_true", help=f"write the table to {RESULTS.name}")
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    results: list[Result] = []
    skipped: dict[str, str] = {}
    for name in arguments.names or NAMES:
        try:
            results.append(asyncio.run(race(name, arguments.messages, arguments.rounds)))
            print(f"{name}: {results[-1].ratio:.2f} x the bare client", file=sys.stderr, flush=True)
        except ModuleNotFoundError as error:
            skipped[name] = f"needs {error.name}"
        except TimeoutError:
            skipped[name] = f"not through within {PATIENCE:g} s"
    text = report(results, skipped)
    print(text)
    if arguments.json is not None:
        arguments.json.write_bytes(msgspec.json.format(msgspec.json.encode(results)))
    if arguments.write:
        write(text)


if __name__ == "__main__":
    main()
