"""Client and SyncClient: where everything starts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Self, TypeVar, overload

from .api import Api, segment
from .buffer import Buffers
from .face import AsyncFace, ClientPortal, SyncFace, operation
from .messages import receipt
from .queue import AsyncQueue, SyncQueue
from .resilience import Resilience
from .transaction import AsyncTransaction, SyncTransaction
from .wire import Wire

if TYPE_CHECKING:
    from collections.abc import Iterable

    from .messages import Delivered, Settled

T = TypeVar("T")

URL = "http://127.0.0.1:6632"


class _Client:
    """What both clients do."""

    def __init__(
        self,
        url: str = URL,
        *,
        resilience: Resilience | None = None,
        timeout: float = 30.0,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self._wire = Wire(url, resilience or Resilience(), timeout, headers or {})
        self._api = Api(self._wire)
        self._buffers = Buffers(self._api)

    @operation
    async def ack(self, message: Delivered) -> Settled:
        """Acknowledge a message; raises Unsettled if its lease is gone.

        Here and below, a message may be a dict with the API's names: `transactionId` and `partitionId`, and
        `leaseId` and `consumerGroup` if they are known. Uncertain is raised where an answer was lost on the
        way, and it cannot be found out whether the call took effect.
        """
        return await self._api.settle(message, "completed", None, None)

    @operation
    async def nack(self, message: Delivered, error: str | None = None, delay: float | None = None) -> Settled:
        """Count a failed attempt: it comes again, or goes to the dead letters at the queue's limit."""
        return await self._api.settle(message, "failed", error, delay)

    @operation
    async def release(self, message: Delivered) -> Settled:
        """Give a message back without counting an attempt."""
        return await self._api.settle(message, "retry", None, None)

    @operation
    async def reject(self, message: Delivered, error: str | None = None) -> Settled:
        """Send a message to the dead letters now."""
        return await self._api.settle(message, "dlq", error, None)

    @operation
    async def ack_batch(
        self, messages: Iterable[Delivered | tuple[Delivered, str | None]], *, atomic: bool = True
    ) -> list[Settled]:
        """Settle many messages in one call; a `(message, error)` pair is a nack unless its error is None.

        A dict may say its `status` and `error` itself. All or nothing unless `atomic` is False.
        """
        items: list[tuple[Delivered, str, str | None]] = []
        for entry in messages:
            message, error = entry if isinstance(entry, tuple) else (entry, None)
            status = "completed" if error is None else "failed"
            if isinstance(entry, Mapping):
                status, error = entry.get("status") or status, entry.get("error")
            items.append((message, status, error))
        return await self._api.settle_batch(items, atomic=atomic)

    @operation
    async def extend(self, message: Delivered, seconds: float = 60.0) -> None:
        """Hold a message's lease for at least `seconds` more."""
        lease_id = receipt(message).lease_id
        if lease_id is not None:
            await self._api.extend(lease_id, seconds)

    @operation
    async def groups(self) -> list[dict[str, Any]]:
        """Every consumer group with its lag."""
        answer: dict[str, Any] = await self._api.json("GET", "/api/v1/consumer-groups")
        groups: list[dict[str, Any]] = answer["groups"]
        return groups

    @operation
    async def seek(self, group: str, queue: str, to: str) -> dict[str, Any]:
        """Move a group on a queue: `to` is "end", "beginning" or an ISO 8601 time."""
        path = f"/api/v1/consumer-groups/{segment(group)}/queues/{segment(queue)}/seek"
        body: dict[str, Any] = {"timestamp": to}
        if to in ("end", "beginning"):
            body = {"toEnd": True} if to == "end" else {"toBeginning": True}
        answer: dict[str, Any] = await self._api.json("POST", path, body)
        return answer

    @operation
    async def retry_dead_letter(self, id: str) -> dict[str, Any]:  # noqa: A002 - the field's name
        """Put a dead letter back in its queue."""
        answer: dict[str, Any] = await self._api.json("POST", f"/api/v1/dlq/{segment(id)}/retry", {})
        return answer

    @operation
    async def health(self) -> dict[str, Any]:
        """The server's health."""
        answer: dict[str, Any] = await self._api.json("GET", "/health")
        return answer

    @operation
    async def flush(self) -> None:
        """Wait until every push that is buffered now was sent; Refused names all that the server refused."""
        await self._buffers.flush()

    async def _close(self) -> None:
        try:
            await self._buffers.close()
        finally:
            await self._wire.close()


class Client(_Client, AsyncFace):
    """The async client.

    async with Client("http://127.0.0.1:6632") as client:
        await client.queue("orders").push({"id": 1})
    """

    @overload
    def queue(self, name: str | None = None) -> AsyncQueue[Any]: ...
    @overload
    def queue(self, name: str | None, payload: type[T]) -> AsyncQueue[T]: ...
    def queue(self, name: str | None = None, payload: Any = Any) -> AsyncQueue[Any]:
        """A queue; with a payload type, messages are decoded to it."""
        return AsyncQueue(self._api, self._buffers, name, payload)

    def transaction(self) -> AsyncTransaction:
        """Acks and pushes that take effect together."""
        return AsyncTransaction(self._api)

    async def close(self) -> None:
        """Send what is buffered and hang up; Refused names all messages that the server refused."""
        await self._close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()


class SyncClient(_Client, SyncFace):
    """The blocking client: the same calls, without await.

    with SyncClient("http://127.0.0.1:6632") as client:
        client.queue("orders").push({"id": 1})
    """

    def __init__(
        self,
        url: str = URL,
        *,
        resilience: Resilience | None = None,
        timeout: float = 30.0,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(url, resilience=resilience, timeout=timeout, headers=headers)
        self._portal = ClientPortal("settled-client")

    @overload
    def queue(self, name: str | None = None) -> SyncQueue[Any]: ...
    @overload
    def queue(self, name: str | None, payload: type[T]) -> SyncQueue[T]: ...
    def queue(self, name: str | None = None, payload: Any = Any) -> SyncQueue[Any]:
        """A queue; with a payload type, messages are decoded to it."""
        return SyncQueue(self._api, self._buffers, name, payload, self._portal)

    def transaction(self) -> SyncTransaction:
        """Acks and pushes that take effect together."""
        transaction = SyncTransaction(self._api)
        transaction._portal = self._portal
        return transaction

    def close(self) -> None:
        """Send what is buffered and hang up; Refused names all messages that the server refused."""
        self._portal.close_after(self._close())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
