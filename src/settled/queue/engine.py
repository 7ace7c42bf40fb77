"""The queue engine: every operation there is, each with a sentence; the work is in the modules behind it."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Self

from settled.queue.core import Core
from settled.queue.push import push_items
from settled.queue.types import (
    QUEUE_MODE,
    AckItem,
    AckOp,
    AckResult,
    Configured,
    CycleAck,
    CycleResult,
    DeadLetter,
    GroupLag,
    JournalEntry,
    LaneLag,
    LeaseExtension,
    Maintenance,
    MessageView,
    Page,
    Popped,
    PopRequest,
    PushItem,
    PushOp,
    PushResult,
    QueueStats,
    StateOp,
    StateRow,
    StreamQuery,
    Trace,
    TraceName,
    TransactionResult,
)


class Engine:
    """A queue on one Postgres database; any number of engines may share it.

    Every method may raise `Unavailable` while Postgres is away and works again when it is back.
    """

    def __init__(self, core: Core) -> None:
        self._core = core

    @classmethod
    async def open(cls, dsn: str, *, worker: str | None = None, maintain: bool = True) -> Self:
        """Connect, bring the schema up to date and start the background work (`maintain`: janitor too)."""
        return cls(await Core.open(dsn, worker))

    async def close(self) -> None:
        """Answer what is in flight, stop the background work and disconnect."""
        await self._core.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    # Messages

    async def push(self, items: Sequence[PushItem]) -> list[PushResult]:
        """Append messages durably, answer in item order; QueueFull or BadRequest refuse the whole call."""
        return await push_items(self._core.pusher, self._core.registry, items)

    async def pop(self, request: PopRequest) -> Popped:
        """Hand out a batch under a lease (auto_ack: settled at once), waiting up to `wait` seconds."""
        return await self._core.poller.pop(request)

    async def ack(
        self, items: Sequence[AckItem], group: str = QUEUE_MODE, *, atomic: bool = True
    ) -> list[AckResult]:
        """Settle delivered messages; `atomic`: if one cannot be, none is (the others say `not_applied`)."""
        return await self._core.settler.settle(items, group, atomic=atomic)

    async def transaction(
        self, operations: Sequence[PushOp | AckOp], required_leases: Sequence[str] = ()
    ) -> TransactionResult:
        """Pushes and acks over any queues, all or nothing; leases are checked."""
        raise NotImplementedError

    async def extend(self, lease_id: str, seconds: float = 60) -> LeaseExtension:
        """Push a lease's expiry to at least `seconds` from now, on every partition under it."""
        raise NotImplementedError

    # Queues

    async def configure(
        self,
        queue: str,
        options: Mapping[str, Any] | None = None,
        *,
        namespace: str | None = None,
        task: str | None = None,
    ) -> Configured:
        """Create or replace a queue's configuration; an option that is missing goes back to its default."""
        raise NotImplementedError

    async def queues(self, *, namespace: str | None = None, task: str | None = None) -> list[QueueStats]:
        """All queues with their figures."""
        raise NotImplementedError

    async def queue(self, name: str) -> QueueStats:
        """One queue with the figures of each partition; NotFound if there is none."""
        raise NotImplementedError

    async def delete_queue(self, name: str) -> bool:
        """Delete a queue and all under it (its dead letters too); False if there was none."""
        raise NotImplementedError

    async def clear_queue(self, name: str, partition: str | None = None) -> int:
        """Drop all messages of a queue or one partition and answer how many; cursors move to the end."""
        raise NotImplementedError

    # Consumer groups

    async def groups(self, *, queue: str | None = None, group: str | None = None) -> list[GroupLag]:
        """Lag of each (group, queue)."""
        raise NotImplementedError

    async def lanes(
        self, *, queue: str | None = None, group: str | None = None, min_lag_seconds: float = 0
    ) -> list[LaneLag]:
        """Lag of each (group, partition)."""
        raise NotImplementedError

    async def seek(self, group: str, queue: str, to: str | datetime, *, partition: str | None = None) -> int:
        """Move a group's cursors to "end", "beginning" or a time (ISO 8601); answers partitions moved."""
        raise NotImplementedError

    async def subscribe(self, group: str, queue: str | None, at: str | datetime) -> int:
        """Change where the group starts on partitions it has not touched yet; answers the rows changed."""
        raise NotImplementedError

    async def delete_group(self, group: str, *, queue: str | None = None, metadata: bool = True) -> int:
        """Forget a group's cursors (and its subscription with `metadata`); answers partitions forgotten."""
        raise NotImplementedError

    # Dead letters

    async def dead_letters(
        self,
        *,
        queue: str | None = None,
        partition: str | None = None,
        group: str | None = None,
        since: str | datetime | None = None,
        until: str | datetime | None = None,
        limit: int = 100,
        offset: int = 0,
    ) -> Page[DeadLetter]:
        """Dead letters, newest first, by the time they died."""
        raise NotImplementedError

    async def requeue(self, dead_letter_id: str) -> PushResult:
        """Push a dead letter's copy to its partition again, with a new transaction id, and drop it."""
        raise NotImplementedError

    async def retry_message(self, partition_id: str, transaction_id: str, *, group: str | None = None) -> int:
        """Requeue the dead letters of one message (of one group, or all); NotFound if there is none."""
        raise NotImplementedError

    async def bury_message(self, partition_id: str, transaction_id: str, *, group: str = QUEUE_MODE) -> None:
        """Send a message that is not leased straight to the dead letters of a group."""
        raise NotImplementedError

    async def delete_dead_letters(self, ids: Sequence[str]) -> int:
        """Drop dead letters for good; answers how many."""
        raise NotImplementedError

    # Looking at messages

    async def message(self, partition_id: str, transaction_id: str) -> MessageView:
        """One message with its payload and what each group did with it; NotFound if it is gone."""
        raise NotImplementedError

    async def messages(
        self,
        *,
        queue: str | None = None,
        partition: str | None = None,
        namespace: str | None = None,
        task: str | None = None,
        status: str | None = None,
        since: str | datetime | None = None,
        until: str | datetime | None = None,
        limit: int = 200,
        offset: int = 0,
    ) -> list[MessageView]:
        """Messages, newest first, without payloads; `since` defaults to an hour ago."""
        raise NotImplementedError

    async def delete_message(self, partition_id: str, transaction_id: str) -> None:
        """Take one message out of the log for every group; NotFound if it is gone."""
        raise NotImplementedError

    async def journal(
        self,
        *,
        queue: str | None = None,
        partition_id: str | None = None,
        transaction_id: str | None = None,
        limit: int = 100,
    ) -> list[JournalEntry]:
        """How messages were settled, newest first; with a transaction id, the life of that message."""
        raise NotImplementedError

    # Traces

    async def trace(
        self,
        partition_id: str,
        transaction_id: str,
        data: bytes,
        *,
        names: Sequence[str] = (),
        event_type: str = "info",
        group: str | None = None,
    ) -> str:
        """Leave a note (JSON) on a message and answer its id; NotFound if there is no such message."""
        raise NotImplementedError

    async def traces(self, partition_id: str, transaction_id: str) -> list[Trace]:
        """The notes on one message, oldest first."""
        raise NotImplementedError

    async def traces_by_name(self, name: str, *, limit: int = 100, offset: int = 0) -> Page[Trace]:
        """The notes under one name, newest first."""
        raise NotImplementedError

    async def trace_names(self, *, limit: int = 50, offset: int = 0) -> Page[TraceName]:
        """The names in use, most recent first."""
        raise NotImplementedError

    # Streams

    async def register_query(
        self,
        name: str,
        source_queue: str,
        config_hash: str,
        *,
        sink_queue: str | None = None,
        reset: bool = False,
    ) -> StreamQuery:
        """Register a stream query; Conflict if the name has another hash and `reset` is not asked for."""
        raise NotImplementedError

    async def state(
        self,
        query_id: str,
        partition_id: str,
        *,
        keys: Sequence[str] = (),
        key_prefix: str | None = None,
        ripe_at_or_before: int | None = None,
    ) -> list[StateRow]:
        """A query's state on one partition, sorted by key; filters are ANDed."""
        raise NotImplementedError

    async def cycle(
        self,
        query_id: str,
        partition_id: str,
        *,
        group: str = QUEUE_MODE,
        state_ops: Sequence[StateOp] = (),
        push_items: Sequence[PushItem] = (),
        ack: CycleAck | None = None,
        release_lease: bool = True,
    ) -> CycleResult:
        """State, sink pushes and the source ack of a cycle in one transaction; Conflict undoes all of it."""
        raise NotImplementedError

    # The engine itself

    async def maintenance(self, *, push: bool | None = None, pop: bool | None = None) -> Maintenance:
        """Read the maintenance switches, or set those given; they hold for every engine on the database."""
        raise NotImplementedError

    async def tidy(self) -> dict[str, int]:
        """Do one round of the janitor's work now and answer what it removed or moved."""
        raise NotImplementedError

    async def ping(self) -> float:
        """A round trip to Postgres, in seconds."""
        raise NotImplementedError

    def metrics(self) -> dict[str, float]:
        """This engine's counters and gauges since it was opened, by name."""
        raise NotImplementedError
