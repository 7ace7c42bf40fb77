"""What a handler sees of a message, and how it settles it."""

from __future__ import annotations

import math
import threading
from collections.abc import Awaitable, Generator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import datetime
from types import MappingProxyType
from typing import Any, Generic, Protocol, TypeVar

from settled import cloudevents
from settled.cloudevents import CloudEvent
from settled.codec import Decode, content_type_of
from settled.settlement import Ack, Action, Nack, Reason, Reject, Requeue, storable

T = TypeVar("T")

_claims = threading.Lock()


@dataclass(frozen=True, slots=True, kw_only=True)
class Metadata:
    """What the broker knows of a delivery; None where it has no such thing."""

    stream_sequence: int | None = None
    consumer_sequence: int | None = None
    timestamp: datetime | None = None
    pending: int | None = None
    redelivery_count: int = 0
    consumer: str | None = None
    lane: str | None = None
    lease: str | None = None


class Delivery:
    """A message as a transport hands it out: raw, and open until somebody claims the right to settle it."""

    __slots__ = (
        "attempt",
        "data",
        "failure",
        "given_up",
        "handled",
        "headers",
        "id",
        "lane",
        "ordered",
        "settled",
        "settled_as",
        "subject",
    )

    settled_as: Action | None
    """How it was settled, set when the broker has taken that; None when it has been counted."""
    # These two are set for the few that are sent round again, so that the many that are not cost nothing.
    failure: str
    given_up: bool

    def __init__(
        self,
        *,
        id: str,  # noqa: A002
        subject: str,
        data: bytes,
        headers: Mapping[str, str],
        attempt: int = 1,
        lane: str | None = None,
        ordered: bool = False,
    ) -> None:
        self.id = id
        self.subject = subject
        self.data = data
        self.headers = headers
        self.attempt = attempt
        self.lane = lane
        # Whether what comes behind it in its lane waits until it is settled for good.
        self.ordered = ordered
        self.settled = False
        # Whether the handler is through with it, settled or not.
        self.handled = False

    @property
    def deliveries(self) -> int:
        """How often the broker has delivered this very copy: what a limit of its own counts."""
        return self.attempt

    def metadata(self) -> Metadata:
        """The facts beside the payload; worked out only when asked for."""
        return Metadata(redelivery_count=self.attempt - 1, lane=self.lane)

    def why(self) -> str:
        """Why it is sent round again, for brokers that record it; empty if nobody said."""
        return getattr(self, "failure", "")

    def is_given_up(self) -> bool:
        """Whether the broker, asked to bring it again, said that it will not."""
        return getattr(self, "given_up", False)

    def claim(self) -> bool:
        """True for the first who asks, from whatever thread or task; that one settles."""
        with _claims:
            if self.settled:
                return False
            self.settled = True
            return True

    def note(self, action: Action) -> bool:
        """The broker has taken this; True if the delivery has been counted before, as left alone."""
        with _claims:
            if getattr(self, "settled_as", action) is None:
                return True
            self.settled_as = action
            return False

    def account(self, otherwise: Action) -> Action | None:
        """What to count it as, once: how it was settled, else `otherwise`; None if it is counted already."""
        with _claims:
            found, self.settled_as = getattr(self, "settled_as", otherwise), None
            return found

    def renew(self) -> None:
        """It was given back and is handed out once more: as new, and to be counted anew."""
        self.settled = self.handled = False
        if hasattr(self, "settled_as"):
            del self.settled_as

    def reopen(self) -> None:
        """The settle call failed: the broker does not know of it, so another may try."""
        self.settled = False


class Settler(Protocol):
    """Carries out what a message asks for: at once for a sync handler, when awaited for an async one."""

    def settle(self, delivery: Delivery, action: Action) -> Awaitable[None]: ...

    def extend(self, delivery: Delivery) -> Awaitable[None]: ...


class Message(Generic[T]):
    """A typed message. A sync handler calls `ack()`, an async one awaits it; settling twice is safe.

    The first settlement counts, later ones do nothing. What the broker answers reaches the caller as it is.
    """

    __slots__ = ("_delivery", "_payload", "_settler")

    _payload: T

    def __init__(self, delivery: Delivery, decode: Decode, settler: Settler) -> None:
        self._payload = decode(delivery.data, delivery.headers)
        self._delivery = delivery
        self._settler = settler

    @property
    def payload(self) -> T:
        """The decoded payload."""
        return self._payload

    @property
    def id(self) -> str:
        """The message's id, the same at every delivery."""
        return self._delivery.id

    @property
    def subject(self) -> str:
        """The subject, topic or queue it was published to."""
        return self._delivery.subject

    @property
    def data(self) -> bytes:
        """The raw bytes."""
        return self._delivery.data

    @property
    def headers(self) -> Mapping[str, str]:
        """The headers, read-only."""
        return MappingProxyType(dict(self._delivery.headers))

    @property
    def lane(self) -> str | None:
        """The lane it is in order with: a partition, key or session; None if it has none."""
        return self._delivery.lane

    @property
    def attempt(self) -> int:
        """Which delivery this is, as the broker counts: 1 is the first."""
        return self._delivery.attempt

    @property
    def metadata(self) -> Metadata:
        """Sequence numbers, time, pending count and the like."""
        return self._delivery.metadata()

    @property
    def event(self) -> CloudEvent | None:
        """The CloudEvent's attributes; None if the message is no CloudEvent."""
        content_type = content_type_of(self._delivery.headers)
        if content_type is not None and content_type.startswith(cloudevents.STRUCTURED):
            return cloudevents.unwrap(self._delivery.data)[0]
        return cloudevents.from_headers(self._delivery.headers, content_type)

    @property
    def settled(self) -> bool:
        """Whether somebody has settled it."""
        return self._delivery.settled

    def ack(self) -> Awaitable[None]:
        """Done: it does not come again."""
        return self._settler.settle(self._delivery, _ACK)

    def nak(self, delay: float | None = None) -> Awaitable[None]:
        """Failed: comes again after `delay` seconds, by default after the backoff."""
        if delay is not None and not 0 <= delay < math.inf:
            raise ValueError(f"nak: delay must be 0 or more seconds, got {delay!r}")
        return self._settler.settle(self._delivery, Requeue(delay))

    def release(self) -> Awaitable[None]:
        """Given back: anyone may have it, and no attempt is counted where the broker allows that."""
        # Whoever gives it back has tried it, unlike a pump that gives back what it has buffered.
        self._delivery.handled = True
        return self._settler.settle(self._delivery, _NACK)

    def term(self, reason: str | None = None) -> Awaitable[None]:
        """Never again: to the dead letters, with the reason."""
        return self._settler.settle(self._delivery, Reject(Reason.DELIVERY_ERROR, storable(reason or "")))

    def in_progress(self) -> Awaitable[None]:
        """Still at it: start the broker's timeout anew."""
        return self._settler.extend(self._delivery)

    def __repr__(self) -> str:
        return f"<Message {self.id!r} on {self.subject!r}, attempt {self.attempt}>"


_ACK = Ack()
_NACK = Nack()


class Done:
    """An awaitable that is done already: what a sync handler gets back, and may ignore."""

    __slots__ = ()

    def __await__(self) -> Generator[Any, None, None]:
        return
        yield


DONE = Done()

in_hand: ContextVar[Message[Any] | None] = ContextVar("settled_message", default=None)


def current_message() -> Message[Any] | None:
    """The message being handled here, also in implicit mode; None outside a handler."""
    return in_hand.get()
