"""A sink whose process dies once at the point it is told, as if somebody had killed it."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pyspark.sql.datasource import WriterCommitMessage

from settled.spark.sink import BatchSink
from settled.spark.source import SettledSource


def die(folder: str, point: str) -> None:
    """End this process at once, if it was told to and for the first time."""
    told = Path(folder, point)
    if told.exists():
        told.rename(told.with_suffix(".done"))
        os.kill(os.getpid(), signal.SIGKILL)


class MortalSink(BatchSink):
    folder = ""

    def write(self, iterator: Iterator[Any]) -> WriterCommitMessage:
        die(self.folder, "write")
        return super().write(iterator)

    def commit(self, messages: list[Any]) -> None:
        die(self.folder, "before")
        super().commit(messages)
        die(self.folder, "after")


def source(folder: str) -> type[SettledSource]:
    """The source, with such a sink; a file in the folder names the point."""

    class MortalSource(SettledSource):
        def writer(self, schema: Any, overwrite: bool) -> BatchSink:
            die(folder, "plan")
            sink = MortalSink(self.settings)
            sink.folder = folder
            return sink

    return MortalSource
