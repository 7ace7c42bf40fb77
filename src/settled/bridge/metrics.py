"""A bridge's totals for Prometheus, read when they are asked for."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import fields

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from settled.bridge.bridge import Bridge

_TEXTS = {
    "read": "Messages received from the source.",
    "written": "Messages the target has confirmed.",
    "duplicates": "Messages the target had already.",
    "rejected": "Messages the target will never take, moved to the source's dead letters.",
    "released": "Messages given back to the source.",
    "unsettled": "Messages the source could not be told of; they come again.",
}


class BridgeCollector(Collector):
    """`settled_bridge_read_total` and its like."""

    def __init__(self, bridge: Bridge) -> None:
        self._bridge = bridge

    def collect(self) -> Iterator[Metric]:
        for field in fields(self._bridge.totals):
            count = getattr(self._bridge.totals, field.name)
            yield CounterMetricFamily(f"settled_bridge_{field.name}", _TEXTS[field.name], value=count)
        yield CounterMetricFamily(
            "settled_bridge_source_sessions_lost",
            "How often the source had forgotten a session, and the messages it kept in it.",
            value=self._bridge.source_status.sessions_lost,
        )
        gauges = {
            "in_flight": ("Messages on their way.", self._bridge.in_flight),
            "source_up": ("Whether the source is there.", self._bridge.source_status.connected),
            "target_up": ("Whether the target takes messages.", self._bridge.target_status.connected),
        }
        for name, (text, value) in gauges.items():
            yield GaugeMetricFamily(f"settled_bridge_{name}", text, value=float(value))


@contextlib.contextmanager
def _closing(server: object, address: str) -> Iterator[str]:
    try:
        yield address
    finally:
        server.shutdown()  # type: ignore[attr-defined]
        server.server_close()  # type: ignore[attr-defined]


def serve(bridge: Bridge, port: int) -> contextlib.AbstractContextManager[str]:
    """Answer on this port of the loopback address, 0 for a free one; OSError if it is taken."""
    registry = CollectorRegistry()
    registry.register(BridgeCollector(bridge))
    server, _ = start_http_server(port, "127.0.0.1", registry)
    return _closing(server, f"http://127.0.0.1:{server.server_port}/metrics")
