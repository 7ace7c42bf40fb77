"""The alert rules, evaluated as Prometheus would on samples of our own counters."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

import settled.observe
from settled.observe.metrics import METRICS, Metrics
from settled.router import Router, RouterConfig

ROOT = Path(__file__).parents[2]
RULES_FILE = Path(settled.observe.__file__).with_name("alerts.yaml")
RULES: list[dict[str, Any]] = yaml.safe_load(RULES_FILE.read_text())["groups"][0]["rules"]
STEP = 15.0

_EXPRESSION = re.compile(
    r"sum\(rate\((?:(?P<name>\w+)|\{__name__=~\"(?P<pattern>[^\"]+)\"\})\[(?P<window>\d+)m\]\)\)"
    r"(?: \* (?P<factor>\d+))? > (?P<threshold>\d+)"
)


@dataclass
class Rule:
    """A rule of ours: the rate of some counters over a window, above a threshold for a while."""

    matches: Callable[[str], bool]
    window: float
    factor: float
    threshold: float
    lasting: float

    @classmethod
    def of(cls, rule: dict[str, Any]) -> Rule:
        found = _EXPRESSION.fullmatch(rule["expr"])
        assert found, f"{rule['alert']}: an expression this test cannot evaluate: {rule['expr']}"
        pattern = re.compile(found["pattern"] or re.escape(found["name"]))
        return cls(
            matches=lambda name: pattern.fullmatch(name) is not None,
            window=60.0 * int(found["window"]),
            factor=float(found["factor"] or 1),
            threshold=float(found["threshold"]),
            lasting=60.0 * int(rule["for"].removesuffix("m")),
        )


Samples = dict[tuple[str, frozenset[tuple[str, str]]], list[tuple[float, float]]]


def record(happens: Callable[[Metrics, float], None], minutes: float, metrics: Metrics) -> Samples:
    """Scrape every 15 s while things happen once a second."""
    samples: Samples = {}
    for second in range(int(minutes * 60) + 1):
        if second % STEP == 0:
            for family in metrics.registry.collect():
                for sample in family.samples:
                    key = (sample.name, frozenset(sample.labels.items()))
                    samples.setdefault(key, []).append((float(second), sample.value))
        happens(metrics, float(second))
    return samples


def rate(points: list[tuple[float, float]], now: float, window: float) -> float:
    inside = [(at, value) for at, value in points if now - window < at <= now]
    if len(inside) < 2:
        return 0.0
    return (inside[-1][1] - inside[0][1]) / (inside[-1][0] - inside[0][0])


def fires(rule: Rule, samples: Samples) -> bool:
    since: float | None = None
    for now in sorted({at for points in samples.values() for at, _ in points}):
        total = sum(
            rate(points, now, rule.window) for (name, _), points in samples.items() if rule.matches(name)
        )
        if total * rule.factor > rule.threshold:
            since = now if since is None else since
            if now - since >= rule.lasting:
                return True
        else:
            since = None
    return False


def per_minute(count: float, *events: tuple[str, dict[str, str]]) -> Callable[[Metrics, float], None]:
    """So many events a minute, of the kinds given in turn."""
    done = 0

    def happens(metrics: Metrics, second: float) -> None:
        nonlocal done
        while done < count * second / 60:
            name, labels = events[done % len(events)]
            metrics.count(name, {"assignment_id": str(done), "request_id": "r"}, **labels)
            done += 1

    return happens


CASES: dict[str, tuple[tuple[tuple[str, dict[str, str]], ...], float, float, float]] = {
    # alert: events, a rate that must fire, one that must not, minutes to the alert
    "RouterCAFHighRetryRate": ((("router_assignment_retry_total", {}),), 13, 8, 12),
    "RouterCAFHighPublishFailureRate": (
        (("router_assignment_publish_failures_total", {"error_kind": "timeout", "subject": "s"}),),
        7,
        4,
        12,
    ),
    "RouterJetStreamHighRedeliveryRate": (
        (
            ("router_jetstream_redelivery_total", {"reason": "processing_error", "source": "results"}),
            ("router_jetstream_redelivery_total", {"reason": "tenant_mismatch", "source": "acks"}),
        ),
        25,
        15,
        17,
    ),
    "RouterTenantRejections": (
        (
            ("router_results_tenant_rejected_total", {"reason": "tenant_mismatch"}),
            ("router_acks_tenant_rejected_total", {"reason": "tenant_not_allowed"}),
        ),
        7,
        4,
        17,
    ),
    "RouterHighDuplicateRate": (
        (("router_results_duplicate_total", {}), ("router_acks_duplicate_total", {})),
        13,
        8,
        17,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_an_alert_on_a_rate_fires_above_its_threshold_and_not_below(name: str) -> None:
    events, high, low, minutes = CASES[name]
    rule = Rule.of(next(rule for rule in RULES if rule["alert"] == name))
    assert fires(rule, record(per_minute(high, *events), minutes, Metrics()))
    assert not fires(rule, record(per_minute(low, *events), minutes, Metrics()))
    assert not fires(rule, record(per_minute(high, *events), rule.lasting / 60 - 1, Metrics()))


@pytest.mark.parametrize(
    ("name", "metric", "labels", "at"),
    [
        (
            "RouterCAFRetryExhausted",
            "router_retry_exhausted_total",
            {"error_kind": "timeout", "retries": "3"},
            [60.0],
        ),
        (
            "RouterJetStreamMaxDeliverExhausted",
            "router_jetstream_maxdeliver_exhausted_total",
            {"reason": "processing_error"},
            # It waits as long as its window, so one event is over before it fires.
            [60.0, 240.0],
        ),
    ],
)
def test_a_critical_alert_fires_on_the_first_events_of_a_series(
    name: str, metric: str, labels: dict[str, str], at: list[float]
) -> None:
    rule = Rule.of(next(rule for rule in RULES if rule["alert"] == name))

    def happens(metrics: Metrics, second: float) -> None:
        if second in at:
            metrics.count(metric, {"assignment_id": "a", "request_id": "r"}, **labels)

    assert fires(rule, record(happens, 12, Router(RouterConfig()).metrics))
    assert not fires(rule, record(lambda *_: None, 12, Router(RouterConfig()).metrics))
    # A series that was not shown as 0 before is born at its first event, and its rate misses that one.
    if len(at) == 1:
        assert not fires(rule, record(happens, 12, Metrics()))


def test_every_alert_names_metrics_we_have_and_a_runbook_page() -> None:
    assert {rule["alert"] for rule in RULES} == {
        *CASES,
        "RouterCAFRetryExhausted",
        "RouterJetStreamMaxDeliverExhausted",
    }
    for rule in RULES:
        assert any(Rule.of(rule).matches(name) for name in METRICS), rule["expr"]
        assert rule["labels"]["severity"] in ("warning", "critical")
        page = ROOT / rule["annotations"]["runbook_url"]
        assert page.read_text().startswith(f"# {rule['alert']}\n")
    pages = {page.stem for page in (ROOT / "docs" / "runbook").glob("*.md")}
    assert pages == {rule["alert"] for rule in RULES}


def test_runbook_pages_speak_of_metrics_that_exist() -> None:
    for page in (ROOT / "docs" / "runbook").glob("*.md"):
        for name in re.findall(r"\brouter_\w+_total\b", page.read_text()):
            assert name in METRICS, f"{page.name}: {name}"
        for target in re.findall(r"\]\(([^)]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_promtool_has_no_objection_where_it_is_installed() -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        # Then the expressions are at least all of the form that was evaluated above.
        assert all(_EXPRESSION.fullmatch(rule["expr"]) for rule in RULES)
        return
    subprocess.run([promtool, "check", "rules", RULES_FILE], check=True, capture_output=True)
