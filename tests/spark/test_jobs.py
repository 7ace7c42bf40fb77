"""The jobs: export, report, redrive and the demonstration, over what really happened to messages."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from pyspark.sql import SparkSession
from typer.testing import CliRunner

from settled import Reject
from settled.queue.errors import Conflict
from settled.queue.types import PopRequest
from settled.spark.command import app
from settled.spark.frames import read_queue
from settled.spark.jobs.demo import demo
from settled.spark.jobs.export import export
from settled.spark.jobs.redrive import Choice, redrive
from settled.spark.jobs.report import write_report
from settled.spark.jobs.run import run as run_job
from tests.spark.conftest import Run, Shop


def handle(order: dict[str, Any]) -> None:
    if order["id"] % 10 == 3:
        raise Reject(f"customer {order['id']} has no card")
    if order["id"] % 10 == 7:
        raise OSError(f"bank {order['id']} is away")


def work(spark: SparkSession, shop: Shop, run: Run, where: str) -> str:
    """A queue on which much has happened: of 100 orders 10 were rejected and 10 ran out of attempts."""
    queue = shop.queue(retryLimit=2)
    shop.push(queue, [{"id": i} for i in range(100)], lanes=4)
    for _ in range(2):
        run(read_queue(spark, queue, "g", url=shop.dsn, handler=handle), where=where)
    assert shop.totals(queue) == {"messages": 110, "acked": 80, "retried": 10, "dead": 20, "batches": 2}
    return queue


@pytest.fixture(scope="module")
def worked(spark: SparkSession, shop: Shop, tmp_path_factory: pytest.TempPathFactory) -> str:
    from settled.spark import settle

    def run(df: Any, where: str) -> None:
        writer = settle(df).option("checkpointLocation", where).trigger(availableNow=True)
        assert writer.start().awaitTermination(120)

    return work(spark, shop, run, str(tmp_path_factory.mktemp("jobs")))  # type: ignore[arg-type]


def test_an_export_adds_what_is_new_and_a_repeated_run_changes_nothing(
    spark: SparkSession, shop: Shop, worked: str, tmp_path: Path
) -> None:
    first = export(spark, shop.dsn, tmp_path, queue=worked, messages=True)
    assert (first.rows["dead_letters"], first.rows["messages"]) == (20, 100)
    state = (tmp_path / "_export.json").read_text()
    second = export(spark, shop.dsn, tmp_path, queue=worked, messages=True)
    assert second.rows == {"settlements": 0, "dead_letters": 0, "messages": 0}
    (tmp_path / "_export.json").unlink()  # as if the first run had been interrupted before it was noted
    assert export(spark, shop.dsn, tmp_path, queue=worked, messages=True).rows == first.rows
    dead = spark.read.parquet(str(tmp_path / "dead_letters"))
    assert dead.count() == 20
    assert {"day", "run"} <= set(dead.columns)
    assert spark.read.parquet(str(tmp_path / "messages")).count() == 100
    assert json.loads(state)["run"] == 1


def test_an_export_to_delta_is_not_doubled_by_a_repeated_run(
    spark: SparkSession, shop: Shop, worked: str, tmp_path: Path
) -> None:
    import deltalake

    export(spark, shop.dsn, tmp_path, queue=worked, kind="delta")
    (tmp_path / "_export.json").unlink()
    export(spark, shop.dsn, tmp_path, queue=worked, kind="delta")
    assert deltalake.DeltaTable(str(tmp_path / "dead_letters")).to_pyarrow_table().num_rows == 20


def test_a_report_says_what_happened(spark: SparkSession, shop: Shop, worked: str, tmp_path: Path) -> None:
    figures = write_report(spark, shop.dsn, tmp_path / "live.html", queue=worked)
    assert figures["totals"] == {"acked": 80, "retried": 10, "released": 0, "dead": 20}
    assert [
        (e["error"], e["count"], e["attempts"])
        for e in sorted(figures["dead_letters"]["errors"], key=lambda e: e["error"])
    ] == [
        ("OSError: bank # is away", 10, 2),
        ("customer # has no card", 10, 1),
    ]
    assert figures["redeliveries"] == [
        {"reason": "OSError: bank # is away", "source": f"{worked}/g", "count": 10}
    ]
    assert figures["lag"] == [
        {"queue": worked, "consumer_group": "g", "partitions": 4, "waiting": 0, "failing": 0}
    ]
    assert sum(t["acked"] + t["dead"] for t in figures["throughput"]) == 100
    assert all(row["p50"] <= row["p99"] for row in figures["latency"])
    exhausted = next(a for a in figures["alerts"] if a["name"] == "RetryExhausted")
    assert exhausted["fired"]
    page = (tmp_path / "live.html").read_text()
    assert "customer # has no card" in page
    assert "http://" not in page
    assert "https://" not in page
    assert msgspec.json.decode((tmp_path / "live.json").read_bytes())["totals"] == figures["totals"]
    export(spark, shop.dsn, tmp_path / "files", queue=worked)
    again = write_report(spark, tmp_path / "files", tmp_path / "files.html")
    assert (again["totals"], again["dead_letters"]["total"]) == (figures["totals"], 20)


def test_dead_letters_are_redriven_once(spark: SparkSession, shop: Shop, worked: str) -> None:
    chosen = Choice(queue=worked, error="has no card")
    assert redrive(shop.dsn, chosen, dry_run=True) == 10
    target = worked + "-again"
    pauses: list[float] = []
    assert redrive(shop.dsn, chosen, to=target, rate=4, sleep=pauses.append) == 10
    assert len(pauses) == 3
    assert redrive(shop.dsn, chosen, to=target) == 0
    where = "attempts = 2 and get_json_object(payload, '$.id') < 40"
    with pytest.raises(Conflict, match="evaluated by Spark"):
        redrive(shop.dsn, Choice(queue=worked, where=where))
    assert redrive(shop.dsn, Choice(queue=worked, where=where), to=target, spark=spark) == 4
    popped = shop.wait(shop.engine.pop(PopRequest(target, batch=100, partitions=10, auto_ack=True)))
    found = {msgspec.json.decode(m.payload)["id"]: m for m in popped.messages()}
    assert sorted(found) == [3, 7, 13, 17, 23, 27, 33, 37, 43, 53, 63, 73, 83, 93]
    assert "redriven-from" in found[3].headers


def test_a_job_runs_until_nothing_is_left(spark: SparkSession, shop: Shop, checkpoint: str) -> None:
    queue = shop.queue(retryLimit=3, retryDelay=100)
    shop.push(queue, [{"id": i} for i in range(50)])
    lines: list[str] = []
    end = run_job(
        spark,
        handle,
        queue,
        "g",
        checkpoint,
        url=shop.dsn,
        until_empty=True,
        every=0.2,
        on_progress=lambda p: lines.append(p.line()),
    )
    assert (end.acked, end.retried, end.dead, end.waiting, end.failing) == (40, 10, 10, 0, 0)
    assert "acked 40" in lines[-1]


def test_the_command_line_says_what_is_wrong(shop: Shop) -> None:
    runner = CliRunner()
    result = runner.invoke(app, ["run", "nonsense", "--queue", "q", "--group", "g", "--url", shop.dsn])
    assert (result.exit_code, "module:function" in result.output) == (2, True)
    result = runner.invoke(app, ["redrive", "--url", shop.dsn, "--queue", "no such queue", "--dry-run"])
    assert (result.exit_code, result.output) == (0, "would redrive=0\n")


def test_the_demonstration_balances_its_books(
    spark: SparkSession, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("settled.spark.jobs.demo.session", lambda *_, **__: spark)
    monkeypatch.setattr(type(spark), "stop", lambda _: None)
    assert demo(4_000, tmp_path, tmp_path / "report.html")
    last = capsys.readouterr().out.strip().splitlines()[-1]
    assert last.startswith("pushed=4000 acked=")
    assert last.endswith(" lost=0")
