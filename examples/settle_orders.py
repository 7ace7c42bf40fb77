"""A thousand orders, good and bad, settled before your eyes; `make run` runs this.

Most orders are fine. Some fail at first and succeed later, some are refused, some cannot be read.
The last line says what became of them.
"""

import asyncio
import logging
import random

import msgspec
from rich.console import Console
from rich.progress import Progress

from settled import App, Defer, Reject, current_message
from settled.transports.memory import MemoryTransport

ORDERS = 1_000


class Order(msgspec.Struct):
    id: int
    amount: float
    kind: str


transport = MemoryTransport()
app = App(transport=transport)


@app.subscriber("orders", requeue_count=5, performers=4)
async def charge(order: Order) -> None:
    message = current_message()
    assert message is not None
    match order.kind:
        case "flaky" if message.attempt < 3:
            raise Defer(0.2, "the bank did not answer")
        case "poison":
            raise Reject("no such customer")
        case "hopeless":
            raise Defer(0.1, "the bank is gone")


def publish_orders() -> int:
    chance = random.Random(7)
    kinds = chance.choices(["good", "flaky", "poison", "hopeless", "malformed"], [90, 5, 2, 1, 2], k=ORDERS)
    for number, kind in enumerate(kinds):
        payload = "not JSON at all" if kind == "malformed" else Order(number, chance.random() * 100, kind)
        app.publish("orders", payload, content_type=None if kind == "malformed" else "application/json")
    return len(kinds)


async def main() -> None:
    pushed = publish_orders()
    console = Console()
    # Every rejected order is a line in the log; here the table below says it in fewer.
    logging.getLogger("settled").setLevel(logging.CRITICAL)
    stop = asyncio.Event()
    running = asyncio.create_task(app.serve(stop))
    with Progress(console=console) as progress:
        bar = progress.add_task("settling", total=pushed)
        while left := transport.depth("orders"):
            progress.update(bar, completed=pushed - left)
            await asyncio.sleep(0.05)
        progress.update(bar, completed=pushed)
    stop.set()
    counts = (await running).counts
    dead = transport.dead_letters("orders")
    for reason in sorted({letter.error for letter in dead}):
        console.print(f"{sum(letter.error == reason for letter in dead):6} dead: {reason}", soft_wrap=True)
    lost = pushed - counts.acked - len(dead)
    print(f"pushed={pushed} acked={counts.acked} retried={counts.requeued} dead={len(dead)} lost={lost}")


if __name__ == "__main__":
    asyncio.run(main())
