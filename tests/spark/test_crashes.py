"""Whatever is killed, and whenever: every message is settled, none twice, and attempts are right."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from pyspark.sql import DataFrame, SparkSession

from settled.queue.embedded import EmbeddedPostgres
from settled.spark import attempt, read_queue, settle, settle_each, to_parquet
from settled.spark.source import SettledSource
from settled.spark.startup import packaged_java, prepare
from tests.spark import mortal
from tests.spark.conftest import Run, Shop, finished

ORDERS = 1000
BAD = ORDERS // 10


def plan(shop: Shop, tmp_path: Path, point: str, **more: Any) -> dict[str, Any]:
    queue = shop.queue(retryLimit=2)
    shop.push(queue, [{"id": i} for i in range(ORDERS)], lanes=5)
    (tmp_path / "work").mkdir(parents=True)
    return {
        "url": shop.dsn,
        "queue": queue,
        "to": queue + "-out",
        "point": point,
        "folder": str(tmp_path / "work"),
        "checkpoint": str(tmp_path / "checkpoint"),
        **more,
    }


@contextmanager
def driver(plan: dict[str, Any], env: dict[str, str] | None = None) -> Iterator[subprocess.Popen[str]]:
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.spark.driver", json.dumps(plan)],
            stdout=output,
            stderr=output,
            text=True,
            env={**os.environ, **(env or {})},
        )
        process.output = lambda: (output.seek(0), output.read())[1]  # type: ignore[attr-defined]
        try:
            yield process
        finally:
            for one in family(process.pid):
                one.kill()
            process.wait(30)


def family(pid: int) -> list[psutil.Process]:
    try:
        parent = psutil.Process(pid)
        return [parent, *parent.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def wait_for(what: Callable[[], object], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline, "it did not come"
        time.sleep(0.05)


def charge(order: dict[str, Any]) -> dict[str, Any]:
    if order["id"] % 10 == 7:
        raise ValueError("never works")
    return {"invoice": order["id"]}


def attempted(spark: SparkSession, plan: dict[str, Any]) -> DataFrame:
    df = read_queue(spark, plan["queue"], "g", url=plan["url"], lease_seconds=plan.get("lease", 60))
    return df.transform(attempt(charge))


def finish(spark: SparkSession, shop: Shop, plan: dict[str, Any], run: Run) -> None:
    """Start again where the dead driver left off, until nothing is left, and look at everything."""
    for _ in range(5):
        run(attempted(spark, plan), plan["to"], where=plan["checkpoint"])
        if shop.lag(plan["queue"]) == (0, 0):
            break
    check(shop, plan)


def check(shop: Shop, plan: dict[str, Any]) -> None:
    found = shop.pop_all(plan["to"])
    good = [i for i in range(ORDERS) if i % 10 != 7]
    assert sorted(v["invoice"] for lane in found.values() for v in lane) == good
    for lane in found.values():
        numbers = [v["invoice"] for v in lane]
        assert numbers == sorted(numbers)
    assert [d.attempts for d in shop.dead(plan["queue"])] == [2] * BAD
    totals = shop.totals(plan["queue"])
    assert (totals["acked"], totals["dead"], totals["retried"], totals["pushed"]) == (
        len(good),
        BAD,
        BAD,
        len(good),
    )


@pytest.mark.parametrize("points", [("claim", "tasks"), ("staging", "settled")])
def test_a_driver_killed_at_any_point_loses_and_doubles_nothing(
    spark: SparkSession, shop: Shop, run: Run, tmp_path: Path, points: tuple[str, str]
) -> None:
    told = [plan(shop, tmp_path / point, point) for point in points]
    # One of them on the wheel's Java, as on a machine without one.
    java = {"JAVA_HOME": str(packaged_java())} if "claim" in points else None
    with driver(told[0], java) as first, driver(told[1]) as second:
        for process in (first, second):
            assert process.wait(300) == -signal.SIGKILL, process.output()  # type: ignore[attr-defined]
    for one in told:
        assert Path(one["folder"], "killed").exists(), one["point"]
        finish(spark, shop, one, run)


def test_a_driver_paused_past_its_lease_is_fenced_when_it_wakes(
    spark: SparkSession, shop: Shop, run: Run, tmp_path: Path
) -> None:
    told = plan(shop, tmp_path, "pause", lease=2)
    with driver(told) as process:
        wait_for((tmp_path / "work" / "working").exists, 240)
        paused = family(process.pid)
        for one in paused:
            one.suspend()
        finish(spark, shop, {**told, "checkpoint": told["checkpoint"] + "-other"}, run)
        (tmp_path / "work" / "go").touch()
        for one in paused:
            one.resume()
        assert process.wait(300) == 1
        assert "another Spark query took over this reader" in process.output()  # type: ignore[attr-defined]
    assert shop.totals(told["queue"])["dead"] == BAD


def test_a_database_that_restarts_in_the_middle_of_a_batch_costs_nothing(
    spark: SparkSession, tmp_path: Path
) -> None:
    with EmbeddedPostgres.start(tempfile.mkdtemp(prefix="st-")) as server:
        shop = Shop(server.dsn)
        told = plan(shop, tmp_path, "")
        shop.link.close()
        flag = tmp_path / "work" / "working"

        def slowly(order: dict[str, Any]) -> dict[str, Any]:
            if order["id"] == 33 and not flag.exists():
                flag.touch()
                time.sleep(1)
            return charge(order)

        for _ in range(6):
            df = read_queue(spark, told["queue"], "g", url=told["url"]).transform(attempt(slowly))
            writer = settle(df, to=told["to"]).option("checkpointLocation", told["checkpoint"])
            query = writer.trigger(availableNow=True).start()
            if not flag.exists():
                wait_for(flag.exists)
                server.restart()
            try:
                query.awaitTermination(60)
            except Exception as error:
                assert "database" in str(error)  # noqa: PT017 - it says why, and goes on when it is started again
            if shop.lag(told["queue"]) == (0, 0):
                break
        shop.close()
        shop = Shop(server.dsn)  # the old one's idle connections were cut too
        check(shop, told)
        shop.close()


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


@contextmanager
def cluster(tmp_path: Path) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """A standalone master and a worker on loopback."""
    import pyspark

    prepare()
    home = Path(pyspark.__file__).parent
    port, url = free_port(), ""
    env = {
        **os.environ,
        "SPARK_HOME": str(home),
        "SPARK_WORKER_DIR": str(tmp_path / "worker"),
        "SPARK_LOG_DIR": str(tmp_path),
        "SPARK_DAEMON_JAVA_OPTS": "-XX:TieredStopAtLevel=1",
    }
    url = f"spark://127.0.0.1:{port}"
    name = "org.apache.spark.deploy"
    script = str(home / "bin" / "spark-class")
    with (tmp_path / "cluster.log").open("wb") as log:
        master = subprocess.Popen(
            [
                script,
                f"{name}.master.Master",
                "--host",
                "127.0.0.1",
                "--port",
                str(port),
                "--webui-port",
                str(free_port()),
            ],
            env=env,
            stdout=log,
            stderr=log,
        )
        worker = subprocess.Popen(
            [
                script,
                f"{name}.worker.Worker",
                url,
                "--host",
                "127.0.0.1",
                "-c",
                "2",
                "-m",
                "1g",
                "--webui-port",
                str(free_port()),
            ],
            env=env,
            stdout=log,
            stderr=log,
        )
        try:
            yield url, worker
        finally:
            for process in (worker, master):
                for one in family(process.pid):
                    one.kill()
                process.wait(30)


def is_executor(process: psutil.Process) -> bool:
    try:
        return "CoarseGrainedExecutorBackend" in " ".join(process.cmdline())
    except psutil.Error:  # a short-lived child that has ended meanwhile
        return False


def test_on_a_cluster_an_executor_may_be_killed(shop: Shop, tmp_path: Path) -> None:
    with cluster(tmp_path) as (url, worker):
        conf = {
            "spark.executor.memory": "600m",
            "spark.executor.extraJavaOptions": "-XX:TieredStopAtLevel=1",
            "spark.executorEnv.PYTHONPATH": str(Path.cwd()),
            "spark.driver.host": "127.0.0.1",
            "spark.driver.bindAddress": "127.0.0.1",
        }
        told = plan(shop, tmp_path, "pause", master=url, conf=conf, runs=2)
        with driver(told) as process:
            wait_for((tmp_path / "work" / "working").exists, 240)
            executors = [p for p in family(worker.pid) if is_executor(p)]
            assert executors
            executors[0].kill()
            (tmp_path / "work" / "go").touch()
            assert process.wait(300) == 0, process.output()  # type: ignore[attr-defined]
    check(shop, told)


def test_over_spark_connect(shop: Shop, tmp_path: Path) -> None:
    told = plan(shop, tmp_path, "", connect=True)
    with driver(told, {"SPARK_CONNECT_MODE_ENABLED": "1", "SPARK_REMOTE": "local[2]"}) as process:
        assert process.wait(300) == 0, process.output()  # type: ignore[attr-defined]
    totals = shop.totals(told["queue"])
    assert (totals["acked"], totals["retried"]) == (ORDERS - BAD, BAD)


@pytest.mark.parametrize("point", ["plan", "write", "before", "after"])
def test_a_python_process_that_is_killed_while_a_batch_is_written_and_settled_ends_no_query(
    spark: SparkSession, shop: Shop, tmp_path: Path, checkpoint: str, point: str
) -> None:
    """Defect S20."""
    queue = shop.queue()
    shop.push(queue, [{"id": i} for i in range(40)])
    (tmp_path / point).touch()
    spark.dataSource.register(mortal.source(str(tmp_path)))
    try:
        df = read_queue(spark, queue, "g", url=shop.dsn).transform(attempt(charge))
        writer = settle_each(df, to_parquet(str(tmp_path / "table")), to=queue + "-out")
        finished(writer.option("checkpointLocation", checkpoint))
    finally:
        spark.dataSource.register(SettledSource)
    assert (tmp_path / f"{point}.done").exists()
    results = [one["invoice"] for lane in shop.pop_all(queue + "-out").values() for one in lane]
    assert sorted(results) == [i for i in range(40) if i % 10 != 7]
    assert spark.read.parquet(str(tmp_path / "table")).count() == 36
