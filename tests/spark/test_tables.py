"""Batches go to tables of other kinds: once each, also when a crash makes Spark repeat one."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from typer.testing import CliRunner

from settled import ConfigurationError, Reject
from settled.queue.errors import BadRequest
from settled.spark import attempt, read_queue, settle_each, to_delta, to_iceberg, to_parquet
from settled.spark.command import app
from tests.spark.conftest import Shop, finished


def test_a_repeated_batch_replaces_what_it_wrote_to_parquet_delta_and_iceberg(
    spark: SparkSession, shop: Shop, checkpoint: str, tmp_path: Path
) -> None:
    import deltalake
    from pyiceberg.catalog import load_catalog

    queue, crashed = shop.queue(), tmp_path / "crashed"
    catalog = {
        "type": "sql",
        "uri": f"sqlite:///{tmp_path}/catalog.db",
        "warehouse": f"file://{tmp_path}/ice",
    }
    writers = [
        to_parquet(str(tmp_path / "files")),
        to_delta(str(tmp_path / "delta")),
        to_iceberg("shop.invoices", **catalog),
    ]

    def charge(order: dict[str, int]) -> dict[str, int]:
        # What came of an order before the crash is not what comes of it afterwards.
        if order["id"] == (2 if crashed.exists() else 1):
            raise Reject("not this time")
        return {"order": order["id"]}

    def write(rows: DataFrame, number: int) -> None:
        for writer in writers:
            writer(rows, number)
        if not crashed.exists():
            crashed.touch()
            raise RuntimeError("written, but not settled")

    def run() -> None:
        df = read_queue(spark, queue, "g", url=shop.dsn).transform(attempt(charge, result="order bigint"))
        finished(settle_each(df, write).option("checkpointLocation", checkpoint))

    def tables() -> list[list[Any]]:
        delta = deltalake.DeltaTable(str(tmp_path / "delta")).to_pyarrow_table()
        iceberg = load_catalog("default", **catalog).load_table("shop.invoices").scan().to_arrow()
        files = spark.read.parquet(str(tmp_path / "files")).select("order", "settled_batch").collect()
        return [
            sorted(zip(t["order"].to_pylist(), t["settled_batch"].to_pylist(), strict=True))
            for t in (delta, iceberg)
        ] + [sorted((row["order"], row["settled_batch"]) for row in files)]

    shop.push(queue, [{"id": i} for i in range(4)], lanes=2)
    with pytest.raises(StreamingQueryException, match="written, but not settled"):
        run()
    assert tables() == [[(0, 1), (2, 1), (3, 1)]] * 3
    run()
    assert tables() == [[(0, 1), (1, 1), (3, 1)]] * 3
    assert shop.totals(queue) == {"messages": 4, "acked": 3, "dead": 1, "batches": 1}
    shop.push(queue, [{"id": 4}], lanes=1)
    run()
    assert tables() == [[(0, 1), (1, 1), (3, 1), (4, 2)]] * 3


def test_a_table_without_a_namespace_is_refused_where_it_is_named() -> None:
    with pytest.raises(BadRequest, match=r"name: must be a table in a namespace, like shop.invoices"):
        to_iceberg("invoices")


@pytest.mark.parametrize(
    ("package", "what", "extra"),
    [("deltalake", "to_delta()", "delta"), ("pyiceberg", "to_iceberg()", "iceberg")],
)
def test_a_table_whose_package_is_missing_is_refused_where_it_is_named(
    package: str, what: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Defect S16."""
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigurationError) as told:
        to_delta("table") if extra == "delta" else to_iceberg("shop.invoices")
    assert str(told.value) == f"{what} needs the package {package}: pip install 'settled[spark,{extra}]'"


def test_an_export_as_delta_without_its_package_is_refused_before_spark_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Defect S16."""
    monkeypatch.setitem(sys.modules, "deltalake", None)
    arguments = [
        "export",
        str(tmp_path),
        "--format",
        "delta",
        "--url",
        "postgresql://nobody@127.0.0.1:1/none",
    ]
    result = CliRunner().invoke(app, arguments)
    told = "settled: format delta needs the package deltalake: pip install 'settled[spark,delta]'\n"
    assert (result.exit_code, result.output) == (1, told)
