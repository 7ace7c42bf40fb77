"""The pipeline on Spark over JetStream: the same columns, outcomes and guarantees as over the queue."""

from __future__ import annotations

import asyncio
import os
import random
import re
import signal
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812
from typer.testing import CliRunner

import settled.spark
from settled import Reject
from settled.queue.errors import BadRequest
from settled.spark import attempt, read_queue, settle_batch, settle_each, to_parquet
from settled.spark.command import app
from settled.spark.jobs.report import write_report
from tests.nats.conftest import until
from tests.nats.servers import Server, server
from tests.router.conftest import config, dead_letters, is_settled, router_on
from tests.spark.conftest import Run, finished
from tests.spark.stall import Stall
from tests.spark.test_crashes import charge, driver

GUIDE = Path(__file__).parents[2] / "docs" / "spark.md"


@pytest.fixture(scope="module")
def nats_server() -> Iterator[Server]:
    with server() as one:
        yield one


@pytest.fixture(scope="module")
def stall(nats_server: Server) -> Iterator[Stall]:
    stall = Stall(nats_server.url)
    yield stall
    stall.close()


class Order(msgspec.Struct):
    id: int


def check(order: Order) -> dict[str, int]:
    if order.id == 3:
        raise Reject("no card")
    if order.id == 4:
        raise OSError("bank is away")
    return {"invoice": order.id}


def test_a_stream_is_attempted_settled_and_pushed_on(
    spark: SparkSession, stall: Stall, run: Run, tmp_path: Path
) -> None:
    stream, target = stall.stream(), stall.stream()
    stall.consumer(stream, "billing", max_deliver=2, filter_subject=f"{stream}.new", backoff=[0.01])
    stall.put(stream, [{"id": i} for i in range(10)], tenant="acme")
    stall.put(stream, [b"nonsense"])
    stall.put(stream, [{"id": 99}], "other")

    def orders(consumer: str = "billing") -> DataFrame:
        return read_queue(spark, url=stall.url, stream=stream, consumer=consumer)

    run(orders().transform(attempt(check)), to=f"{target}.invoices")
    assert stall.totals(stream, "billing") == {
        "batches": 1, "messages": 11, "acked": 8, "retried": 1, "dead": 2, "pushed": 8,
    }  # fmt: skip
    # A deleted checkpoint costs nothing: the place is kept beside the stream. The retry is due now.
    run(orders().transform(attempt(check)), to=f"{target}.invoices", where=str(tmp_path / "new"))
    assert stall.totals(stream, "billing")["dead"] == 3
    pushed = [msgspec.json.decode(m.data)["invoice"] for m in stall.all(target)]
    assert pushed == [0, 1, 2, 5, 6, 7, 8, 9]
    letters = {one.headers["settled-error"]: one.headers for one in stall.letters(stream, "billing")}
    assert len(letters) == 3
    assert letters["OSError: bank is away"]["settled-attempts"] == "2"
    assert letters["no card"]["tenant"] == "acme"
    with pytest.raises(Exception, match="the checkpoint belongs to group 'billing' of queue"):
        run(orders("audit").transform(attempt(check)), where=str(tmp_path / "new"))


def test_a_batch_read_looks_at_rows_and_settles_them_by_sql(spark: SparkSession, stall: Stall) -> None:
    stream = stall.stream()
    stall.put(stream, [{"id": i} for i in range(6)], "a", **{"Nats-Msg-Id": "a"})
    stall.put(stream, [{"id": i} for i in range(6)], "b", tenant="acme")
    looked = spark.read.format("settled").options(url=stall.url, stream=stream, subject=f"{stream}.a").load()
    [row] = looked.collect()
    assert (row.queue, row.partition, row.sequence, row.message_id) == (stream, f"{stream}.a", 1, "a")
    assert (row.attempt, bytes(row.payload), row.headers) == (1, b'{"id":0}', {"Nats-Msg-Id": "a"})
    assert row.created_at.year >= 2025
    for _ in range(2):
        rows = read_queue(
            spark, url=stall.url, stream=stream, consumer="sql", payload="id bigint", streaming=False
        )
        settle_batch(rows.withColumn("outcome", rows.payload.id.isin([4, 5]).cast("string")).replace(
            {"true": "dead", "false": "ack"}, subset=["outcome"]
        ))  # fmt: skip
    assert stall.totals(stream, "sql") == {"batches": 1, "messages": 7, "acked": 5, "dead": 2}


def test_wrong_combinations_are_explained(spark: SparkSession, stall: Stall) -> None:
    stream = stall.stream()
    for options, text in (
        ({"url": stall.url, "stream": stream}, "consumer: a pipeline settles for one"),
        ({"url": stall.url, "consumer": "g"}, "name the stream"),
        ({"url": "postgresql://x", "stream": stream, "consumer": "g"}, "is for a stream on NATS"),
        ({"url": "http://x", "stream": stream, "consumer": "g"}, "must be the queue's database"),
        ({"url": stall.url, "stream": stream, "consumer": "g", "backoff": [-1]}, "must be seconds"),
    ):
        with pytest.raises(BadRequest, match=text):
            read_queue(spark, **options)  # type: ignore[arg-type]
    rows = read_queue(spark, url=stall.url, stream=stream, consumer="g").transform(attempt(check))
    for to, text in (
        (f"{stream}.out", "would go round for ever"),
        ("nobody", "no stream takes this subject"),
    ):
        with pytest.raises(BadRequest, match=text):
            settle_batch(rows, to=to)


def test_a_driver_killed_at_every_point_in_turn_loses_and_doubles_nothing(
    spark: SparkSession, stall: Stall, run: Run, tmp_path: Path
) -> None:
    stream, target = stall.stream(), stall.stream()
    stall.consumer(stream, max_deliver=2, backoff=[0.01])
    stall.put(stream, [{"id": i} for i in range(1000)])
    plan: dict[str, Any] = {
        "url": stall.url, "queue": stream, "to": f"{target}.out", "checkpoint": str(tmp_path / "checkpoint"),
    }  # fmt: skip
    for point in ("claim", "tasks", "staging", "settled"):
        (tmp_path / point).mkdir()
        with driver({**plan, "point": point, "folder": str(tmp_path / point)}) as process:
            assert process.wait(180) == -signal.SIGKILL, process.output()  # type: ignore[attr-defined]
        assert (tmp_path / point / "killed").exists()
    assert stall.totals(stream)["batches"] == 1
    for _ in range(6):
        df = read_queue(spark, url=stall.url, stream=stream, consumer="g").transform(attempt(charge))
        run(df, to=plan["to"], where=plan["checkpoint"])
        if stall.books(stream).cursor == 1001 and not stall.books(stream).retries:
            break
    good = [i for i in range(1000) if i % 10 != 7]
    assert sorted(msgspec.json.decode(m.data)["invoice"] for m in stall.all(target)) == good
    letters = stall.letters(stream)
    assert {one.headers["settled-attempts"] for one in letters} == {"2"}
    assert sorted(int(one.headers["settled-sequence"]) for one in letters) == [
        i + 1 for i in range(1000) if i % 10 == 7
    ]
    totals = stall.totals(stream)
    assert (totals["acked"], totals["dead"], totals["retried"], totals["pushed"]) == (900, 100, 100, 900)


def test_each_message_has_one_result_after_kills_with_failures_by_chance(
    spark: SparkSession, stall: Stall, run: Run, tmp_path: Path
) -> None:
    """Defect S17."""
    stream, target = stall.stream(), stall.stream()
    stall.consumer(stream, max_deliver=-1, backoff=[0.01])
    stall.put(stream, [{"id": i} for i in range(800)])
    plan: dict[str, Any] = {
        "url": stall.url, "queue": stream, "to": f"{target}.out", "checkpoint": str(tmp_path / "checkpoint"),
        "point": "staging", "chance": 0.2,
    }  # fmt: skip
    for number in range(2):
        (tmp_path / str(number)).mkdir()
        with driver({**plan, "folder": str(tmp_path / str(number))}) as process:
            assert process.wait(180) == -signal.SIGKILL, process.output()  # type: ignore[attr-defined]
    assert len(stall.all(target)) > 300  # published, and not settled

    def by_chance(order: dict[str, Any]) -> dict[str, Any]:
        if random.random() < 0.2:
            raise OSError("the bank is away")
        return {"invoice": order["id"]}

    for _ in range(20):
        df = read_queue(spark, url=stall.url, stream=stream, consumer="g").transform(attempt(by_chance))
        run(df, to=plan["to"], where=plan["checkpoint"])
        if stall.books(stream).cursor == 801 and not stall.books(stream).retries:
            break
    assert sorted(msgspec.json.decode(m.data)["invoice"] for m in stall.all(target)) == list(range(800))
    assert stall.totals(stream)["acked"] == 800


def test_a_task_that_is_repeated_doubts_what_it_may_have_published(
    spark: SparkSession, stall: Stall, run: Run, tmp_path: Path
) -> None:
    """Defect S17: a process dies after 1,000 results are published, and one of those fails next time."""
    stream, target, killed = stall.stream(), stall.stream(), tmp_path / "killed"
    stall.consumer(stream, max_deliver=-1, backoff=[0.01])
    stall.put(stream, [{"id": i} for i in range(1500)])

    def fragile(order: dict[str, Any]) -> dict[str, Any]:
        if order["id"] == 1200 and not killed.exists():
            killed.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if order["id"] == 5 and killed.exists() and not (tmp_path / "failed").exists():
            (tmp_path / "failed").touch()
            raise OSError("the bank is away")
        return {"invoice": order["id"]}

    for doubtful in (1, 0):
        rows = read_queue(spark, url=stall.url, stream=stream, consumer="g", tasks=1)
        run(rows.transform(attempt(fragile)), to=f"{target}.out", where=str(tmp_path / "checkpoint"))
        assert [(one.first, one.end) for one in stall.books(stream).doubts] == [(6, 7)] * doubtful
    results = [msgspec.json.decode(m.data)["invoice"] for m in stall.all(target)]
    assert sorted(results) == list(range(1500))


def result(tenant: str, provider: str) -> dict[str, Any]:
    return {
        "version": "1", "status": "success", "provider_id": provider, "tenant_id": tenant, "timestamp": 1,
        "job": {"type": "text"}, "assignment_id": str(uuid.uuid4()),
    }  # fmt: skip


async def route(url: str) -> None:
    """Three results through a router: one is handled, one is of a tenant it does not serve, one is none."""
    # A second to settle each delivery: on a slow machine the reason would else be that it took too long.
    settings = config(url, tenants=("acme",), nats_js_max_deliver=3, nats_js_backoff_seconds=(1.0, 1.0, 1.0))
    async with router_on(settings) as router:
        jetstream = router.transport.connection.jetstream
        for body in (result("acme", "p1"), result("globex", "p2"), {"version": "1", "tenant_id": "acme"}):
            await jetstream.publish(router.config.result_subject, msgspec.json.encode(body))

        async def done() -> bool:
            return len(await dead_letters(router)) == 2 and await is_settled(router)

        await until(done, 60)


def test_the_guides_examples_on_streams_run_and_report_whose_messages_came_again(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with server() as one:
        stall = Stall(one.url)
        check_the_guide(spark, stall, tmp_path, monkeypatch)
        stall.close()


def check_the_guide(
    spark: SparkSession, stall: Stall, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asyncio.run(route(stall.url))
    page = tmp_path / "router.html"
    alone = write_report(spark, stall.url, page, dead_letters=["CAF_DLQ"])
    assert alone["totals"] == {"acked": None, "retried": None, "released": None, "dead": 2}
    assert alone["only_dead_letters"] == [{"queue": "CAF_RESULTS", "consumer_group": "router-results"}]
    assert alone["from"] is not None
    alerts = {alert["name"]: alert for alert in alone["alerts"]}
    assert not alerts["HighRedeliveryRate"]["known"]
    assert alerts["RetriesExhausted"]["worst_rate"] > 0
    assert alerts["RetriesExhausted"]["router_alert"] == "RouterCAFRetryExhausted"
    assert "All streams" in page.read_text()
    for name, subjects in (("ORDERS", ["orders.>"]), ("INVOICES", ["invoices.>"])):
        stall.call(lambda js, n=name, s=subjects: js.add_stream(name=n, subjects=s, allow_direct=True))
    for i in range(4):
        body = msgspec.json.encode({"id": i, "amount": i - 1})
        stall.call(lambda js, body=body: js.publish("orders.new", body))
    blocks = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.S)
    assert len(blocks) == 2
    monkeypatch.setattr(settled.spark, "session", lambda: spark, raising=False)
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "guide"}
    for block in blocks:
        here = block.replace('"checkpoints/', f'"{tmp_path}/checkpoints/')
        exec(compile(here.replace("nats://127.0.0.1:4222", stall.url), str(GUIDE), "exec"), names)
    assert [msgspec.json.decode(m.data)["order"] for m in stall.all("INVOICES")] == [1, 2, 3]
    assert stall.totals("ORDERS", "billing")["dead"] == 1
    end = names["end"]
    assert (end.messages, end.acked, end.retried, end.dead, end.waiting) == (5, 1, 2, 2, 0)
    figures = names["figures"]
    rows = {(r["consumer_group"], r["tenant"], r["provider"]): r for r in figures["owners"]}
    counts = {key: (r["redelivered"], r["exhausted"], r["rejected"]) for key, r in rows.items()}
    assert counts == {
        ("bookkeeping", "globex", "p2"): (2, 1, 0),
        ("router-results", "globex", "p2"): (2, 1, 0),
        ("bookkeeping", "acme", ""): (0, 0, 1),
        ("router-results", "acme", ""): (0, 0, 1),
        ("billing", "", ""): (0, 0, 1),
    }
    assert rows["router-results", "globex", "p2"]["reason"] == "tenant_not_allowed"
    assert rows["bookkeeping", "globex", "p2"]["reason"] == "PermissionError: tenant_not_allowed"
    assert figures["totals"] == {"acked": 4, "retried": 2, "released": 0, "dead": 5}
    assert figures["dead_letters"]["total"] == 5
    assert figures["only_dead_letters"] == alone["only_dead_letters"]
    assert {r["queue"] for r in figures["lag"]} >= {"ORDERS", "CAF_RESULTS"}
    assert "By tenant, provider and reason" in (tmp_path / "report.html").read_text()


def test_the_command_line_names_what_does_not_go_together(stall: Stall) -> None:
    for wrong, text in (
        (["--url", stall.url, "--queue", "q", "--group", "g"], "--queue does not go with a nats:// address"),
        (["--url", stall.url, "--stream", "S"], "--consumer is missing for a nats:// address"),
        (["--url", "postgresql://x", "--stream", "S", "--consumer", "c"], "give --queue and --group"),
    ):
        result = CliRunner().invoke(app, ["run", "shop:charge", *wrong])
        assert (result.exit_code, text in result.output) == (2, True), result.output


def test_a_message_may_have_several_results_and_one_that_has_no_subject_is_a_dead_letter(
    spark: SparkSession, stall: Stall, run: Run, tmp_path: Path
) -> None:
    stream, target = stall.stream(), stall.stream()
    stall.put(stream, [{"id": i, "items": [1, 2, 3]} for i in range(4)])
    schema = "id bigint, items array<bigint>"
    rows = read_queue(spark, url=stall.url, stream=stream, consumer="b", payload=schema)
    rows = rows.withColumn("result", F.explode("payload.items"))
    for _ in range(2):
        run(rows, to=f"{target}.out")
    totals = stall.totals(stream, "b")
    assert (totals["acked"], totals["pushed"]) == (4, 12)
    assert sorted(m.data for m in stall.all(target)) == sorted([b"1", b"2", b"3"] * 4)

    parts = ["k", "eu.k", "a b", "", "a..b", "*", "x\r\ny", "k\n", None]
    stall.put(stream, [{"part": part} for part in parts], "new")
    rows = read_queue(spark, url=stall.url, stream=stream, consumer="c", payload="part string")
    rows = (
        rows.where("sequence > 4")
        .withColumn("result", F.lit(1))
        .withColumn("to_partition", F.col("payload.part"))
    )
    run(rows, to=f"{target}.parts", where=str(tmp_path / "parts"))
    subjects = {m.subject for m in stall.all(target)} - {f"{target}.out"}
    assert subjects == {f"{target}.parts{rest}" for rest in ("", ".k", ".eu.k")}
    errors = [one.headers["settled-error"] for one in stall.letters(stream, "c")]
    assert len(errors) == 6
    assert "to_partition: must be tokens of a subject, without blanks, '*' and '>', got a b" in errors


def test_a_stream_is_written_to_a_table(spark: SparkSession, stall: Stall, run: Run, tmp_path: Path) -> None:
    stream = stall.stream()
    stall.put(stream, [{"id": i} for i in range(6)])
    rows = read_queue(spark, url=stall.url, stream=stream, consumer="t").transform(attempt(check))
    writer = settle_each(rows, to_parquet(str(tmp_path / "table")))
    finished(writer.option("checkpointLocation", str(tmp_path / "checkpoint")))
    found = spark.read.parquet(str(tmp_path / "table"))
    assert sorted(row.result for row in found.collect()) == [f'{{"invoice":{i}}}' for i in (0, 1, 2, 5)]
