"""What a subscription reads on NATS, as a user says it and as the server has it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from nats.js.api import AckPolicy, ConsumerConfig, ConsumerInfo

from settled.backoff import AFTER_NAK
from settled.signals import ConfigurationError


@dataclass(frozen=True, slots=True, kw_only=True)
class Durable:
    """A consumer that outlives the process; all who read it share its messages.

    It must exist, unless `create` makes it from `config`. A config with a deliver subject is a push consumer;
    give it a deliver group, so that several processes can share it.
    """

    stream: str
    consumer: str
    create: bool = False
    config: ConsumerConfig | None = None
    confirm: bool = False
    """Wait for the server to say that it has an ack, at the price of a round trip each."""
    in_progress: bool = True
    """Tell the server that a message is worked on, while its handler runs longer than a third of ack_wait."""
    jitter: float = 0.2
    """How far, as a fraction, a backoff may vary either way."""

    def __post_init__(self) -> None:
        _check_names(stream=self.stream, consumer=self.consumer)
        _check_jitter(self.jitter)
        if self.config is not None and not self.create:
            raise ConfigurationError(
                f"durable {self.stream}/{self.consumer}: config is only for create=True; "
                "an existing consumer keeps its own"
            )
        named = {self.config.name, self.config.durable_name} if self.config is not None else set()
        if named - {None, self.consumer}:
            raise ConfigurationError(
                f"durable {self.stream}/{self.consumer}: config names another consumer, "
                f"{', '.join(sorted(n for n in named if n))}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Ephemeral:
    """A consumer of this process alone, gone some time after it; the stream is found by the subject."""

    stream: str | None = None
    config: ConsumerConfig | None = None
    confirm: bool = False
    in_progress: bool = True
    jitter: float = 0.2

    def __post_init__(self) -> None:
        if self.stream is not None:
            _check_names(stream=self.stream)
        _check_jitter(self.jitter)
        if self.config is not None and (self.config.durable_name or self.config.deliver_group):
            raise ConfigurationError(
                "ephemeral: config has a durable name or a deliver group; "
                "write Durable(stream=..., consumer=...)"
            )


@dataclass(frozen=True, slots=True)
class Lasting:
    """A durable consumer of the stream that takes the subject, made if it is not there."""

    consumer: str


Settings: TypeAlias = Durable | Ephemeral


def _check_names(**names: str) -> None:
    for what, name in names.items():
        if not isinstance(name, str) or not name or any(c in " \t\r\n.*>/\\" for c in name):
            raise ConfigurationError(
                f"nats: {what} must be a name without spaces, '.', '*', '>' and slashes, got {name!r}"
            )


def _check_jitter(jitter: float) -> None:
    if not 0 <= jitter < 1:
        raise ConfigurationError(f"nats: jitter must be a fraction from 0 to below 1, got {jitter!r}")


@dataclass(slots=True)
class Consumer:
    """A consumer as the server has it, and what an ephemeral one needs to be made again."""

    stream: str
    name: str
    settings: Settings
    ack_policy: str = "explicit"
    ack_wait: float = 30.0
    backoff: tuple[float, ...] = ()
    max_deliver: int | None = None
    deliver_subject: str | None = None
    deliver_group: str | None = None
    subjects: tuple[str, ...] = ()
    unsettled: set[int] = field(default_factory=set)
    last: int = 0

    @classmethod
    def of(cls, info: ConsumerInfo, settings: Settings) -> Consumer:
        """From what the server says."""
        config = info.config
        if config is None:
            raise ConfigurationError(f"nats: the server told nothing of consumer {info.name!r}")
        one = (config.filter_subject,) if config.filter_subject else ()
        limit = config.max_deliver
        return cls(
            stream=info.stream_name,
            name=info.name,
            settings=settings,
            ack_policy=AckPolicy(config.ack_policy or AckPolicy.EXPLICIT).value,
            ack_wait=config.ack_wait or 30.0,
            backoff=tuple(config.backoff or ()),
            max_deliver=limit if limit is not None and limit > 0 else None,
            deliver_subject=config.deliver_subject,
            deliver_group=config.deliver_group,
            subjects=tuple(config.filter_subjects or one),
        )

    @property
    def is_ephemeral(self) -> bool:
        return isinstance(self.settings, Ephemeral)

    def exhausted(self, attempt: int) -> bool:
        """Whether the server will not deliver it again after this attempt."""
        return self.max_deliver is not None and attempt >= self.max_deliver

    def patience(self, attempt: int) -> float:
        """How long the server waits for this delivery to be settled."""
        return self.backoff[min(attempt, len(self.backoff)) - 1] if self.backoff else self.ack_wait

    def retry_delay(self, attempt: int, random: float) -> float:
        """The wait after the given delivery: the consumer's backoff, varied by a random number from 0 to 1.

        A plain nak ignores the backoff and comes back at once, so it has to be asked for.
        """
        if not self.backoff:
            return AFTER_NAK.wait(attempt)
        return self.patience(attempt) * (1 + self.settings.jitter * (2 * random - 1))

    def asked_delay(self, attempt: int, delay: float) -> int:
        """The nanoseconds to ask a nak for, so that the message comes again after `delay` seconds.

        On a consumer with a backoff the server adds to a nak's delay what this delivery's step has over the
        first one: 4 s after the third delivery of 1, 2, 4 would come out as 7. It takes negative delays.
        """
        extra = self.patience(attempt) - self.backoff[0] if self.backoff else 0.0
        # 0 would be a plain nak, which comes back at once.
        return round((delay - extra) * 1e9) or 1


def stream_for(subject: str) -> str:
    """What a stream is called that is made for a subject.

    >>> stream_for("orders.new"), stream_for("orders.*.>")
    ('orders-new', 'orders-any-all')
    """
    return subject.replace("*", "any").replace(">", "all").replace(".", "-")


def overlap(subject: str, other: str) -> bool:
    """Whether any subject matches both patterns.

    >>> overlap("orders.*", "orders.new"), overlap("orders.>", "orders"), overlap("a.*.c", "*.b.>")
    (True, False, True)
    """
    return _overlap(subject.split("."), other.split("."))


def _overlap(a: Sequence[str], b: Sequence[str]) -> bool:
    for mine, theirs in zip(a, b, strict=False):
        if ">" in (mine, theirs):
            return True
        if "*" not in (mine, theirs) and mine != theirs:
            return False
    return len(a) == len(b)
