"""One row that fits nowhere fails by itself: the others go on, and nothing is lost without a word."""

from __future__ import annotations

import decimal
import threading
from typing import Any

import msgspec
import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import SparkSession
from pyspark.sql import functions as F  # noqa: N812

from settled import (
    App,
    ConfigurationError,
    Defer,
    Message,
    Reject,
    current_message,
    feature_switch,
    features,
)
from settled.queue import PushItem
from settled.queue.errors import BadRequest
from settled.spark import attempt, read_queue, settle, settle_batch
from settled.spark.settling import LONGEST_DELAY
from tests.spark.conftest import Shop
from tests.spark.test_crashes import wait_for


class Price(msgspec.Struct):
    id: int
    price: decimal.Decimal = decimal.Decimal(0)


def test_a_queue_made_anew_under_a_running_query_ends_it_with_an_error(
    spark: SparkSession, shop: Shop, checkpoint: str
) -> None:
    """Defect S5."""
    queue = shop.queue()
    shop.push(queue, [{"id": 1}])
    rows = read_queue(spark, queue, "g", url=shop.dsn)
    query = settle(rows).option("checkpointLocation", checkpoint).start()
    try:
        wait_for(lambda: shop.totals(queue).get("acked") == 1 or not query.isActive, 120)
        assert query.isActive, query.exception()
        shop.wait(shop.engine.delete_queue(queue))
        shop.push(queue, [{"id": 2}])
        assert query.awaitTermination(60)
    except StreamingQueryException as error:
        told = f"queue '{queue}' was deleted, and perhaps made anew, while group 'g' read it"
        assert told in str(error)  # noqa: PT017 - it may end while it is waited for
    finally:
        query.stop()
    assert shop.totals(queue, "g") == {}


@feature_switch("discounts")
def discount(order: dict[str, int]) -> dict[str, int]:
    return {"order": order["id"]}


@pytest.mark.parametrize("mode", ["udf", "fused"])
def test_a_feature_flag_that_the_driver_sets_holds_where_the_handler_runs(
    spark: SparkSession, shop: Shop, mode: str
) -> None:
    """Defect S12. Executors import this module, and it sets no flag."""
    queue = shop.queue()
    for number, flag in enumerate((True, False, lambda: True)):
        features["discounts"] = flag
        shop.push(queue, [{"id": number}], lanes=1)
        df = read_queue(spark, queue, "g", url=shop.dsn, streaming=False)
        df = (df.where("true") if mode == "udf" else df).transform(attempt(discount))
        settle_batch(df, to=queue + "-out")
    assert [one["order"] for one in shop.pop_all(queue + "-out")["p0"]] == [0, 2]
    assert shop.totals(queue)["acked"] == 3


def test_a_flag_that_cannot_be_sent_is_named(spark: SparkSession, shop: Shop) -> None:
    """Defect S12."""
    lock = threading.Lock()
    features["discounts"] = lambda: lock.locked()
    rows = read_queue(spark, shop.queue(), "g", url=shop.dsn, streaming=False)
    with pytest.raises(ConfigurationError, match="feature 'discounts': its flag cannot be sent to executors"):
        rows.transform(attempt(discount))


def errors(shop: Shop, queue: str) -> dict[int, str | None]:
    """Why each message died, by its `id`."""
    return {msgspec.json.decode(d.payload)["id"]: d.error for d in shop.dead(queue)}


def failures(shop: Shop, queue: str) -> list[tuple[int, str]]:
    """How many seconds each failed message stays away, and why, in their order."""
    query = """select extract(epoch from e.due - e.failed_at)::int as s, coalesce(e.error, '') as error
                 from exception e join lane l on l.id = e.lane_id join queue q on q.id = l.queue_id
                where q.name = %s order by l.name, e.seq"""
    rows = shop.link.run(lambda c: c.execute(query, (queue,)).fetchall())
    return [(row["s"], row["error"]) for row in rows]


@pytest.mark.parametrize("mode", ["udf", "fused"])
def test_a_result_that_is_not_of_its_type_fails_its_row_and_holds_back_what_is_behind_it(
    spark: SparkSession, shop: Shop, mode: str
) -> None:
    queue = shop.queue(retry="in_order", retryLimit=5)
    shop.push(queue, [{"id": i} for i in range(12)], lanes=2)

    def count(order: dict[str, int]) -> Any:
        return {4: "abc", 5: 10**30, 8: None}.get(order["id"], order["id"])

    df = read_queue(spark, queue, "g", url=shop.dsn, streaming=False)
    df = (df.where("true") if mode == "udf" else df).transform(attempt(count, result=int))
    settle_batch(df, to=queue + "-out")
    assert shop.pop_all(queue + "-out") == {"p0": [0, 2], "p1": [1, 3]}
    seen = {"messages": 12, "acked": 4, "retried": 2, "released": 6, "pushed": 4, "batches": 1}
    assert shop.totals(queue) == seen
    assert ["Arrow" in error or "Overflow" in error for _, error in failures(shop, queue)] == [True, True]


def test_results_of_all_types_are_pushed_as_json(spark: SparkSession) -> None:
    from settled.spark.settling import _json

    kinds = "i int, s string, l array<int>, m map<string,double>, b boolean, t struct<a:int>, n int"
    df = spark.createDataFrame([(5, 'é "x"', [1, 2], {"a": 1.5}, True, (1,), None)], kinds)
    [row] = df.select(*(_json(df, name).alias(name) for name in df.columns)).collect()
    found = [None if v is None else msgspec.json.decode(v) for v in row]
    assert found == [5, 'é "x"', [1, 2], {"a": 1.5}, True, {"a": 1}, None]


@pytest.mark.parametrize("mode", ["udf", "fused"])
def test_a_result_that_cannot_be_kept_is_not_acknowledged_by_an_explicit_handler(
    spark: SparkSession, shop: Shop, mode: str
) -> None:
    queue = shop.queue()
    shop.push(queue, [{"id": i} for i in range(3)], lanes=1)

    def handle(message: Message[Price]) -> Any:
        message.ack()
        sequence = message.metadata.stream_sequence
        assert type(sequence) is int
        return object() if message.payload.id == 1 else {"sequence": sequence}

    df = read_queue(spark, queue, "g", url=shop.dsn, streaming=False)
    df = (df.where("true") if mode == "udf" else df).transform(attempt(handle, on_error="reject"))
    settle_batch(df, to=queue + "-out")
    assert errors(shop, queue) == {1: "TypeError: cannot encode an object of type object"}
    assert len(shop.pop_all(queue + "-out")["p0"]) == 2


def test_payloads_that_arrow_does_not_take_are_invalid_and_stay_so(spark: SparkSession, shop: Shop) -> None:
    queue = shop.queue()
    prices = ["1.5", "1e30", "NaN", "0.12345678901234567890123"]
    shop.push(queue, [{"id": i, "price": price} for i, price in enumerate(prices)], lanes=1)
    shop.push(queue, [{"id": 10**25}, b"\xff"], lanes=1)
    packed = msgspec.msgpack.encode({"id": 7, "price": "2.5"})
    item = PushItem(queue, packed, partition="p0", content_type="application/msgpack")
    shop.wait(shop.engine.push([item]))

    def loose(order: dict[str, Any]) -> dict[str, Any]:
        if order["id"] == 7:
            raise Reject("seven")
        return order

    def second(order: dict[str, Any]) -> str:
        return "second"

    rows = read_queue(spark, queue, "g", url=shop.dsn, streaming=False, payload=Price)
    parsed = rows.orderBy("sequence").select("payload.id", "payload.price", "headers").collect()
    assert [row["id"] for row in parsed] == [0, None, None, None, None, None, 7]
    assert [row["price"] for row in parsed][::6] == [decimal.Decimal("1.5"), decimal.Decimal("2.5")]
    assert parsed[-1]["headers"] == {"content-type": "application/msgpack"}
    df = rows.transform(attempt(loose)).transform(attempt(second))
    came = [tuple(r) for r in df.orderBy("sequence").select("outcome", "error", "result").collect()]
    assert [outcome for outcome, _, _ in came] == ["ack", *["invalid"] * 5, "dead"]
    assert all(error and not result for _, error, result in came[1:])
    assert came[0][2] == b'"second"'
    settle_batch(df)
    assert shop.totals(queue) == {"messages": 7, "acked": 1, "dead": 6, "batches": 1}
    letters = {d.error: d for d in shop.dead(queue)}
    assert (letters["seven"].payload, letters["seven"].content_type) == (packed, "application/msgpack")
    look = spark.read.format("settled").options(url=shop.dsn, queue=queue, payload="string").load()
    texts = [row["payload"] for row in look.orderBy("sequence").collect()]
    assert (texts[0], texts[5]) == ('{"id":0,"price":"1.5"}', "\ufffd")


def test_a_payload_that_is_no_text_is_invalid_also_without_a_handler(spark: SparkSession, shop: Shop) -> None:
    queue = shop.queue()
    shop.push(queue, [b"ok", b"\xff\xfe", "é".encode(), b""], lanes=1)
    rows = read_queue(spark, queue, "g", url=shop.dsn, streaming=False, payload=str)
    seen = rows.orderBy("sequence").select("payload", "outcome").collect()
    assert [tuple(r) for r in seen] == [("ok", "ack"), (None, "invalid"), ("é", "ack"), ("", "ack")]
    settle_batch(rows)
    assert shop.totals(queue) == {"messages": 4, "acked": 3, "dead": 1, "batches": 1}
    [letter] = shop.dead(queue)
    assert (letter.error, letter.payload) == ("the payload is no UTF-8 text", b"\xff\xfe")


def test_a_delay_is_at_most_a_year_and_a_dead_row_needs_no_error(spark: SparkSession, shop: Shop) -> None:
    queue = shop.queue(retryDelay=5000)
    shop.push(queue, [{"id": i} for i in range(9)], lanes=1)

    def defer(order: dict[str, int]) -> None:
        if order["id"] < 2:
            raise Defer((float("inf"), 1e300)[order["id"]], "later")
        if order["id"] == 2:
            raise Defer(float("nan"))

    rows = read_queue(spark, queue, "g", url=shop.dsn, streaming=False).transform(attempt(defer))
    own = "array('NaN', 'Infinity', '1e300', '-5', null)"
    at = F.from_json(F.col("payload").cast("string"), "id bigint")
    df = (
        rows.withColumn("payload", at)  # the bytes are gone: dead letters are JSON
        .withColumn(
            "delay", F.expr(f"coalesce(cast(get({own}, cast(payload.id - 3 as int)) as double), delay)")
        )
        .withColumn(
            "outcome",
            F.expr("case when payload.id > 7 then 'dead' when payload.id > 2 then 'retry' else outcome end"),
        )
    )
    settle_batch(df)
    longest = int(LONGEST_DELAY)
    found = failures(shop, queue)
    assert found[0][0] in (5, longest)  # whether `Defer` itself takes it or not
    assert [seconds for seconds, _ in found][1:] == [longest, 5, 5, longest, longest, 0, 5]
    assert found[1][1] == "later"
    assert "got nan" in found[2][1]
    assert "delay is NaN" in found[3][1]
    assert [(d.payload, d.error) for d in shop.dead(queue)] == [(b'{"id":8}', "rejected, without an error")]


def test_a_target_that_cannot_be_is_refused_and_a_partition_fails_its_row(
    spark: SparkSession, shop: Shop
) -> None:
    queue = shop.queue()
    shop.push(queue, [{"id": i} for i in range(5)], lanes=1)

    def same(order: dict[str, int]) -> dict[str, int] | None:
        return order if order["id"] < 4 else None

    df = read_queue(spark, queue, "g", url=shop.dsn, streaming=False).transform(attempt(same))
    for to in ("", "x" * 300):
        with pytest.raises(BadRequest, match=r"^to"):
            settle_batch(df, to=to)
    chosen = "element_at(array('', repeat('x', 256), null, 'east', ''), cast(sequence as int) - first + 1)"
    [first] = df.selectExpr("cast(min(sequence) as int) as first").collect()
    df = df.withColumn("to_partition", F.expr(chosen.replace("first", str(first["first"]))))
    settle_batch(df, to=queue + "-out")
    assert shop.pop_all(queue + "-out") == {"p0": [{"id": 2}], "east": [{"id": 3}]}
    dead = errors(shop, queue)
    assert dead[0] == "to_partition: must be text of 1..255 characters without NUL, got "
    assert (dead[1] or "").endswith("got " + "x" * 100)
    assert len(dead) == 2


def test_a_batch_that_nobody_looked_at_is_acknowledged(spark: SparkSession, shop: Shop) -> None:
    queue = shop.queue()
    shop.push(queue, [{"id": i} for i in range(5)], lanes=2)
    settle_batch(read_queue(spark, queue, "g", url=shop.dsn, streaming=False))
    assert shop.totals(queue) == {"messages": 5, "acked": 5, "batches": 1}


def test_a_subscribers_policy_is_its_policy_on_spark_too(spark: SparkSession, shop: Shop) -> None:
    app, queue = App(), shop.queue()
    shop.push(queue, [{"id": 1}], lanes=1)

    @app.subscriber("orders", on_error="reject", buffer=50, unacceptable_limit=3, ack_on_delivery=True)
    def fail(order: Price) -> None:
        message = current_message()
        raise OSError(f"attempt {message.attempt if message is not None else 0}")

    df = read_queue(spark, queue, "g", url=shop.dsn, streaming=False)
    again = df.transform(attempt(fail, on_error="nak", requeue_count=2))
    settle_batch(again)
    assert shop.totals(queue) == {"messages": 1, "retried": 1, "batches": 1}
    settle_batch(read_queue(spark, queue, "g", url=shop.dsn, streaming=False).transform(attempt(fail)))
    assert errors(shop, queue) == {1: "OSError: attempt 2"}
    for name, value in {"unacceptable_limit": 1, "ack_on_delivery": True, "bogus": 1}.items():
        with pytest.raises(ConfigurationError, match=f"{name} has no meaning on Spark"):
            df.transform(attempt(fail, **{name: value}))  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="on_error must be one of"):
        df.transform(attempt(fail, on_error="explode"))  # type: ignore[arg-type]


def test_names_that_cannot_be_and_queues_that_are_not_there_are_told(spark: SparkSession, shop: Shop) -> None:
    for group in ("x" * 300, "a\0b"):
        with pytest.raises(BadRequest, match=r"option group: must be text of 1..255 characters without NUL"):
            read_queue(spark, shop.queue(), group, url=shop.dsn)
    with pytest.raises(Exception, match="queue not found: nosuch"):
        spark.read.format("settled").options(url=shop.dsn, queue="nosuch").load().count()
    assert spark.read.format("settled").options(url=shop.dsn, queue=shop.queue()).load().count() == 0


def test_a_payload_that_does_not_fit_its_spark_schema_is_invalid(spark: SparkSession, shop: Shop) -> None:
    queue = shop.queue()
    fitting = [b'{"id":1}', b' {"id":2,"who":{"name":"ann","age":null},"more":[1]} ', b'{"id":3,"who":null}']
    wrong = [
        b'{"id":1}{"id":2}', b'{"id":3} trash', b'{"id":4},{"id":5}', b'{"amount":1}', b'{"id":"six"}',
        b"{'id':8}", b'{"id":9,"amount":NaN}', b'{"id":10,"who":{"age":3}}', b"[]", b"7", b"null", b"", b"{",
    ]  # fmt: skip
    shop.push(queue, [*fitting, *wrong], lanes=1)
    schema = "id bigint not null, amount double, who struct<name: string not null, age: int>"
    df = read_queue(spark, queue, "g", url=shop.dsn, payload=schema, streaming=False)
    rows = {bytes(row.data): row for row in df.collect()}
    assert [rows[one].outcome for one in fitting] == ["ack"] * 3
    assert [rows[one].payload.id for one in fitting] == [1, 2, 3]
    assert rows[fitting[1]].payload.who.asDict() == {"name": "ann", "age": None}
    assert {one: rows[one].outcome for one in wrong} == dict.fromkeys(wrong, "invalid")
    assert {rows[one].payload for one in wrong} == {None}
    unfit = "the payload does not fit the schema"
    assert rows[b'{"amount":1}'].error == f"{unfit}: id is null"
    assert rows[b'{"id":10,"who":{"age":3}}'].error == f"{unfit}: who.name is null"
    assert rows[b"{"].error == unfit
