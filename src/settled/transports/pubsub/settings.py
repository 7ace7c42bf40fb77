"""How a subscriber reads, as a user says it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from settled.signals import ConfigurationError


@dataclass(frozen=True, slots=True, kw_only=True)
class Subscription:
    """How a subscriber reads its subscription; what is None is the transport's."""

    wait: float | None = None
    """Seconds a pull may wait for a message."""
    backoff: float | None = None
    """Seconds until a message comes again that failed without saying when; else the subscriber's backoff."""
    create: bool | None = None
    """Make the topic, the subscription and those for dead letters, if they are not there."""
    ack_deadline: int | None = None
    """Of a subscription that is made: seconds a message is a consumer's own."""
    ordered: bool | None = None
    """Of a subscription that is made: messages with the same ordering key come in order."""
    exactly_once: bool | None = None
    """Of a subscription that is made: no redelivery while a lease runs, and acks are answered for."""
    max_attempts: int | None = None
    """Of a subscription that is made: its dead-letter policy, without which Pub/Sub counts no attempts."""

    def __post_init__(self) -> None:
        for name, least, most in (("ack_deadline", 1, 600), ("max_attempts", 0, 100)):
            value = getattr(self, name)
            if value is not None and not least <= value <= most:
                raise ConfigurationError(f"pubsub: {name} must be {least}..{most}, got {value!r}")

    def over(self, defaults: Subscription) -> Subscription:
        """These settings, with the defaults where there are none."""
        changed = {name: getattr(self, name) for name in self.__slots__ if getattr(self, name) is not None}
        return replace(defaults, **changed)


DEFAULTS = Subscription(wait=30.0, create=False, ack_deadline=60, max_attempts=100)
