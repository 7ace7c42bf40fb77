"""Stream queries: registration, state, and a cycle of state, pushes and ack in one transaction."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypedDict

import msgspec
from msgspec import Raw

from settled.queue.types import QUEUE_MODE, CycleAck, StateOp, StreamQuery

from . import answers, bodies
from .convert import partition_id, push_items
from .exchange import Answer, Request, bad, ok
from .openapi import Time
from .parse import decode, name
from .schemas import KEY_LIMIT, KEYS_LIMIT

if TYPE_CHECKING:
    from settled.queue.engine import Engine

_query = msgspec.json.Decoder(bodies.StreamQueryBody)
_state = msgspec.json.Decoder(bodies.StateGetBody)
_cycle = msgspec.json.Decoder(bodies.CycleBody)


class RegisteredQuery(StreamQuery):
    """A registered stream query; `fresh` if it was not known before."""

    success: bool


class StateValue(TypedDict):
    """One key of a query's state."""

    key: str
    value: Any
    updated_at: Time


class StateAnswer(TypedDict):
    """A query's state on one partition."""

    success: bool
    rows: list[StateValue]


class CycleAcked(TypedDict):
    """What became of the ack of a cycle."""

    success: bool
    count: int
    lease_released: bool
    dlq: bool


class CycleAnswer(TypedDict):
    """What one cycle committed; no `ack_result` without an ack."""

    success: bool
    query_id: str
    partition_id: str
    queueName: str
    state_ops_applied: int
    push_results: list[answers.Pushed]
    ack_result: CycleAcked | None


class Streams:
    """Handlers of /streams/v1/*."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def register(self, request: Request) -> Answer:
        """POST /streams/v1/queries."""
        body = decode(request.body, _query)
        result = await self._engine.register_query(
            name(body.name, "name"),
            name(body.source_queue, "source_queue"),
            name(body.config_hash, "config_hash"),
            sink_queue=None if not body.sink_queue else name(body.sink_queue, "sink_queue"),
            reset=body.reset,
        )
        return ok({"success": True, **msgspec.to_builtins(result)})

    async def state(self, request: Request) -> Answer:
        """POST /streams/v1/state/get."""
        body = decode(request.body, _state)
        keys = body.keys or []
        if len(keys) > KEYS_LIMIT:
            raise bad("keys", f"must have at most {KEYS_LIMIT} elements, got {len(keys)}")
        if body.ripe_at_or_before is not None and not 0 <= body.ripe_at_or_before < 2**53:
            raise bad("ripe_at_or_before", f"must be milliseconds since 1970, got {body.ripe_at_or_before}")
        rows = await self._engine.state(
            partition_id(body.query_id, "query_id"),
            partition_id(body.partition_id, "partition_id"),
            keys=[_key(key, "keys") for key in keys],
            key_prefix=None if not body.key_prefix else _key(body.key_prefix, "key_prefix"),
            ripe_at_or_before=None if body.ripe_at_or_before is None else int(body.ripe_at_or_before),
        )
        shown = [{"key": row.key, "value": Raw(row.value), "updated_at": row.updated_at} for row in rows]
        return ok({"success": True, "rows": shown})

    async def cycle(self, request: Request) -> Answer:
        """POST /streams/v1/cycle."""
        body = decode(request.body, _cycle, stored=True)
        ops = body.state_ops or []
        if len(ops) > KEYS_LIMIT:
            raise bad("state_ops", f"must have at most {KEYS_LIMIT} elements, got {len(ops)}")
        items = push_items(body.push_items or [], "push_items")
        result = await self._engine.cycle(
            partition_id(body.query_id, "query_id"),
            partition_id(body.partition_id, "partition_id"),
            group=QUEUE_MODE if not body.consumer_group else name(body.consumer_group, "consumer_group"),
            state_ops=[
                StateOp(op.type, _key(op.key, f"state_ops[{i}].key"), bytes(op.value or b"null"))
                for i, op in enumerate(ops)
            ],
            push_items=items,
            ack=None if body.ack is None else _ack(body.ack),
            release_lease=body.release_lease,
        )
        acked = None
        if body.ack is not None:
            acked = {
                "success": True,
                "count": result.acked,
                "lease_released": result.lease_released,
                "dlq": result.dlq,
            }
        return ok(
            {
                "success": True,
                "query_id": result.query_id,
                "partition_id": result.partition_id,
                "queueName": result.queue,
                "state_ops_applied": result.state_ops_applied,
                "push_results": Raw(answers.pushed(result.push_results, items)),
                "ack_result": acked,
            }
        )


def _ack(ack: bodies.CycleAck) -> CycleAck:
    return CycleAck(
        name(ack.transaction_id, "ack.transactionId"),
        ack.lease_id or None,
        ack.status or "completed",
        None if ack.count is None else int(ack.count),
        ack.error,
    )


def _key(key: str, field: str) -> str:
    if len(key) > KEY_LIMIT or "\x00" in key:
        raise bad(field, f"must have at most {KEY_LIMIT} characters, none of them NUL")
    return key
