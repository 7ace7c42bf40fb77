"""What all routers remember together: whose an assignment is, and which messages are done."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from typing import Protocol

import nats.js.errors
from nats.js.kv import KeyValue


class Memory(Protocol):
    """Small facts under a name, for a while."""

    async def put(self, kind: str, name: str, value: str) -> None: ...

    async def get(self, kind: str, name: str) -> str | None: ...


class LocalMemory:
    """In this process, the last so many."""

    def __init__(self, limit: int = 100_000) -> None:
        self._facts: OrderedDict[tuple[str, str], str] = OrderedDict()
        self._limit = limit

    async def put(self, kind: str, name: str, value: str) -> None:
        self._facts[kind, name] = value
        while len(self._facts) > self._limit:
            self._facts.popitem(last=False)

    async def get(self, kind: str, name: str) -> str | None:
        return self._facts.get((kind, name))


class SharedMemory:
    """In a JetStream key-value bucket, with what this process knows already in front of it."""

    def __init__(self, bucket: KeyValue) -> None:
        self._bucket = bucket
        self._near = LocalMemory(10_000)

    async def put(self, kind: str, name: str, value: str) -> None:
        await self._bucket.put(_key(kind, name), value.encode())
        await self._near.put(kind, name, value)

    async def get(self, kind: str, name: str) -> str | None:
        known = await self._near.get(kind, name)
        if known is not None:
            return known
        try:
            entry = await self._bucket.get(_key(kind, name))
        except nats.js.errors.KeyNotFoundError:
            return None
        value = (entry.value or b"").decode()
        await self._near.put(kind, name, value)
        return value


def _key(kind: str, name: str) -> str:
    # Ids come from outside, and a key may hold only some characters.
    return f"{kind}.{hashlib.sha256(name.encode()).hexdigest()[:40]}"


class DeliveryCounts:
    """Deliveries of each message that is not done; the broker's own count, so it survives a restart."""

    def __init__(self, limit: int = 100_000) -> None:
        self._counts: OrderedDict[str, int] = OrderedDict()
        self._limit = limit

    def note(self, id: str, attempt: int) -> None:  # noqa: A002
        self._counts[id] = attempt
        while len(self._counts) > self._limit:
            self._counts.popitem(last=False)

    def forget(self, id: str) -> None:  # noqa: A002
        self._counts.pop(id, None)

    def __len__(self) -> int:
        return len(self._counts)

    def get(self, id: str) -> int:  # noqa: A002
        """0 if it is not known."""
        return self._counts.get(id, 0)
