"""The values that go into and come out of the queue engine."""

from collections.abc import Mapping
from datetime import datetime
from typing import Generic, Literal, TypeVar

import msgspec

from settled.queue.errors import (
    BadRequest,
    Conflict,
    Fenced,
    NotFound,
    QueueError,
    QueueFull,
    Unavailable,
)
from settled.queue.options import QueueOptions
from settled.queue.popped import Popped, PoppedMessage
from settled.queue.segment import JSON
from settled.queue.views import (
    GroupLag,
    GroupState,
    JournalEntry,
    LaneLag,
    LaneStats,
    MessageView,
    QueueStats,
    Trace,
    TraceName,
)

__all__ = [
    "QUEUE_MODE",
    "DEFAULT_PARTITION",
    "JSON",
    "PushItem",
    "PushResult",
    "Appended",
    "PopRequest",
    "Popped",
    "PoppedMessage",
    "AckItem",
    "AckResult",
    "Acked",
    "PushOp",
    "AckOp",
    "TransactionResult",
    "LeaseExtension",
    "QueueOptions",
    "Configured",
    "DeadLetter",
    "Page",
    "GroupLag",
    "LaneLag",
    "GroupState",
    "MessageView",
    "Maintenance",
    "QueueStats",
    "LaneStats",
    "JournalEntry",
    "Trace",
    "TraceName",
    "StateOp",
    "StateRow",
    "StreamQuery",
    "CycleAck",
    "CycleResult",
    "QueueError",
    "BadRequest",
    "NotFound",
    "Conflict",
    "QueueFull",
    "Unavailable",
    "Fenced",
]

QUEUE_MODE = "__QUEUE_MODE__"
DEFAULT_PARTITION = "Default"

T = TypeVar("T")

Status = Literal["completed", "success", "failed", "dlq", "retry"]
Outcome = Literal[
    "acknowledged",
    "failed_retry",
    "failed_dlq",
    "failed_dropped",
    "released",
    "invalid_lease",
    "not_found",
    "not_applied",
]


class PushItem(msgspec.Struct, frozen=True, gc=False):
    """One message to push; `payload` is bytes of `content_type` (JSON text unless said otherwise)."""

    queue: str
    payload: bytes | bytearray | memoryview | msgspec.Raw = b"null"
    partition: str = DEFAULT_PARTITION
    transaction_id: str | None = None
    headers: Mapping[str, str] | None = None
    content_type: str = JSON
    delay_seconds: float = 0
    trace_id: str | None = None
    producer: str | None = None


class PushResult(msgspec.Struct, gc=False):
    """What became of one pushed item; a duplicate carries the first message's id.

    `failed` (it is not stored) and `unknown` (it may be) come with `PartlyStored` only.
    """

    transaction_id: str
    message_id: str
    status: Literal["queued", "duplicate", "scheduled", "failed", "unknown"]
    queue: str
    partition: str
    partition_id: str


class Appended(msgspec.Struct, frozen=True, gc=False):
    """The answer to plain pushes: where they went, each message's id, and whether it is a duplicate's."""

    queue: str
    partition_id: str
    results: list[tuple[str, bool]]


class PopRequest(msgspec.Struct, frozen=True):
    """Which messages are wanted: of a queue, of one of its partitions, or of a namespace/task.

    With `release_rest` the first nack in a partition gives back what is unsettled of that partition.
    """

    queue: str | None = None
    partition: str | None = None
    namespace: str | None = None
    task: str | None = None
    group: str = QUEUE_MODE
    batch: int = 1
    partitions: int = 1
    auto_ack: bool = False
    wait: float = 0
    lease_seconds: int | None = None
    subscription_mode: str | None = None
    subscription_from: str | None = None
    release_rest: bool = False


class AckItem(msgspec.Struct, frozen=True, gc=False):
    """How one delivered message is settled; `group` overrides the call's group.

    `release_rest` gives back what is unsettled under the lease in the same partition.
    """

    transaction_id: str
    partition_id: str
    status: str = "completed"
    lease_id: str | None = None
    error: str | None = None
    delay: float | None = None
    group: str | None = None
    release_rest: bool = False


class AckResult(msgspec.Struct, gc=False):
    """The answer to one ack item: `success`, the outcome's name, and why not; `noop`: settled before."""

    transaction_id: str
    success: bool
    message: Outcome
    error: str | None = None
    queue: str | None = None
    partition: str | None = None
    lease_released: bool = False
    dlq: bool = False
    attempts: int = 0
    noop: bool = False


class Acked(msgspec.Struct, frozen=True, gc=False):
    """The answer to plain acks: all were acknowledged, and whether that was the last of the lease."""

    queue: str
    partition: str
    lease_released: bool


class PushOp(msgspec.Struct, frozen=True, tag="push"):
    """Push these items, in a transaction."""

    items: list[PushItem]


class AckOp(msgspec.Struct, frozen=True, tag="ack"):
    """Settle this message, in a transaction."""

    item: AckItem
    group: str = QUEUE_MODE


class TransactionResult(msgspec.Struct):
    """All or nothing: results in the order of the flattened operations."""

    success: bool
    results: list[PushResult | AckResult]
    error: str | None = None


class LeaseExtension(msgspec.Struct):
    """The answer to a lease renewal; `renewed` counts partitions."""

    lease_id: str
    success: bool
    expires_at: datetime | None = None
    error: str | None = None
    renewed: int = 0


class Configured(msgspec.Struct):
    """A queue as it is configured now."""

    queue_id: str
    partition_id: str
    queue: str
    namespace: str
    task: str
    options: QueueOptions
    created_at: datetime


class DeadLetter(msgspec.Struct):
    """A message that will not be tried again for its group, with its own copy of the data."""

    id: str
    message_id: str
    partition_id: str
    transaction_id: str
    queue: str
    partition: str
    group: str
    error: str | None
    attempts: int
    unsettled: int
    payload: bytes
    content_type: str
    headers: dict[str, str]
    trace_id: str | None
    producer: str | None
    created_at: datetime
    failed_at: datetime


class DeadLetterFilter(msgspec.Struct, frozen=True, kw_only=True):
    """A choice of dead letters; a field that is None leaves nothing out. An `error` is a part of the text."""

    queue: str | None = None
    partition: str | None = None
    group: str | None = None
    since: str | datetime | None = None
    until: str | datetime | None = None
    error: str | None = None
    ids: list[str] | None = None


class DeadLetterRefused(msgspec.Struct):
    """A dead letter that could not be sent again, and why."""

    id: str
    error: str


class DeadLettersDone(msgspec.Struct):
    """One part of a bulk operation on dead letters.

    `matched` counts all that were chosen, in the first part only; `next` is where the next part begins.
    """

    matched: int | None
    done: int
    refused: list[DeadLetterRefused]
    next: str | None


class Page(msgspec.Struct, Generic[T]):
    """One page of a listing, with the total it was cut from."""

    rows: list[T]
    total: int
    limit: int
    offset: int


class StateOp(msgspec.Struct, frozen=True):
    """A change to a stream query's state; `value` is JSON text."""

    type: Literal["upsert", "delete"]
    key: str
    value: bytes | msgspec.Raw | None = None


class StateRow(msgspec.Struct):
    """One key of a stream query's state; `value` is JSON text."""

    key: str
    value: bytes
    updated_at: datetime


class StreamQuery(msgspec.Struct):
    """A registered stream query."""

    query_id: str
    name: str
    config_hash: str
    fresh: bool
    reset: bool


class CycleAck(msgspec.Struct, frozen=True):
    """The source ack of a stream cycle: everything leased up to and with this message."""

    transaction_id: str
    lease_id: str | None = None
    status: str = "completed"
    count: int | None = None
    error: str | None = None


class CycleResult(msgspec.Struct):
    """What one stream cycle committed, in one transaction."""

    query_id: str
    partition_id: str
    queue: str
    state_ops_applied: int
    push_results: list[PushResult]
    acked: int
    lease_released: bool
    dlq: bool


class Maintenance(msgspec.Struct):
    """Which switches are on: pushes refused, pops answered empty."""

    push: bool
    pop: bool
