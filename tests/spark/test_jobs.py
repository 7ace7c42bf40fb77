"""The jobs: export, report, redrive and the demonstration, over what really happened to messages."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as F  # noqa: N812
from typer.testing import CliRunner

import settled
from settled import Defer, Reject
from settled.queue.errors import Conflict, NotFound
from settled.queue.types import PopRequest
from settled.spark.command import app
from settled.spark.frames import attempt, read_queue, settle_batch
from settled.spark.jobs.alerts import RULES, Rule, evaluate, judge
from settled.spark.jobs.demo import demo
from settled.spark.jobs.export import export, exported
from settled.spark.jobs.page import pattern_of
from settled.spark.jobs.redrive import Choice, redrive
from settled.spark.jobs.report import write_report
from settled.spark.jobs.run import Progress
from settled.spark.jobs.run import run as run_job
from settled.spark.source import SettledSource
from tests.spark.conftest import Run, Shop, finished


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
        run(read_queue(spark, queue, "g", url=shop.dsn).transform(attempt(handle)), where=where)
    assert shop.totals(queue) == {"messages": 110, "acked": 80, "retried": 10, "dead": 20, "batches": 2}
    return queue


@pytest.fixture(scope="module")
def worked(spark: SparkSession, shop: Shop, tmp_path_factory: pytest.TempPathFactory) -> str:
    from settled.spark import settle

    def run(df: Any, where: str) -> None:
        finished(settle(df).option("checkpointLocation", where))

    return work(spark, shop, run, str(tmp_path_factory.mktemp("jobs")))  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["parquet", "delta"])
def test_an_export_adds_what_is_new_and_an_interrupted_run_is_done_again(
    spark: SparkSession, shop: Shop, tmp_path: Path, kind: str
) -> None:
    queue = shop.queue()

    def reject(order: dict[str, int]) -> None:
        raise Reject("no card")

    def work(count: int) -> None:
        shop.push(queue, [{"id": i} for i in range(count)], lanes=1, headers={"a": "b"})
        settle_batch(read_queue(spark, queue, "g", url=shop.dsn, streaming=False).transform(attempt(reject)))

    def run() -> dict[str, int]:
        return export(spark, shop.dsn, tmp_path, queue=queue, messages=True, kind=kind).rows

    def rows(name: str) -> int:
        return exported(spark, tmp_path, name).count()

    messages = f"messages/queue_name={queue}"
    work(4)
    (tmp_path / "messages").touch()  # where a folder should be: the run fails when it gets there
    with pytest.raises(Exception, match="messages"):
        run()
    assert rows("dead_letters") == 4
    (tmp_path / "messages").unlink()
    work(3)
    assert run() == {"settlements": 4, "dead_letters": 4, "waits": 0, "messages": 4}
    assert (rows("settlements"), rows("dead_letters"), rows(messages)) == (4, 4, 4)
    assert run() == {"settlements": 3, "dead_letters": 3, "waits": 0, "messages": 3}
    assert (rows("settlements"), rows("dead_letters"), rows(messages)) == (7, 7, 7)
    assert {"day", "run"} <= set(exported(spark, tmp_path, messages).columns)
    with pytest.raises(Conflict, match=f"holds an export of queue '{queue}' as {kind}: go on like that"):
        export(spark, shop.dsn, tmp_path, kind=kind)


def test_a_report_says_what_happened(spark: SparkSession, shop: Shop, worked: str, tmp_path: Path) -> None:
    """Also defects R4 and D5."""
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
    assert figures["latency"]
    for row in figures["latency"] + figures["in_hand"]:
        assert 0 < row["p50"] <= row["p90"] <= row["p99"]
    exhausted = next(a for a in figures["alerts"] if a["name"] == "RetriesExhausted")
    assert exhausted["minutes_over"] >= 1
    assert exhausted["worst_rate"] == 2
    # Nothing waits and nothing comes again, so no rule is about to fire.
    assert [a for a in figures["alerts"] if a["pending_since"] or "Router" in a["name"]] == []
    assert figures["books"] == [
        {
            "queue": worked, "consumer_group": "g", "pushed": 100, "acked": 80, "dead": 20, "waiting": 0,
            "failing": 0, "removed": 0, "lost": 0,
        }
    ]  # fmt: skip
    assert figures["rate"]["peak"] > 0
    letters = {letter.id: letter.error for letter in shop.dead(worked)}
    for error in figures["dead_letters"]["errors"]:
        pattern = pattern_of(error["error"])
        assert len(error["ids"]) == 2
        assert all(re.search(pattern, letters[one]) for one in error["ids"])
        assert redrive(shop.dsn, Choice(queue=worked, group="g", error=pattern), dry_run=True) == 10
    page = (tmp_path / "live.html").read_text()
    assert "customer # has no card" in page
    assert "http://" not in page
    assert "https://" not in page
    assert msgspec.json.decode((tmp_path / "live.json").read_bytes())["totals"] == figures["totals"]
    export(spark, shop.dsn, tmp_path / "files", queue=worked)
    again = write_report(spark, tmp_path / "files", tmp_path / "files.html")
    assert (again["totals"], again["dead_letters"]["total"]) == (figures["totals"], 20)
    assert again["lag"] == figures["lag"]


def test_a_report_counts_each_outstanding_message_once_and_only_successes_as_successes(
    spark: SparkSession, shop: Shop, tmp_path: Path
) -> None:
    queue = shop.queue(retry="in_order", retryDelay=600_000)
    shop.push(queue, [{"id": i} for i in range(1, 11)], lanes=1)
    flag = tmp_path / "mended"

    def away(order: dict[str, int]) -> None:
        if order["id"] == 7 or (order["id"] == 1 and not flag.exists()):
            raise Defer(0 if order["id"] == 1 else 600, "the bank is away")

    def work() -> None:
        settle_batch(read_queue(spark, queue, "g", url=shop.dsn, streaming=False).transform(attempt(away)))

    work()
    assert shop.lag(queue) == (9, 1)
    flag.touch()
    work()
    assert shop.lag(queue) == (3, 1)
    shop.push(queue, [{"id": i} for i in range(30)], lanes=3)  # two of them are new to the group
    export(spark, shop.dsn, tmp_path / "files", queue=queue)
    live = write_report(spark, shop.dsn, tmp_path / "live.html", queue=queue)
    files = write_report(spark, tmp_path / "files", tmp_path / "files.html")
    for figures in (live, files):
        assert figures["lag"] == [
            {"queue": queue, "consumer_group": "g", "partitions": 3, "waiting": 33, "failing": 1}
        ]
        assert figures["retries_to_success"] == [{"attempts": 1, "count": 1}]
    for source in (shop.dsn, tmp_path / "files"):
        with pytest.raises(NotFound, match="queue not found: nosuch"):
            write_report(spark, source, tmp_path / "none.html", queue="nosuch")
    assert write_report(spark, tmp_path / "files", tmp_path / "files.html", queue=queue)["lag"]


@pytest.mark.parametrize("kind", ["parquet", "delta"])
def test_messages_of_any_queue_are_exported_and_never_of_two_databases_into_one_folder(
    spark: SparkSession, shop: Shop, tmp_path: Path, kind: str
) -> None:
    for name in ("my orders", "заказы-на-доставку-по-москве-и-московской-области", "a/b%20"):
        shop.push(f"{kind} {name}", [{"id": i} for i in range(3)])
        folder = tmp_path / str(len(name))
        for more in (3, 0):
            done = export(spark, shop.dsn, folder, queue=f"{kind} {name}", messages=True, kind=kind)
            assert done.rows["messages"] == more
        [part] = (folder / "messages").iterdir()
        assert len(list(part.rglob("*.parquet"))) >= 1
    state = folder / "_export.json"
    state.write_bytes(msgspec.json.encode(msgspec.json.decode(state.read_bytes()) | {"database": "another"}))
    with pytest.raises(Conflict, match="holds an export of another database"):
        export(spark, shop.dsn, folder, queue=f"{kind} {name}", messages=True, kind=kind)


def test_what_was_settled_behind_a_released_message_does_not_wait(spark: SparkSession, shop: Shop) -> None:
    queue = shop.queue(retry="parked")
    shop.push(queue, [{"id": i} for i in range(10)], lanes=1)
    rows = read_queue(spark, queue, "g", url=shop.dsn, streaming=False)
    settle_batch(rows.withColumn("outcome", F.expr("case when sequence = 2 then 'release' else 'ack' end")))
    assert shop.lag(queue) == (1, 0)


def test_the_alert_rules_have_the_runbooks_limits_and_all_are_evaluated(spark: SparkSession) -> None:
    import yaml

    groups = yaml.safe_load(Path(settled.__file__).with_name("observe").joinpath("alerts.yaml").read_text())
    wanted = {}
    for rule in groups["groups"][0]["rules"]:
        assert "[5m]" in rule["expr"]
        wanted[rule["alert"]] = (float(rule["expr"].rpartition(">")[2]), int(rule["for"].rstrip("m")))
    assert {rule.router: (rule.threshold, rule.minutes) for rule in RULES} == wanted
    start = datetime(2026, 1, 1, tzinfo=UTC)
    bad = [("failed", 25, 1, "a duplicate order"), ("dead", 6, 2, "tenant acme is not known")]
    columns = "at timestamp, kind string, messages bigint, attempts bigint, error string"
    rows = [(start + timedelta(minutes=m), *one) for m in range(30) for one in bad]
    found = evaluate(spark.createDataFrame(rows, columns), start + timedelta(days=1))
    # At 25 a minute, a rate over five minutes passes 10 in the third minute and 20 in the fifth.
    assert {a["name"]: a["fired"][0][11:16] for a in found} == {
        "HighRetryRate": "00:08",
        "RetriesExhausted": "00:02",
        "HighDeadLetterRate": "00:06",
        "HighRedeliveryRate": "00:15",
        "LastDeliveryFailed": "00:01",
        "TenantRejections": "00:06",
        "HighDuplicateRate": "00:13",
    }
    assert [a["worst_rate"] for a in found] == [25, 6, 6, 25, 6, 6, 25]


def test_an_alert_fires_only_when_the_limit_is_passed_long_enough() -> None:
    rule = Rule("Many", "", "", 10, 3, "")
    quiet = judge(rule, {1: 11, 2: 11, 3: 11, 5: 11, 6: 10, 7: 11}, last=99)
    assert (quiet["fired"], quiet["pending_since"], quiet["worst_rate"]) == ([], None, 11)
    pending = judge(rule, {5: 11, 6: 11, 7: 11, 8: 11, 9: 11}, last=7)
    assert (pending["fired"], pending["pending_since"]) == ([], "1970-01-01T00:05:00+00:00")
    fired = judge(rule, {**dict.fromkeys(range(5, 12), 11.0), **dict.fromkeys(range(20, 24), 12.0)}, last=99)
    assert [at[11:16] for at in fired["fired"]] == ["00:08", "00:23"]


def test_dead_letters_are_redriven_once(spark: SparkSession, shop: Shop, worked: str) -> None:
    chosen = Choice(queue=worked, error="has no card")
    assert redrive(shop.dsn, chosen, dry_run=True) == 10
    soon = datetime.now(UTC) + timedelta(hours=1)
    for narrower, count in (
        (replace(chosen, group="g"), 10),
        (replace(chosen, until=soon), 10),
        (replace(chosen, since=soon), 0),
    ):
        assert redrive(shop.dsn, narrower, dry_run=True) == count
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


def test_messages_that_are_purged_during_a_run_are_in_its_summary(
    spark: SparkSession, shop: Shop, checkpoint: str
) -> None:
    """Defect S20."""
    queue = shop.queue(retryLimit=3, retryDelay=600_000)
    shop.push(queue, [{"id": i} for i in range(50)])

    def purge(progress: Progress) -> None:
        if progress.failing == 5 and progress.acked:
            shop.push(queue, [{"id": 1}] * 3)
            shop.wait(shop.engine.clear_queue(queue))

    end = run_job(spark, handle, queue, "g", checkpoint, url=shop.dsn, until_empty=True, on_progress=purge)
    assert (end.waiting, end.failing, end.acked + end.dead + end.removed) == (0, 0, 53)
    assert end.removed >= 5


def test_the_command_line_says_what_is_wrong(shop: Shop, signals: None) -> None:
    runner = CliRunner()
    result = runner.invoke(app, ["run", "nonsense", "--queue", "q", "--group", "g", "--url", shop.dsn])
    assert (result.exit_code, "module:function" in result.output) == (2, True)
    result = runner.invoke(app, ["redrive", "--url", shop.dsn, "--queue", "no such queue", "--dry-run"])
    assert (result.exit_code, result.output) == (1, "settled: queue not found: no such queue\n")


def test_a_condition_that_spark_refuses_is_told_in_one_line(
    spark: SparkSession, shop: Shop, worked: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(spark), "stop", lambda _: None)

    def told(where: str) -> str:
        command = ["redrive", "--url", shop.dsn, "--queue", worked, "--where", where, "--dry-run"]
        result = CliRunner().invoke(app, command)
        start, text = result.output.splitlines()
        assert (result.exit_code, start.startswith("starting Spark")) == (1, True)
        return text

    assert told("attempts >").startswith("settled: [PARSE_SYNTAX_ERROR] Syntax error")
    assert "`nosuch`" in told("nosuch > 3")


def test_the_demonstration_balances_its_books(
    spark: SparkSession, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("settled.spark.jobs.demo.session", lambda *_, **__: spark)
    monkeypatch.setattr(type(spark), "stop", lambda _: None)
    assert demo(4_000, tmp_path, tmp_path / "report.html")
    last = capsys.readouterr().out.strip().splitlines()[-1]
    assert last.startswith("pushed=4000 acked=")
    assert last.endswith(" lost=0")


def test_a_run_goes_on_when_a_process_starts_too_slowly(
    spark: SparkSession, shop: Shop, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    usual = spark.sparkContext.pythonExec
    slow = tmp_path / "python"
    # The process for the offsets takes longer to start than Spark waits, once.
    slow.write_text(
        "#!/bin/sh\n"
        f'case "$*" in *streaming_source_runner*) mkdir {tmp_path}/slept 2>/dev/null && sleep 15 ;; esac\n'
        f'exec "{usual}" "$@"\n'
    )
    slow.chmod(0o755)
    queue = shop.queue()
    shop.push(queue, [{"id": i} for i in range(10)])
    spark.sparkContext.pythonExec = str(slow)
    spark.dataSource.register(SettledSource)
    try:
        done = run_job(
            spark,
            handle,
            queue,
            "g",
            str(tmp_path / "checkpoint"),
            url=shop.dsn,
            until_empty=True,
            policy={"on_error": "ack"},
        )
    finally:
        spark.sparkContext.pythonExec = usual
        spark.dataSource.register(SettledSource)
    assert (done.messages, done.acked, done.dead) == (10, 9, 1)
    assert (tmp_path / "slept").exists()
    assert "did not start within Spark's 10 s" in caplog.text


@pytest.mark.parametrize("told", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_all_its_processes_ends_a_run_with_its_summary(
    shop: Shop, tmp_path: Path, told: signal.Signals
) -> None:
    """Also defect S20: no EOFError of Spark's own threads."""
    queue = shop.queue()
    shop.push(queue, [{"id": i} for i in range(20)])
    (tmp_path / "clerk.py").write_text("def note(order: dict[str, int]) -> None: pass\n")
    progress = tmp_path / "progress"
    command = [sys.executable, "-m", "settled", "pipeline", "run", "clerk:note", "--master", "local[1,4]"]
    with progress.open("w") as errors:
        process = subprocess.Popen(
            [*command, "--url", shop.dsn, "--queue", queue, "--group", "g"],
            cwd=tmp_path, stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True,
        )  # fmt: skip
        try:
            until = time.monotonic() + 120
            while "acked 20" not in progress.read_text():
                assert process.poll() is None, progress.read_text()
                assert time.monotonic() < until, progress.read_text()
                time.sleep(0.1)
            every = psutil.Process(process.pid)
            for one in (*every.children(recursive=True), every):  # its JVM too, as systemd does
                with suppress(psutil.NoSuchProcess):
                    one.send_signal(told)
            out, _ = process.communicate(timeout=60)
        finally:
            process.kill()
            process.wait()
    assert (process.returncode, out) == (
        0,
        "batches=1 acked=20 retried=0 dead=0 released=0 pushed=0 waiting=0 failing=0 removed=0\n",
    ), progress.read_text()
    assert "Traceback" not in progress.read_text()
