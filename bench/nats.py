"""Reading a stream: Settled beside the bare client and FastStream, on one server, in one run.

python -m bench.nats [--messages 20000] [--rounds 3] [--batch 500]

A batch of 0 leaves it to the default of each.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import statistics
import time
from collections.abc import Awaitable, Callable

import msgspec
from nats.aio.client import Client
from nats.js.api import AckPolicy, ConsumerConfig
from pydantic import BaseModel
from tests.nats.servers import server

import nats
from settled import App
from settled.transports.nats import Durable


class Order(msgspec.Struct):
    id: int
    customer: str
    amount: float
    items: list[str]


class OrderModel(BaseModel):
    id: int
    customer: str
    amount: float
    items: list[str]


def _config(name: str, batch: int) -> ConsumerConfig:
    return ConsumerConfig(
        name=name,
        durable_name=name,
        filter_subject="orders.new",
        ack_policy=AckPolicy.EXPLICIT,
        ack_wait=30,
        max_ack_pending=4 * (batch or 250),
    )


async def _fill(client: Client, count: int) -> None:
    jetstream = client.jetstream()
    await jetstream.add_stream(name="ORDERS", subjects=["orders.>"])
    headers = {"content-type": "application/json"}
    for start in range(0, count, 500):
        orders = [Order(i, f"customer-{i % 97}", i * 1.5, ["tea", "milk"]) for i in range(start, start + 500)]
        await asyncio.gather(
            *(
                jetstream.publish("orders.new", msgspec.json.encode(order), headers=headers)
                for order in orders
            )
        )


async def raw(url: str, name: str, count: int, batch: int) -> float:
    """The client alone: fetch, decode, acknowledge."""
    client = await nats.connect(url)
    subscription = await client.jetstream().pull_subscribe_bind(name, "ORDERS")
    decode = msgspec.json.Decoder(Order).decode
    done = 0
    began = 0.0
    while done < count:
        for message in await subscription.fetch(batch or 1, timeout=5):
            began = began or time.perf_counter()
            decode(message.data)
            await message.ack()
            done += 1
    await client.flush()
    took = time.perf_counter() - began
    await client.close()
    return count / took


async def settled(url: str, name: str, count: int, batch: int) -> float:
    """An async handler in implicit mode."""
    app = App(url)
    done, stop = 0, asyncio.Event()
    began = 0.0

    @app.subscriber("orders.new", source=Durable(stream="ORDERS", consumer=name), buffer=batch or None)
    async def handle(order: Order) -> None:
        nonlocal done, began
        if not done:
            began = time.perf_counter()
        done += 1
        if done == count:
            stop.set()

    task = asyncio.create_task(app.serve(stop))
    await stop.wait()
    took = time.perf_counter() - began
    await task
    return count / took


async def settled_sync(url: str, name: str, count: int, batch: int) -> float:
    """A sync handler in implicit mode, in its own thread."""
    app = App(url)
    done, began = 0, 0.0

    @app.subscriber("orders.new", source=Durable(stream="ORDERS", consumer=name), buffer=batch or None)
    def handle(order: Order) -> None:
        nonlocal done, began
        if not done:
            began = time.perf_counter()
        done += 1
        if done == count:
            app.stop()

    await app.serve()
    return count / (time.perf_counter() - began)


async def faststream(url: str, name: str, count: int, batch: int) -> float:
    """FastStream's pull subscriber, with its own consumer of the same batch size."""
    from faststream.nats import JStream, NatsBroker, PullSub

    broker = NatsBroker(url, logger=None)
    done, stop = 0, asyncio.Event()
    began = 0.0

    @broker.subscriber(
        "orders.new",
        stream=JStream("ORDERS", declare=False),
        durable=name,
        pull_sub=PullSub(batch_size=batch) if batch else PullSub(),
    )
    async def handle(order: OrderModel) -> None:
        nonlocal done, began
        if not done:
            began = time.perf_counter()
        done += 1
        if done == count:
            stop.set()

    await broker.start()
    await stop.wait()
    took = time.perf_counter() - began
    await broker.stop()
    return count / took


Runner = Callable[[str, str, int, int], Awaitable[float]]


async def _check(client: Client, name: str, count: int) -> None:
    """What is not acknowledged at the server was not settled."""
    jetstream = client.jetstream()
    for _ in range(100):
        info = await jetstream.consumer_info("ORDERS", name)
        if info.ack_floor is not None and info.ack_floor.stream_seq == count:
            return
        await asyncio.sleep(0.05)
    raise SystemExit(f"{name}: the server has acknowledgements up to {info.ack_floor}, not {count}")


async def main(messages: int, rounds: int, batch: int) -> None:
    runners: dict[str, Runner] = {
        "raw nats-py": raw,
        "Settled, async": settled,
        "Settled, sync": settled_sync,
        "FastStream": faststream,
    }
    rates: dict[str, list[float]] = {name: [] for name in runners}
    with server() as one:
        client = await nats.connect(one.url)
        await _fill(client, messages)
        for number in range(rounds):
            for label, runner in runners.items():
                name = f"c{number}-{label.replace(' ', '').replace(',', '-')}"
                await client.jetstream().add_consumer("ORDERS", _config(name, batch))
                gc.collect()
                rates[label].append(await runner(one.url, name, messages, batch))
                await _check(client, name, messages)
                await client.jetstream().delete_consumer("ORDERS", name)
        await client.close()
    base, other = (statistics.median(rates[name]) for name in ("raw nats-py", "FastStream"))
    size = batch or "the default size"
    print(f"{messages} messages, batches of {size}, {rounds} rounds, median (lowest - highest)")
    for label, found in rates.items():
        rate = statistics.median(found)
        print(
            f"{label:16} {rate:9,.0f} msg/s  ({min(found):,.0f} - {max(found):,.0f})  "
            f"{rate / base:5.2f} x raw  {rate / other:5.2f} x FastStream"
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--messages", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batch", type=int, default=500)
    arguments = parser.parse_args()
    logging.disable(logging.INFO)
    asyncio.run(main(arguments.messages, arguments.rounds, arguments.batch))
