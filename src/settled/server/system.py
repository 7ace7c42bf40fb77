"""Health, metrics, maintenance switches and the figures a dashboard asks for."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

import msgspec

from settled._version import __version__
from settled.queue.errors import Unavailable

from . import answers, bodies
from .exchange import TEXT, Answer, Request, ok
from .metrics import Board, Counters, Snapshot, render, snapshot
from .parse import Query, decode

if TYPE_CHECKING:
    from collections.abc import Callable

    from settled.queue.engine import Engine
    from settled.queue.types import GroupLag, QueueStats

    from .spool import Spool

FIGURES_AGE = 2.0

_switch = msgspec.json.Decoder(bodies.SwitchBody)


class System:
    """Handlers about the server itself."""

    def __init__(
        self,
        engine: Engine,
        counters: Counters,
        board: Board,
        spool: Spool,
        connections: Callable[[], int],
    ) -> None:
        self._engine = engine
        self._counters = counters
        self._board = board
        self._spool = spool
        self._connections = connections
        self._figures: tuple[float, list[QueueStats], list[GroupLag]] = (0.0, [], [])

    def snapshot(self) -> Snapshot:
        """This process's figures now."""
        kept = {"buffered_messages": self._spool.pending, "refused_buffered_messages": self._spool.refused}
        return snapshot(self._counters, {**self._engine.metrics(), **kept}, self._connections())

    def _buffered(self) -> tuple[int, int]:
        """How many messages wait in the files of all processes, and how many were put aside."""
        every = self._board.gather(self.snapshot())
        names = ("buffered_messages", "refused_buffered_messages")
        waiting, refused = (round(sum(each.engine.get(name, 0) for each in every)) for name in names)
        return waiting, refused

    async def health(self, request: Request) -> Answer:
        """GET /health: 200 when Postgres answers, 503 when it does not."""
        answer: dict[str, Any] = {
            "server": "running",
            "version": __version__,
            "worker_id": os.getpid(),
            "uptime": round(time.time() - self._counters.started, 3),
        }
        try:
            seconds = await self._engine.ping()
        except Unavailable as error:
            return ok({"status": "unhealthy", "database": "disconnected", "error": str(error), **answer}, 503)
        latency = round(seconds * 1000, 3)
        return ok({"status": "healthy", "database": "connected", "databaseLatencyMs": latency, **answer})

    async def metrics(self, request: Request) -> Answer:
        """GET /metrics and /metrics/prometheus."""
        read_at, queues, groups = self._figures
        if time.monotonic() - read_at > FIGURES_AGE:
            try:
                queues, groups = await self._engine.queues(), await self._engine.groups()
                self._figures = (time.monotonic(), queues, groups)
            except Unavailable:
                # The process's own figures are worth most when the database is away.
                queues, groups = [], []
        return Answer(200, render(self._board.gather(self.snapshot()), queues, groups).encode(), TEXT)

    async def maintenance(self, request: Request) -> Answer:
        """GET and POST /api/v1/system/maintenance."""
        push = decode(request.body, _switch).enabled if request.method == "POST" else None
        state = await self._engine.maintenance(push=push)
        word = "on: pushes are kept in a file of this server" if state.push else "off"
        waiting, refused = self._buffered()
        return ok(
            {
                "maintenanceMode": state.push,
                "bufferedMessages": waiting,
                "bufferHealthy": not refused,
                "message": f"Maintenance mode is {word}",
            }
        )

    async def pop_maintenance(self, request: Request) -> Answer:
        """GET and POST /api/v1/system/maintenance/pop."""
        pop = decode(request.body, _switch).enabled if request.method == "POST" else None
        state = await self._engine.maintenance(pop=pop)
        word = "on: pops are answered empty" if state.pop else "off"
        return ok({"popMaintenanceMode": state.pop, "message": f"Pop maintenance mode is {word}"})

    async def refresh(self, request: Request) -> Answer:
        """POST /api/v1/stats/refresh: figures are always live, so this does one round of housekeeping."""
        done = await self._engine.tidy()
        return ok({"success": True, **done})

    async def status(self, request: Request) -> Answer:
        """GET /api/v1/status."""
        query = Query(request.query)
        queues = await self._engine.queues(namespace=query.name("namespace"), task=query.name("task"))
        wanted = query.name("queue")
        rows = [row for row in queues if wanted is None or row.name == wanted]
        groups = await self._engine.groups(queue=wanted)
        return ok(
            {
                "queues": [answers.queue_row(row) for row in rows],
                "groups": [answers.group(row) for row in groups],
                "leases": {"active": sum(row.active_leases for row in groups)},
                "deadLetters": sum(row.dead for row in rows),
                "workers": [msgspec.to_builtins(self.snapshot())],
            }
        )

    async def queues(self, request: Request) -> Answer:
        """GET /api/v1/status/queues."""
        return ok({"queues": [answers.queue_row(row) for row in await self._engine.queues()]})

    async def queue(self, request: Request) -> Answer:
        """GET /api/v1/status/queues/{queue}."""
        detail = answers.queue_detail(await self._engine.queue(request.segments[0]))
        groups = await self._engine.groups(queue=request.segments[0])
        return ok({**detail, "queue": request.segments[0], "groups": [answers.group(row) for row in groups]})

    async def buffers(self, request: Request) -> Answer:
        """GET /api/v1/status/buffers: pushes that are held back, and those that could not be pushed after."""
        waiting, refused = self._buffered()
        return ok({"buffers": [], "pending": waiting, "failed": refused})

    async def figures(self, request: Request) -> Answer:
        """GET /api/v1/analytics/system-metrics and .../worker-metrics."""
        every = self._board.gather(self.snapshot())
        return ok({"workers": [msgspec.to_builtins(each) for each in every]})
