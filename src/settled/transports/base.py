"""What a transport has to do."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Protocol, TypeAlias, runtime_checkable

from settled.backoff import AFTER_NAK
from settled.message import Delivery
from settled.settlement import Action, Nack, Reject, Requeue


class NackMeans(Enum):
    """What giving a message back means on a broker."""

    RELEASE = "release"
    """It is available to anyone at once."""
    REWIND = "rewind"
    """The consumer seeks back to it."""
    LEASE = "lease"
    """It comes again when its timeout has passed."""
    NONE = "none"
    """It cannot be given back."""


class Attempts(Enum):
    """Who counts the deliveries of a message."""

    BROKER = "the broker"
    HEADER = "a header, when sent round again"
    """A delivery that ended without a word, as in a crash, is not counted."""
    NONE = "nobody"


class RejectMeans(Enum):
    """How a message becomes a dead letter."""

    NATIVE = "by the broker"
    TOGETHER = "in one transaction"
    """The letter is stored and the message settled, or neither."""
    PUBLISH = "published and confirmed, then acked"
    """A crash in between writes the letter twice, and never loses it."""


class DelayMeans(Enum):
    """What holds a message until its delay is over."""

    NATIVE = "the broker"
    PARKED = "a parked copy"
    """Stored elsewhere on the broker until it is due."""
    HELD = "the consumer"
    """Held by the consumer that has it, under its lease; a crash brings it again early."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What a channel can do, so that nothing has to be found out by failing."""

    nack: NackMeans = NackMeans.RELEASE
    attempts: Attempts = Attempts.BROKER
    reject: RejectMeans = RejectMeans.PUBLISH
    delay: DelayMeans = DelayMeans.NATIVE
    extends: bool = True
    """A lease can be started anew while the handler runs; False also where there is none that runs out."""
    wakes: bool = False
    """A receive that waits ends when a message arrives, so no pause is needed after an empty one."""
    buffer: int = 1
    """How many messages a receive may take where nobody says so. More than one only if it costs nothing to
    give back what is behind a message that blocks, and if an ack waits for no other."""
    lanes: bool = False
    """Messages published with the same `lane` stay in order; where False, publish refuses a lane."""
    lease: float | None = None
    """How many seconds a delivery is a consumer's own; None if that is not known, or has no end."""
    max_attempts: int | None = None
    """After so many deliveries the broker itself gives a message up; None if it never does."""
    counts_releases: bool = True
    """A delivery that was given back is one of them too."""
    counts_untried: bool = False
    """Giving back is a delivery like any other to the broker, also of a message that nobody has tried."""
    saves: bool = False
    """What the broker would then give up, the channel itself keeps, as a copy or as a dead letter."""

    def gives_up(self, delivery: Delivery, action: Action) -> bool:
        """Whether the broker would answer this by giving the message up, with no word on why."""
        if self.max_attempts is None or delivery.deliveries < self.max_attempts:
            return False
        match action:
            case Nack():
                return self.counts_untried and not self.saves
            case Requeue(delay):
                # A copy that is parked is counted from the start.
                return not (self.delay is DelayMeans.PARKED and delay)
            case _:
                return False


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """What a subscription reads: a channel, as which group, and where its rejects go."""

    channel: str
    group: str | None = None
    dead_letter: str | None = None
    invalid: str | None = None
    settings: object = None
    """What only the transport in question understands, such as a NATS stream and consumer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerStatus:
    """Whether a transport has its broker, and which or why not."""

    connected: bool
    detail: str = ""
    sessions_lost: int = 0
    """How often the broker had forgotten what it kept for us, and with it messages; MQTT only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outgoing:
    """A message on its way to a transport."""

    subject: str
    data: bytes
    headers: Mapping[str, str] = field(default_factory=dict)
    id: str | None = None
    lane: str | None = None
    delay: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """What became of a published message; a duplicate names the first one."""

    id: str
    duplicate: bool = False
    sequence: int | None = None
    lane: str | None = None


class Publication(Awaitable[Published]):
    """A publish call: done when it returns in sync code, done when awaited in async code."""

    __slots__ = ("_call", "_result")

    def __init__(self, call: Awaitable[Published] | None, result: Published | None) -> None:
        self._call = call
        self._result = result

    @classmethod
    def of(cls, result: Published) -> Publication:
        """One that is done."""
        return cls(None, result)

    @classmethod
    def when_awaited(cls, call: Awaitable[Published]) -> Publication:
        """One that is done when it is awaited."""
        return cls(call, None)

    def result(self) -> Published:
        """What became of it."""
        if self._result is None:
            raise RuntimeError("this message is not published yet: in async code, await app.publish(...)")
        return self._result

    def __await__(self) -> Generator[Any, None, Published]:
        if self._result is None and self._call is not None:
            self._result = yield from self._call.__await__()
        return self.result()


def retry_delay(delay: float | None, configured: float | None, attempt: int) -> float:
    """How long a failed message waits: as asked for, else as configured, else as everywhere.

    >>> retry_delay(5, 3, attempt=2), retry_delay(None, 3, attempt=2), retry_delay(None, None, attempt=2)
    (5, 3, 2.0)
    """
    if delay is not None:
        return delay
    return AFTER_NAK.wait(attempt) if configured is None else configured


class LeaseLost(Exception):
    """The message is no longer this consumer's to settle: its lease ran out, or it is settled already."""


class Channel(Protocol):
    """A subscription's end of a broker, with blocking calls."""

    @property
    def capabilities(self) -> Capabilities:
        """What it can do; some of it may be known only when messages come."""

    def receive(self, limit: int, timeout: float) -> Sequence[Delivery]:
        """Up to `limit` messages; waits at most `timeout` seconds for the first."""

    def ack(self, delivery: Delivery) -> None:
        """Done with it."""

    def nack(self, delivery: Delivery) -> None:
        """Give it back now, to anyone; no attempt is counted where the broker allows that."""

    def requeue(self, delivery: Delivery, delay: float | None) -> None:
        """It failed: count an attempt, and bring it again after `delay`.

        None is the backoff that the broker or its settings have for it, else `AFTER_NAK`: see `retry_delay`.
        """

    def reject(self, delivery: Delivery, rejection: Reject) -> None:
        """Move it to the dead letters, or to the invalid-message channel, and be done with it."""

    def extend(self, delivery: Delivery) -> None:
        """Start its lease anew."""

    def wake(self) -> None:
        """End a receive that is waiting."""

    def close(self) -> None:
        """Stop receiving; what is unsettled stays the broker's."""


class AsyncChannel(Protocol):
    """The same, with awaitable calls."""

    @property
    def capabilities(self) -> Capabilities: ...

    async def receive(self, limit: int, timeout: float) -> Sequence[Delivery]: ...

    async def ack(self, delivery: Delivery) -> None: ...

    async def nack(self, delivery: Delivery) -> None: ...

    async def requeue(self, delivery: Delivery, delay: float | None) -> None: ...

    async def reject(self, delivery: Delivery, rejection: Reject) -> None: ...

    async def extend(self, delivery: Delivery) -> None: ...

    def wake(self) -> None: ...

    async def close(self) -> None: ...


class Transport(Protocol):
    """A broker: opened once, then asked for channels."""

    capabilities: Capabilities
    """What its channels can do, as far as that can be said with nothing opened; a channel's own may say more.

    It is declared on the class, and the table in docs/brokers.md is made from it. A class that can be set up
    to work in another way has that in `variants` too, a mapping from what it is called to its capabilities.
    """

    async def open(self) -> None:
        """Connect; called in the loop that the app runs on."""

    async def close(self) -> None:
        """Disconnect, after every channel is closed."""

    def channel(self, source: Source) -> Channel:
        """A blocking channel, for a sync handler."""

    def async_channel(self, source: Source) -> AsyncChannel:
        """An awaitable channel, for an async handler."""

    def publish(self, message: Outgoing) -> Publication:
        """Hand the message over; awaited in async code, done when it returns elsewhere."""


AckFailed: TypeAlias = Callable[[Delivery, Exception], None]


@runtime_checkable
class AcksSoon(Protocol):
    """A blocking channel on which a handler's thread need not wait for acks of what it is through with."""

    def ack_soon(self, delivery: Delivery, failed: AckFailed, *, last: bool) -> None:
        """Ack it without waiting; `failed` is called, in another thread, if that does not work.

        With `last`, the next call follows at once, and may take it along: a receive, or `send_acks`.
        """

    def send_acks(self) -> None:
        """Send what has not been taken along, without waiting."""


@runtime_checkable
class Buffers(Protocol):
    """A channel that may have received more than it has handed out."""

    def buffered(self) -> Sequence[Delivery]:
        """What it has of messages that nobody has taken, and whose leases run."""


@runtime_checkable
class Prepares(Protocol):
    """A transport that looks at, or makes, what a subscription reads before anything runs."""

    async def prepare(self, source: Source) -> None:
        """Called after open and before the channels of this source; raises what is wrong with it."""


@runtime_checkable
class PublishesMany(Protocol):
    """A transport that takes many messages in one call."""

    async def publish_many(self, messages: Sequence[Outgoing]) -> Sequence[Published]:
        """Store them in their order; after a failure some may be stored, and none behind one that is not."""


@runtime_checkable
class Remembers(Protocol):
    """A transport on which a subscription without a group begins anew each time, unless it has a name."""

    def lasting(self, name: str) -> object:
        """The settings of a subscription that goes on where it was, under this name."""


@dataclass(frozen=True, slots=True)
class Abandoned:
    """What readers of a source have in hand; all of it, if they are gone, comes again within a lease."""

    count: int
    lease: float
    is_read: bool = False
    """Somebody has asked for more a moment ago."""


@runtime_checkable
class Recovers(Protocol):
    """A transport whose broker hands out newer messages while it waits for those that a dead reader had."""

    async def abandoned(self, source: Source) -> Abandoned:
        """What there is of them now."""

    def position(self, delivery: Delivery) -> Any:
        """Sorts deliveries of a source as they were published."""


@runtime_checkable
class TellsLanes(Protocol):
    """A transport whose messages say in a header which lane they were published with: what is read is a part
    of many lanes, as a partition is of keys."""

    lane_header: str


@runtime_checkable
class Refuses(Protocol):
    """A transport that can tell a message it will never take from a moment in which it takes none."""

    def refuses(self, error: Exception) -> bool:
        """Whether a publish that failed with this error would fail at every further try: too large, say."""


@runtime_checkable
class Reports(Protocol):
    """A transport that knows whether its broker is there."""

    def broker(self) -> BrokerStatus:
        """How the connection is."""
