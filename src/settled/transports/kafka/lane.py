"""A partition as its consumer has it: what is out, what waits, and how far it is settled. No I/O."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

from confluent_kafka import Message

from settled.message import Delivery, Metadata
from settled.transports.base import LeaseLost
from settled.transports.kafka.records import ID, KEY, stored_at

# The broker takes 4,096 bytes of metadata with an offset; an entry is at most 50.
_MOST_FAILURES = 75


class KafkaDelivery(Delivery):
    """A record as it is handed out; the same record handed out again is another delivery."""

    __slots__ = ("deadline", "home", "offset", "record")

    def __init__(
        self, record: Message, offset: int, home: Lane, headers: Mapping[str, str], attempt: int
    ) -> None:
        # Not through the base: this runs for every record, and what few ask for is worked out when they do.
        self.id = headers.get(ID) or f"{home.place}{offset}"
        self.subject = home.topic
        self.data = record.value() or b""
        self.headers = headers
        self.attempt = attempt
        self.lane = home.name
        self.ordered = home.ordered
        self.settled = False
        self.handled = False
        self.record = record
        self.offset = offset
        self.home = home
        self.deadline = 0.0

    @property
    def key(self) -> str | None:
        """The record's key, as its headers have it."""
        return None if self.record.key() is None else self.headers[KEY]

    def again(self, attempt: int) -> KafkaDelivery:
        """The same record, open."""
        return KafkaDelivery(self.record, self.offset, self.home, self.headers, attempt)

    def metadata(self) -> Metadata:
        stored = stored_at(self.record)
        return Metadata(
            stream_sequence=self.offset,
            timestamp=None if stored is None else datetime.fromtimestamp(stored / 1000, UTC),
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

    Every record that came is out, or waits, or is settled; so the position is known without a note of each.

    >>> lane = Lane("orders", 0, "billing", ordered=True)
    >>> four, five, seven = (
    ...     lane.hand_out(lane.came(Message(value=b"1", offset=at), {}), 0) for at in (4, 5, 7)
    ... )
    >>> lane.settle(five)
    >>> lane.position
    4
    >>> lane.settle(four)
    >>> lane.position
    7
    """

    def __init__(self, topic: str, number: int, group: str, *, ordered: bool) -> None:
        self.topic = topic
        self.number = number
        self.name = str(number)
        self.place = f"{topic}:{number}:"
        self.group = group
        self.ordered = ordered
        self.lost = False
        self.out: dict[int, KafkaDelivery] = {}
        """Handed out, and not settled."""
        self.waiting: dict[int, KafkaDelivery] = {}
        """To be handed out, again or for the first time."""
        self.failures: dict[int, Failure] = {}
        self.committed: tuple[int, str] | None = None
        self._next: int | None = None

    @property
    def position(self) -> int | None:
        """The first offset that is not settled; None before the first record."""
        if self.out or self.waiting:
            return min(itertools.chain(self.out, self.waiting))
        return self._next

    def came(self, record: Message, headers: Mapping[str, str]) -> KafkaDelivery:
        """The broker has delivered this one. Offsets have gaps: compacted records, transaction markers."""
        offset = record.offset() or 0
        if self.committed is None:
            # Where a new group begins needs no commit.
            self.committed = (offset, "")
        self._next = offset + 1
        failure = self.failures.get(offset) if self.failures else None
        return KafkaDelivery(record, offset, self, headers, 1 if failure is None else failure.attempts + 1)

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
        return bool(self.waiting) if self.ordered else len(self.out) + len(self.waiting) >= _MOST_UNSETTLED

    def due(self) -> float | None:
        """When the next one that waits may be handed out."""
        times = [self.failures[offset].due for offset in self.waiting if offset in self.failures]
        return min(times, default=None)

    def waits(self, delivery: KafkaDelivery, now: float) -> bool:
        """Whether this one, which has just come, must not be handed out yet."""
        if self.ordered and self.waiting:
            return True
        failure = self.failures.get(delivery.offset) if self.failures else None
        return failure is not None and failure.due > now

    def hand_out(self, delivery: KafkaDelivery, deadline: float) -> KafkaDelivery:
        delivery.deadline = deadline
        self.out[delivery.offset] = delivery
        return delivery

    def settle(self, delivery: KafkaDelivery) -> None:
        """It is settled for good."""
        offset = delivery.offset
        if self.lost or self.out.get(offset) is not delivery:
            self.check(delivery)
        del self.out[offset]
        if self.failures:
            self.failures.pop(offset, None)

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
