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
from typing import Any

import msgspec

from bench.contenders import C_LOOPS, NAMES, Contender, Meter, Order, Span
from settled import App
from settled.transports.faces import BlockingChannel

RESULTS = Path(__file__).with_name("RESULTS-transports.md")
GOAL = 0.8
PATIENCE = 120.0
_queues = count()


@dataclass(frozen=True, slots=True)
class Result:
    """What one broker came to, a figure a round: messages a second, and microseconds of processor time each.

    The keys are "raw", the bare client, and "async" and "sync", Settled with a handler of that kind.
    """

    name: str
    client: str
    messages: int
    rates: dict[str, list[float]]
    cpu: dict[str, list[float]]

    def rate(self, who: str) -> float:
        return statistics.median(self.rates[who])

    def ratio(self, who: str) -> float:
        """Of the medians."""
        return self.rate(who) / self.rate("raw")


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


async def read_async(one: Contender, queue: str, messages: int) -> Span:
    """An async handler in implicit mode; the span ends when the last message is settled."""
    app, meter = App(one.url), Handled(messages)

    @app.subscriber(queue, buffer=one.batch, **one.subscription(queue))
    async def handle(order: Order) -> None:
        meter()

    return await _serve(app, meter, queue, messages)


async def read_sync(one: Contender, queue: str, messages: int) -> Span:
    """The same with a sync handler, which has a thread of its own."""
    app, meter = App(one.url), Handled(messages)

    @app.subscriber(queue, buffer=one.batch, **one.subscription(queue))
    def handle(order: Order) -> None:
        meter()

    return await _serve(app, meter, queue, messages)


READERS = {"raw": read_raw, "async": read_async, "sync": read_sync}


class Handled:
    """Counts what a handler was given, from the first message on, and rings at the last."""

    def __init__(self, messages: int) -> None:
        self.span = Span()
        self.all = asyncio.Event()
        self._left = messages
        self._loop = asyncio.get_running_loop()

    def __call__(self) -> None:
        if not self.span.began:
            self.span.begin()
        self._left -= 1
        if not self._left:
            self._loop.call_soon_threadsafe(self.all.set)


async def _serve(app: App, meter: Handled, queue: str, messages: int) -> Span:
    stop = asyncio.Event()
    serving = asyncio.create_task(app.serve(stop))
    waiting = asyncio.create_task(meter.all.wait())
    await asyncio.wait({serving, waiting}, return_when=asyncio.FIRST_COMPLETED)
    while (done := app.status().counts.acked) < messages:
        if serving.done():
            raise SystemExit(f"{queue}: the app ended after {done} messages: {await serving}")
        await asyncio.sleep(0.001)
    await _sent(app)
    meter.span.end()
    stop.set()
    await serving
    return meter.span


async def _sent(app: App) -> None:
    """Wait for the acks that a channel has on its way when the pump is through with them."""
    for crew in app._runner.crews if app._runner is not None else ():
        for pump in crew.pumps:
            channel: Any = pump.channel
            if isinstance(channel, BlockingChannel):
                await channel._send_acks()
                channel = channel._inner
            sending = getattr(channel, "_sending", None)
            if sending is not None:
                await asyncio.wait([sending])
            while any(lane.uncommitted() for lane in getattr(channel, "_lanes", {}).values()):  # noqa: ASYNC110
                await asyncio.sleep(0.0005)


async def race(name: str, messages: int, rounds: int) -> Result:
    """All readers, in turn, each on a new queue with the same messages."""
    contender = import_module(f"bench.contenders.{name}")
    rates: dict[str, list[float]] = {who: [] for who in READERS}
    cpu: dict[str, list[float]] = {who: [] for who in READERS}
    async with contender.start() as one:
        messages = min(messages, one.most)
        # The first round warms up caches, connections and just-in-time queues, and does not count.
        for number in range(rounds + 1):
            for who, read in READERS.items():
                queue = f"bench-{next(_queues)}"
                await fill(one, queue, messages)
                gc.collect()
                async with asyncio.timeout(PATIENCE):
                    span = await read(one, queue, messages)
                if number:
                    rates[who].append(messages / span.seconds)
                    cpu[who].append(span.cpu / messages * 1e6)
        client = one.client
    return Result(name, client, messages, rates, cpu)


def report(results: list[Result], skipped: dict[str, str]) -> str:
    settling = [_line(result) for result in results if result.name not in C_LOOPS]
    others = [_line(result) for result in results if result.name in C_LOOPS]
    lines = [*_HEAD, *settling] if settling else []
    if others:
        lines += ["\nKafka against loops in C:\n", *_HEAD, *others]
    lines += [f"\nNot run: {NAMES[name]}: {why}" for name, why in skipped.items()]
    rounds = len(results[0].rates["raw"]) if results else 0
    lines.append(
        f"\nMessages of about 80 bytes, medians of {rounds} rounds; "
        f"Python {platform.python_version()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}."
    )
    return "\n".join(lines)


_HEAD = (
    "| broker | bare client | messages | bare, /s | `async def`, /s | ratio | `def`, /s | ratio | µs |",
    "|---|---|---|---|---|---|---|---|---|",
)


def _line(result: Result) -> str:
    cells = [NAMES[result.name], result.client, f"{result.messages:,}", f"{result.rate('raw'):,.0f}"]
    for who in ("async", "sync"):
        ratio = result.ratio(who)
        cells += [f"{result.rate(who):,.0f}", f"{ratio:.2f}" if ratio >= GOAL else f"**{ratio:.2f}**"]
    cells.append(" / ".join(f"{statistics.median(result.cpu[who]):,.0f}" for who in READERS))
    return f"| {' | '.join(cells)} |"


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
            last = results[-1]
            print(
                f"{name}: {last.ratio('async'):.2f} x the bare client, {last.ratio('sync'):.2f} with def",
                file=sys.stderr,
                flush=True,
            )
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
