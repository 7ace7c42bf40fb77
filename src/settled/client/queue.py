"""One queue as a fluent value: each method returns a changed copy, so a prepared queue can be shared."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

from .api import segment
from .buffer import BufferRules
from .consumer import AsyncConsumption, Handler, Plan, SyncConsumption
from .face import AsyncFace, SyncFace, operation
from .messages import DeadLetters, Message, Pushed, outgoing

if TYPE_CHECKING:
    from collections.abc import Iterable

    from .api import Api
    from .buffer import Buffers
    from .face import ClientPortal

T = TypeVar("T")

GRACE = 0.2
PROMPT = 1.0
"""How long the server may hold a pop that must not be interrupted, so that a stop is prompt."""


class Queue(Generic[T]):
    """A queue, how to push to it and how to consume from it."""

    def __init__(self, api: Api, buffers: Buffers, name: str | None, payload: type[T]) -> None:
        self._api = api
        self._buffers = buffers
        self._name = name
        self._payload = payload
        self._namespace: str | None = None
        self._task: str | None = None
        self._partition: str | None = None
        self._group: str | None = None
        self._auto_ack = False
        self._batch = 1
        self._partitions = 1
        self._each = False
        self._wait = 30.0
        self._renew: tuple[float, float] | None = None
        self._start: dict[str, str] = {}
        self._limit: int | None = None
        self._idle: float | None = None
        self._workers = 1
        self._rules: BufferRules | None = None

    def _with(self, **changes: Any) -> Self:
        twin = copy.copy(self)
        for key, value in changes.items():
            setattr(twin, f"_{key}", value)
        return twin

    def partition(self, name: str) -> Self:
        """Push to, or pop from, this partition only."""
        return self._with(partition=name)

    def group(self, name: str) -> Self:
        """Consume as this group; without one, all consumers share the queue."""
        return self._with(group=name)

    def namespace(self, name: str) -> Self:
        """Pop from every queue of this namespace."""
        return self._with(namespace=name)

    def task(self, name: str) -> Self:
        """Pop from every queue of this task."""
        return self._with(task=name)

    def auto_ack(self, enabled: bool = True) -> Self:
        """Acknowledge on delivery: at most once, nothing to ack, no retry.

        A consumer that is told to stop handles what it has taken first.
        """
        return self._with(auto_ack=enabled)

    def batch(self, size: int) -> Self:
        """Take up to this many messages at a time."""
        return self._with(batch=size)

    def partitions(self, count: int) -> Self:
        """Take from up to this many partitions at a time."""
        return self._with(partitions=count)

    def each(self) -> Self:
        """Call the handler with one message at a time; else a batch of more than one comes as a list."""
        return self._with(each=True)

    def wait(self, seconds: float) -> Self:
        """How long a pop waits for a message; 0 answers at once."""
        return self._with(wait=seconds)

    def renew_lease(self, enabled: bool = True, every: float = 30.0, seconds: float = 60.0) -> Self:
        """While a handler runs, extend the lease by `seconds` `every` so many seconds."""
        return self._with(renew=(every, seconds) if enabled else None)

    def from_all(self) -> Self:
        """A new group starts at the oldest message."""
        return self._with(start={"subscriptionMode": "all"})

    def from_new(self) -> Self:
        """A new group starts with messages pushed from now on."""
        return self._with(start={"subscriptionMode": "new"})

    def from_time(self, moment: str) -> Self:
        """A new group starts with messages pushed from this ISO 8601 time on."""
        return self._with(start={"subscriptionFrom": moment})

    def limit(self, count: int) -> Self:
        """Stop consuming after this many messages; no more than these are taken."""
        return self._with(limit=count)

    def idle(self, seconds: float) -> Self:
        """Stop consuming when nothing came for so long."""
        return self._with(idle=seconds)

    def concurrency(self, workers: int) -> Self:
        """Run so many consume loops side by side."""
        return self._with(workers=workers)

    def buffer(self, count: int = 100, seconds: float = 0.05, limit: int = 10_000) -> Self:
        """Gather pushes and send them together: at `count` messages or after `seconds`."""
        return self._with(rules=BufferRules(count, seconds, limit))

    @operation
    async def push(
        self,
        payload: T,
        *,
        transaction_id: str | None = None,
        headers: dict[str, str] | None = None,
        delay: float | None = None,
        trace_id: str | None = None,
    ) -> Pushed:
        """Push one message: bytes as they are, all else as JSON."""
        item = outgoing(
            self._required(),
            self._partition or "Default",
            payload,
            transaction_id=transaction_id,
            headers=headers,
            delay=delay,
            trace_id=trace_id,
        )
        if self._rules is not None:
            await self._buffers.of(self._rules).add([item])
            return Pushed("buffered", item.transaction_id)
        return (await self._api.push([item]))[0]

    @operation
    async def push_all(self, payloads: Iterable[T]) -> list[Pushed]:
        """Push many messages in one request; they keep their order in the partition."""
        items = [outgoing(self._required(), self._partition or "Default", payload) for payload in payloads]
        if self._rules is not None:
            await self._buffers.of(self._rules).add(items)
            return [Pushed("buffered", item.transaction_id) for item in items]
        return await self._api.push(items) if items else []

    @operation
    async def pop(self) -> list[Message[T]]:
        """Take messages: up to `batch`, waiting up to `wait` seconds for the first."""
        return await self._pop()

    async def _pop(self, longest: float | None = None, size: int | None = None) -> list[Message[T]]:
        wait = self._wait if longest is None else min(self._wait, longest)
        params = {
            "batch": str(self._batch if size is None else size),
            "partitions": str(self._partitions),
            **self._start,
        }
        if wait > 0:
            params |= {"wait": "true", "timeout": str(round(wait * 1000))}
        for key, value in (
            ("consumerGroup", self._group),
            ("namespace", self._namespace),
            ("task", self._task),
        ):
            if value:
                params[key] = value
        if self._auto_ack:
            params["autoAck"] = "true"
        return await self._api.pop(self._path(), params, wait, self._payload)

    def _path(self) -> str:
        if self._name is None:
            if not (self._namespace or self._task):
                raise ValueError("pop needs a queue, a namespace or a task")
            return "/api/v1/pop"
        path = f"/api/v1/pop/queue/{segment(self._name)}"
        return f"{path}/partition/{segment(self._partition)}" if self._partition else path

    @operation
    async def get_dlq(
        self, *, limit: int = 100, offset: int = 0, from_: str | None = None, to: str | None = None
    ) -> DeadLetters:
        """A page of this queue's dead letters, of the group if one is set."""
        params = {"queue": self._required(), "limit": str(limit), "offset": str(offset)}
        for key, value in (
            ("consumerGroup", self._group), ("partition", self._partition), ("from", from_), ("to", to),
        ):  # fmt: skip
            if value:
                params[key] = value
        return await self._api.dead_letters(params)

    @operation
    async def create(self, /, *, replace: bool = False, **options: Any) -> dict[str, Any]:
        """Create the queue, or change the options given: as the server names them, or in snake_case.

        What is left out keeps its value, and None resets an option; `replace=True` resets all left out.
        """
        body: dict[str, Any] = {
            "queue": self._required(),
            "options": {_camel(key): value for key, value in options.items()},
        }
        if replace:
            body["mode"] = "replace"
        if self._namespace is not None:
            body["namespace"] = self._namespace
        if self._task is not None:
            body["task"] = self._task
        configured: dict[str, Any] = await self._api.json("POST", "/api/v1/configure", body)
        return configured

    @operation
    async def delete(self) -> None:
        """Delete the queue with everything in it."""
        await self._api.json("DELETE", f"/api/v1/resources/queues/{segment(self._required())}")

    def _required(self) -> str:
        if self._name is None:
            raise ValueError("this needs a queue name: client.queue(name)")
        return self._name

    def _plan(self, handler: Handler) -> Plan[T]:
        every, seconds = self._renew or (None, 0.0)
        longest = None if self._idle is None else self._idle + GRACE
        if self._auto_ack:
            longest = PROMPT if longest is None else min(longest, PROMPT)
        return Plan(
            pop=lambda size: self._pop(longest, size),
            batch=self._batch,
            auto_ack=self._auto_ack,
            handler=handler,
            each=self._each or self._batch == 1,
            workers=self._workers,
            limit=self._limit,
            idle=self._idle,
            renew_every=every,
            renew_seconds=seconds,
        )


class AsyncQueue(Queue[T], AsyncFace):
    """A queue of the async client."""

    def consume(self, handler: Handler) -> AsyncConsumption[T]:
        """`await queue.consume(handler)`; the handler gets one message, or a list (see `each`)."""
        return AsyncConsumption(self._api, self._plan(handler))


class SyncQueue(Queue[T], SyncFace):
    """A queue of the sync client."""

    def __init__(
        self, api: Api, buffers: Buffers, name: str | None, payload: type[T], portal: ClientPortal
    ) -> None:
        super().__init__(api, buffers, name, payload)
        self._portal = portal

    def consume(self, handler: Handler) -> SyncConsumption[T]:
        """`queue.consume(handler).run()`; the handler gets one message, or a list (see `each`)."""
        consumption = SyncConsumption(self._api, self._plan(handler))
        consumption._portal = self._portal
        return consumption


def _camel(name: str) -> str:
    first, *rest = name.split("_")
    return first + "".join(word.capitalize() for word in rest)
