"""What a URL and a subscription say about Kafka, checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias
from urllib.parse import parse_qsl, unquote

from settled.signals import ConfigurationError
from settled.transports.base import Source
from settled.transports.urls import port_of, split

Config: TypeAlias = dict[str, object]

DEFAULT_GROUP = "settled"

_OWN = {"create", "lease", "backoff"}
_DECIDED = {
    "bootstrap.servers": "name the brokers in the URL: kafka://one:9092,two:9092",
    "metadata.broker.list": "name the brokers in the URL: kafka://one:9092,two:9092",
    "group.id": "say subscriber(..., group=...)",
    "enable.auto.commit": "offsets are committed when messages are settled",
    "enable.auto.offset.store": "offsets are committed when messages are settled",
    "share.acknowledgement.mode": "messages are acknowledged when they are settled",
    "transactional.id": "messages are published one by one",
}
_CONSUMING = (
    "auto.commit", "auto.offset", "check.crcs", "consume.", "coordinator.", "enable.partition.eof", "fetch.",
    "group.", "heartbeat.", "isolation.", "max.partition.", "max.poll.", "offset.", "partition.assignment",
    "queued.", "session.",
)  # fmt: skip
_PRODUCING = (
    "acks", "batch.", "compression.", "delivery.", "dr_", "enable.gapless", "enable.idempotence", "linger.",
    "message.send", "message.timeout", "msg_order", "partitioner", "queue.buffering", "queuing.",
    "request.required", "request.timeout", "retries", "sticky.", "transaction.",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class KafkaTopic:
    """How a subscription reads a topic; what is None is as the URL says.

    >>> KafkaTopic(share=True).ordered
    True
    """

    share: bool = False
    """Read as a member of a share group: any member gets any message, and the broker counts deliveries."""
    ordered: bool = True
    """A partition waits for a message that is not settled yet; False lets what is behind it go on."""
    lease: float | None = None
    """After so many seconds a message that nobody settled is handed out again; of a share group, how long
    the broker locks a record for a consumer (group.share.record.lock.duration.ms)."""
    backoff: float | None = None
    """Seconds before a message comes again that failed without a delay of its own; None with the URL's is
    the subscriber's backoff."""
    create: bool | None = None
    """Create the topic if it is missing, with the broker's default partitions and replicas."""
    max_attempts: int = 5
    """Of a share group: after so many deliveries the broker gives a message up
    (group.share.delivery.count.limit)."""


@dataclass(frozen=True, slots=True)
class Settled:
    """A subscription's settings, with nothing left open."""

    share: bool
    ordered: bool
    lease: float
    backoff: float | None
    create: bool
    max_attempts: int


@dataclass(frozen=True, slots=True)
class Address:
    """A URL, taken apart: the brokers, librdkafka's properties, and our own defaults."""

    servers: str
    properties: Mapping[str, str]
    lease: float
    backoff: float | None
    create: bool

    @classmethod
    def parse(cls, url: str) -> Address:
        """
        >>> Address.parse("kafka://ann:s3cret@one:9092,two?security.protocol=SASL_SSL&lease=60").servers
        'one:9092,two'
        """
        parts = split(url)
        who, _, hosts = parts.netloc.rpartition("@")
        if not hosts or parts.path.strip("/"):
            shown = f"{parts.scheme}://{hosts}{parts.path}"
            raise ConfigurationError(
                f"kafka: {shown!r}: write kafka://host:9092, or kafka://one:9092,two:9092"
            )
        for host in hosts.split(","):
            port_of(split(f"kafka://{host}"))
        query = dict(parse_qsl(parts.query, keep_blank_values=True))
        own = {name: query.pop(name) for name in _OWN & query.keys()}
        for name in query:
            if name in _DECIDED:
                raise ConfigurationError(f"kafka: the URL cannot set {name}; {_DECIDED[name]}")
        if who:
            user, _, password = who.partition(":")
            query = {"sasl.username": unquote(user), "sasl.password": unquote(password), **query}
            query.setdefault("sasl.mechanism", "PLAIN")
            query.setdefault("security.protocol", "SASL_SSL")
        return cls(
            servers=hosts,
            properties=query,
            lease=_seconds("lease", own.get("lease", "300"), least=0.1),
            backoff=_seconds("backoff", own["backoff"], least=0.0) if "backoff" in own else None,
            create=_flag("create", own.get("create", "false")),
        )

    def client(self) -> Config:
        """What every client of the cluster is given."""
        common = {k: v for k, v in self.properties.items() if not k.startswith((*_CONSUMING, *_PRODUCING))}
        return {"client.id": "settled", **common, "bootstrap.servers": self.servers}

    def producer(self) -> Config:
        """A producer's properties: every broker that must have a message has it when it is confirmed."""
        given = {k: v for k, v in self.properties.items() if k.startswith(_PRODUCING)}
        return {"acks": "all", "message.timeout.ms": 30_000, **self.client(), **given}

    def consumer(self, group: str) -> Config:
        """A consumer's properties; a new group begins with the oldest message, so that none is missed."""
        given = {k: v for k, v in self.properties.items() if k.startswith(_CONSUMING)}
        return {
            "auto.offset.reset": "earliest",
            **self.client(),
            **given,
            "group.id": group,
            "enable.auto.commit": False,
            "enable.auto.offset.store": False,
        }

    def patience(self) -> float:
        """For how many seconds the group waits for a poll."""
        try:
            return int(self.properties.get("max.poll.interval.ms", 300_000)) / 1000
        except ValueError:
            return 300.0

    def share_consumer(self, group: str) -> Config:
        """A share consumer's properties; where a new group begins is the group's own setting."""
        given = {k: v for k, v in self.properties.items() if k.startswith(("fetch.", "max.poll."))}
        return {
            "max.poll.records": 100,
            **self.client(),
            **given,
            "group.id": group,
            "share.acknowledgement.mode": "explicit",
        }

    def settings(self, source: Source) -> Settled:
        """A subscription's settings."""
        match source.settings:
            case None:
                given = KafkaTopic()
            case KafkaTopic() as given:
                pass
            case other:
                raise ConfigurationError(
                    f"subscriber {source.channel!r}: source must be a KafkaTopic, got {other!r}"
                )
        own_lease = 30.0 if given.share else self.lease
        found = Settled(
            share=given.share,
            ordered=given.ordered,
            lease=own_lease if given.lease is None else given.lease,
            backoff=self.backoff if given.backoff is None else given.backoff,
            create=self.create if given.create is None else given.create,
            max_attempts=given.max_attempts,
        )
        if not found.lease > 0 or (found.backoff is not None and not found.backoff >= 0):
            raise ConfigurationError(
                f"subscriber {source.channel!r}: KafkaTopic needs lease > 0 and backoff >= 0 seconds, "
                f"got lease={found.lease!r}, backoff={found.backoff!r}"
            )
        return replace(found, ordered=found.ordered and not found.share)


def _seconds(name: str, text: str, least: float) -> float:
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not least <= value < float("inf"):
        raise ConfigurationError(f"kafka: {name} must be a number of seconds from {least:g}, got {text!r}")
    return value


def _flag(name: str, text: str) -> bool:
    if text not in ("true", "false"):
        raise ConfigurationError(f"kafka: {name} must be true or false, got {text!r}")
    return text == "true"
