"""A queue as a user asks for it, and as SQS has it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import msgspec

from settled.signals import ConfigurationError

LONGEST_VISIBILITY = 12 * 3600


@dataclass(frozen=True, slots=True, kw_only=True)
class Queue:
    """How a subscription reads its queue; what is None is the transport's."""

    visibility: int | None = None
    """Seconds a message is a consumer's own; None for what the queue says."""
    wait: int | None = None
    """Seconds a long poll may take."""
    backoff: float | None = None
    """Seconds until a message comes again that failed without saying when; else the subscriber's backoff."""
    create: bool | None = None
    """Make the queue, and the one for dead letters, if they are not there."""

    def __post_init__(self) -> None:
        if self.visibility is not None and not 1 <= self.visibility <= LONGEST_VISIBILITY:
            raise ConfigurationError(
                f"sqs: visibility must be 1..{LONGEST_VISIBILITY} s, got {self.visibility}"
            )
        if self.wait is not None and not 1 <= self.wait <= 20:
            raise ConfigurationError(f"sqs: wait must be 1..20 s, got {self.wait}")

    def over(self, defaults: Queue) -> Queue:
        """These settings, with the defaults where there are none."""
        changed = {name: getattr(self, name) for name in self.__slots__ if getattr(self, name) is not None}
        return replace(defaults, **changed)


DEFAULTS = Queue(wait=20, create=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A queue as SQS has it."""

    name: str
    url: str
    visibility: int
    max_attempts: int | None = None
    dead: str | None = None
    """Where its redrive policy sends what was received too often."""

    @property
    def fifo(self) -> bool:
        return self.name.endswith(".fifo")

    @property
    def dead_letters(self) -> str:
        """Where rejects go if the subscription does not say."""
        if self.dead is not None:
            return self.dead
        return f"{self.name.removesuffix('.fifo')}-dead.fifo" if self.fifo else f"{self.name}-dead"


class Redrive(msgspec.Struct, rename="camel"):
    """What a queue does with a message that was received too often."""

    dead_letter_target_arn: str
    max_receive_count: int | str
