"""A partition as its consumer has it: what is out, what waits, and how far it is settled. No I/O."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

from settled.message import Delivery, Metadata
from settled.transports.base import LeaseLost

# The broker takes 4,096 bytes of metadata with an offset; an entry is at most 50.
_MOST_FAILURES = 75


class KafkaDelivery(Delivery):
    """A record as it is handed out; the same record handed out again is another delivery."""

    __slots__ = ("deadline", "home", "key", "offset", "timestamp")

    def __init__(
        self,
        *,
        id: str,  # noqa: A002
        data: bytes,
        headers: Mapping[str, str],
        key: str | None,
        timestamp: int | None,
        offset: int,
        home: Lane,
        attempt: int,
    ) -> None:
        super().__init__(
            id=id,
            subject=home.topic,
            data=data,
            headers=headers,
            attempt=attempt,
            lane=str(home.number),
            ordered=home.ordered,
        )
        self.key = key
        self.timestamp = timestamp
        self.offset = offset
        self.home = home
        self.deadline = 0.0

    def again(self, attempt: int) -> KafkaDelivery:
        """The same record, open."""
        return KafkaDelivery(
            id=self.id,
            data=self.data,
            headers=self.headers,
            key=self.key,
            timestamp=self.timestamp,
            offset=self.offset,
            home=self.home,
            attempt=attempt,
        )

    def metadata(self) -> Metadata:
        stored = None if self.timestamp is None else datetime.fromtimestamp(self.timestamp / 1000, UTC)
        return Metadata(
            stream_sequence=self.offset,
            timestamp=stored,
            redelivery_count=self.attempt - 1,
            consumer=self.home.group,
            lane=self.lane,
        )


@dataclass(frozen=True, slots=True)
class Failure:
    """A record that failed: how often, and when it may be tried again, in seconds since the epoch."""

    attempts: int
    due: float


class Lane:
    """One partition of one consumer, from its assignment to its loss.

    >>> lane = Lane("orders", 0, "billing", ordered=True)
    >>> for offset in (4, 5, 7):
    ...     lane.came(offset)
    >>> lane.done(5)
    >>> lane.position
    4
    >>> lane.done(4)
    >>> lane.position
    7
    """

    def __init__(self, topic: str, number: int, group: str, *, ordered: bool) -> None:
        self.topic = topic
        self.number = number
        self.group = group
        self.ordered = ordered
        self.lost = False
        self.out: dict[int, KafkaDelivery] = {}
        """Handed out, and not settled."""
        self.waiting: dict[int, KafkaDelivery] = {}
        """To be handed out, again or for the first time."""
        self.failures: dict[int, Failure] = {}
        self.committed: tuple[int, str] | None = None
        self._unsettled: deque[int] = deque()
        self._settled: set[int] = set()
        self._next: int | None = None

    @property
    def position(self) -> int | None:
        """The first offset that is not settled; None before the first record."""
        return self._unsettled[0] if self._unsettled else self._next

    def came(self, offset: int) -> None:
        """The broker has delivered this one. Offsets have gaps: compacted records, transaction markers."""
        if self.committed is None:
            # Where a new group begins needs no commit.
            self.committed = (offset, "")
        self._unsettled.append(offset)
        self._next = offset + 1

    def done(self, offset: int) -> None:
        """It is settled for good: the position moves over the settled prefix only."""
        self._settled.add(offset)
        self.failures.pop(offset, None)
        while self._unsettled and self._unsettled[0] in self._settled:
            self._settled.discard(self._unsettled.popleft())

    def goes_back(self, offset: int) -> bool:
        """Whether the partition begins anew, as when its topic was deleted and made again."""
        return self._next is not None and offset < self._next

    def ready(self, limit: int, now: float) -> list[KafkaDelivery]:
        """What waits and may be handed out now, in order."""
        if self.ordered and self.out:
            return []
        found: list[KafkaDelivery] = []
        for offset in sorted(self.waiting):
            failure = self.failures.get(offset)
            if len(found) == limit:
                break
            if failure is not None and failure.due > now:
                if self.ordered:
                    break
                continue
            found.append(self.waiting[offset])
        return found

    def blocked(self) -> bool:
        """Whether nothing behind may be fetched now."""
        return bool(self.waiting) if self.ordered else len(self._unsettled) >= _MOST_UNSETTLED

    def due(self) -> float | None:
        """When the next one that waits may be handed out."""
        times = [self.failures[offset].due for offset in self.waiting if offset in self.failures]
        return min(times, default=None)

    def hand_out(self, delivery: KafkaDelivery, deadline: float) -> KafkaDelivery:
        self.waiting.pop(delivery.offset, None)
        delivery.deadline = deadline
        self.out[delivery.offset] = delivery
        return delivery

    def settle(self, delivery: KafkaDelivery) -> None:
        self.check(delivery)
        del self.out[delivery.offset]
        self.done(delivery.offset)

    def give_back(self, delivery: KafkaDelivery) -> None:
        """Nobody failed: it is next again."""
        self.check(delivery)
        del self.out[delivery.offset]
        self.waiting[delivery.offset] = delivery.again(delivery.attempt)

    def fail(self, delivery: KafkaDelivery, due: float) -> None:
        """It comes again when due, with one more attempt."""
        self.check(delivery)
        del self.out[delivery.offset]
        self.failures[delivery.offset] = Failure(delivery.attempt, due)
        self.waiting[delivery.offset] = delivery.again(delivery.attempt + 1)

    def expire(self, now: float, due: float) -> None:
        """Take back what was out for too long."""
        for delivery in [one for one in self.out.values() if one.deadline <= now]:
            self.fail(delivery, due)

    def check(self, delivery: KafkaDelivery) -> None:
        """LeaseLost if this delivery is not the one that is out."""
        if self.lost:
            raise LeaseLost(
                f"topic {self.topic!r}: message {delivery.id!r}: partition {self.number} is somebody else's"
            )
        if self.out.get(delivery.offset) is not delivery:
            raise LeaseLost(
                f"topic {self.topic!r}: message {delivery.id!r}: it is settled already, or its lease ran out"
            )

    def note(self) -> str:
        """What is known of failures from the position on, to be kept with the committed offset."""
        if not self.failures:
            return ""
        # The oldest first: with too many, the youngest are forgotten and tried once too often.
        kept = sorted(self.failures.items())[:_MOST_FAILURES]
        return json.dumps(
            {"settled": [[at, one.attempts, int(one.due * 1000)] for at, one in kept]}, separators=(",", ":")
        )

    def restore(self, note: str | None) -> None:
        """Remember what another consumer, or an earlier run, noted; somebody else's note says nothing."""
        try:
            found = json.loads(note or "{}")["settled"]
            self.failures = {int(at): Failure(int(n), due / 1000) for at, n, due in found}
        except (ValueError, KeyError, TypeError):
            self.failures = {}

    def uncommitted(self) -> tuple[int, str] | None:
        """The offset and note the broker should have, if it has another."""
        position = self.position
        if position is None:
            return None
        wanted = (position, self.note())
        return None if wanted == self.committed else wanted


_MOST_UNSETTLED = 10_000
