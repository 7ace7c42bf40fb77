"""Everything a router can be told, with the defaults, once."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from settled.signals import ConfigurationError

Positive = Annotated[float, Meta(gt=0)]


class RouterConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A router's settings; in a file, TOML with these names."""

    url: str = "nats://127.0.0.1:4222"
    assign_subject: str = "caf.exec.assign.v1"
    ack_subject: str = "caf.exec.assign.v1.ack"
    result_subject: str = "caf.exec.result.v1"
    dead_letter_subject: str = "caf.exec.dlq.v1"
    assign_stream: str = "CAF_ASSIGNMENTS"
    ack_stream: str = "CAF_ACKS"
    result_stream: str = "CAF_RESULTS"
    dead_letter_stream: str = "CAF_DLQ"
    bucket: str = "ROUTER"
    """A key-value bucket that all routers share: whose an assignment is, and which messages are done."""
    bucket_ttl_seconds: Positive = 86_400.0
    create: bool = True
    """Make the streams, consumers and the bucket that are not there."""
    replicas: Annotated[int, Meta(ge=1, le=5)] = 1
    nats_js_max_deliver: Annotated[int, Meta(ge=1)] = 3
    nats_js_backoff_seconds: tuple[Positive, ...] = (1.0, 2.0, 4.0)
    performers: Annotated[int, Meta(ge=1)] = 1
    caf_max_retries: Annotated[int, Meta(ge=0)] = 3
    caf_retry_base_ms: Annotated[int, Meta(ge=1)] = 100
    publish_timeout_seconds: Positive = 2.0
    push_assignment_enabled: bool = True
    """The kill switch: off, nothing is published."""
    tenants: tuple[str, ...] = ()
    """The tenants that are served; none named means all."""
    metrics_port: int | None = None
    metrics_id_labels: bool = False
    """Ids as labels: a time series a message. Off, they are exemplars."""
    metrics_job_types: tuple[str, ...] = ()
    """The job types that are labels, all others are `other`; none named: the first ones that come."""
    metrics_providers: tuple[str, ...] = ()
    """The same for providers."""
    metrics_label_values: Annotated[int, Meta(ge=1)] = 100
    """How many job types, providers and tenants of no list get a label value of their own."""

    def __post_init__(self) -> None:
        if len(self.nats_js_backoff_seconds) > self.nats_js_max_deliver:
            raise ValueError(
                f"nats_js_backoff_seconds has {len(self.nats_js_backoff_seconds)} steps, "
                f"more than nats_js_max_deliver {self.nats_js_max_deliver}"
            )

    @classmethod
    def load(cls, path: Path) -> RouterConfig:
        """From a TOML file; ConfigurationError, with the field, if it does not fit."""
        try:
            return msgspec.convert(tomllib.loads(path.read_text()), cls)
        except (OSError, tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
            raise ConfigurationError(f"router: {path}: {error}") from error

    def serves(self, tenant: str | None) -> bool:
        """Whether a tenant is on the allow-list."""
        return not self.tenants or tenant in self.tenants


def deadline_ms(expected_latency_ms: float) -> int:
    """How long an assignment may take: five times what is expected, within 5 to 60 s.

    >>> [deadline_ms(ms) for ms in (100, 3_000, 30_000)]
    [5000, 15000, 60000]
    """
    return int(min(60_000.0, max(5_000.0, 5 * expected_latency_ms)))
