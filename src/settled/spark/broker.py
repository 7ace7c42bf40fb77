"""What source and sink ask of the broker behind them: claim a batch, read it in tasks, settle it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.datasource import InputPartition, WriterCommitMessage

    from settled.queue.manifest import Settled
    from settled.spark.attempts import Rows
    from settled.spark.options import Options


class Chunk(Protocol):
    """Some messages, in order, as a task reads them."""

    def rows(self) -> Rows:
        """As a handler's rows."""
        ...

    def only(self, places: list[int]) -> Chunk:
        """Some of them."""
        ...

    def arrays(self, batch: int) -> list[pa.Array]:
        """As the columns of `rows.ARROW`."""
        ...


class Reader(Protocol):
    """One holder's hold on a group's batches."""

    def hold(self, *, streaming: bool) -> None:
        """Become the holder, taking over from one that is gone; Conflict if another one lives."""
        ...

    def renew(self) -> None:
        """Stay the holder; Fenced if another one took over."""
        ...

    def horizon(self) -> Any:
        """Now, as a bound for `claim`: what comes or falls due later is not read."""
        ...

    def source(self) -> str:
        """Whose batches are numbered: what is deleted and made anew counts from 1 again, as another one."""
        ...

    def settled_up_to(self) -> int:
        """The number of the last batch that is done."""
        ...

    def claim(self, limit: int | None, horizon: Any) -> int | None:
        """The open batch's number, or that of a new one, written down; None if there is nothing to read."""
        ...

    def plan(self, number: int) -> Sequence[InputPartition]:
        """A batch as tasks: the same messages each time, none if it is settled; 0 is an empty batch."""
        ...

    def close(self) -> None:
        """Let go, so that the next query need not wait."""
        ...


class Broker(Protocol):
    """A broker as one query uses it."""

    def reader(self) -> Reader:
        """The hold that the options ask for, not yet taken."""
        ...

    def source(self) -> str:
        """Whose batches are numbered, as its readers say."""
        ...

    def look(self) -> Sequence[InputPartition]:
        """All there is now, as tasks, for who only looks."""
        ...

    def chunks(self, task: InputPartition) -> Iterator[Chunk]:
        """A task's messages, on an executor."""
        ...

    def stage(self, batches: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Take over a task's rows, on an executor; nothing of it counts before the driver settles."""
        ...

    def settle(self, messages: Sequence[Any]) -> Settled:
        """Settle the batch with what the tasks staged, at once and once, however often it is repeated."""
        ...


def broker_of(settings: Options) -> Broker:
    """The broker that a URL names."""
    if settings.on_nats:
        from settled.spark.jetstream.broker import JetStream

        return JetStream(settings)
    from settled.spark.postgres import Postgres

    return Postgres(settings)
