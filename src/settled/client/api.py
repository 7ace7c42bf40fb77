"""The HTTP API as coroutines: the one implementation beneath both faces."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import quote

import msgspec

from settled.settlement import ERROR_LIMIT, storable

from .errors import ClientError, Refused, Uncertain, Unsettled
from .messages import DeadLetters, Message, Outgoing, Popped, Pushed, Receipt, Settled, receipt

if TYPE_CHECKING:
    from .messages import Delivered
    from .wire import Wire

T = TypeVar("T")

DEFAULT_GROUP = "__QUEUE_MODE__"
ERRORS_LIMIT = 500_000
"""Characters of all errors in one request."""

_popped = msgspec.json.Decoder(Popped)
_pushed = msgspec.json.Decoder(list[Pushed])
_settled = msgspec.json.Decoder(Settled)
_settled_list = msgspec.json.Decoder(list[Settled])
_dead_letters = msgspec.json.Decoder(DeadLetters)


def segment(name: str) -> str:
    """A name as one segment of a path."""
    return quote(name, safe="")


class Api:
    """One method a route."""

    def __init__(self, wire: Wire) -> None:
        self.wire = wire

    async def push(self, items: list[Outgoing], *, until_room: bool = True) -> list[Pushed]:
        """POST /api/v1/push."""
        return _pushed.decode(
            await self.wire.call("POST", "/api/v1/push", {"items": items}, until_room=until_room)
        )

    async def pop(self, path: str, params: dict[str, str], wait: float, payload: type[T]) -> list[Message[T]]:
        """GET a pop route."""
        answer = await self.wire.call("GET", path, params=params, wait=wait)
        if not answer:
            return []
        popped = _popped.decode(answer)
        return [Message(message, message.queue or popped.queue, payload) for message in popped.messages]

    async def settle(
        self, delivered: Delivered, status: str, error: str | None, delay: float | None
    ) -> Settled:
        """POST /api/v1/ack; the partition and the lease are always named."""
        message = receipt(delivered)
        body = {**_ack(message, status, error, delay), "consumerGroup": message.group}
        try:
            return _settled.decode(await self.wire.call("POST", "/api/v1/ack", body))
        except Refused as refused:
            unsettled = _unsettled(refused)
            if (
                isinstance(unsettled, Uncertain)
                and status == "completed"
                and await self._is_acknowledged(message)
            ):
                return Settled(message.transaction_id, True, "acknowledged")
            raise unsettled from None

    async def _is_acknowledged(self, message: Message[Any] | Receipt) -> bool:
        """Whether its group is done with it; False also if that cannot be found out."""
        path = f"/api/v1/messages/{segment(message.partition_id)}/{segment(message.transaction_id)}"
        with contextlib.suppress(ClientError):
            detail = await self.json("GET", path)
            done = {group["name"] for group in detail["consumerGroups"] if group["status"] == "completed"}
            return (message.group or DEFAULT_GROUP) in done
        return False

    async def settle_batch(
        self, delivered: list[tuple[Delivered, str, str | None]], *, atomic: bool
    ) -> list[Settled]:
        """POST /api/v1/ack/batch."""
        if not delivered:
            return []
        items = [(receipt(message), status, error) for message, status, error in delivered]
        acks = [
            {**_ack(m, status, error, None, len(items)), "consumerGroup": m.group}
            for m, status, error in items
        ]
        body = {"acknowledgments": acks, "atomic": atomic, "consumerGroup": items[0][0].group}
        try:
            return _settled_list.decode(await self.wire.call("POST", "/api/v1/ack/batch", body))
        except Refused as refused:
            raise _unsettled(refused) from None

    async def extend(self, lease_id: str, seconds: float) -> None:
        """POST /api/v1/lease/{id}/extend; raises if the lease is gone."""
        await self.wire.call("POST", f"/api/v1/lease/{segment(lease_id)}/extend", {"seconds": seconds})

    async def transaction(self, operations: list[dict[str, Any]]) -> dict[str, Any]:
        """POST /api/v1/transaction: all or nothing."""
        try:
            answer = await self.wire.call("POST", "/api/v1/transaction", {"operations": operations})
        except Refused as refused:
            raise _unsettled(refused) from None
        return msgspec.json.decode(answer)  # type: ignore[no-any-return]

    async def dead_letters(self, params: dict[str, str]) -> DeadLetters:
        """GET /api/v1/dlq."""
        return _dead_letters.decode(await self.wire.call("GET", "/api/v1/dlq", params=params))

    async def json(self, method: str, path: str, body: object = None, **params: str) -> Any:
        """Any other route."""
        try:
            answer = await self.wire.call(method, path, body, params=params or None)
        except Refused as refused:
            raise (_unsettled(refused) if refused.after_loss and method != "GET" else refused) from None
        return msgspec.json.decode(answer) if answer else None


def shortened(error: str | None, together: int = 1) -> str | None:
    """An error as it is sent with so many others: a request may not become too large because of them."""
    return None if error is None else storable(error, min(ERROR_LIMIT, ERRORS_LIMIT // together))


def _ack(
    message: Message[Any] | Receipt, status: str, error: str | None, delay: float | None, together: int = 1
) -> dict[str, Any]:
    return {
        "transactionId": message.transaction_id,
        "partitionId": message.partition_id,
        "leaseId": message.lease_id,
        "status": status,
        "error": shortened(error, together),
        "delaySeconds": delay,
    }


def _unsettled(refused: Refused) -> Refused:
    """A 404 or 409 about a message is told apart from other refusals."""
    if refused.status not in (404, 409) or not isinstance(refused.body, dict):
        return refused
    why = str(refused.body.get("message") or "conflict")
    kind = Uncertain if refused.after_loss else Unsettled
    return kind(refused.status, refused.error, why, refused.body)
