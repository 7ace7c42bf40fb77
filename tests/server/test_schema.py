"""Schemathesis sends what the API document allows, and what it does not: no answer may be a 5xx."""

from __future__ import annotations

from typing import Any

import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import content_type_conformance, status_code_conformance

from settled.server.testing import RunningServer

CHECKS = [not_a_server_error, content_type_conformance, status_code_conformance]
# Switching the whole server off is tested elsewhere; here it would make the other answers 503.
LEFT_OUT = ("/api/v1/system/maintenance", "/api/v1/system/maintenance/pop")
EXAMPLES = 15


def test_no_request_of_the_document_makes_the_server_fail(server: RunningServer) -> None:
    document = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    operations: list[Any] = [found.ok() for found in document.get_all_operations()]  # type: ignore[union-attr]
    tried = sum(
        probe(operation, mode)
        for operation in operations
        if operation.path not in LEFT_OUT
        for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE)
        if mode is GenerationMode.POSITIVE or operation.body or operation.query
    )
    assert tried > 400


def probe(operation: Any, mode: GenerationMode) -> int:
    """Send some requests of one operation; how many."""
    sent = 0

    @given(case=operation.as_strategy(generation_mode=mode))
    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    def send(case: Any) -> None:
        nonlocal sent
        sent += 1
        if operation.path.startswith("/api/v1/pop"):
            # What waits, waits; here it shall not take half a minute.
            case.query = {**(case.query or {}), "timeout": 10}
        case.validate_response(case.call(timeout=20), checks=CHECKS)

    send()
    return sent
