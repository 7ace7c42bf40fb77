"""The figures of a server as Prometheus text: this process, its siblings, and the queues in the database."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from settled.queue.types import GroupLag, QueueStats

    from .exchange import Request

STALE_AFTER = 30.0

_NAME = re.compile(r"[^a-zA-Z0-9_]")
_ENGINE_HELP = {
    "pushed_messages_total": "Messages stored.",
    "push_flushes_total": "Writes of pushed messages to the database.",
    "duplicate_messages_total": "Pushed messages whose id was there already.",
    "popped_messages_total": "Messages handed out.",
    "claims_total": "Calls to the database that lease messages.",
    "audits_total": "Rounds in which memory was compared with the tables.",
    "audited_openings_total": "Partitions found to have messages that memory did not know of.",
    "settled_messages_total": "Messages settled, whatever the status.",
    "settle_calls_total": "Calls to the database that settle messages.",
    "known_lanes": "Partitions this server has seen.",
    "known_leases": "Leases this server has handed out and remembers.",
    "ready_lanes": "Partitions that may have messages to hand out, by group.",
    "waiting_pops": "Pops that wait for a message.",
    "remembered_ids": "Transaction ids kept in memory to find duplicates.",
    "forgotten_ids_total": "Transaction ids dropped from memory before their window ended.",
    "cached_segment_bytes": "Messages kept in memory, in bytes.",
    "failed_retry_messages_total": "Messages that failed and come again.",
    "failed_dlq_messages_total": "Messages that became dead letters.",
    "failed_dropped_messages_total": "Messages that failed for good in a queue without dead letters.",
    "released_messages_total": "Messages given back without an attempt counted.",
    "refused_acks_total": "Acks that were refused: no such message, or no lease on it.",
    "buffered_messages": "Pushes on this server's disk that wait for the end of maintenance.",
    "refused_buffered_messages": "Pushes kept during maintenance that could not be pushed afterwards.",
}


class Tally:
    """How many requests, and how long they took together."""

    __slots__ = ("count", "seconds")

    def __init__(self) -> None:
        self.count = 0
        self.seconds = 0.0


class Counters:
    """Requests by route and status, with their time."""

    def __init__(self) -> None:
        self.tallies: dict[tuple[str, str, int], Tally] = {}
        self.started = time.time()

    def add(self, request: Request, status: int) -> None:
        """Count one answered request."""
        key = (request.method, request.label, status)
        tally = self.tallies.get(key)
        if tally is None:
            tally = self.tallies[key] = Tally()
        tally.count += 1
        tally.seconds += time.perf_counter() - request.started


class Snapshot(msgspec.Struct):
    """One process's figures at one moment."""

    pid: int
    at: float
    requests: list[tuple[str, str, int, int, float]]
    engine: dict[str, float]
    connections: int
    memory: int


_snapshot = msgspec.json.Decoder(Snapshot)


def snapshot(counters: Counters, engine: dict[str, float], connections: int) -> Snapshot:
    """This process's figures now."""
    return Snapshot(
        os.getpid(),
        time.time(),
        [(*key, tally.count, tally.seconds) for key, tally in counters.tallies.items()],
        engine,
        connections,
        resident_bytes(),
    )


class Board:
    """A directory where each worker process leaves its snapshot, so that any of them can answer for all."""

    def __init__(self, folder: str | None) -> None:
        self._folder = None if folder is None else Path(folder)
        self._own = f"{os.getpid()}.json"

    def write(self, own: Snapshot) -> None:
        """Leave this process's figures for its siblings."""
        if self._folder is None:
            return
        draft = self._folder / f".{self._own}"
        draft.write_bytes(msgspec.json.encode(own))
        draft.replace(self._folder / self._own)

    def gather(self, own: Snapshot) -> list[Snapshot]:
        """Every process's figures; a sibling that has been silent for long is left out."""
        found = [own]
        if self._folder is None:
            return found
        for file in self._folder.glob("*.json"):
            if file.name == self._own:
                continue
            try:
                sibling = _snapshot.decode(file.read_bytes())
            except (OSError, msgspec.MsgspecError):
                continue
            if own.at - sibling.at < STALE_AFTER:
                found.append(sibling)
        return found


def render(snapshots: Iterable[Snapshot], queues: Iterable[QueueStats], groups: Iterable[GroupLag]) -> str:
    """Prometheus text; processes are summed."""
    lines: list[str] = []
    requests: dict[tuple[str, str, int], int] = {}
    seconds: dict[tuple[str, str], float] = {}
    engine: dict[str, float] = {}
    workers = connections = memory = 0
    for each in snapshots:
        workers += 1
        connections += each.connections
        memory += each.memory
        for method, route, status, count, spent in each.requests:
            requests[method, route, status] = requests.get((method, route, status), 0) + count
            seconds[method, route] = seconds.get((method, route), 0.0) + spent
        for key, value in each.engine.items():
            engine[key] = engine.get(key, 0.0) + value

    def family(name: str, kind: str, help_: str, rows: Iterable[tuple[Mapping[str, object], float]]) -> None:
        lines.append(f"# HELP {name} {help_}")
        lines.append(f"# TYPE {name} {kind}")
        for labels, value in rows:
            inside = ",".join(f'{key}="{_escape(str(text))}"' for key, text in labels.items())
            lines.append(f"{name}{{{inside}}} {value:g}" if inside else f"{name} {value:g}")

    family("settled_workers", "gauge", "Server processes.", [({}, workers)])
    family("settled_connections", "gauge", "Open HTTP connections.", [({}, connections)])
    family("settled_resident_memory_bytes", "gauge", "Memory of the server processes.", [({}, memory)])
    family(
        "settled_http_requests_total", "counter", "Answered requests.",
        [({"method": m, "route": r, "status": s}, n) for (m, r, s), n in sorted(requests.items())],
    )  # fmt: skip
    family(
        "settled_http_request_seconds_total", "counter", "Time spent on requests, waiting included.",
        [({"method": m, "route": r}, round(n, 6)) for (m, r), n in sorted(seconds.items())],
    )  # fmt: skip
    for key, value in sorted(engine.items()):
        kind = "counter" if key.endswith("_total") else "gauge"
        help_ = _ENGINE_HELP.get(key, "A figure of the engine.")
        family(f"settled_engine_{_NAME.sub('_', key)}", kind, help_, [({}, value)])
    queues = list(queues)
    for field, help_ in (
        ("total", "Messages retained."),
        ("pending", "Messages not settled by the slowest group."),
        ("processing", "Messages under a lease."),
        ("dead", "Dead letters."),
        ("partitions", "Partitions."),
    ):
        rows = [({"queue": q.name}, float(getattr(q, field))) for q in queues]
        family(f"settled_queue_{field}", "gauge", help_, rows)
    groups = list(groups)
    family(
        "settled_group_lag", "gauge", "Messages a group is behind.",
        [({"group": g.group, "queue": g.queue}, g.total_lag) for g in groups],
    )  # fmt: skip
    family(
        "settled_group_lag_seconds", "gauge", "Age of the oldest message a group has not settled.",
        [({"group": g.group, "queue": g.queue}, g.max_time_lag) for g in groups],
    )  # fmt: skip
    return "\n".join(lines) + "\n"


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def resident_bytes() -> int:
    """Memory of this process, where the system tells."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0
