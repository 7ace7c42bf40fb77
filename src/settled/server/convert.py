"""Checked request bodies to the engine's values, each field named when it is wrong; pure functions."""

from __future__ import annotations

import base64
import math
import uuid
from functools import lru_cache
from typing import TYPE_CHECKING

import msgspec

from settled.queue.types import JSON, QUEUE_MODE, AckItem, AckOp, PushItem, PushOp

from .exchange import bad
from .parse import NAME_LIMIT, name, uuid_of
from .schemas import DELAY_LIMIT, HEADER_VALUE_LIMIT, HEADERS_LIMIT, ITEMS_LIMIT

if TYPE_CHECKING:
    from msgspec import Raw

    from . import bodies

UUID_SIZE = 36
NULL = b"null"
DONE = (None, "completed", "success")
_SHOWN = {"id": "that GET /api/v1/dlq shows", "query_id": "that POST /streams/v1/queries returned"}


def push_items(items: list[bodies.PushItem], field: str = "items") -> list[PushItem]:
    """The messages of a push."""
    if len(items) > ITEMS_LIMIT:
        raise bad(field, f"must have at most {ITEMS_LIMIT} elements, got {len(items)}")
    return [_push_item(item, field, i) for i, item in enumerate(items)]


def plain_push(items: list[bodies.PushItem]) -> bool:
    """Whether these are JSON messages for one partition, now, with nothing else said about them."""
    queue, partition = items[0].queue, items[0].partition
    for item in items:
        if item.queue != queue or item.partition != partition or item.content_type is not None:
            return False
        if item.headers is not None or item.trace_id is not None or item.delay_seconds is not None:
            return False
    return len(items) <= ITEMS_LIMIT


def _push_item(item: bodies.PushItem, field: str, i: int) -> PushItem:
    queue, partition, transaction_id = item.queue, item.partition, item.transaction_id
    # Spelled out rather than through name(): this runs once a message.
    if not 0 < len(queue) <= 255 or "\x00" in queue:
        name(queue, f"{field}[{i}].queue")
    if partition is None:
        partition = "Default"
    elif not 0 < len(partition) <= 255 or "\x00" in partition:
        name(partition, f"{field}[{i}].partition")
    if transaction_id is not None and (not 0 < len(transaction_id) <= 255 or "\x00" in transaction_id):
        name(transaction_id, f"{field}[{i}].transactionId")
    payload = item.payload or item.data or NULL
    if (
        item.trace_id is None
        and item.headers is None
        and item.delay_seconds is None
        and item.content_type is None
    ):
        return PushItem(queue, payload, partition, transaction_id)
    return PushItem(
        queue,
        _payload(item, payload, f"{field}[{i}]"),
        partition,
        transaction_id,
        content_type=JSON if item.content_type is None else item.content_type,
        headers=_headers(item.headers, f"{field}[{i}].headers"),
        delay_seconds=_delay(item.delay_seconds, f"{field}[{i}].delaySeconds") or 0,
        trace_id=None if item.trace_id is None else str(uuid_of(item.trace_id, f"{field}[{i}].traceId")),
    )


def _payload(item: bodies.PushItem, payload: Raw | bytes, field: str) -> Raw | bytes:
    """The bytes of a payload that says what it is: JSON as it stands, a string for its text or base64."""
    if item.content_type is None or item.content_type == JSON or item.content_type.endswith("+json"):
        return payload
    name(item.content_type, f"{field}.contentType")
    text = msgspec.json.decode(payload)
    if not isinstance(text, str):
        raise bad(f"{field}.payload", f"must be a string where contentType is {item.content_type!r}")
    if item.encoding is None:
        return text.encode()
    try:
        return base64.b64decode(text, validate=True)
    except ValueError as error:  # binascii.Error, or a character that is not ASCII
        raise bad(f"{field}.payload", f"must be base64: {error}") from error


def _headers(headers: dict[str, str] | None, field: str) -> dict[str, str] | None:
    if not headers:
        return None
    if len(headers) > HEADERS_LIMIT:
        raise bad(field, f"must have at most {HEADERS_LIMIT} entries, got {len(headers)}")
    for key, value in headers.items():
        name(key, f"{field} key")
        if key.startswith(":"):
            raise bad(f"{field}.{key}", "must not start with a colon")
        if len(value) > HEADER_VALUE_LIMIT or "\x00" in value:
            raise bad(
                f"{field}.{key}", f"must have at most {HEADER_VALUE_LIMIT} characters, none of them NUL"
            )
    return headers


def _delay(seconds: float | None, field: str) -> float | None:
    if seconds is not None and not (math.isfinite(seconds) and 0 <= seconds <= DELAY_LIMIT):
        raise bad(field, f"must be 0..{DELAY_LIMIT} seconds, got {seconds}")
    return seconds


@lru_cache(maxsize=16_384)
def _uuid_text(value: str) -> str | None:
    try:
        return str(uuid.UUID(value))
    except ValueError:
        return None


def partition_id(value: str, field: str = "partitionId") -> str:
    """A partition id in its usual spelling."""
    text = _uuid_text(value)
    if text is None:
        shown = _SHOWN.get(field, "a pop returned")
        raise bad(field, f"must be the uuid {shown}, got {value[:64]!r}")
    return text


def letter_id(value: str) -> str:
    """The id of a dead letter; Queen MQ's clients put `dlq:` before it.

    >>> letter_id("dlq:0197c5f1-27e4-7b0f-8b57-7b9d1c3d9a52")
    '0197c5f1-27e4-7b0f-8b57-7b9d1c3d9a52'
    """
    return partition_id(value.removeprefix("dlq:"), "id")


def plain_ack(body: bodies.AckBody) -> bool:
    """Whether a message was handled, and nothing else is said about it."""
    extra = body.error is not None or body.delay_seconds is not None or bool(body.release_rest)
    return body.status in DONE and not extra


def ack_item(body: bodies.AckBody, at: str, group: str | None) -> AckItem:
    """One ack; `group` is the batch's, used where the item names none."""
    transaction_id = body.transaction_id
    if not 0 < len(transaction_id) <= 255 or "\x00" in transaction_id:
        name(transaction_id, f"{at}transactionId")
    own = body.consumer_group or group or QUEUE_MODE
    if len(own) > 255 or "\x00" in own:
        name(own, f"{at}consumerGroup")
    lease_id = body.lease_id or None
    if lease_id is not None and len(lease_id) > 255:
        raise bad(f"{at}leaseId", "must have at most 255 characters")
    return AckItem(
        transaction_id,
        partition_id(body.partition_id, f"{at}partitionId"),
        body.status or "completed",
        lease_id,
        body.error,
        _delay(body.delay_seconds, f"{at}delaySeconds"),
        own,
        bool(body.release_rest),
    )


def ack_items(body: bodies.AckBatchBody) -> list[AckItem]:
    """The acks of a batch."""
    acks = body.acknowledgments
    if len(acks) > ITEMS_LIMIT:
        raise bad("acknowledgments", f"must have at most {ITEMS_LIMIT} elements, got {len(acks)}")
    group = name(body.consumer_group, "consumerGroup") if body.consumer_group else QUEUE_MODE
    items: list[AckItem] = []
    seen = canonical = ""
    for i, ack in enumerate(acks):
        transaction_id, lease_id = ack.transaction_id, ack.lease_id
        plain = ack.error is None and ack.consumer_group is None and ack.delay_seconds is None
        # The usual ack of a batch, without a call or a formatted field name for each.
        if (
            plain
            and not ack.release_rest
            and lease_id
            and len(lease_id) == UUID_SIZE
            and 0 < len(transaction_id) <= NAME_LIMIT
        ):
            if ack.partition_id != seen:
                seen = ack.partition_id
                canonical = partition_id(seen, f"acknowledgments[{i}].partitionId")
            if "\x00" not in transaction_id:
                status = ack.status or "completed"
                items.append(AckItem(transaction_id, canonical, status, lease_id, None, None, group))
                continue
        items.append(ack_item(ack, f"acknowledgments[{i}].", body.consumer_group))
    return items


def operations(body: bodies.TransactionBody) -> list[PushOp | AckOp]:
    """The operations of a transaction."""
    if not body.operations:
        raise bad("operations", "array cannot be empty")
    if len(body.operations) > ITEMS_LIMIT:
        raise bad("operations", f"must have at most {ITEMS_LIMIT} elements, got {len(body.operations)}")
    done: list[PushOp | AckOp] = []
    for i, operation in enumerate(body.operations):
        if hasattr(operation, "items"):
            done.append(PushOp(push_items(operation.items, f"operations[{i}].items")))
        else:
            item = ack_item(operation, f"operations[{i}].", None)
            done.append(AckOp(item, item.group or QUEUE_MODE))
    if sum(len(op.items) if isinstance(op, PushOp) else 1 for op in done) > ITEMS_LIMIT:
        raise bad("operations", f"must hold at most {ITEMS_LIMIT} pushes and acks in all")
    return done
