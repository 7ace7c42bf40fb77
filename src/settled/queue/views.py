"""What an inspector of the queue sees: lags, messages, journals, traces, figures."""

from datetime import datetime
from typing import Literal

import msgspec

from settled.queue.options import QueueOptions
from settled.queue.segment import JSON


class GroupLag(msgspec.Struct):
    """How far a group is behind on one queue."""

    group: str
    queue: str
    partitions: int
    partitions_with_lag: int
    total_lag: int
    max_time_lag: float
    active_leases: int
    state: Literal["Stable", "Lagging", "Dead"]
    subscription_mode: str | None
    subscription_timestamp: datetime | None
    subscription_created_at: datetime | None


class LaneLag(msgspec.Struct):
    """How far a group is behind on one partition."""

    group: str
    queue: str
    partition: str
    partition_id: str
    lag: int
    time_lag: float
    total_consumed: int
    lease_id: str | None
    lease_expires_at: datetime | None
    oldest_pending_at: datetime | None
    last_consumed_at: datetime | None


class GroupState(msgspec.Struct):
    """What one group has done with one message; `unsettled` deliveries ended without a verdict."""

    group: str
    status: Literal["pending", "processing", "retrying", "completed", "dead_letter"]
    attempts: int = 0
    lease_expires_at: datetime | None = None
    error: str | None = None
    unsettled: int = 0


class MessageView(msgspec.Struct):
    """One message as an inspector sees it; `payload` and `options` are there if one message was asked for."""

    id: str
    transaction_id: str
    partition_id: str
    queue: str
    partition: str
    namespace: str
    task: str
    seq: int
    created_at: datetime
    groups: list[GroupState]
    trace_id: str | None = None
    producer: str | None = None
    headers: dict[str, str] = {}
    content_type: str = JSON
    payload: bytes | None = None
    encrypted: bool = False
    priority: int = 0
    options: QueueOptions | None = None

    @property
    def status(self) -> str:
        """The message's state over all groups: the least finished one wins."""
        states = {g.status for g in self.groups}
        for name in ("processing", "retrying", "pending", "dead_letter", "completed"):
            if name in states:
                return "pending" if name == "retrying" else name
        return "pending"


class JournalEntry(msgspec.Struct):
    """One settle call as it touched one partition: what was settled, when, by whom, with which error.

    Not `exact`: of the messages from `first_seq` to `last_seq` only `count` were settled, in no order.
    """

    at: datetime
    kind: Literal["settled", "auto_ack", "failed", "released", "dead", "dropped", "seek", "expired"]
    group: str
    partition_id: str
    first_seq: int
    last_seq: int
    count: int
    worker: str
    lease_id: str | None = None
    attempts: int = 0
    error: str | None = None
    exact: bool = True


class Trace(msgspec.Struct):
    """A note somebody left on a message; `payload` of the message where notes of several were asked for."""

    id: str
    transaction_id: str
    partition_id: str
    queue: str
    partition: str
    group: str | None
    event_type: str
    names: list[str]
    data: bytes
    worker: str
    created_at: datetime
    payload: bytes | None = None
    content_type: str = JSON


class TraceName(msgspec.Struct):
    """A trace name and how often it was used."""

    name: str
    traces: int
    messages: int
    last_seen: datetime


class LaneStats(msgspec.Struct):
    """One partition in figures."""

    id: str
    name: str
    created_at: datetime
    oldest: datetime | None
    newest: datetime | None
    total: int
    pending: int
    processing: int
    completed: int
    dead: int


class QueueStats(msgspec.Struct):
    """One queue in figures; `lanes` only where a single queue was asked for."""

    id: str
    name: str
    namespace: str
    task: str
    created_at: datetime
    options: QueueOptions
    partitions: int
    total: int
    pending: int
    processing: int
    completed: int
    dead: int
    lanes: list[LaneStats] = []
