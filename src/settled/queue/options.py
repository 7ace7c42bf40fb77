"""A queue's options: names and defaults of the API, checked in one place."""

import os
from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from settled.queue.errors import BadRequest

DAY = 86_400
YEAR = 366 * DAY
INT_MAX = 2**31 - 1

RANGES: dict[str, tuple[int, int]] = {
    "leaseTime": (1, DAY),
    "retryLimit": (0, 1_000_000),
    "retryDelay": (0, YEAR * 1000),
    "unsettledLimit": (0, 1_000_000),
    "priority": (-INT_MAX, INT_MAX),
    "maxSize": (0, 2**53),
    "ttl": (0, YEAR),
    "delayedProcessing": (0, YEAR),
    "windowBuffer": (0, YEAR),
    "retentionSeconds": (0, INT_MAX),
    "completedRetentionSeconds": (0, INT_MAX),
    "maxWaitTimeSeconds": (0, YEAR),
    "dedupWindowSeconds": (0, INT_MAX),
}
UNITS = {"retryDelay": " ms", "retryLimit": "", "unsettledLimit": "", "priority": "", "maxSize": " messages"}


def setting(name: str, least: int, default: int) -> int:
    """A whole number from the environment, or its default."""
    text = os.environ.get(name) or str(default)
    if not text.isdecimal() or int(text) < least:
        raise BadRequest(name, text, f"must be a whole number, {least} or more")
    return int(text)


class QueueOptions(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """Everything a queue can be told; times in seconds, `retry_delay` in milliseconds.

    A failed message comes again after `retry_delay`, doubled for each further attempt; after `retry_limit`
    failures it is dead-lettered. `retry` says what it does to its partition meanwhile: `in_order` holds the
    partition, `parked` lets it go on. A message whose leases expired `unsettled_limit` times with no verdict
    (0: no limit) is dead-lettered too, since it may be what ends its consumers. A group that has not settled
    a message within `ttl` seconds (or `max_wait_time_seconds`, whichever is less) gets it no more, and
    finds it among its dead letters. Without
    `dlq_after_max_retries` a message is tried again for ever; without `dead_letter_queue` what would become
    a dead letter is dropped, and only the journal tells. Both are on by default, so that nothing is lost.
    With `release_rest` a nack gives back what is unsettled of its partition's batch.
    """

    lease_time: int = 300
    retry_limit: int = 3
    retry_delay: int = 1000
    retry: Literal["in_order", "parked"] = "in_order"
    unsettled_limit: int = 10
    priority: int = 0
    max_size: int = 0
    ttl: int = 0
    dead_letter_queue: bool = True
    dlq_after_max_retries: bool = True
    delayed_processing: int = 0
    window_buffer: int = 0
    retention_seconds: int = 0
    completed_retention_seconds: int = 0
    retention_enabled: bool = False
    encryption_enabled: bool = False
    max_wait_time_seconds: int = 0
    dedup_window_seconds: int = 7 * DAY
    release_rest: bool = False

    def to_json(self) -> bytes:
        """The options as JSON with the API's names."""
        return msgspec.json.encode(self)


def parse_options(queue: str, raw: Mapping[str, Any]) -> dict[str, Any]:
    """Check options given with the API's names; a bad one is refused by name, None stands for the default.

    >>> parse_options("orders", {"leaseTime": 30, "retryLimit": None})
    {'leaseTime': 30, 'retryLimit': 3}
    """
    fields = {f.encode_name: f for f in msgspec.structs.fields(QueueOptions)}
    parsed: dict[str, Any] = {}
    for name, value in raw.items():
        if name not in fields:
            raise BadRequest(
                f"queue {queue!r}: options.{name}", value, f"unknown option; known are {', '.join(fields)}"
            )
        if value is None:
            parsed[name] = fields[name].default
            continue
        if isinstance(value, float) and value.is_integer():
            value = int(value)  # 5.0 is an integer in JSON
        parsed[name] = value
        if name == "retry":
            if value not in ("in_order", "parked"):
                raise BadRequest(f"queue {queue!r}: options.retry", value, "must be in_order or parked")
        elif name in RANGES:
            low, high = RANGES[name]
            if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
                hint = f"must be an integer {low}..{high}{UNITS.get(name, ' s')}"
                raise BadRequest(f"queue {queue!r}: options.{name}", value, hint)
        elif not isinstance(value, bool):
            raise BadRequest(f"queue {queue!r}: options.{name}", value, "must be true or false")
    return parsed
