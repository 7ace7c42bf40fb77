"""The user's guide does what it says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import deltalake
import msgspec
import pytest
from pyspark.sql import SparkSession

import settled.spark
from tests.spark.conftest import Shop

GUIDE = Path(__file__).parents[2] / "docs" / "spark.md"


def test_the_examples_of_the_guide_run(
    spark: SparkSession, shop: Shop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = shop.queue()
    shop.push(queue, [{"id": i, "amount": i - 1} for i in range(4)], lanes=1)
    blocks = re.findall(r"```py\n(.*?)```", GUIDE.read_text(), re.S)
    assert len(blocks) == 3
    monkeypatch.setattr(settled.spark, "session", lambda: spark, raising=False)
    monkeypatch.setenv("SETTLED_URL", shop.dsn)
    names: dict[str, Any] = {"__name__": "guide"}
    for block in blocks:
        exec(
            compile(
                block.replace('"orders"', repr(queue))
                .replace('"invoices"', repr(queue + "-out"))
                .replace('"checkpoints/', f'"{tmp_path}/checkpoints/')
                .replace('"tables/', f'"{tmp_path}/tables/'),
                str(GUIDE),
                "exec",
            ),
            names,
        )
    assert [v["order"] for v in shop.pop_all(queue + "-out")["p0"]] == [1, 2, 3]
    assert shop.totals(queue, "billing") == {"messages": 4, "acked": 3, "dead": 1, "pushed": 3, "batches": 1}
    assert shop.totals(queue, "audit")["dead"] == 1
    shop.push(queue, [{"id": 9, "amount": 1}], lanes=1)
    names["query"].trigger(availableNow=True).start().awaitTermination(60)
    table = deltalake.DeltaTable(str(tmp_path / "tables" / "invoices")).to_pyarrow_table()
    assert [msgspec.json.decode(row)["order"] for row in table["result"].to_pylist()] == [9]
