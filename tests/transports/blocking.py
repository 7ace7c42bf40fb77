"""An app that does not acknowledge the first of five messages until it has no deliveries left."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

from settled import App, DontAck


def block_on_the_first(app: App, channel: str, **options: Any) -> Counter[int]:
    """How often each message was handled when all five are settled for good."""
    handled: Counter[int] = Counter()

    @app.subscriber(channel, buffer=5, dont_ack_delay=0.02, **options)
    async def handle(number: int) -> None:
        handled[number] += 1
        if number == 0:
            raise DontAck("the bank is down")

    async def main() -> None:
        for number in range(5):
            await app.publish(channel, number)
        stop = asyncio.Event()
        running = asyncio.create_task(app.serve(stop))
        async with asyncio.timeout(60):
            while app.status().counts.acked + app.status().counts.rejected < 5 and not running.done():
                await asyncio.sleep(0.02)
        stop.set()
        await running

    asyncio.run(main())
    return handled
