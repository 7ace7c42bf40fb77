"""The classes Spark starts with, archived: JVMs that live for seconds start in half the time."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pyspark

# Most of a short life would go into compiling what is then run a few times.
_SHORT_LIVED = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"


def options() -> str:
    """What to start such a JVM with; the archive is made once for a virtual environment."""
    archive = Path(sys.prefix) / f"spark-{pyspark.__version__}.jsa"
    with archive.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not archive.exists():
            _make(archive)
    # A JVM that cannot use it, because it is another Java's, goes on without.
    return f"{_SHORT_LIVED} -XX:SharedArchiveFile={archive}" if archive.stat().st_size else _SHORT_LIVED


def _make(archive: Path) -> None:
    """Empty if this Java cannot: it needs an archive of its own classes to begin with."""
    new = archive.with_suffix(".new")
    subprocess.run(
        [sys.executable, "-m", "tests.spark.archive"],
        env={**os.environ, "SPARK_SUBMIT_OPTS": f"{_SHORT_LIVED} -XX:ArchiveClassesAtExit={new}"},
        capture_output=True,
        check=True,
    )
    new.touch()
    new.rename(archive)


def _use_spark() -> None:
    """A stream with a Python function and a batch that writes, as most tests have."""
    from pyspark.sql import DataFrame

    from settled.spark import session

    spark = session("archive")
    rows = spark.readStream.format("rate").option("rowsPerSecond", 100).load()
    rows = rows.mapInArrow(lambda batches: batches, rows.schema)

    def count(batch: DataFrame, _: int) -> None:
        batch.groupBy("value").count().collect()

    query = rows.writeStream.foreachBatch(count).trigger(processingTime="0 seconds").start()
    while query.isActive and (query.lastProgress is None or query.lastProgress.batchId < 3):
        query.awaitTermination(1)
    query.stop()
    spark.stop()


if __name__ == "__main__":
    _use_spark()
