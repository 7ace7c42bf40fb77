"""The request bodies of the HTTP API, as msgspec structs; unknown fields are ignored, null means absent."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Raw, Struct

from .schemas import (
    ITEMS_LIMIT,
    KEYS_LIMIT,
    Delay,
    Extension,
    Headers,
    Key,
    LeaseId,
    Milliseconds,
    Name,
    OptionalName,
    Options,
    Timestamp,
    Uuid,
)

# The default of a Raw field: `Raw(b"null")` would keep the API document from being made.
ABSENT: Any = None
Status = Literal["completed", "success", "failed", "retry", "dlq"]


class Body(Struct, gc=False, rename="camel"):
    """Base of the camelCase bodies."""


class PushItem(Body):
    """One message to push; `data` is another name for `payload`.

    A `contentType` other than JSON takes a string: the text itself, or base64 where `encoding` says so.
    """

    queue: Name
    partition: Name | None = None
    payload: Raw = ABSENT
    data: Raw = ABSENT
    transaction_id: Name | None = None
    trace_id: Uuid | None = None
    headers: Headers | None = None
    delay_seconds: Delay | None = None
    content_type: Name | None = None
    encoding: Literal["base64"] | None = None


class PushBody(Body):
    """POST /api/v1/push."""

    items: Annotated[list[PushItem], Meta(extra_json_schema={"maxItems": ITEMS_LIMIT})]


class AckBody(Body):
    """POST /api/v1/ack."""

    transaction_id: Name
    partition_id: Uuid
    lease_id: OptionalName | None = None
    status: Status | None = None
    consumer_group: OptionalName | None = None
    error: str | None = None
    delay_seconds: Delay | None = None
    release_rest: bool | None = None


class AckBatchBody(Body):
    """POST /api/v1/ack/batch: `atomic: false` settles item by item."""

    acknowledgments: Annotated[list[AckBody], Meta(extra_json_schema={"maxItems": ITEMS_LIMIT})]
    consumer_group: OptionalName | None = None
    atomic: bool = True


class PushOperation(PushBody, tag_field="type", tag="push"):
    """Pushes inside a transaction."""


class AckOperation(AckBody, tag_field="type", tag="ack"):
    """An ack or nack inside a transaction."""


class TransactionBody(Body):
    """POST /api/v1/transaction; `kv` and `timers`, which Queen MQ 2.x has, are refused, never ignored."""

    operations: Annotated[
        list[PushOperation | AckOperation], Meta(extra_json_schema={"minItems": 1, "maxItems": ITEMS_LIMIT})
    ]
    required_leases: list[LeaseId] | None = None
    kv: None = None
    timers: None = None


class ExtendBody(Body):
    """POST /api/v1/lease/{leaseId}/extend."""

    seconds: Extension | None = None


class ConfigureBody(Body):
    """POST /api/v1/configure: an option that is null is reset, one that is missing keeps its value.

    So do `namespace` and `task`, which an empty string takes away. With `mode` `replace` all that is missing
    is reset.
    """

    queue: Name
    namespace: OptionalName | None = None
    task: OptionalName | None = None
    options: Options | None = None
    mode: Literal["merge", "replace"] | None = None


class SeekBody(Body):
    """POST .../seek: one of the three."""

    to_end: bool | None = None
    to_beginning: bool | None = None
    timestamp: Timestamp | None = None


class DeadLettersBody(
    Body, rename={"group": "consumerGroup", "since": "from", "until": "to", "dry_run": "dryRun"}
):
    """POST /api/v1/dlq/retry and /api/v1/dlq/purge: at least one filter, or `all`.

    `error` is a part of the error's text. A call does `limit`; `after` is the `next` of the last call.
    """

    queue: Name | None = None
    partition: Name | None = None
    group: Name | None = None
    since: Timestamp | None = None
    until: Timestamp | None = None
    error: Name | None = None
    ids: list[Uuid] | None = None
    all: bool = False
    limit: Annotated[float, Meta(ge=1, le=1000)] | None = None
    after: str | None = None
    dry_run: bool = False


class SubscriptionBody(Body):
    """POST /api/v1/consumer-groups/{group}/subscription."""

    subscription_timestamp: Timestamp


class TraceBody(Body):
    """POST /api/v1/traces."""

    transaction_id: Name
    partition_id: Uuid
    data: Raw
    consumer_group: OptionalName | None = None
    event_type: OptionalName | None = None
    trace_names: list[Name] | Name | None = None


class SwitchBody(Body):
    """POST /api/v1/system/maintenance and .../maintenance/pop."""

    enabled: bool


class StreamQueryBody(Struct, gc=False):
    """POST /streams/v1/queries."""

    name: Name
    source_queue: Name
    config_hash: Name
    sink_queue: OptionalName | None = None
    reset: bool = False


class StateGetBody(Struct, gc=False):
    """POST /streams/v1/state/get."""

    query_id: Uuid
    partition_id: Uuid
    keys: Annotated[list[Key], Meta(extra_json_schema={"maxItems": KEYS_LIMIT})] | None = None
    key_prefix: Key | None = None
    ripe_at_or_before: Milliseconds | None = None


class StateOp(Struct, gc=False):
    """One change of a stream's state."""

    type: Literal["upsert", "delete"]
    key: Key
    value: Raw = ABSENT


class CycleAck(Body):
    """The ack of a stream cycle: everything up to this message."""

    transaction_id: Name
    lease_id: OptionalName | None = None
    status: Status | None = None
    count: float | None = None
    error: str | None = None


class CycleBody(Struct, gc=False):
    """POST /streams/v1/cycle."""

    query_id: Uuid
    partition_id: Uuid
    consumer_group: OptionalName | None = None
    release_lease: bool = True
    state_ops: Annotated[list[StateOp], Meta(extra_json_schema={"maxItems": KEYS_LIMIT})] | None = None
    push_items: Annotated[list[PushItem], Meta(extra_json_schema={"maxItems": ITEMS_LIMIT})] | None = None
    ack: CycleAck | None = None
