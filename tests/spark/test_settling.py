"""Rows are settled one way each, by the same handlers and the same table as in a pump."""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.types import ArrayType, LongType

from settled import App, ConfigurationError, Defer, DontAck, Invalid, Message, Reject, current_message
from settled.handlers import defer_on_error, reject_on_error
from settled.policy import PolicyOptions
from settled.queue.errors import BadRequest, Conflict, QueueFull
from settled.queue.types import PopRequest
from settled.spark import attempt, read_queue, settle, settle_batch, sink
from settled.spark.frames import Reading
from settled.testing import Rehearsal
from tests.spark.conftest import Run, Shop, finished


class Order(msgspec.Struct):
    id: int
    kind: str = "good"


def charge(order: Order) -> dict[str, int] | None:
    match order.kind:
        case "flaky":
            message = current_message()
            if message is not None and message.attempt == 1:
                raise ConnectionError("bank away")
        case "poison":
            raise Reject("no such card")
        case "broken":
            raise ZeroDivisionError("always")
        case "invalid":
            raise Invalid("negative amount")
        case "later":
            raise Defer(3600, "not before tomorrow")
        case "blocked":
            raise DontAck("bank is closed")
        case "quiet":
            return None
    return {"invoice": order.id}


def orders(kinds: str) -> list[Any]:
    return [Order(i, kind) if kind != "nonsense" else b"{nonsense" for i, kind in enumerate(kinds.split())]


def attempted(
    mode: str, spark: SparkSession, shop: Shop, queue: str, handler: Any = charge, **more: Any
) -> DataFrame:
    policy = {
        name: more.pop(name) for name in list(more) if name in {"result", *PolicyOptions.__annotations__}
    }
    df = read_queue(spark, queue, "g", url=shop.dsn, **more)
    if mode == "udf":
        df = df.where("true")  # what is changed is not read in another way
    return df.transform(attempt(handler, **policy))


@pytest.mark.parametrize("mode", ["udf", "fused"])
def test_every_outcome_is_settled_its_own_way(spark: SparkSession, shop: Shop, run: Run, mode: str) -> None:
    queue = shop.queue(retryLimit=3)
    shop.push(queue, orders("good flaky poison nonsense invalid later quiet blocked broken good"), lanes=1)
    run(attempted(mode, spark, shop, queue), queue + "-out")
    assert shop.totals(queue) == {
        "messages": 10,
        "acked": 3,
        "retried": 3,
        "dead": 3,
        "released": 1,
        "pushed": 2,
        "batches": 1,
    }
    for _ in range(2):
        settle_batch(attempted(mode, spark, shop, queue, streaming=False), to=queue + "-out")
    assert shop.pop_all(queue + "-out") == {"p0": [{"invoice": 0}, {"invoice": 9}, {"invoice": 1}]}
    dead = {
        msgspec.json.decode(d.payload)["id"] if d.payload[1:2] != b"n" else 3: d for d in shop.dead(queue)
    }
    assert {i: d.attempts for i, d in dead.items()} == {2: 1, 3: 1, 4: 1, 8: 3}
    assert dead[2].error == "no such card"
    assert dead[3].error is not None
    assert "malformed" in dead[3].error
    assert dead[8].error == "ZeroDivisionError: always"
    assert dead[2].group == "g"
    assert dead[2].partition == "p0"
    assert dead[2].payload == b'{"id":2,"kind":"poison"}'
    assert shop.lag(queue) == (0, 2)  # the blocked one and the later one stay away for a while


@pytest.mark.parametrize("mode", ["udf", "fused"])
def test_on_a_queue_in_order_a_failed_row_holds_back_its_lane(
    spark: SparkSession, shop: Shop, run: Run, mode: str
) -> None:
    queue = shop.queue(retry="in_order", retryLimit=5)
    shop.push(queue, orders("good good good good flaky flaky good good poison good good good"), lanes=2)
    run(attempted(mode, spark, shop, queue), queue + "-out")
    assert shop.totals(queue) == {
        "messages": 12,
        "acked": 4,
        "retried": 2,
        "released": 6,
        "pushed": 4,
        "batches": 1,
    }
    settle_batch(attempted(mode, spark, shop, queue, streaming=False), to=queue + "-out")
    found = shop.pop_all(queue + "-out")
    assert [v["invoice"] for v in found["p0"]] == [0, 2, 4, 6, 10]
    assert [v["invoice"] for v in found["p1"]] == [1, 3, 5, 7, 9, 11]
    assert shop.lag(queue) == (0, 0)
    assert [d.attempts for d in shop.dead(queue)] == [1]


@pytest.mark.parametrize("order", ["parked", "in_order"])
def test_a_message_that_is_not_acked_stays_away_for_the_delay_and_no_attempt_is_counted(
    spark: SparkSession, shop: Shop, order: str
) -> None:
    queue = shop.queue(retry=order)
    shop.push(queue, orders("good blocked good"), lanes=1)

    def read() -> DataFrame:
        return attempted("fused", spark, shop, queue, dont_ack_delay=3600, streaming=False)

    settle_batch(read())
    behind = 0 if order == "parked" else 1
    seen = {"messages": 3, "acked": 2 - behind, "released": 1 + behind, "batches": 1}
    assert shop.totals(queue) == seen
    settle_batch(read())
    assert shop.totals(queue) == seen  # it is not due, and in order nothing passes it

    def come_due(connection: Any) -> list[Any]:
        lanes = "select l.id from lane l join queue q on q.id = l.queue_id where q.name = %s"
        at = "clock_timestamp() - interval '1 s'"
        connection.execute(f"update consumer set next_due = {at} where lane_id in ({lanes})", (queue,))
        update = f"update exception set due = {at} where lane_id in ({lanes}) returning attempts"
        return connection.execute(update, (queue,)).fetchall()

    assert shop.link.run(come_due) == [{"attempts": 0}]
    rows = read().select("attempt", "outcome", "delay").collect()
    assert tuple(rows[0]) == (1, "release", 3600.0)
    assert len(rows) == 1 + behind


def test_a_reader_may_give_up_the_order_of_a_queue(spark: SparkSession, shop: Shop) -> None:
    queue = shop.queue(retry="in_order", retryLimit=5)
    shop.push(queue, orders("good flaky good good flaky good"), lanes=1)
    settle_batch(
        attempted("fused", spark, shop, queue, ordering="parked", streaming=False), to=queue + "-out"
    )
    assert shop.totals(queue) == {"messages": 6, "acked": 4, "retried": 2, "pushed": 4, "batches": 1}
    settle_batch(attempted("fused", spark, shop, queue, ordering="none", streaming=False), to=queue + "-out")
    assert [v["invoice"] for v in shop.pop_all(queue + "-out")["p0"]] == [0, 2, 3, 5, 1, 4]
    assert shop.lag(queue) == (0, 0)


def test_the_last_attempt_on_a_queue_in_order_loses_nothing_behind_it(
    spark: SparkSession, shop: Shop
) -> None:
    queue = shop.queue(retry="in_order", retryLimit=2)
    shop.push(queue, orders("broken good good broken good"), lanes=1)
    for _ in range(5):
        settle_batch(attempted("fused", spark, shop, queue, streaming=False), to=queue + "-out")
    assert [v["invoice"] for v in shop.pop_all(queue + "-out")["p0"]] == [1, 2, 4]
    assert sorted(d.attempts for d in shop.dead(queue)) == [2, 2]
    assert shop.lag(queue) == (0, 0)


@pytest.mark.parametrize("pushed_on", [False, True])
def test_rows_nobody_will_see_are_not_even_sent_to_spark(
    spark: SparkSession, shop: Shop, run: Run, pushed_on: bool
) -> None:
    queue = shop.queue(retryLimit=2)
    shop.push(queue, orders("good poison flaky nonsense " + "good " * 46), lanes=3)
    for _ in range(2):
        query = run(attempted("fused", spark, shop, queue), queue + "-out" if pushed_on else None)
        assert [p["numInputRows"] for p in query.recentProgress] == [1]  # by each task: what it staged
    totals = {"messages": 51, "acked": 48, "retried": 1, "dead": 2, "batches": 2}
    assert shop.totals(queue) == totals | ({"pushed": 48} if pushed_on else {})
    if pushed_on:
        assert sum(map(len, shop.pop_all(queue + "-out").values())) == 48
    assert {d.payload for d in shop.dead(queue)} == {b'{"id":1,"kind":"poison"}', b"{nonsense"}
    assert shop.lag(queue) == (0, 0)


@pytest.mark.parametrize("mode", ["udf", "fused"])
def test_what_is_not_acknowledged_is_not_pushed_on_though_it_has_a_result(
    spark: SparkSession, shop: Shop, run: Run, mode: str
) -> None:
    queue = shop.queue()
    shop.push(queue, orders("good good"))
    run(attempted(mode, spark, shop, queue, auto_ack=False), queue + "-out")
    assert shop.totals(queue) == {"messages": 2, "released": 2, "batches": 1}
    assert shop.lag(queue) == (0, 2)
    assert shop.pop_all(queue + "-out") == {}


def test_a_handler_too_large_for_every_task_stays_a_udf(spark: SparkSession, shop: Shop, run: Run) -> None:
    large = bytes(range(256)) * 8192

    def weigh(order: Order) -> int:
        return len(large) + order.id

    queue = shop.queue()
    shop.push(queue, orders("good good"), lanes=1)
    df = attempted("fused", spark, shop, queue, weigh)
    assert Reading.of(attempted("fused", spark, shop, queue)) is not None
    assert Reading.of(df) is None
    run(df, queue + "-out")
    assert shop.pop_all(queue + "-out") == {"p0": [2**21, 2**21 + 1]}


def test_rows_of_pure_sql_settle_by_their_columns(spark: SparkSession, shop: Shop, run: Run) -> None:
    queue = shop.queue()
    shop.push(queue, [{"id": i, "amount": i - 2} for i in range(6)], lanes=1)
    df = read_queue(spark, queue, "g", url=shop.dsn, payload="id bigint, amount bigint")
    df = (
        df.withColumn(
            "outcome",
            F.expr("case when payload.amount < 0 then 'dead' when payload.amount = 0 then 'retry' end"),
        )
        .withColumn("error", F.lit("no amount"))
        .withColumn("delay", F.lit(3600.0))
        .withColumn("result", F.struct("payload.id"))
    )
    run(df, queue + "-out")
    assert shop.pop_all(queue + "-out") == {"p0": [{"id": 3}, {"id": 4}, {"id": 5}]}
    assert [(d.error, d.payload) for d in sorted(shop.dead(queue), key=lambda d: d.payload)] == [
        ("no amount", b'{"id":0,"amount":-2}'),
        ("no amount", b'{"id":1,"amount":-1}'),
    ]
    assert shop.lag(queue) == (0, 1)


@dataclass
class Plain:
    id: int
    tags: list[str]
    note: str | None = None


class Invoice(msgspec.Struct):
    order: int
    lines: list[str]


@pytest.mark.parametrize("kind", [Plain, "id bigint, tags array<string>, note string"])
def test_a_payload_is_parsed_to_its_schema_and_a_bad_one_is_invalid(
    spark: SparkSession, shop: Shop, kind: Any
) -> None:
    queue = shop.queue()
    shop.push(queue, [{"id": 1, "tags": ["a"]}, {"id": "x", "tags": 3}, b"nope"], lanes=1)
    df = read_queue(spark, queue, "g", url=shop.dsn, payload=kind, streaming=False)
    rows = df.select(
        "payload.id", "payload.tags", "outcome", F.col("error").isNotNull().alias("why")
    ).collect()
    assert next(tuple(r) for r in rows) == (1, ["a"], "ack", False)
    assert [(r.outcome, r.why) for r in rows][1:] == [("invalid", True)] * 2
    settle_batch(df)
    assert shop.totals(queue)["dead"] == 2
    assert {d.payload for d in shop.dead(queue)} == {b"nope", b'{"id":"x","tags":3}'}


def test_a_result_may_have_a_schema(spark: SparkSession, shop: Shop) -> None:
    queue = shop.queue()
    shop.push(queue, [{"id": 4, "tags": ["a", "b"]}], lanes=1)

    def bill(plain: Plain) -> Invoice:
        return Invoice(plain.id, plain.tags)

    df = read_queue(spark, queue, "g", url=shop.dsn, streaming=False).transform(attempt(bill, result=Invoice))
    assert [tuple(r) for r in df.select("outcome", "result.order", "result.lines").collect()] == [
        ("ack", 4, ["a", "b"])
    ]
    settle_batch(df, to=queue + "-out")
    assert shop.pop_all(queue + "-out") == {"p0": [{"order": 4, "lines": ["a", "b"]}]}


@pytest.mark.parametrize("mode", ["udf", "fused"])
def test_an_explicit_handler_settles_its_message(
    spark: SparkSession, shop: Shop, run: Run, mode: str
) -> None:
    queue = shop.queue()

    def handle(message: Message[Order]) -> dict[str, Any] | None:
        match message.payload.kind:
            case "good":
                message.ack()
                message.nak()  # the first one counts
                return {
                    "lane": message.metadata.lane,
                    "attempt": message.attempt,
                    "tenant": message.headers["tenant"],
                }
            case "poison":
                message.term("broken glass")
            case "flaky":
                message.nak(3600)
        return None

    shop.push(queue, orders("good poison flaky forgotten"), lanes=1, headers={"tenant": "acme"})
    run(attempted(mode, spark, shop, queue, handle), queue + "-out")
    assert shop.totals(queue) == {
        "messages": 4,
        "acked": 1,
        "retried": 1,
        "dead": 1,
        "released": 1,
        "pushed": 1,
        "batches": 1,
    }
    assert shop.pop_all(queue + "-out") == {"p0": [{"lane": "p0", "attempt": 1, "tenant": "acme"}]}
    [dead] = shop.dead(queue)
    assert (dead.error, dead.headers) == ("broken glass", {"tenant": "acme"})


def by_hand(order: Order) -> dict[str, int]:
    """Settles its message itself, though it is given the payload."""
    message = current_message()
    assert message is not None
    assert not message.settled
    match order.kind:
        case "terminated":
            message.term("by hand")
            message.ack()  # too late
        case "again":
            message.nak(3600)
        case "given-back":
            message.release()
        case "acked-then-broken":
            message.ack()
            raise ZeroDivisionError
    return {"invoice": order.id}


@pytest.mark.parametrize("mode", ["udf", "fused"])
def test_what_a_handler_of_payloads_settles_by_hand_stands_as_in_a_pump(
    spark: SparkSession, shop: Shop, run: Run, mode: str
) -> None:
    queue, kinds = shop.queue(), ["good", "terminated", "again", "given-back", "acked-then-broken", "good"]
    app = App()
    app.subscriber("orders")(by_hand)
    rehearsal = Rehearsal(app)
    published = [rehearsal.publish("orders", Order(i, kinds[i])).id for i in (0, 1, 4)]
    rehearsal.run_until_idle()
    assert [rehearsal.history(id_) for id_ in published] == [["ack"], ["reject"], ["ack"]]
    shop.push(queue, orders(" ".join(kinds)), lanes=1)
    run(attempted(mode, spark, shop, queue, by_hand), queue + "-out")
    assert shop.totals(queue) == {
        "messages": 6, "acked": 3, "dead": 1, "retried": 1, "released": 1, "pushed": 2, "batches": 1,
    }  # fmt: skip
    assert [(d.transaction_id != "", d.error) for d in shop.dead(queue)] == [(True, "by hand")]
    [pushed] = shop.pop_all(queue + "-out").values()
    assert pushed == [{"invoice": 0}, {"invoice": 5}]


@pytest.mark.parametrize("mode", ["udf", "fused"])
def test_a_handler_of_payloads_may_ask_for_its_message(spark: SparkSession, shop: Shop, mode: str) -> None:
    queue = shop.queue()
    shop.push(queue, [Order(i) for i in range(30)], lanes=3)
    # What waited for its retry is read by itself, far from the rest of its partition.
    first = read_queue(spark, queue, "g", url=shop.dsn, streaming=False)
    settle_batch(first.withColumn("outcome", F.when(F.col("sequence") % 4 == 1, "retry")))
    shop.push(queue, [Order(i) for i in range(30, 60)], lanes=3)

    def facts(order: Order) -> dict[str, Any]:
        message = current_message()
        assert message is not None
        at = message.metadata.timestamp
        return {
            "id": message.id,
            "lane": message.lane,
            "attempt": message.attempt,
            "at": at,
            "order": order.id,
        }

    df = attempted(mode, spark, shop, queue, facts, streaming=False)
    at = F.unix_micros("created_at").alias("at")
    rows = df.select("message_id", "partition", "attempt", at, "result", "payload").collect()
    assert {row["attempt"] for row in rows} == {1, 2}
    assert len({row["message_id"] for row in rows}) == len(rows) > 30
    for row in rows:
        told = msgspec.json.decode(row["result"])
        order = msgspec.json.decode(row["payload"])["id"]
        assert (told["id"], told["lane"], told["attempt"]) == (
            row["message_id"],
            row["partition"],
            row["attempt"],
        )
        assert (told["order"], row["partition"]) == (order, f"p{order % 3}")
        assert msgspec.convert(told["at"], datetime) == datetime.fromtimestamp(row["at"] / 1e6, UTC)


def test_decorators_and_policies_work_as_in_a_pump(spark: SparkSession, shop: Shop) -> None:
    @defer_on_error(0)
    def defer(order: Order) -> None:
        raise OSError("disk full")

    @reject_on_error
    def reject(order: Order) -> None:
        raise OSError("disk full")

    first, second, third = shop.queue(retryLimit=10), shop.queue(), shop.queue()
    for queue in (first, second, third):
        shop.push(queue, orders("good"), lanes=1)
    for _ in range(2):
        settle_batch(attempted("fused", spark, shop, first, defer, requeue_count=2, streaming=False))
    [dead] = shop.dead(first)
    assert dead.error == "Defer: no attempts left after 2; OSError: disk full"
    settle_batch(attempted("udf", spark, shop, second, reject, streaming=False))
    assert shop.dead(second)[0].error == "OSError: disk full"
    settle_batch(attempted("udf", spark, shop, third, charge_badly, on_error="ack", streaming=False))
    assert shop.totals(third) == {"messages": 1, "acked": 1, "batches": 1}


def charge_badly(order: Order) -> None:
    raise OSError("disk full")


@pytest.mark.parametrize("mode", ["udf", "fused"])
def test_a_poison_row_never_stops_a_query(spark: SparkSession, shop: Shop, run: Run, mode: str) -> None:
    queue = shop.queue(retryLimit=1)

    def cruel(order: Order) -> Any:
        match order.id:
            case 0:
                return object()  # no JSON for that
            case 1:
                return cruel(order)  # for ever
            case 2:
                raise ExceptionGroup("many", [ValueError("a"), OSError("b")])
            case 3:
                raise type("Odd", (Exception,), {"__str__": lambda self: 1 / 0})
            case 4:
                raise ValueError("nul \0 and a lone \ud800")
        return {"ok": order.id}

    shop.push(queue, [*orders("a b c d e f"), b"", b"\xff\xfe", b"[]", b"null"], lanes=1)
    run(attempted(mode, spark, shop, queue, cruel), queue + "-out")
    assert shop.pop_all(queue + "-out") == {"p0": [{"ok": 5}]}
    assert len(shop.dead(queue)) == 9
    assert shop.lag(queue) == (0, 0)


def test_a_configuration_error_stops_the_query_and_settles_nothing(
    spark: SparkSession, shop: Shop, run: Run
) -> None:
    queue = shop.queue()

    def misconfigured(order: Order) -> None:
        raise ConfigurationError("no bank is configured")

    shop.push(queue, orders("good good"))
    with pytest.raises(StreamingQueryException, match="no bank is configured"):
        run(attempted("fused", spark, shop, queue, misconfigured))
    assert shop.totals(queue) == {}
    run(attempted("fused", spark, shop, queue))
    assert shop.totals(queue)["acked"] == 2


def test_workers_take_the_installed_pyspark_and_not_its_packed_sources(spark: SparkSession) -> None:
    def where(_: int) -> str:
        import pyspark

        return pyspark.__file__

    [found] = spark.sparkContext.parallelize([0], 1).map(where).collect()
    assert ".zip" not in found


def test_what_cannot_work_is_refused_before_the_query_starts(
    spark: SparkSession, shop: Shop, checkpoint: str
) -> None:
    async def later(order: Order) -> None: ...

    queue = shop.queue()
    with pytest.raises(ConfigurationError, match="write def, not async def"):
        read_queue(spark, queue, "g", url=shop.dsn).transform(attempt(later))
    with pytest.raises(BadRequest, match=r"must be the queue's database.*got 'http://127.0.0.1:6632'"):
        read_queue(spark, queue, "g", url="http://127.0.0.1:6632")
    for wrong in ("array<int>", "string", ArrayType(LongType()), "not a ddl ((", object):
        with pytest.raises(BadRequest, match="payload"):
            read_queue(spark, queue, "g", url=shop.dsn, payload=wrong)
    with pytest.raises(BadRequest, match="startingPosition: must be earliest, latest or a time"):
        read_queue(spark, queue, "g", url=shop.dsn, starting="foo")
    with pytest.raises(Conflict, match="read_queue"):
        spark.range(1).transform(attempt(charge))
    stream = spark.readStream.format("settled").options(url=shop.dsn, queue=queue).load()
    with pytest.raises(StreamingQueryException, match="a stream settles for a group: name one") as caught:
        finished(stream.writeStream.format("noop").option("checkpointLocation", checkpoint))
    assert "UnboundLocalError" not in str(caught.value)


def test_a_killed_worker_process_is_replaced_and_nothing_is_settled_twice(
    spark: SparkSession, shop: Shop, run: Run, tmp_path: Path
) -> None:
    queue, flag = shop.queue(), tmp_path / "killed"

    def killer(order: Order) -> dict[str, int]:
        if order.id == 150 and not flag.exists():
            flag.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return {"invoice": order.id}

    shop.push(queue, orders("good " * 300), lanes=3)
    run(attempted("fused", spark, shop, queue, killer), queue + "-out")
    assert flag.exists()
    assert sorted(v["invoice"] for lane in shop.pop_all(queue + "-out").values() for v in lane) == list(
        range(300)
    )
    assert shop.totals(queue)["acked"] == 300


def test_batches_are_bounded_and_an_available_now_run_ends(spark: SparkSession, shop: Shop, run: Run) -> None:
    queue = shop.queue(retryLimit=1000)
    shop.push(queue, orders("good good good broken " * 25), lanes=4)
    query = run(attempted("udf", spark, shop, queue, max_rows=40))
    assert [p["numInputRows"] for p in query.recentProgress] == [40, 40, 20]
    assert shop.totals(queue) == {"messages": 100, "acked": 75, "retried": 25, "batches": 3}
    query = run(attempted("udf", spark, shop, queue, max_rows=None))
    assert [p["numInputRows"] for p in query.recentProgress] == [25]


def test_results_wait_for_room_in_their_queue(
    spark: SparkSession, shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue, out = shop.queue(), shop.queue(maxSize=3)
    shop.push(queue, orders("good good good good good"), lanes=1)
    shop.push(out, [{"waits": i} for i in range(3)], lanes=1)
    monkeypatch.setattr(sink, "ROOM_WITHIN", 0)
    with pytest.raises(QueueFull, match=f"queue '{out}' is full: 3 pending, maxSize 3"):
        sink.wait_for_room(shop.link, out)

    def make_room() -> dict[str, list[Any]]:
        staged = f"select from staged_segment where queue = '{out}'"
        while not shop.link.run(lambda c: c.execute(staged).fetchall()):
            time.sleep(0.05)
        time.sleep(2)  # to settle would take a few milliseconds from here
        return shop.pop_all(out)

    with ThreadPoolExecutor() as pool:
        first = pool.submit(make_room)
        settle_batch(attempted("fused", spark, shop, queue, streaming=False), to=out)
    assert first.result() == {"p0": [{"waits": i} for i in range(3)]}
    assert shop.pop_all(out) == {"p0": [{"invoice": i} for i in range(5)]}
    assert shop.totals(queue)["acked"] == 5


def test_parquet_is_written_once_a_batch_and_then_settled(
    spark: SparkSession, shop: Shop, checkpoint: str, tmp_path: Path
) -> None:
    queue = shop.queue()
    shop.push(queue, orders("good poison good"), lanes=1)
    table = str(tmp_path / "invoices")

    def write(df: DataFrame, batch_id: int) -> None:
        df.persist()
        acked = df.where("outcome = 'ack'").select("result", "batch")
        acked.write.mode("overwrite").option("partitionOverwriteMode", "dynamic").partitionBy(
            "batch"
        ).parquet(table)
        settle_batch(df, batch_id)
        df.unpersist()

    df = attempted("udf", spark, shop, queue)
    finished(df.writeStream.foreachBatch(write).option("checkpointLocation", checkpoint))
    assert spark.read.parquet(table).count() == 2
    assert shop.totals(queue) == {"messages": 3, "acked": 2, "dead": 1, "batches": 1}


def test_a_batch_that_is_not_settled_is_explained(spark: SparkSession, shop: Shop, checkpoint: str) -> None:
    queue = shop.queue()
    shop.push(queue, orders("good good good"))
    df = read_queue(spark, queue, "g", url=shop.dsn, max_rows=2)
    writer = df.writeStream.format("noop").option("checkpointLocation", checkpoint).trigger(availableNow=True)
    with pytest.raises(
        StreamingQueryException, match="was read but not settled; write the stream with settle"
    ):
        writer.start().awaitTermination(60)


def test_a_deleted_checkpoint_goes_on_and_a_foreign_one_is_refused(
    spark: SparkSession, shop: Shop, run: Run, checkpoint: str
) -> None:
    queue, other = shop.queue(), shop.queue()
    shop.push(queue, orders("good good"))
    shop.push(other, orders("good"))
    run(attempted("fused", spark, shop, queue))
    shop.push(queue, orders("good"))
    run(attempted("fused", spark, shop, queue), where=checkpoint + "-new")
    assert shop.totals(queue) == {"messages": 3, "acked": 3, "batches": 2}
    told = (
        f"queue '{queue}', group 'g': no checkpoint, but the group has read 1 batches; it goes on after them"
    )
    deadline = time.monotonic() + 30
    while told not in spark.log.read_text(errors="replace"):  # type: ignore[attr-defined]
        assert time.monotonic() < deadline, "nothing was said"
        time.sleep(0.1)
    with pytest.raises(StreamingQueryException, match="checkpoint belongs to group 'g' of queue"):
        run(attempted("fused", spark, shop, other))
    shop.wait(shop.engine.delete_queue(queue))
    shop.push(queue, orders("good"))
    with pytest.raises(StreamingQueryException, match="the queue was deleted and made anew"):
        run(attempted("fused", spark, shop, queue))


def test_two_queries_of_one_group_do_not_share_it(
    spark: SparkSession, shop: Shop, run: Run, checkpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = shop.queue()
    df = attempted("fused", spark, shop, queue, lease_seconds=3)
    first = settle(df).option("checkpointLocation", checkpoint).start()
    shop.push(queue, orders("good"))
    first.processAllAvailable()
    for other in (attempted("fused", spark, shop, queue, lease_seconds=3), df):  # also of the same rows
        with pytest.raises(StreamingQueryException, match="is read by another Spark query"):
            run(other, where=checkpoint + "2")
    first.stop()
    shop.push(queue, orders("good"))
    run(df)
    shop.push(queue, orders("good"))
    run(attempted("fused", spark, shop, queue), where=checkpoint + "2")
    assert shop.totals(queue)["acked"] == 3


def test_a_pump_and_spark_share_a_group_without_sharing_messages(spark: SparkSession, shop: Shop) -> None:
    queue = shop.queue()
    shop.push(queue, orders("good " * 10), lanes=2)
    pop = PopRequest(queue, "p0", group="g", batch=2, lease_seconds=60)
    assert len(shop.wait(shop.engine.pop(pop)).lanes) == 1
    df = attempted("fused", spark, shop, queue, streaming=False)
    assert {r.partition for r in df.collect()} == {"p1"}
    assert not shop.wait(shop.engine.pop(PopRequest(queue, "p1", group="g"))).lanes
    settle_batch(df)
    assert shop.totals(queue) == {"messages": 5, "acked": 5, "batches": 1}


def test_without_a_group_the_log_is_only_looked_at(spark: SparkSession, shop: Shop) -> None:
    queue = shop.queue()
    shop.push(queue, orders("good " * 30), lanes=3, headers={"a": "b"})
    df = spark.read.format("settled").options(url=shop.dsn, queue=queue, payload="string").load()
    rows = df.orderBy("payload").collect()
    assert len({r.message_id for r in rows}) == 30
    assert rows[0].headers == {"a": "b"}
    assert rows[0].payload == '{"id":0,"kind":"good"}'
    assert rows[0].queue == queue
    assert len(shop.pop_all(queue)) == 3


def test_a_password_stays_out_of_what_is_written(spark: SparkSession, shop: Shop, tmp_path: Path) -> None:
    queue = shop.queue()
    shop.push(queue, orders("good"))
    url = shop.dsn.replace("settled@", "settled:s3cret@")
    df = read_queue(spark, queue, "g", url=url, streaming=False).transform(attempt(charge))
    df.write.parquet(str(tmp_path / "rows"))
    assert not any(b"s3cret" in file.read_bytes() for file in (tmp_path / "rows").iterdir())
    settle_batch(df)
    assert shop.totals(queue)["acked"] == 1


def test_a_new_group_may_start_at_the_end(spark: SparkSession, shop: Shop, run: Run) -> None:
    queue = shop.queue()
    shop.push(queue, orders("good good"), lanes=1)
    run(attempted("fused", spark, shop, queue, starting="latest"))
    shop.push(queue, orders("good"), lanes=1)
    run(attempted("fused", spark, shop, queue, starting="latest"))
    assert shop.totals(queue) == {"messages": 1, "acked": 1, "batches": 1}


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"url": "http://127.0.0.1:6632"}, "http:// has no segments to read"),
        ({"maxRows": "0"}, "maxRows: must be a whole number of at least 1, got '0'"),
        ({"ordering": "sorted"}, "must be one of queue, in_order, parked, none"),
        (
            {"colour": "red"},
            "unknown; known are url, queue.*payload, stream.*deadLetter, got 'red'",
        ),
        ({"startingPosition": "foo"}, "startingPosition: must be earliest, latest or a time.*got 'foo'"),
        ({"queue": ""}, "name the queue"),
    ],
)
def test_a_wrong_option_is_named(options: dict[str, str], text: str) -> None:
    from settled.spark.source import SettledSource

    with pytest.raises(BadRequest, match=text):
        SettledSource({"url": "postgresql://x/y", "queue": "orders", "group": "g", **options})
