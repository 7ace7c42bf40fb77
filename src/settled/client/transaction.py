"""Acks, nacks and pushes over several queues that take effect together or not at all."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

import msgspec

from .api import shortened
from .face import AsyncFace, SyncFace, operation
from .messages import outgoing, receipt

if TYPE_CHECKING:
    from .api import Api
    from .messages import Delivered


class Transaction:
    """Gathers operations; `commit()` applies them all or none.

    If it raises, none was applied, with two exceptions that do not know: `Unreachable`, and `Uncertain` where
    an answer was lost on the way.
    """

    def __init__(self, api: Api) -> None:
        self._api = api
        self._operations: list[dict[str, Any]] = []
        self._queue = ""
        self._partition = "Default"

    def ack(self, *messages: Delivered) -> Self:
        """Acknowledge these messages."""
        return self._settle(messages, "completed", None)

    def nack(self, *messages: Delivered, error: str | None = None) -> Self:
        """Count a failed attempt of these messages."""
        return self._settle(messages, "failed", error)

    def reject(self, *messages: Delivered, error: str | None = None) -> Self:
        """Send these messages to the dead letters."""
        return self._settle(messages, "dlq", error)

    def _settle(self, messages: tuple[Delivered, ...], status: str, error: str | None) -> Self:
        for message in map(receipt, messages):
            self._operations.append(
                {
                    "type": "ack",
                    "transactionId": message.transaction_id,
                    "partitionId": message.partition_id,
                    "leaseId": message.lease_id,
                    "consumerGroup": message.group,
                    "status": status,
                    "error": shortened(error, len(messages)),
                }
            )
        return self

    def queue(self, name: str) -> Self:
        """Where the following pushes go."""
        self._queue, self._partition = name, "Default"
        return self

    def partition(self, name: str) -> Self:
        """The partition of the following pushes."""
        self._partition = name
        return self

    def push(
        self, *payloads: object, transaction_id: str | None = None, headers: dict[str, str] | None = None
    ) -> Self:
        """Push these payloads to the queue named last."""
        if not self._queue:
            raise ValueError("push in a transaction needs a queue: call .queue(name) first")
        if transaction_id is not None and len(payloads) > 1:
            raise ValueError("transaction_id names one message; push the payloads one by one")
        items = [
            outgoing(self._queue, self._partition, payload, transaction_id=transaction_id, headers=headers)
            for payload in payloads
        ]
        self._operations.append({"type": "push", "items": items})
        return self

    @operation
    async def commit(self) -> list[dict[str, Any]]:
        """Apply everything and return each result; raises Unsettled if one cannot be applied, and so none is.

        Uncertain, which is an Unsettled too, says that the answer was lost: all may have been applied.
        """
        if not self._operations:
            return []
        answer = await self._api.transaction(
            msgspec.to_builtins(self._operations, builtin_types=(msgspec.Raw,))
        )
        results: list[dict[str, Any]] = answer["results"]
        return results


class AsyncTransaction(Transaction, AsyncFace):
    """`await transaction.commit()`."""


class SyncTransaction(Transaction, SyncFace):
    """`transaction.commit()` blocks."""
