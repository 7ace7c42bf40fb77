"""The same orders through the queue: an embedded Postgres, its HTTP server, and an app as its client.

Messages are on disk before they are handled; the counts at the end are the queue's own.
"""

import asyncio
import logging
import random

import msgspec
from rich.console import Console
from rich.progress import Progress

from settled import App, Defer, Reject, current_message
from settled.client import Client
from settled.server.testing import running_server

ORDERS = 5_000


class Order(msgspec.Struct):
    id: int
    amount: float
    kind: str


async def charge(order: Order) -> None:
    message = current_message()
    assert message is not None
    match order.kind:
        case "flaky" if message.attempt < 3:
            raise Defer(0.2, "the bank did not answer")
        case "poison":
            raise Reject("no such customer")


async def push_orders(client: Client) -> int:
    chance = random.Random(7)
    kinds = chance.choices(["good", "flaky", "poison", "malformed"], [92, 4, 2, 2], k=ORDERS)
    orders = [
        {"nothing": "of use"} if kind == "malformed" else Order(number, chance.random() * 100, kind)
        for number, kind in enumerate(kinds)
    ]
    for start in range(0, ORDERS, 500):
        lane = f"customer-{start // 500}"
        await client.queue("orders").partition(lane).push_all(orders[start : start + 500])
    return ORDERS


async def main(url: str) -> None:
    console = Console()
    # Every rejected order is a line in the log; here the table below says it in fewer.
    logging.getLogger("settled").setLevel(logging.CRITICAL)
    app = App(url)
    app.subscriber("orders", group="billing", performers=8, buffer=100)(charge)
    stop = asyncio.Event()
    async with Client(url) as client:
        await client.queue("orders").create(retry="parked", retry_limit=5)
        pushed = await push_orders(client)
        running = asyncio.create_task(app.serve(stop))
        with Progress(console=console) as progress:
            bar = progress.add_task("settling", total=pushed)
            while (done := await settled(client, app)) < pushed:
                progress.update(bar, completed=done)
                await asyncio.sleep(0.1)
            progress.update(bar, completed=pushed)
        stop.set()
        counts = (await running).counts
        letters = await client.queue("orders").group("billing").get_dlq(limit=1000)
        for error in sorted({letter.error_message or "" for letter in letters.messages}):
            number = sum(letter.error_message == error for letter in letters.messages)
            console.print(f"{number:6} dead: {error}", soft_wrap=True)
        (group,) = [g for g in await client.groups() if g["name"] == "billing"]
        lost = pushed - counts.acked - letters.total - group["totalLag"]
    print(f"pushed={pushed} acked={counts.acked} retried={counts.requeued} dead={letters.total} lost={lost}")


async def settled(client: Client, app: App) -> int:
    counts = app.status().counts
    return counts.acked + counts.rejected


if __name__ == "__main__":
    with running_server() as server:
        asyncio.run(main(server.url))
