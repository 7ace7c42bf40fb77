"""How a subscription reads a queue or a topic, as a user says it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from settled.signals import ConfigurationError
from settled.transports.base import Source


@dataclass(frozen=True, slots=True, kw_only=True)
class Entity:
    """How a subscription reads its queue, or its subscription of a topic; what is None is the transport's."""

    sessions: bool | None = None
    """The entity requires sessions: read one after the other, each in order."""
    idle: float | None = None
    """Seconds without a message until a session is left for the next one."""
    backoff: float | None = None
    """Seconds until a message comes again that failed without saying when; else the subscriber's backoff."""
    max_delivery_count: int | None = None
    """What the entity has for it; 10 if nobody said otherwise when it was made."""

    def __post_init__(self) -> None:
        if self.max_delivery_count is not None and not 1 <= self.max_delivery_count <= 2000:
            raise ConfigurationError(
                f"servicebus: max_delivery_count must be 1..2000, got {self.max_delivery_count}"
            )

    def over(self, defaults: Entity) -> Entity:
        """These settings, with the defaults where there are none."""
        changed = {name: getattr(self, name) for name in self.__slots__ if getattr(self, name) is not None}
        return replace(defaults, **changed)


DEFAULTS = Entity(sessions=False, idle=1.0, max_delivery_count=10)


@dataclass(frozen=True, slots=True)
class Place:
    """A queue, or a subscription of a topic."""

    name: str
    subscription: str | None = None

    @classmethod
    def of(cls, source: Source) -> Place:
        """A channel is a queue, or `topic/subscription`; or a topic, with the subscription as group.

        >>> Place.of(Source(channel="orders/billing")) == Place.of(Source(channel="orders", group="billing"))
        True
        """
        name, _, subscription = source.channel.partition("/")
        if subscription and source.group is not None:
            raise ConfigurationError(
                f"subscriber {source.channel!r}: the subscription is named twice, also as "
                f"group={source.group!r}; leave one out"
            )
        return cls(name, subscription or source.group)
