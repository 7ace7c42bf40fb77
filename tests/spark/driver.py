"""A driver program of its own, which kills itself and its JVM at the point it is told."""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

from settled.spark import attempt, read_queue, session, settle
from settled.spark.sink import StreamSink
from settled.spark.source import SettledSource, StreamReader

PLAN: dict[str, Any] = json.loads(sys.argv[1]) if len(sys.argv) > 1 else {}


def die() -> None:
    """End everything at once, the first time."""
    flag = Path(PLAN["folder"], "killed")
    if flag.exists():
        return
    flag.touch()
    for pid in json.loads(Path(PLAN["folder"], "pids").read_text()):
        os.kill(pid, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


class DyingReader(StreamReader):
    # ruff: noqa: N802, N803 - the names are Spark's
    def latestOffset(self, start: dict[str, Any], limit: Any) -> dict[str, Any]:
        end = super().latestOffset(start, limit)
        if PLAN["point"] == "claim" and end != start:
            die()
        return end


class DyingSink(StreamSink):
    def write(self, iterator: Any) -> Any:
        staged = super().write(iterator)
        if PLAN["point"] == "staging":
            die()
        return staged

    def commit(self, messages: list[Any], batchId: int) -> None:
        super().commit(messages, batchId)
        if PLAN["point"] == "settled":
            die()


class DyingSource(SettledSource):
    def streamReader(self, schema: Any) -> Any:
        return DyingReader(self.settings)

    def streamWriter(self, schema: Any, overwrite: bool) -> Any:
        return DyingSink(self.settings)


def charge(order: dict[str, Any]) -> dict[str, Any] | None:
    if PLAN["point"] == "tasks" and order["id"] == 33:
        die()
    if PLAN["point"] == "pause" and order["id"] == 33:
        folder = Path(PLAN["folder"])
        (folder / "working").touch()
        while not (folder / "go").exists():
            time.sleep(0.05)
    if random.random() < PLAN.get("chance", 0):
        raise OSError("the bank is away")
    if not PLAN.get("chance") and order["id"] % 10 == 7:
        raise ValueError("never works")
    return {"invoice": order["id"]}


def main() -> None:
    spark = session("driver", PLAN.get("master", "local[2,4]"), quick=True, conf=PLAN.get("conf"))
    if PLAN["point"]:
        spark.dataSource.register(DyingSource)
    jvm = spark._jvm.java.lang.ProcessHandle.current().pid() if not PLAN.get("connect") else 0  # type: ignore[union-attr]
    Path(PLAN["folder"], "pids").write_text(json.dumps([pid for pid in (jvm, os.getpid()) if pid]))
    df = read_queue(
        spark,
        PLAN["queue"],
        "g",
        url=PLAN["url"],
        lease_seconds=PLAN.get("lease", 60),
        max_rows=400,
    ).transform(attempt(charge))
    writer = (
        settle(df, to=PLAN["to"]).option("checkpointLocation", PLAN["checkpoint"]).trigger(availableNow=True)
    )
    for _ in range(PLAN.get("runs", 1)):
        writer.start().awaitTermination()
    spark.stop()


if __name__ == "__main__":
    main()
