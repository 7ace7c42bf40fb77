"""News between workers: each reads what the others did, when the bell rings and before it says "empty"."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from settled.queue.db import Link, sql
from settled.queue.errors import Unavailable
from settled.queue.turns import Rounds

if TYPE_CHECKING:
    from collections.abc import Callable

    from settled.queue.db import Clock
    from settled.queue.lanes import Registry
    from settled.queue.ready import ReadySets

log = logging.getLogger("settled.queue")
CHANNEL = "settled"
RING_EVERY = 0.004
LOOK_EVERY = 1.0


class Activity:
    """Reads others' activity and rings for ours.

    Rows become visible in another order than they were written. So each read starts at the oldest transaction
    that was still open at the read before, and what was seen already is skipped: nothing is missed, and a
    rolled-back transaction holds nobody up.
    """

    def __init__(
        self,
        dsn: str,
        worker: str,
        registry: Registry,
        ready: ReadySets,
        clock: Clock,
        on_reset: Callable[[int], None],
    ) -> None:
        self._on_reset = on_reset
        self._worker = worker
        self._registry = registry
        self._ready = ready
        self._clock = clock
        self._reader = Link(dsn)
        self._listener = Link(dsn)
        self._bell = Link(dsn, synchronous_commit="off")
        self._horizon: str | None = None
        self._seen: set[tuple[str, str]] = set()
        self._reads = Rounds(self._read)
        self._lost = False
        self._rung = asyncio.Event()
        self._tick = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._listening: Any = None
        # Nobody hears the bell but us: until another worker rings, which each does when it joins.
        self._alone = self._heard_another = False
        self._closing = False

    async def start(self) -> None:
        """Begin listening."""
        await self.read()
        await self._listen()
        await self._bell.get()
        self._tasks = [asyncio.create_task(task()) for task in (self._ring, self._timers, self._watch)]

    async def close(self) -> None:
        """Stop, with no statement cut off half-way."""
        self._closing = True
        self._rung.set()
        ring, *others = self._tasks
        for task in others:
            task.cancel()
        await asyncio.gather(ring, *others, self._reads.end(), return_exceptions=True)
        for link in (self._reader, self._listener, self._bell):
            await link.close()

    def ring(self) -> None:
        """Tell the others that there is something to read; rings are gathered for a few milliseconds."""
        if not self._alone:
            self._rung.set()

    def look(self) -> None:
        """The next due time may have changed."""
        self._tick.set()

    async def read(self) -> None:
        """Take over the others' news up to now; callers share a read that began after they asked."""
        await self._reads.run()

    async def _read(self) -> None:
        try:
            rows = await self._reader.fetch(sql("activity"), self._horizon, self._worker)
        except Unavailable:
            self._horizon, self._seen, self._lost = None, set(), True
            raise
        self._horizon = rows[0]["horizon"]
        fresh = [r for r in rows if r["kind"] is not None]
        news = [r for r in fresh if (r["xid"], r["place"]) not in self._seen]
        self._seen = {(r["xid"], r["place"]) for r in fresh}
        if self._lost:  # nobody knows what happened meanwhile: look everywhere
            self._lost = False
            self._ready.reset()
        try:
            await self._apply(news)
        except BaseException:  # what was not taken over is not read again
            self._lost = True
            raise

    async def _apply(self, rows: list[Any]) -> None:
        for row in rows:
            match row["kind"]:
                case "push":
                    queues, lanes = row["queues"], row["lanes"]
                    if any(lane not in self._registry.lanes_by_id for lane in lanes):
                        self._registry.announce()
                    self._ready.pushed((q, lane, 1) for q, lane in zip(queues, lanes, strict=True))
                case "release":
                    for queue, lane, group, until in zip(
                        row["queues"], row["lanes"], row["groups"], row["until"], strict=True
                    ):
                        self._ready.released(queue, lane, group, until.timestamp() if until else None)
                case "free":
                    for queue, lane, group in zip(row["queues"], row["lanes"], row["groups"], strict=True):
                        self._ready.freed(queue, lane, group)
                case "config":
                    await self._registry.refresh(row["queues"])
                    for queue in row["queues"]:
                        self._on_reset(queue)
                    self._registry.announce()
                case "reset":
                    for queue in row["queues"]:
                        self._on_reset(queue)
        if rows:
            self.look()

    async def _listen(self) -> None:
        connection = await self._listener.get()
        if connection is not self._listening:
            # A worker holds this lock while it listens, so that others can see whether anybody does.
            await connection.fetch(sql("join_workers"))
            await connection.add_listener(CHANNEL, self._heard)
            self._listening = connection
            self._rung.set()

    async def _look_around(self) -> None:
        self._heard_another = False  # one that joins while we look is heard, though not seen
        found = await self._listener.fetch(sql("other_workers"))
        self._alone = not found[0]["others"] and not self._heard_another

    def _heard(self, _connection: Any, _pid: int, _channel: str, payload: object) -> None:
        if payload != self._worker and not self._closing:
            self._alone, self._heard_another = False, True
            task = asyncio.ensure_future(self.read())
            task.add_done_callback(_ignore)

    async def _ring(self) -> None:
        while not self._closing:
            await self._rung.wait()
            self._rung.clear()
            try:
                await self._bell.fetch("select pg_notify($1, $2)", CHANNEL, self._worker)
            except Unavailable:
                await asyncio.sleep(0.2)
            await asyncio.sleep(RING_EVERY)

    async def _timers(self) -> None:
        while True:
            self._tick.clear()
            soonest = self._ready.tick()
            pause = (
                LOOK_EVERY if soonest is None else min(LOOK_EVERY, max(0.001, soonest - self._clock.now()))
            )
            await wait_for(self._tick, pause)

    async def _watch(self) -> None:
        """Look once a second even if no bell was heard, and listen again after an outage."""
        down = False
        while True:
            await asyncio.sleep(LOOK_EVERY if not down else 0.25)
            try:
                await self._listen()
                await self._look_around()
                await self.read()
                if down:
                    log.info("the queue's database is back")
                    down = False
            except Unavailable as error:
                if not down:
                    log.warning("%s", error)
                down = True


async def wait_for(event: asyncio.Event, seconds: float) -> None:
    """Wait for an event, but not for ever."""
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):  # asyncio.wait_for may swallow a cancellation
            await event.wait()


def _ignore(task: asyncio.Task[None]) -> None:
    if not task.cancelled():
        task.exception()
