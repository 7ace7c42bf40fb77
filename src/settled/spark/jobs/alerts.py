"""Alert rules, evaluated over what a queue's journal tells, window by window."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from pyspark.sql import functions as F  # noqa: N812

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pyspark.sql import DataFrame

OVER = 5
"""Minutes over which a rate is taken, as the rules for Prometheus take it."""


@dataclass(frozen=True, slots=True)
class Rule:
    """More than `threshold` a minute, for so many minutes on end, of the settlements that fit `counts`."""

    name: str
    router: str
    """The router's alert with this threshold and time, in observe/alerts.yaml."""
    counts: str
    threshold: float
    minutes: int
    text: str


RULES = (
    Rule(
        "HighRetryRate",
        "RouterCAFHighRetryRate",
        "kind = 'failed'",
        10,
        5,
        "more than 10 failed attempts a minute came again: whatever the handler calls is overloaded",
    ),
    Rule(
        "RetriesExhausted",
        "RouterCAFRetryExhausted",
        "kind = 'dead' and attempts > 1",
        0,
        1,
        "messages died after they were tried again: whatever the handler calls is away",
    ),
    Rule(
        "HighDeadLetterRate",
        "RouterCAFHighPublishFailureRate",
        "kind = 'dead'",
        5,
        1,
        "more than 5 dead letters a minute, for whatever reason: look at their errors",
    ),
    Rule(
        "HighRedeliveryRate",
        "RouterJetStreamHighRedeliveryRate",
        "kind in ('failed', 'released')",
        20,
        10,
        "more than 20 messages a minute came again, failed or given back: look at reason and source",
    ),
    Rule(
        "LastDeliveryFailed",
        "RouterJetStreamMaxDeliverExhausted",
        "kind = 'dead' and attempts > 1",
        0,
        0,
        "messages died after their last delivery",
    ),
    Rule(
        "TenantRejections",
        "RouterTenantRejections",
        "kind = 'dead' and error ilike '%tenant%'",
        5,
        1,
        "more than 5 dead letters a minute name a tenant: a producer is misconfigured, or tries something",
    ),
    Rule(
        "HighDuplicateRate",
        "RouterHighDuplicateRate",
        "kind in ('dead', 'failed') and error ilike '%duplicate%'",
        10,
        10,
        "more than 10 failures a minute name a duplicate: a producer repeats itself",
    ),
)
OF_REDELIVERIES = frozenset(rule.name for rule in RULES if "'failed'" in rule.counts)
"""Rules that need to know what came again."""


def evaluate(settlements: DataFrame, until: datetime, *, at_rest: bool = False) -> list[dict[str, Any]]:
    """Each rule: when it fired, or since when it was about to, and the worst rate.

    `at_rest`: nothing waits and nothing comes again, so that what was about to fire will not.
    """
    counts = [
        F.sum(F.when(F.expr(rule.counts), F.col("messages")).otherwise(0)).alias(rule.name) for rule in RULES
    ]
    failures = settlements.where("kind in ('failed', 'released', 'dead')")
    windows = failures.groupBy(F.window("at", f"{OVER} minutes", "1 minute").alias("window")).agg(*counts)
    rows = windows.withColumn("end", F.col("window.end").cast("long")).collect()
    ends = {row["end"] // 60: row for row in rows}
    last = int(until.timestamp()) // 60
    found = [judge(rule, {end: row[rule.name] / OVER for end, row in ends.items()}, last) for rule in RULES]
    return [{**one, "pending_since": None} if at_rest else one for one in found]


def judge(rule: Rule, rates: Mapping[int, float], last: int) -> dict[str, Any]:
    """A rule over rates, by the minute they end in; none is known after the minute `last`.

    >>> rule = Rule("Many", "", "", 10, 2, "")
    >>> judge(rule, {1: 11.0, 2: 12.0, 3: 11.0}, 9)["fired"]
    ['1970-01-01T00:03:00+00:00']
    """
    fired: list[str] = []
    since: int | None = None
    pending = None
    longest = 0
    # The window that is open at the end is looked at then.
    known = sorted({min(end, last) for end, rate in rates.items() if rate > rule.threshold})
    for place, end in enumerate(known):
        since = end if since is None else since
        longest = max(longest, end - since + 1)
        if end - since == rule.minutes:
            fired.append(_at(end))
        if known[place + 1 : place + 2] != [end + 1]:
            pending = since if end == last and end - since < rule.minutes else None
            since = None
    return {
        "name": rule.name,
        "fired": fired,
        "pending_since": _at(pending) if pending is not None else None,
        "minutes_over": longest,
        "worst_rate": max(rates.values(), default=0.0),
        "threshold": rule.threshold,
        "minutes": rule.minutes,
        "text": rule.text,
    }


def _at(minute: int) -> str:
    return datetime.fromtimestamp(minute * 60, UTC).isoformat(timespec="seconds")
