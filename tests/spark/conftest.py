"""One Postgres, one queue engine and one Spark session for all tests on Spark."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import tempfile
import uuid
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming import StreamingQuery
from pyspark.sql.streaming.readwriter import DataStreamWriter

from settled.queue import Engine, PushItem
from settled.queue.embedded import EmbeddedPostgres
from settled.queue.manifest import Link
from settled.queue.sealing import VARIABLE
from settled.queue.types import DeadLetter, PopRequest
from settled.spark import session, settle
from tests.spark import archive

KEY = "ab" * 32
STREAMING = "org.apache.spark.sql.execution.streaming.checkpointing"


def pytest_configure() -> None:
    # Before xdist has workers, which get it from here.
    if "SPARK_SUBMIT_OPTS" not in os.environ:
        os.environ["SPARK_SUBMIT_OPTS"] = archive.options()


class Shop:
    """A queue engine as a test uses it: push, look, pop."""

    def __init__(self, dsn: str) -> None:
        self.dsn = dsn
        self.link = Link(dsn)
        self._loop = asyncio.new_event_loop()
        self.engine: Engine = self.wait(Engine.open(dsn))

    def wait(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self._loop.run_until_complete(work)

    def queue(self, **options: Any) -> str:
        """A new queue; its retries come at once unless the test says otherwise."""
        name = f"orders-{uuid.uuid4().hex[:10]}"
        self.wait(self.engine.configure(name, {"retry": "parked", "retryDelay": 0, **options}))
        return name

    def push(self, queue: str, values: list[Any], lanes: int = 2, **fields: Any) -> None:
        """Push values as JSON (bytes as they are), dealt out over the lanes."""
        items = [
            PushItem(
                queue,
                v if isinstance(v, bytes) else msgspec.json.encode(v),
                partition=f"p{i % lanes}",
                **fields,
            )
            for i, v in enumerate(values)
        ]
        for at in range(0, len(items), 500):
            self.wait(self.engine.push(items[at : at + 500]))

    def pop_all(self, queue: str, group: str = "test") -> dict[str, list[Any]]:
        """Everything in a queue, by partition, in order."""
        found: dict[str, list[Any]] = {}
        while True:
            popped = self.wait(
                self.engine.pop(PopRequest(queue, group=group, batch=1000, partitions=10, auto_ack=True))
            )
            if not popped.lanes:
                return found
            for message in popped.messages():
                found.setdefault(message.partition, []).append(msgspec.json.decode(message.payload))

    def stored(self, queue: str) -> bytes:
        """All that lies on disk of a queue's messages and dead letters, and of what tasks staged."""
        query = """
            select s.body from segment s join lane l on l.id = s.lane_id join queue q on q.id = l.queue_id
             where q.name = %(queue)s
             union all select headers || payload from dead_letter where queue = %(queue)s
             union all select o.headers || o.payload from staged_outcome o join lane l on l.id = o.lane_id
              join queue q on q.id = l.queue_id where q.name = %(queue)s
             union all select body from staged_segment where queue = %(queue)s
        """
        rows = self.link.run(lambda c: c.execute(query, {"queue": queue}).fetchall())
        return b"".join(row["body"] or b"" for row in rows)

    def dead(self, queue: str) -> list[DeadLetter]:
        return list(self.wait(self.engine.dead_letters(queue=queue, limit=10_000)).rows)

    def totals(self, queue: str, group: str = "g") -> dict[str, int]:
        rows = self.link.rows("totals", queue=queue, group=group, after=0)
        return {k: v for k, v in rows[0].items() if v}

    def lag(self, queue: str, group: str = "g") -> tuple[int, int]:
        row = self.link.rows("lag", queue=queue, group=group)[0]
        return row["waiting"], row["failing"]

    def close(self) -> None:
        self.link.close()
        self.wait(self.engine.close())
        self._loop.close()


@pytest.fixture(scope="session")
def postgres() -> Iterator[EmbeddedPostgres]:
    folder = tempfile.mkdtemp(prefix="st-")
    with EmbeddedPostgres.start(folder) as server:
        yield server
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def shop(postgres: EmbeddedPostgres) -> Iterator[Shop]:
    shop = Shop(postgres.dsn)
    yield shop
    shop.close()


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    folder = tmp_path_factory.mktemp("spark")
    conf = {
        "spark.sql.warehouse.dir": str(folder),
        "spark.sql.streaming.checkpointFileManagerClass": f"{STREAMING}.FileSystemBasedCheckpointFileManager",
    }
    with pytest.MonkeyPatch.context() as patch:  # Spark's processes have it, this one has not
        patch.setenv(VARIABLE, KEY)
        spark = session("tests", "local[2,4]", quick=True, log=folder / "jvm.log", conf=conf)
    spark.log = folder / "jvm.log"  # type: ignore[attr-defined]
    yield spark
    spark.stop()


@pytest.fixture
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process may read and write encrypted queues."""
    monkeypatch.setenv(VARIABLE, KEY)


@pytest.fixture
def signals() -> Iterator[None]:
    """This process listens to signals as before, whatever a command did."""
    usual = {one: signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)}
    yield
    for one, handler in usual.items():
        signal.signal(one, handler)


@pytest.fixture
def checkpoint(tmp_path: Path) -> str:
    return str(tmp_path / "checkpoint")


Run = Callable[..., StreamingQuery]


def finished(writer: DataStreamWriter) -> StreamingQuery:
    """A query that took what is there now and ended.

    Spark gives the process that reads offsets ten seconds to start, which a busy machine may not grant;
    nothing was read then, so it is started again.
    """
    for attempt in range(4):
        query = writer.trigger(availableNow=True).start()
        try:
            assert query.awaitTermination(240)
        except StreamingQueryException as error:
            if attempt == 3 or "Python worker failed to connect back" not in str(error):
                raise
        else:
            return query
    raise AssertionError("not reached")


@pytest.fixture
def run(checkpoint: str) -> Run:
    """Settle what is there now and wait for the end."""

    def run(df: DataFrame, to: str | None = None, where: str = checkpoint) -> StreamingQuery:
        return finished(settle(df, to=to).option("checkpointLocation", where))

    return run
