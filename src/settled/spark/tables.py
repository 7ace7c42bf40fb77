"""Batches into Parquet, Delta and Iceberg tables: one that is repeated after a crash replaces itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.types import StructType

from settled.queue.errors import BadRequest
from settled.spark.attempts import ACK
from settled.spark.broker import broker_of
from settled.spark.jobs.checks import check_package
from settled.spark.options import Options
from settled.spark.origin import Origin

if TYPE_CHECKING:
    import pyarrow as pa

Write = Callable[[DataFrame, int], None]
Choose = Callable[[DataFrame], DataFrame]
SOURCE, BATCH = "settled_source", "settled_batch"


def results(rows: DataFrame) -> DataFrame:
    """The results of the acknowledged rows, a struct as columns; without results, the messages."""
    if "outcome" in rows.columns:
        rows = rows.where(F.coalesce(F.col("outcome"), F.lit(ACK)) == ACK)
    if "result" not in rows.columns:
        return rows.select("queue", "partition", "sequence", "message_id", "created_at", "payload")
    if isinstance(rows.schema["result"].dataType, StructType):
        return rows.select("result.*")
    return rows.select("message_id", "created_at", F.col("result").cast("string").alias("result"))


def to_parquet(path: str, choose: Choose = results) -> Write:
    """Write each batch to a directory of its own under `path`; a repeated batch overwrites it."""

    def write(rows: DataFrame, number: int) -> None:
        folder = f"{path}/{SOURCE}={_source(rows)}/{BATCH}={number}"
        choose(rows).write.mode("overwrite").parquet(folder)

    return write


def to_delta(path: str, choose: Choose = results, storage: dict[str, str] | None = None) -> Write:
    """Append each batch to a Delta table; a repeated batch replaces its rows.

    The batch's number is the version of a Delta transaction, which tells a repeated batch from a new one.
    """
    check_package("deltalake", "to_delta()", "delta")

    def write(rows: DataFrame, number: int) -> None:
        import deltalake

        source = _source(rows)
        data = _collect(choose(rows), source, number)
        known = deltalake.DeltaTable.is_deltatable(path, storage)
        table = deltalake.DeltaTable(path, storage_options=storage) if known else None
        last = table.transaction_version(source) if table is not None else None
        mark = deltalake.Transaction(source, max(number, last or 0))
        properties = deltalake.CommitProperties(app_transactions=[mark])
        if last is not None and last >= number:
            deltalake.write_deltalake(
                path,
                data,
                mode="overwrite",
                predicate=_rows_of(source, number),
                commit_properties=properties,
                storage_options=storage,
            )
        else:
            deltalake.write_deltalake(
                path, data, mode="append", commit_properties=properties, storage_options=storage
            )

    return write


def to_iceberg(name: str, choose: Choose = results, catalog: str = "default", **properties: str) -> Write:
    """Append each batch to an Iceberg table; a repeated batch replaces its rows.

    `properties` are pyiceberg's for the catalog, else its configuration file tells. The batch's number is
    kept as a property of the table, changed in the transaction that appends.
    """
    check_package("pyiceberg", "to_iceberg()", "iceberg")
    if not name.strip(".").count("."):
        raise BadRequest("name", name, "must be a table in a namespace, like shop.invoices")

    def write(rows: DataFrame, number: int) -> None:
        from pyiceberg.catalog import load_catalog

        source = _source(rows)
        data = _collect(choose(rows), source, number)
        tables = load_catalog(catalog, **properties)
        tables.create_namespace_if_not_exists(name.rpartition(".")[0])
        table = tables.create_table_if_not_exists(name, data.schema)
        mark = f"settled.batch.{source}"
        last = int(table.properties.get(mark, 0))
        with table.transaction() as changes:
            if last >= number:
                changes.overwrite(data, _rows_of(source, number))
            else:
                changes.append(data)
            changes.set_properties({mark: str(max(number, last))})

    return write


def _source(rows: DataFrame) -> str:
    """Whose batches are numbered: a queue that is made anew begins at 1 again, and is another source."""
    return broker_of(Options.parse(Origin.of(rows).options())).source()


def _rows_of(source: str, number: int) -> str:
    return f"{SOURCE} = '{source}' and {BATCH} = {number}"


def _collect(rows: DataFrame, source: str, number: int) -> pa.Table:
    marked = rows.withColumn(SOURCE, F.lit(source)).withColumn(BATCH, F.lit(number).cast("bigint"))
    return marked.toArrow()
