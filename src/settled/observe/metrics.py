"""The router's counters for Prometheus: every one by name, with labels of few values and ids as exemplars."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter

_IDS = ("assignment_id", "request_id")

OTHER = "other"
"""The label value of everything that has no series of its own."""
LABEL_VALUES = 100
_LONGEST_VALUE = 128


@dataclass(frozen=True, slots=True)
class _Metric:
    text: str
    labels: tuple[str, ...] = ()
    has_ids: bool = False


FROM_OUTSIDE = ("job_type", "provider_id", "tenant_id")
"""Labels whose values are written by workers and clients."""

METRICS: dict[str, _Metric] = {
    "router_assignment_published_total": _Metric("Assignments a stream has acknowledged.", (), True),
    "router_assignment_retry_total": _Metric("Publishes of an assignment that were tried again.", (), True),
    "router_retry_exhausted_total": _Metric(
        "Assignments given up after the last retry.", ("error_kind", "retries"), True
    ),
    "router_assignment_publish_failures_total": _Metric(
        "Assignments that were not published in the end.", ("error_kind", "subject"), True
    ),
    "router_assignment_skipped_total": _Metric("Assignments not published: switched off.", ("reason",)),
    "router_assignment_blocked_total": _Metric(
        "Assignments of tenants that are not served.", ("tenant_id", "reason")
    ),
    "router_jetstream_redelivery_total": _Metric(
        "Redeliveries the router asked for.", ("reason", "source"), True
    ),
    "router_jetstream_maxdeliver_exhausted_total": _Metric(
        "Messages given up after their last delivery.", ("reason",), True
    ),
    "router_results_total": _Metric("Results handled.", ("status", "job_type", "provider_id")),
    "router_acks_total": _Metric("Acknowledgements handled.", ("status",)),
    "router_results_duplicate_total": _Metric("Results seen before, and only acked."),
    "router_acks_duplicate_total": _Metric("Acknowledgements seen before, and only acked."),
    "router_results_tenant_rejected_total": _Metric("Results of an unknown or another tenant.", ("reason",)),
    "router_acks_tenant_rejected_total": _Metric("Acks of an unknown or another tenant.", ("reason",)),
    "router_results_parse_failed_total": _Metric("Results that are no JSON object."),
    "router_results_validation_failed_total": _Metric("Results that break the contract.", ("field",)),
    "router_acks_parse_failed_total": _Metric("Acknowledgements that are no JSON object."),
    "router_acks_validation_failed_total": _Metric("Acks that break the contract.", ("field",)),
    "router_dlq_total": _Metric("Messages written to the dead letters.", ("reason",)),
}


class Metrics:
    """Counts by name. One id a label value is a time series a message, so ids are labels only when asked for.

    >>> metrics = Metrics()
    >>> metrics.count("router_acks_total", status="accepted")
    >>> metrics.value("router_acks_total", status="accepted")
    1.0

    Labels whose values come from outside have a bounded number of them: only the `known` ones of a label
    where there are any, else the first `label_values` that come; the others are counted as `other`.
    """

    def __init__(
        self,
        registry: CollectorRegistry | None = None,
        *,
        id_labels: bool = False,
        known: Mapping[str, Collection[str]] | None = None,
        label_values: int = LABEL_VALUES,
    ) -> None:
        self.registry = registry or CollectorRegistry()
        self._id_labels = id_labels
        self._label_values = label_values
        self._known = {label: frozenset(values) for label, values in (known or {}).items() if values}
        self._seen: dict[str, set[str]] = {label: set() for label in FROM_OUTSIDE}
        self._counters = {
            name: Counter(name, metric.text, self._labels(metric), registry=self.registry)
            for name, metric in METRICS.items()
        }

    def _labels(self, metric: _Metric) -> tuple[str, ...]:
        return (*_IDS, *metric.labels) if self._id_labels and metric.has_ids else metric.labels

    def count(self, name: str, ids: Mapping[str, str] | None = None, **labels: str) -> None:
        """Add one; the ids become labels or an exemplar."""
        metric, counter = METRICS[name], self._counters[name]
        labels = {label: self._bounded(label, value) for label, value in labels.items()}
        known = {key: (ids or {}).get(key, "") for key in _IDS} if metric.has_ids else {}
        if self._id_labels:
            labels = {**known, **labels}
        child = counter.labels(**labels) if labels else counter
        exemplar = {key: value for key, value in known.items() if value}
        child.inc(1, exemplar if exemplar and not self._id_labels else None)

    def _bounded(self, label: str, value: str) -> str:
        if label not in FROM_OUTSIDE:
            return value
        if label in self._known:
            return value if value in self._known[label] else OTHER
        seen = self._seen[label]
        if value not in seen:
            if len(seen) >= self._label_values or len(value) > _LONGEST_VALUE:
                return OTHER
            seen.add(value)
        return value

    def expect(self, name: str, **labels: str) -> None:
        """Show a series as 0 before its first event: the rate of a series that is born at 1 is 0."""
        if not (self._id_labels and METRICS[name].has_ids):
            self._counters[name].labels(**labels)

    def value(self, name: str, **labels: str) -> float:
        """The sum over all series that have these labels; for tests and reports."""
        return sum(
            sample.value
            for family in self._counters[name].collect()
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )

    def snapshot(self) -> dict[str, float]:
        """Every counter's sum."""
        return {name: self.value(name) for name in METRICS}
