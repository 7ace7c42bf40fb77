"""Short ways to say what the queue tests say often."""

from __future__ import annotations

import asyncio
import functools
from typing import TYPE_CHECKING, Any

from settled.queue.engine import Engine
from settled.queue.types import AckItem, AckResult, Popped, PopRequest, PushItem, PushResult

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable


def with_engine(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Run an async test with an engine on a fresh database."""

    @functools.wraps(test)
    def run(dsn: str) -> None:
        async def body() -> None:
            async with await Engine.open(dsn) as engine:
                await asyncio.wait_for(test(engine), 60)

        asyncio.run(body())

    del run.__wrapped__  # pytest must see our parameters, not the test's
    return run


def with_engines(count: int) -> Callable[[Callable[..., Awaitable[None]]], Callable[..., None]]:
    """Run an async test with several engines on one fresh database."""

    def wrap(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
        @functools.wraps(test)
        def run(dsn: str) -> None:
            async def body() -> None:
                engines = [await Engine.open(dsn, worker=f"w{i}") for i in range(count)]
                try:
                    await asyncio.wait_for(test(*engines), 120)
                finally:
                    for engine in engines:
                        await engine.close()

            asyncio.run(body())

        del run.__wrapped__
        return run

    return wrap


async def push(
    engine: Engine, queue: str, *ids: str, partition: str = "Default", **more: Any
) -> list[PushResult]:
    """Push messages whose payload is their id."""
    items = [PushItem(queue, f'"{i}"'.encode(), partition, i, **more) for i in ids]
    return await engine.push(items)


async def pop(engine: Engine, queue: str, batch: int = 100, **more: Any) -> Popped:
    """Pop from a queue."""
    return await engine.pop(PopRequest(queue, batch=batch, **more))


def ids(popped: Popped) -> list[str]:
    """The transaction ids of what was popped."""
    return [message.transaction_id for message in popped.messages()]


async def settle(
    engine: Engine,
    popped: Popped,
    status: str,
    *which: str,
    atomic: bool = True,
    lease: bool = True,
    **more: Any,
) -> list[AckResult]:
    """Settle messages of a batch (all, if none is named)."""
    wanted = {m.transaction_id: m for m in popped.messages()}
    items = [
        AckItem(t, wanted[t].partition_id, status, popped.lease_id if lease else None, **more)
        for t in which or wanted
    ]
    return await engine.ack(items, popped.group, atomic=atomic)


async def drain(engine: Engine, queue: str, group: str = "__QUEUE_MODE__") -> list[str]:
    """Take everything there is, acknowledged on delivery."""
    taken: list[str] = []
    while got := ids(await pop(engine, queue, 1000, group=group, auto_ack=True)):
        taken += got
    return taken
