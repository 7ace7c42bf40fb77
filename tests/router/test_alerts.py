"""The alert rules, evaluated by Prometheus' own tool on samples of our own counters."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

import settled.observe
from settled.observe.metrics import METRICS, Metrics
from settled.router import Router, RouterConfig
from tests.brokers.debs import environment, required

ROOT = Path(__file__).parents[2]
RULES_FILE = Path(settled.observe.__file__).with_name("alerts.yaml")
RULES: list[dict[str, Any]] = yaml.safe_load(RULES_FILE.read_text())["groups"][0]["rules"]
STEP = 15.0

_METRIC = re.compile(r"\brouter_\w+_total\b")


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


def fires(alert: str, samples: Samples, folder: Path) -> bool:
    """Whether Prometheus would raise an alert at any minute of these samples."""
    end = max(at for points in samples.values() for at, _ in points)
    series = [
        {
            "series": f"{name}{{{','.join(f'{k}={json.dumps(v)}' for k, v in sorted(labels))}}}",
            "values": " ".join(["_"] * int(points[0][0] / STEP) + [f"{value:g}" for _, value in points]),
        }
        for (name, labels), points in samples.items()
        if name.startswith("router_") and name.endswith("_total")
    ]
    quiet = [
        {"eval_time": f"{minute}m", "alertname": alert, "exp_alerts": []}
        for minute in range(int(end / 60) + 1)
    ]
    test = {"interval": f"{STEP:g}s", "input_series": series, "alert_rule_test": quiet}
    file = folder / "test.yaml"
    file.write_text(
        yaml.safe_dump({"rule_files": [str(RULES_FILE)], "evaluation_interval": "15s", "tests": [test]})
    )
    root = required("prometheus", "usr/bin/promtool")
    command = [root / "usr/bin/promtool", "test", "rules", file]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(root), check=False)
    told = done.stdout + done.stderr
    if done.returncode == 0:
        return False
    assert "got:" in told, told  # an expression that cannot be evaluated is no alert
    return True


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
            ("router_acks_tenant_rejected_total", {"reason": "tenant_mismatch"}),
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
def test_an_alert_on_a_rate_fires_above_its_threshold_and_not_below(name: str, tmp_path: Path) -> None:
    events, high, low, minutes = CASES[name]
    rule = next(rule for rule in RULES if rule["alert"] == name)
    lasting = int(rule["for"].removesuffix("m"))
    assert fires(name, record(per_minute(high, *events), minutes, Metrics()), tmp_path)
    assert not fires(name, record(per_minute(low, *events), minutes, Metrics()), tmp_path)
    assert not fires(name, record(per_minute(high, *events), max(lasting - 1, 2), Metrics()), tmp_path)


@pytest.mark.parametrize(
    ("name", "metric", "labels"),
    [
        (
            "RouterCAFRetryExhausted",
            "router_retry_exhausted_total",
            {"error_kind": "timeout", "retries": "3"},
        ),
        (
            # Its deadline came before its last retry.
            "RouterCAFRetryExhausted",
            "router_retry_exhausted_total",
            {"error_kind": "connection_failed", "retries": "1"},
        ),
        (
            "RouterJetStreamMaxDeliverExhausted",
            "router_jetstream_maxdeliver_exhausted_total",
            {"reason": "processing_error"},
        ),
    ],
)
def test_a_critical_alert_fires_on_the_first_event_of_a_series(
    name: str, metric: str, labels: dict[str, str], tmp_path: Path
) -> None:
    """Defect R1."""

    def happens(metrics: Metrics, second: float) -> None:
        if second == 60:
            metrics.count(metric, {"assignment_id": "a", "request_id": "r"}, **labels)

    assert fires(name, record(happens, 12, Router(RouterConfig()).metrics), tmp_path)
    assert not fires(name, record(lambda *_: None, 12, Router(RouterConfig()).metrics), tmp_path)
    # A series that was not shown as 0 before is born at its first event, and its rate misses that one.
    assert not fires(name, record(happens, 12, Metrics()), tmp_path)


@pytest.mark.parametrize(
    ("name", "metric", "labels"),
    [
        (
            "RouterJetStreamMaxDeliverExhausted",
            "router_jetstream_maxdeliver_exhausted_total",
            {"reason": "not_settled_in_time"},
        ),
        (
            "RouterCAFRetryExhausted",
            "router_retry_exhausted_total",
            {"error_kind": "connection_failed", "retries": "3"},
        ),
        (
            "RouterCAFHighPublishFailureRate",
            "router_assignment_publish_failures_total",
            {"error_kind": "rejected_by_stream", "subject": RouterConfig().assign_subject},
        ),
        (
            "RouterTenantRejections",
            "router_results_tenant_rejected_total",
            {"reason": "tenant_mismatch"},
        ),
    ],
)
def test_an_alert_on_something_lost_or_refused_fires_for_a_burst(
    name: str, metric: str, labels: dict[str, str], tmp_path: Path
) -> None:
    """Defect R1: a thousand within 15 s, then none."""

    def happens(metrics: Metrics, second: float) -> None:
        if 61 <= second < 71:
            for _ in range(100):
                metrics.count(metric, {"assignment_id": "a", "request_id": "r"}, **labels)

    assert fires(name, record(happens, 12, Router(RouterConfig()).metrics), tmp_path)


def test_every_alert_names_metrics_we_have_and_a_runbook_page() -> None:
    assert {rule["alert"] for rule in RULES} == {
        *CASES,
        "RouterCAFRetryExhausted",
        "RouterJetStreamMaxDeliverExhausted",
    }
    for rule in RULES:
        assert set(_METRIC.findall(rule["expr"])) <= set(METRICS), rule["expr"]
        assert rule["labels"]["severity"] in ("warning", "critical")
        page = ROOT / rule["annotations"]["runbook_url"]
        assert page.read_text().startswith(f"# {rule['alert']}\n")
    pages = {page.stem for page in (ROOT / "docs" / "runbook").glob("*.md")}
    assert pages == {rule["alert"] for rule in RULES}


def test_runbook_pages_speak_of_metrics_that_exist() -> None:
    for page in (ROOT / "docs" / "runbook").glob("*.md"):
        for name in _METRIC.findall(page.read_text()):
            assert name in METRICS, f"{page.name}: {name}"
        for target in re.findall(r"\]\(([^)]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"
