"""The request bodies of the HTTP API, as msgspec structs; unknown fields are ignored, null means absent."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Raw, Struct

# The default of a Raw field: `Raw(b"null")` would keep the API document from being made.
ABSENT: Any = None
Status = Literal["completed", "success", "failed", "retry", "dlq"]


class Body(Struct, gc=False, rename="camel"):
    """Base of the camelCase bodies."""


class PushItem(Body):
    """One message to push; `data` is another name for `payload`.

    A `contentType` other than JSON takes a string: the text itself, or base64 where `encoding` says so.
    """

    queue: str
    partition: str | None = None
    payload: Raw = ABSENT
    data: Raw = ABSENT
    transaction_id: str | None = None
    trace_id: str | None = None
    headers: dict[str, str] | None = None
    delay_seconds: float | None = None
    content_type: str | None = None
    encoding: Literal["base64"] | None = None


class PushBody(Body):
    """POST /api/v1/push."""

    items: list[PushItem]


class AckBody(Body):
    """POST /api/v1/ack."""

    transaction_id: str
    partition_id: str
    lease_id: str | None = None
    status: Status | None = None
    consumer_group: str | None = None
    error: str | None = None
    delay_seconds: float | None = None
    release_rest: bool | None = None


class AckBatchBody(Body):
    """POST /api/v1/ack/batch: `atomic: false` settles item by item."""

    acknowledgments: list[AckBody]
    consumer_group: str | None = None
    atomic: bool = True


class PushOperation(PushBody, tag_field="type", tag="push"):
    """Pushes inside a transaction."""


class AckOperation(AckBody, tag_field="type", tag="ack"):
    """An ack or nack inside a transaction."""


class TransactionBody(Body):
    """POST /api/v1/transaction; `kv` and `timers`, which Queen MQ 2.x has, are refused, never ignored."""

    operations: list[PushOperation | AckOperation]
    required_leases: list[str] | None = None
    kv: None = None
    timers: None = None


class ExtendBody(Body):
    """POST /api/v1/lease/{leaseId}/extend."""

    seconds: float | None = None


class ConfigureBody(Body):
    """POST /api/v1/configure: an option that is null is reset, one that is missing keeps its value.

    So do `namespace` and `task`, which an empty string takes away. With `mode` `replace` all that is missing
    is reset.
    """

    queue: str
    namespace: str | None = None
    task: str | None = None
    options: dict[str, Any] | None = None
    mode: Literal["merge", "replace"] | None = None


class SeekBody(Body):
    """POST .../seek: one of the three."""

    to_end: bool | None = None
    to_beginning: bool | None = None
    timestamp: str | None = None


class DeadLettersBody(
    Body, rename={"group": "consumerGroup", "since": "from", "until": "to", "dry_run": "dryRun"}
):
    """POST /api/v1/dlq/retry and /api/v1/dlq/purge: at least one filter, or `all`.

    `error` is a part of the error's text. A call does `limit`; `after` is the `next` of the last call.
    """

    queue: str | None = None
    partition: str | None = None
    group: str | None = None
    since: str | None = None
    until: str | None = None
    error: str | None = None
    ids: list[str] | None = None
    all: bool = False
    limit: Annotated[int, Meta(ge=1, le=1000)] | None = None
    after: str | None = None
    dry_run: bool = False


class SubscriptionBody(Body):
    """POST /api/v1/consumer-groups/{group}/subscription."""

    subscription_timestamp: str


class TraceBody(Body):
    """POST /api/v1/traces."""

    transaction_id: str
    partition_id: str
    data: Raw
    consumer_group: str | None = None
    event_type: str | None = None
    trace_names: list[str] | str | None = None


class SwitchBody(Body):
    """POST /api/v1/system/maintenance and .../maintenance/pop."""

    enabled: bool


class StreamQueryBody(Struct, gc=False):
    """POST /streams/v1/queries."""

    name: str
    source_queue: str
    config_hash: str
    sink_queue: str | None = None
    reset: bool = False


class StateGetBody(Struct, gc=False):
    """POST /streams/v1/state/get."""

    query_id: str
    partition_id: str
    keys: list[str] | None = None
    key_prefix: str | None = None
    ripe_at_or_before: int | None = None


class StateOp(Struct, gc=False):
    """One change of a stream's state."""

    type: Literal["upsert", "delete"]
    key: str
    value: Raw = ABSENT


class CycleAck(Body):
    """The ack of a stream cycle: everything up to this message."""

    transaction_id: str
    lease_id: str | None = None
    status: Status | None = None
    count: int | None = None
    error: str | None = None


class CycleBody(Struct, gc=False):
    """POST /streams/v1/cycle."""

    query_id: str
    partition_id: str
    consumer_group: str | None = None
    release_lease: bool = True
    state_ops: list[StateOp] | None = None
    push_items: list[PushItem] | None = None
    ack: CycleAck | None = None
