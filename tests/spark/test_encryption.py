"""Encrypted queues on Spark: nothing of a message lies on disk in clear."""

from __future__ import annotations

import uuid

import msgspec
import numpy as np
import pyarrow as pa
import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import SparkSession

from settled import Reject, current_message
from settled.queue.errors import Conflict
from settled.spark import attempt, read_queue
from settled.spark.options import Options
from settled.spark.postgres import Reader
from settled.spark.sink import Staging, settle_staged
from tests.spark.conftest import Run, Shop

SECRET = "hush" * 8


class Patient(msgspec.Struct):
    id: int
    note: str = SECRET


def treat(patient: Patient) -> Patient:
    message = current_message()
    if patient.id == 1:
        raise Reject("not here")
    if patient.id == 2 and message is not None and message.attempt == 1:
        raise ConnectionError("ward away")
    return patient


@pytest.mark.parametrize("changed", ["fused", "udf"])
def test_an_encrypted_queue_is_settled_and_pushed_on_in_secret(
    spark: SparkSession, shop: Shop, run: Run, key: None, changed: str
) -> None:
    queue, to = (shop.queue(retryLimit=3, encryptionEnabled=True) for _ in range(2))
    shop.push(queue, [Patient(i) for i in range(20)], lanes=1, headers={"who": SECRET})
    for _ in range(2):
        rows = read_queue(spark, queue, "g", url=shop.dsn)
        run((rows if changed == "fused" else rows.where("true")).transform(attempt(treat)), to)
    assert shop.totals(queue) == {
        "messages": 21,
        "acked": 19,
        "retried": 1,
        "dead": 1,
        "pushed": 19,
        "batches": 2,
    }
    [letter] = shop.dead(queue)
    assert msgspec.json.decode(letter.payload) == {"id": 1, "note": SECRET}
    assert letter.headers == {"who": SECRET}
    for name in (queue, to):
        assert SECRET.encode() not in shop.stored(name)
    assert [one["id"] for one in shop.pop_all(to)["p0"]] == [0, *range(3, 20), 2]


def test_results_go_in_clear_only_where_their_queue_is_in_clear(
    spark: SparkSession, shop: Shop, run: Run, key: None
) -> None:
    queue, to = shop.queue(), shop.queue()
    shop.push(queue, [Patient(0)])
    run(read_queue(spark, queue, "g", url=shop.dsn).transform(attempt(treat)), to)
    assert shop.pop_all(to) == {"p0": [{"id": 0, "note": SECRET}]}
    assert SECRET.encode() in shop.stored(to)


def test_without_its_key_an_encrypted_queue_is_refused_by_name(
    spark: SparkSession, shop: Shop, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setenv("SETTLED_ENCRYPTION_KEY", "cd" * 32)  # which Spark's processes do not have
        queue = shop.queue(encryptionEnabled=True)
        shop.push(queue, [Patient(0)])
    rows = read_queue(spark, queue, "g", url=shop.dsn)
    with pytest.raises(StreamingQueryException, match="which is not in SETTLED_ENCRYPTION_KEY"):
        run(rows.transform(attempt(treat)))
    assert shop.lag(queue) == (1, 0)


def test_a_queue_that_becomes_encrypted_meanwhile_is_not_written_to_in_clear(shop: Shop, key: None) -> None:
    queue, to = shop.queue(), shop.queue()
    shop.push(queue, [Patient(0)])
    settings = Options.parse(
        {"url": shop.dsn, "queue": queue, "group": "g", "to": to, "holder": str(uuid.uuid4())}
    )
    reader = Reader(settings)
    with reader.link:
        reader.hold(streaming=False)
        number = reader.claim(10, None)
        assert number is not None
        [range_] = reader.serve(number)
        staging = Staging(queue, to, in_order=False)
        staging.number([number])
        staging.push(range_.lane, "p0", np.array([range_.first]), pa.array([SECRET.encode()], pa.binary()))
        staged = staging.finish(reader.link)
        shop.wait(shop.engine.configure(to, {"encryptionEnabled": True}))
        with pytest.raises(Conflict, match=f"queue '{to}' has become encrypted"):
            settle_staged(settings, [staged], reader)
    assert shop.lag(queue) == (1, 0)
    assert shop.pop_all(to) == {}
