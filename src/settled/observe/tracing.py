"""W3C trace context in message headers, where OpenTelemetry is installed; nothing where it is not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

try:
    from opentelemetry import propagate, trace
except ModuleNotFoundError:
    _installed = False
else:
    _installed = True


def inject(headers: dict[str, str]) -> dict[str, str]:
    """Add `traceparent` of the current span; headers that have one keep it."""
    if _installed and "traceparent" not in headers and trace.get_current_span().get_span_context().is_valid:
        propagate.inject(headers)
    return headers


@contextmanager
def span(
    name: str,
    headers: Mapping[str, str] | None = None,
    *,
    kind: str = "consumer",
    attributes: Mapping[str, str] | None = None,
) -> Iterator[Any]:
    """A span round some work, in the trace the headers carry; None if OpenTelemetry is not installed."""
    if not _installed:
        yield None
        return
    parent = None if headers is None else propagate.extract({k.lower(): v for k, v in headers.items()})
    tracer = trace.get_tracer("settled")
    with tracer.start_as_current_span(
        name, context=parent, kind=trace.SpanKind[kind.upper()], attributes=dict(attributes or {})
    ) as current:
        yield current
