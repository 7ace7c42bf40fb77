"""Health, metrics, maintenance switches and the figures a dashboard asks for."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Literal, NotRequired, TypedDict

import msgspec

from settled._version import __version__
from settled.queue.errors import Unavailable
from settled.queue.types import QueueOptions

from . import answers, bodies
from .exchange import HTML, TEXT, Answer, Request, ok
from .metrics import Board, Counters, Snapshot, render, snapshot
from .openapi import Time
from .parse import Query, decode
from .router import SEE

if TYPE_CHECKING:
    from collections.abc import Callable

    from settled.queue.engine import Engine
    from settled.queue.types import GroupLag, QueueStats

    from .spool import Spool

FIGURES_AGE = 2.0
PAGE = f"""<!doctype html>
<html lang="en">
<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>Settled</title>
<style>body {{ font: 16px/1.5 sans-serif; max-width: 40rem; margin: 3rem auto; padding: 1rem }}</style>
<h1>Settled {__version__}</h1>
<p>This is a queue server: programs push and pop messages here over HTTP.</p>
<ul>
<li><a href="/health">/health</a>: whether it works</li>
<li><a href="/metrics">/metrics</a>: figures for Prometheus</li>
<li><a href="/api/v1/resources/queues">/api/v1/resources/queues</a>: the queues</li>
<li><a href="/openapi.json">/openapi.json</a>: all routes</li>
</ul>
</html>
""".encode()

_switch = msgspec.json.Decoder(bodies.SwitchBody)


class Counts(TypedDict):
    """Messages by their state; `failed` is another name of `deadLetter`."""

    total: int
    pending: int
    processing: int
    completed: int
    failed: int
    deadLetter: int


class Sums(TypedDict):
    """Messages of several queues by their state; `dead` is another name of `deadLetter`."""

    total: int
    pending: int
    processing: int
    completed: int
    dead: int
    deadLetter: int


class LaneRow(TypedDict):
    """One partition in figures."""

    id: str
    name: str
    createdAt: Time
    oldestMessage: Time | None
    newestMessage: Time | None
    stats: Counts


class QueueFacts(TypedDict):
    """What is said of a queue everywhere."""

    id: str
    name: str
    namespace: str
    task: str
    createdAt: Time
    messages: Counts


class QueueRow(QueueFacts):
    """One queue of a list; `partitions` is their number."""

    partitions: int


class QueueList(TypedDict):
    """Queues."""

    queues: list[QueueRow]


class QueueDetail(QueueFacts):
    """One queue with `limit` of its partitions from `offset` on, by name; there are `partitionsTotal`."""

    options: QueueOptions
    totals: Counts
    partitions: list[LaneRow]
    partitionsTotal: int
    limit: int
    offset: int


class GroupRow(TypedDict):
    """One group on one queue with its lag; `members` are the leases it holds, times are seconds."""

    name: str
    topics: list[str]
    queueName: str
    members: int
    partitions: int
    partitionsWithLag: int
    totalLag: int
    maxTimeLag: float
    state: Literal["Stable", "Lagging", "Dead"]
    subscriptionMode: str | None
    subscriptionTimestamp: Time | None
    subscriptionCreatedAt: Time | None


class LaggingLane(TypedDict):
    """One partition where a group lags; `worker_id` is the lease on it."""

    consumer_group: str
    queue_name: str
    partition_name: str
    partition_id: str
    worker_id: str | None
    offset_lag: int
    time_lag_seconds: float
    lag_hours: float
    oldest_unconsumed_at: Time | None
    last_consumed_at: Time | None


class GroupLane(TypedDict):
    """One partition of a group; `workerId` is the lease on it."""

    partition: str
    partitionId: str
    workerId: str | None
    lastConsumedAt: Time | None
    totalConsumed: int
    offsetLag: int
    timeLagSeconds: float
    leaseActive: bool
    leaseExpiresAt: Time | None


class QueueStatus(QueueDetail):
    """One queue with its partitions and groups."""

    queue: str
    groups: list[GroupRow]


class Leases(TypedDict):
    """Leases that are held now."""

    active: int


class Status(TypedDict):
    """Figures for a dashboard."""

    queues: list[QueueRow]
    groups: list[GroupRow]
    leases: Leases
    deadLetters: int
    workers: list[Snapshot]


class Workers(TypedDict):
    """The server's processes in figures."""

    workers: list[Snapshot]


class Buffers(TypedDict):
    """Pushes that are held back, and those that could not be pushed after."""

    buffers: list[str]
    pending: int
    failed: int


class Server(TypedDict):
    """The process that answers; `uptime` in seconds."""

    server: Literal["running"]
    version: str
    worker_id: int
    uptime: float


class Health(Server):
    """The server and its database work."""

    status: Literal["healthy"]
    database: Literal["connected"]
    databaseLatencyMs: float


class Unhealthy(Server):
    """The server runs, and its database is away, or there and stores nothing."""

    status: Literal["unhealthy"]
    database: Literal["disconnected", "connected"]
    error: str


class Live(TypedDict):
    """The process runs."""

    status: Literal["live"]


class Ready(TypedDict):
    """Pushes can be stored."""

    status: Literal["ready"]


class Unready(TypedDict):
    """No push can be stored now."""

    status: Literal["unready"]
    error: str


class Index(TypedDict):
    """What this is, and where to look."""

    name: Literal["settled"]
    version: str
    see: dict[str, str]


class PushMaintenance(TypedDict):
    """Whether pushes are held back, and how many."""

    maintenanceMode: bool
    bufferedMessages: int
    bufferHealthy: bool
    message: str


class PopMaintenance(TypedDict):
    """Whether pops are switched off."""

    popMaintenanceMode: bool
    message: str


class Refreshed(TypedDict):
    """What a round of housekeeping did; nothing is counted where another process is at it."""

    success: bool
    retained: NotRequired[int]
    compacted: NotRequired[int]
    expired: NotRequired[int]
    journal: NotRequired[int]
    activity: NotRequired[int]
    leases: NotRequired[int]
    consumers: NotRequired[int]


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
        """GET /health: 200 when Postgres answers and stores messages, 503 when it does not."""
        answer: Server = {
            "server": "running",
            "version": __version__,
            "worker_id": os.getpid(),
            "uptime": round(time.time() - self._counters.started, 3),
        }
        try:
            seconds = await self._engine.ping()
        except Unavailable as error:
            return ok({"status": "unhealthy", "database": "disconnected", "error": str(error), **answer}, 503)
        try:
            await self._engine.check_writable()
        except Unavailable as error:
            return ok({"status": "unhealthy", "database": "connected", "error": str(error), **answer}, 503)
        latency = round(seconds * 1000, 3)
        return ok({"status": "healthy", "database": "connected", "databaseLatencyMs": latency, **answer})

    async def live(self, request: Request) -> Answer:
        """GET /livez: 200 as long as the process runs, whatever its database does."""
        return ok({"status": "live"})

    async def ready(self, request: Request) -> Answer:
        """GET /readyz: 200 when a push can be stored, 503 when every push would be refused."""
        try:
            await self._engine.check_writable()
        except Unavailable as error:
            return ok({"status": "unready", "error": str(error)}, 503)
        return ok({"status": "ready"})

    async def index(self, request: Request) -> Answer:
        """GET /: a page for a browser, JSON for others."""
        if request.html:
            return Answer(200, PAGE, HTML)
        return ok({"name": "settled", "version": __version__, "see": SEE})

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
        limit, offset = Query(request.query).page()
        found = await self._engine.queue(request.segments[0], limit=limit, offset=offset)
        detail = answers.queue_detail(found, limit, offset)
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
