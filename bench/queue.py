"""How fast the queue is, measured with wrk, beside a plain one-row-per-message queue on the same Postgres.

    python bench/queue.py                 every case, about three minutes
    python bench/queue.py --only push1    some of them
    python bench/queue.py --seconds 2     shorter runs

wrk is not installed by this script: `apt-get install wrk` or `brew install wrk`.
"""

# ruff: noqa: E402 - the path is mended before anything else is imported
from __future__ import annotations

import sys

# Run as a script, this directory comes first and this file would hide the standard library's `queue`.
sys.path[:] = [entry for entry in sys.path if not entry.endswith("bench")]

import argparse
import contextlib
import json
import os
import re
import shutil
import subprocess
import tempfile
import time
import uuid
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import urllib3

from settled.queue.embedded import EmbeddedPostgres
from settled.server.testing import running_server

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

HERE = Path(__file__).parent
CLOCK = str(HERE / "wrk" / "clock.lua")
LANES = 50
# Leases of this size on every partition: a server remembers 300,000 leased messages and looks up older ones.
LEASED = 5_000
IDLE_1 = "pop 1 auto-ack, 50 connections, 100,000 idle partitions beside"
IDLE_100 = "pop 100 auto-ack, 10 connections, 100,000 idle partitions beside"
GROUPS = "push 100, 10 connections, 10 groups on the queue"
GOALS = {
    "push 1, 50 connections": 14_000, "push 1, 256 connections": 18_000, "push 100, 10 connections": 175_000,
    "pop 100 auto-ack, 10 connections": 350_000, "pop 1 auto-ack, 50 connections": 18_000,
    "ack 1, 50 connections": 18_000, "ack 1, 256 connections": 20_000, "ack 100, 10 connections": 200_000,
    "pop 100 with lease, then ack 100, 10 connections": 100_000,
    IDLE_1: 18_000, IDLE_100: 350_000, GROUPS: 175_000,
}  # fmt: skip
_RATE = re.compile(r"(?:messages|requests) (\d+) in (\d+) us")
_P99 = re.compile(r"99%\s+([\d.]+)(us|ms|s)")
_BAD = re.compile(r"Non-2xx or 3xx responses: (\d+)|refused (\d+)")


@dataclass
class Row:
    """One line of the table."""

    case: str
    messages_per_second: float
    p99_ms: float
    bad: int = 0
    memory_mib: float = 0
    plain: float | None = None
    server_us: float = 0
    postgres_us: float = 0


def wrk(url: str, script: str, connections: int, seconds: float, *args: str, per_request: int = 1) -> Row:
    """Run wrk once."""
    command = [
        "wrk",
        "-t1",
        f"-c{connections}",
        f"-d{max(1, round(seconds))}s",
        "--latency",
        "-s",
        str(HERE / "wrk" / script),
        url,
    ]
    before = cpu_seconds()
    done = subprocess.run([*command, "--", *args], capture_output=True, text=True, check=False)
    spent_on = {name: seconds - before.get(name, 0.0) for name, seconds in cpu_seconds().items()}
    out = done.stdout
    if done.returncode or "Requests/sec" not in out:
        raise SystemExit(f"{' '.join(command)} failed:\n{out}{done.stderr}")
    found = _RATE.search(out)
    if found:
        count, spent = int(found[1]), int(found[2]) / 1e6
    else:
        count, spent = int(re.search(r"(\d+) requests in ([\d.]+)s", out)[1]), seconds  # type: ignore[index]
        spent = count / float(re.search(r"Requests/sec:\s+([\d.]+)", out)[1])  # type: ignore[index]
    p99 = _P99.search(out)
    scale = {"us": 0.001, "ms": 1.0, "s": 1000.0}
    bad = _BAD.search(out)
    return Row(
        "",
        count * per_request / spent,
        float(p99[1]) * scale[p99[2]] if p99 else 0.0,
        int(bad[1] or bad[2]) if bad else 0,
        server_us=spent_on.get("server", 0.0) * 1e6 / max(1, count * per_request),
        postgres_us=spent_on.get("postgres", 0.0) * 1e6 / max(1, count * per_request),
    )


WATCHED: dict[str, list[int]] = {"server": [], "postgres": []}


def cpu_seconds() -> dict[str, float]:
    """Processor time used so far by the server and by its Postgres.

    It tells more than a rate when other programs share the machine.
    """
    used: dict[str, float] = {}
    tick = os.sysconf("SC_CLK_TCK")
    for name, parents in WATCHED.items():
        for file in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                text = file.read_text()
                fields = text[text.rindex(")") + 2 :].split()
                if int(file.parent.name) in parents or int(fields[1]) in parents:
                    used[name] = used.get(name, 0.0) + (int(fields[11]) + int(fields[12])) / tick
    return used


def settle_down(most: float = 20.0) -> None:
    """Wait until nothing is tidied up any more of what the case before has left, such as rows to vacuum."""
    until = time.monotonic() + most
    calm = 0
    while calm < 3 and time.monotonic() < until:
        before = sum(cpu_seconds().values())
        time.sleep(0.4)
        calm = calm + 1 if sum(cpu_seconds().values()) - before < 0.04 else 0


class Bench:
    """The cases, on one server and one plain queue."""

    def __init__(self, url: str, plain: str, seconds: float, pid: int) -> None:
        self.url = url
        self.plain = plain
        self.seconds = seconds
        self.pid = pid
        self.http = urllib3.PoolManager(maxsize=20)
        self.temporary = tempfile.TemporaryDirectory()

    def cases(self) -> dict[str, Callable[[], Row]]:
        """Every case by its short name."""
        return {
            "push1": lambda: self.push("push 1, 50 connections", 1, 50),
            "push1-256": lambda: self.push("push 1, 256 connections", 1, 256),
            "push100": lambda: self.push("push 100, 10 connections", 100, 10),
            "pop100": lambda: self.pop("pop 100 auto-ack, 10 connections", 100, 10, 400_000),
            "pop1": lambda: self.pop("pop 1 auto-ack, 50 connections", 1, 50, 30_000),
            "ack1": lambda: self.ack("ack 1, 50 connections", 1, 50, 30_000),
            "ack1-256": lambda: self.ack("ack 1, 256 connections", 1, 256, 30_000),
            "ack100": lambda: self.ack("ack 100, 10 connections", 100, 10, 300_000),
            "cycle": lambda: self.cycle("pop 100 with lease, then ack 100, 10 connections"),
            "idle1": lambda: self.pop(IDLE_1, 1, 50, 30_000, idle=100_000),
            "idle100": lambda: self.pop(IDLE_100, 100, 10, 400_000, idle=100_000),
            "groups": lambda: self.push(GROUPS, 100, 10, groups=10),
        }

    def measured(self, case: str, row: Row) -> Row:
        """The row with its name and the server's memory."""
        row.case = case
        row.memory_mib = memory_mib(self.pid)
        return row

    def push(self, case: str, size: int, connections: int, groups: int = 0) -> Row:
        """Push `size` messages a request, to a queue that has its partitions already."""
        queue = fresh()
        self.post("/api/v1/push", {"items": [{"queue": queue, "partition": f"p{n}"} for n in range(LANES)]})
        for group in range(groups):
            self.get(
                f"/api/v1/pop/queue/{queue}?batch=1000&partitions=1000&autoAck=true&consumerGroup=g{group}"
            )
        arguments = ("/api/v1/push", queue, str(size), str(LANES), "t")
        settle_down()
        row = wrk(self.url, "push.lua", connections, self.seconds, *arguments, per_request=size)
        plain = ("/push", queue, str(size), str(LANES), fresh())
        row.plain = wrk(
            self.plain, "push.lua", connections, self.seconds, *plain, per_request=size
        ).messages_per_second
        return self.measured(case, row)

    def pop(self, case: str, batch: int, connections: int, rate: int, idle: int = 0) -> Row:
        """Pop with auto-ack until the time is up, with `idle` partitions beside those that have messages."""
        queue = fresh()
        if idle:
            self.idle_partitions(queue, idle)
        self.fill(queue, round(rate * self.seconds * 1.2))
        path = f"/api/v1/pop/queue/{queue}?batch={batch}&autoAck=true"
        settle_down()
        row = wrk(self.url, "pop.lua", connections, self.seconds, path, CLOCK)
        self.fill_plain(min(200_000, round(rate / 4 * self.seconds)))
        row.plain = wrk(
            self.plain, "pop.lua", connections, self.seconds, f"/pop?batch={batch}&autoAck=true", CLOCK
        ).messages_per_second
        return self.measured(case, row)

    def ack(self, case: str, size: int, connections: int, rate: int) -> Row:
        """Ack what was popped before, `size` messages a request."""
        queue = fresh()
        each = min(LEASED, max(size, round(rate * self.seconds / LANES / size) * size))
        self.fill(queue, each * LANES)
        lanes = [self.lease(queue, each) for _ in range(LANES)]
        each = min(map(len, lanes)) // size * size
        file = Path(self.temporary.name) / "acks"
        with file.open("wb") as out:
            for start in range(0, each, size):
                for messages in lanes:
                    out.write(ack_body(messages[start : start + size], size) + b"\n")
        path = "/api/v1/ack" if size == 1 else "/api/v1/ack/batch"
        settle_down()
        row = wrk(
            self.url, "lines.lua", connections, self.seconds * 1.5, path, CLOCK, str(file), per_request=size
        )
        self.fill_plain(min(100_000, round(rate / 4 * self.seconds)))
        ids = self.lease_plain(100_000)
        file.write_text("".join(json.dumps(ids[i : i + size]) + "\n" for i in range(0, len(ids), size)))
        row.plain = wrk(
            self.plain,
            "lines.lua",
            connections,
            self.seconds * 1.5,
            "/ack",
            CLOCK,
            str(file),
            per_request=size,
        ).messages_per_second
        return self.measured(case, row)

    def cycle(self, case: str) -> Row:
        """Pop under a lease, ack, again."""
        queue = fresh()
        self.fill(queue, round(130_000 * self.seconds))
        settle_down()
        row = wrk(self.url, "cycle.lua", 10, self.seconds, f"/api/v1/pop/queue/{queue}?batch=100")
        return self.measured(case, row)

    def fill(self, queue: str, count: int, size: int = 100) -> None:
        """Push `count` messages or some more over all partitions, as fast as it goes."""
        while count > 0:
            arguments = ("/api/v1/push", queue, str(size), str(LANES), fresh())
            row = wrk(self.url, "push.lua", 10, 1, *arguments, per_request=size)
            if row.bad:
                raise SystemExit(f"{row.bad} pushes were refused")
            count -= round(row.messages_per_second)

    def idle_partitions(self, queue: str, count: int) -> None:
        """Make `count` partitions that had a message once."""
        for start in range(0, count, 5000):
            items = [{"queue": queue, "partition": f"idle{start + i}", "payload": 0} for i in range(5000)]
            self.post("/api/v1/push", {"items": items})
        while self.get(f"/api/v1/pop/queue/{queue}?batch=1000&partitions=1000&autoAck=true")["messages"]:
            pass

    def get(self, path: str) -> Any:
        """A GET's JSON."""
        return json.loads(self.http.request("GET", self.url + path, timeout=120).data)

    def post(self, path: str, body: Any) -> None:
        """A POST that must succeed."""
        answer = self.http.request("POST", self.url + path, body=json.dumps(body), timeout=120)
        if answer.status >= 300:
            raise SystemExit(f"{path} failed: {answer.data!r}")

    def lease(self, queue: str, count: int) -> list[dict[str, Any]]:
        """Pop one lane under a lease."""
        messages: list[dict[str, Any]] = self.get(f"/api/v1/pop/queue/{queue}?batch={count}")["messages"]
        return messages

    def fill_plain(self, count: int) -> None:
        """Push to the plain queue."""
        run = fresh()
        for start in range(0, count, 1000):
            items = [
                {
                    "queue": "q",
                    "partition": f"p{i % LANES}",
                    "transactionId": f"{run}{start + i}",
                    "payload": "x" * 90,
                }
                for i in range(1000)
            ]
            self.http.request("POST", f"{self.plain}/push", body=json.dumps({"items": items}))

    def lease_plain(self, count: int) -> list[int]:
        """Lease everything of the plain queue."""
        ids: list[int] = []
        while len(ids) < count:
            messages = json.loads(self.http.request("GET", f"{self.plain}/pop?batch=10000").data)["messages"]
            if not messages:
                break
            ids += [int(m["transactionId"]) for m in messages]
        return ids


def ack_body(messages: list[dict[str, Any]], size: int) -> bytes:
    """The body of an ack, or of a batch of them."""
    keys = ("transactionId", "partitionId", "leaseId")
    acks = [{key: message[key] for key in keys} for message in messages]
    return json.dumps(acks[0] if size == 1 else {"acknowledgments": acks}).encode()


def fresh() -> str:
    """A name nobody has used."""
    return uuid.uuid4().hex[:10]


def memory_mib(pid: int) -> float:
    """Resident memory of the server process and its children."""
    with contextlib.suppress(OSError, ValueError):
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        pages = sum(int(Path(f"/proc/{each}/statm").read_text().split()[1]) for each in (str(pid), *children))
        return pages * os.sysconf("SC_PAGE_SIZE") / 2**20
    return 0.0


@contextlib.contextmanager
def plain_queue(dsn: str) -> Iterator[str]:
    """The baseline, in a process of its own."""
    process = subprocess.Popen(
        [sys.executable, "-P", str(HERE / "queue_baseline.py"), dsn], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        yield f"http://127.0.0.1:{process.stdout.readline().strip()}"
    finally:
        process.terminate()
        process.wait()


def show(rows: list[Row]) -> str:
    """The table, in Markdown."""
    lines = [
        "| case | msg/s | goal | plain queue | p99 | CPU a message: server, Postgres | memory |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        plain = "-" if row.plain is None else f"{row.plain:,.0f}"
        bad = f" ({row.bad} refused)" if row.bad else ""
        lines.append(
            f"| {row.case} | {row.messages_per_second:,.0f}{bad} | {GOALS[row.case]:,} | {plain} "
            f"| {row.p99_ms:.1f} ms | {row.server_us:.1f}, {row.postgres_us:.1f} \u00b5s "
            f"| {row.memory_mib:.0f} MiB |"
        )
    return "\n".join(lines)


def main() -> None:
    """Run the cases and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="*", help="short names of cases")
    parser.add_argument("--seconds", type=float, default=4)
    parser.add_argument("--repeat", type=int, default=1, help="run each case so often and keep the best")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--json", default="queue-results.json", help="where the figures go")
    options = parser.parse_args()
    if shutil.which("wrk") is None:
        raise SystemExit("wrk is not installed: apt-get install wrk, or brew install wrk")
    rows: list[Row] = []
    with contextlib.ExitStack() as stack:
        data = stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True))
        postgres = stack.enter_context(EmbeddedPostgres.start(data))
        server = stack.enter_context(running_server(data=data, workers=options.workers))
        bench = Bench(
            server.url, stack.enter_context(plain_queue(postgres.dsn)), options.seconds, server.process.pid
        )
        WATCHED["server"] = [server.process.pid]
        WATCHED["postgres"] = [int((Path(data) / "postgres" / "postmaster.pid").read_text().split()[0])]
        chosen = bench.cases()
        for name in options.only or chosen:
            tries = [chosen[name]() for _ in range(options.repeat)]
            best = max(tries, key=lambda row: row.messages_per_second)
            best.plain = max((row.plain for row in tries if row.plain is not None), default=None)
            rows.append(best)
            print(show(rows[-1:]).splitlines()[-1], flush=True)
            time.sleep(0.5)
        bench.temporary.cleanup()
    print("\n" + show(rows))
    Path(options.json).write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n")


if __name__ == "__main__":
    main()
