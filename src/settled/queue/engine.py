"""The queue engine: every operation there is, each with a sentence; the work is in the modules behind it."""

import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Self

from settled.queue import admin, deadletters, inspection, notes, pushing, refusals, releases, transact
from settled.queue.core import Core
from settled.queue.pop import POP_BYTES
from settled.queue.soon import Done
from settled.queue.types import (
    QUEUE_MODE,
    Acked,
    AckItem,
    AckOp,
    AckResult,
    Appended,
    Configured,
    CycleAck,
    CycleResult,
    DeadLetter,
    DeadLetterFilter,
    DeadLettersDone,
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
    async def open(
        cls, dsn: str, *, worker: str | None = None, maintain: bool = True, pop_bytes: int = POP_BYTES
    ) -> Self:
        """Connect, bring the schema up to date and start the background work (`maintain`: janitor too).

        A pop hands out about `pop_bytes` at most, and one message at least.
        """
        return cls(await Core.open(dsn, worker, maintain, pop_bytes))

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
        return await pushing.push(self._core, items)

    def push_soon(
        self,
        queue: str,
        partition: str,
        transaction_ids: Sequence[str | None],
        payloads: list[bytes],
        done: Done[Appended],
    ) -> bool:
        """Append JSON to one known partition without a coroutine; False: use `push`."""
        return pushing.push_soon(self._core, queue, partition, transaction_ids, payloads, done)

    async def pop(self, request: PopRequest) -> Popped:
        """Hand out a batch under a lease (auto_ack: settled at once), waiting up to `wait` seconds."""
        return await self._core.poller.pop(request)

    def pop_soon(self, request: PopRequest, done: Done[Popped]) -> bool:
        """Like `pop` without a coroutine, of a queue known to have messages; False: use `pop`."""
        return not self._core.switches.get("pop") and self._core.poller.pop_soon(request, done)

    def give_back(self, popped: Popped) -> None:
        """Let others have what was handed out to somebody who has gone away."""
        self._core.give_back(popped)

    async def ack(
        self, items: Sequence[AckItem], group: str = QUEUE_MODE, *, atomic: bool = True
    ) -> list[AckResult]:
        """Settle delivered messages; `atomic`: if one cannot be, none is (the others say `not_applied`)."""
        results = await self._core.settler.settle(items, group, atomic=atomic)
        await refusals.explain(self._core, items, group, results)
        await releases.release_rest(self._core, items, group, results)
        return results

    def ack_soon(
        self,
        partition_id: str,
        lease_id: str | None,
        group: str,
        transaction_ids: Sequence[str],
        done: Done[Acked],
    ) -> bool:
        """Ack messages under one lease, all or none, without a coroutine; False: use `ack`."""
        return self._core.settler.ack_soon(partition_id, lease_id, group, transaction_ids, done)

    async def transaction(
        self, operations: Sequence[PushOp | AckOp], required_leases: Sequence[str] = ()
    ) -> TransactionResult:
        """Pushes and acks over any queues, all or nothing; leases are checked."""
        return await transact.transaction(self._core, operations, required_leases)

    async def extend(self, lease_id: str, seconds: float = 60) -> LeaseExtension:
        """Push a lease's expiry to at least `seconds` from now, on every partition under it."""
        return await transact.extend(self._core, lease_id, seconds)

    # Queues

    async def configure(
        self,
        queue: str,
        options: Mapping[str, Any] | None = None,
        *,
        namespace: str | None = None,
        task: str | None = None,
        replace: bool = False,
    ) -> Configured:
        """Create a queue, or change the options given; None resets one, `replace` all that are missing.

        `namespace` and `task` keep their value where they are None, and are taken away by an empty text.
        """
        return await admin.configure(self._core, queue, options, namespace, task, replace)

    async def queues(self, *, namespace: str | None = None, task: str | None = None) -> list[QueueStats]:
        """All queues with their figures."""
        return await inspection.queues(self._core, None, namespace, task)

    async def queue(self, name: str, *, limit: int | None = None, offset: int = 0) -> QueueStats:
        """One queue with the figures of its partitions, all or `limit` of them; NotFound if there is none."""
        return await inspection.queue(self._core, name, limit, offset)

    async def delete_queue(self, name: str) -> bool:
        """Delete a queue and all under it (its dead letters too); False if there was none."""
        return await admin.delete_queue(self._core, name)

    async def clear_queue(self, name: str, partition: str | None = None) -> int:
        """Drop all messages of a queue or one partition and answer how many; cursors move to the end."""
        return await admin.clear_queue(self._core, name, partition)

    # Consumer groups

    async def groups(self, *, queue: str | None = None, group: str | None = None) -> list[GroupLag]:
        """Lag of each (group, queue)."""
        return await inspection.groups(self._core, queue, group)

    async def lanes(
        self, *, queue: str | None = None, group: str | None = None, min_lag_seconds: float = 0
    ) -> list[LaneLag]:
        """Lag of each (group, partition)."""
        return await inspection.lanes(self._core, queue, group, min_lag_seconds)

    async def seek(self, group: str, queue: str, to: str | datetime, *, partition: str | None = None) -> int:
        """Move a group's cursors to "end", "beginning" or a time (ISO 8601); answers partitions moved."""
        return await admin.seek(self._core, group, queue, to, partition)

    async def subscribe(self, group: str, queue: str | None, at: str | datetime) -> int:
        """Change where the group starts on partitions it has not touched yet; answers the rows changed."""
        return await admin.subscribe(self._core, group, queue, at)

    async def delete_group(self, group: str, *, queue: str | None = None, metadata: bool = True) -> int:
        """Forget a group's cursors (and its subscription with `metadata`); answers partitions forgotten."""
        return await admin.delete_group(self._core, group, queue, metadata)

    # Dead letters

    async def dead_letters(
        self,
        *,
        queue: str | None = None,
        partition: str | None = None,
        group: str | None = None,
        since: str | datetime | None = None,
        until: str | datetime | None = None,
        error: str | None = None,
        ids: Sequence[str] | None = None,
        limit: int = 100,
        offset: int = 0,
    ) -> Page[DeadLetter]:
        """Dead letters, newest first, by the time they died; `error` is a part of theirs."""
        chosen = DeadLetterFilter(
            queue=queue,
            partition=partition,
            group=group,
            since=since,
            until=until,
            error=error,
            ids=list(ids) if ids is not None else None,
        )
        return await deadletters.dead_letters(self._core, chosen, limit, offset)

    async def dead_letter(self, dead_letter_id: str) -> DeadLetter:
        """One dead letter; NotFound if there is none."""
        return await deadletters.dead_letter(self._core, dead_letter_id)

    async def retry_dead_letters(
        self, chosen: DeadLetterFilter, *, limit: int = 500, after: str | None = None, dry_run: bool = False
    ) -> DeadLettersDone:
        """Send dead letters again, in parts: pass `next` of the result as `after` until it is None."""
        return await deadletters.retry_dead_letters(self._core, chosen, limit, after, dry_run=dry_run)

    async def purge_dead_letters(
        self, chosen: DeadLetterFilter, *, limit: int = 500, after: str | None = None, dry_run: bool = False
    ) -> DeadLettersDone:
        """Drop dead letters for good, a part at a time, as `retry_dead_letters` does."""
        return await deadletters.purge_dead_letters(self._core, chosen, limit, after, dry_run=dry_run)

    async def requeue(self, dead_letter_id: str) -> PushResult:
        """Push a dead letter's copy to its partition again, with a new transaction id, and drop it."""
        return await deadletters.requeue(self._core, dead_letter_id)

    async def retry_message(self, partition_id: str, transaction_id: str, *, group: str | None = None) -> int:
        """Requeue the dead letters of one message (of one group, or all); NotFound if there is none."""
        return await deadletters.retry_message(self._core, partition_id, transaction_id, group)

    async def bury_message(self, partition_id: str, transaction_id: str, *, group: str = QUEUE_MODE) -> None:
        """Send a message that is not leased straight to the dead letters of a group."""
        await deadletters.bury_message(self._core, partition_id, transaction_id, group)

    async def delete_dead_letters(self, ids: Sequence[str]) -> int:
        """Drop dead letters for good; answers how many."""
        return await deadletters.delete_dead_letters(self._core, ids)

    # Looking at messages

    async def message(self, partition_id: str, transaction_id: str) -> MessageView:
        """One message with its payload and what each group did with it; NotFound if it is gone."""
        return await inspection.message(self._core, partition_id, transaction_id)

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
        where = (queue, partition, namespace, task)
        return await inspection.messages(self._core, where, status, since, until, limit, offset)

    async def delete_message(self, partition_id: str, transaction_id: str) -> None:
        """Take one message out of the log for every group; NotFound if it is gone."""
        await inspection.delete_message(self._core, partition_id, transaction_id)

    async def journal(
        self,
        *,
        queue: str | None = None,
        partition_id: str | None = None,
        transaction_id: str | None = None,
        limit: int = 100,
    ) -> list[JournalEntry]:
        """How messages were settled, newest first; with a transaction id, the life of that message."""
        return await inspection.journal(self._core, queue, partition_id, transaction_id, limit)

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
        return await notes.trace(self._core, partition_id, transaction_id, data, names, event_type, group)

    async def traces(self, partition_id: str, transaction_id: str) -> list[Trace]:
        """The notes on one message, oldest first."""
        return await notes.traces(self._core, partition_id, transaction_id)

    async def traces_by_name(self, name: str, *, limit: int = 100, offset: int = 0) -> Page[Trace]:
        """The notes under one name, newest first."""
        return await notes.traces_by_name(self._core, name, limit, offset)

    async def trace_names(self, *, limit: int = 50, offset: int = 0) -> Page[TraceName]:
        """The names in use, most recent first."""
        return await notes.trace_names(self._core, limit, offset)

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
        return await notes.register_query(self._core, name, source_queue, config_hash, sink_queue, reset)

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
        return await notes.state(self._core, query_id, partition_id, keys, key_prefix, ripe_at_or_before)

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
        return await transact.cycle(
            self._core, query_id, partition_id, group, state_ops, push_items, ack, release_lease
        )

    # The engine itself

    @property
    def pushes_paused(self) -> bool:
        """Whether pushing is switched off, as far as this engine has heard."""
        return self._core.switches.get("push", False)

    async def maintenance(self, *, push: bool | None = None, pop: bool | None = None) -> Maintenance:
        """Read the maintenance switches, or set those given; they hold for every engine on the database."""
        return await admin.maintenance(self._core, push, pop)

    async def tidy(self) -> dict[str, int]:
        """Do one round of the janitor's work now and answer what it removed or moved."""
        return await self._core.janitor.round()

    async def ping(self) -> float:
        """A round trip to Postgres, in seconds."""
        before = time.perf_counter()
        await self._core.pool.fetch("select 1")
        return time.perf_counter() - before

    async def check_writable(self) -> None:
        """Unavailable if no message could be stored now, as with a full disk or a read-only database.

        Postgres is not asked shortly after a push was stored, or after it was asked.
        """
        await self._core.probe.check()

    def metrics(self) -> dict[str, float]:
        """This engine's counters and gauges since it was opened, by name."""
        return self._core.metrics()
