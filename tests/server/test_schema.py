"""What the API document tells is so: its requests make no server fail, and answers have their shapes."""

from __future__ import annotations

import json
import re
from typing import Any

import jsonschema_rs
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from settled.server.testing import RunningServer
from tests.server.http import Answer, Http, ack_of

CHECKS = [not_a_server_error, content_type_conformance, status_code_conformance, response_schema_conformance]
# Switching the whole server off is tested elsewhere; here it would make the other answers 503.
LEFT_OUT = ("/api/v1/system/maintenance", "/api/v1/system/maintenance/pop")
EXAMPLES = 15
MAKES = {("post", "/api/v1/push"), ("post", "/api/v1/traces")}
# OpenAPI has no words for rules between parameters, nor for a value that an earlier answer gave.
UNTOLD = (
    "namespace or task is required",
    "transactionId: needs its partitionId",
    "after: must be the `next`",
)
LOST = "0" * 8 + "-0000-4000-8000-" + "0" * 12


class Checked(Http):
    """A caller that holds each answer against the API document: its status, its shape, and nothing more."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        document = super().__call__("GET", "/openapi.json").body
        self._components = document["components"]
        for schema in self._components["schemas"].values():
            if "properties" in schema:
                schema["additionalProperties"] = False  # a field that is not told is a fault here
        # Fixed words win over parameters.
        self._paths = [
            (re.compile(re.sub(r"{\w+}", "[^/]+", path)), operations)
            for path, operations in sorted(document["paths"].items(), key=lambda each: each[0].count("{"))
        ]
        self._validators: dict[str, Any] = {}

    def __call__(self, method: str, path: str, body: Any = None, **rest: Any) -> Answer:
        answer = super().__call__(method, path, body, **rest)
        operation = next(found for wanted, found in self._paths if wanted.fullmatch(path))[method.lower()]
        told = operation["responses"].get(str(answer.status))
        assert told is not None, f"{method} {path} answered {answer}, which the document does not tell"
        [(media, content)] = told["content"].items()
        assert answer.headers["content-type"].startswith(media)
        self._validator(content["schema"]).validate(answer.body)
        return answer

    def _validator(self, schema: Any) -> Any:
        key = json.dumps(schema)
        if key not in self._validators:
            whole = {**schema, "components": self._components}
            self._validators[key] = jsonschema_rs.Draft202012Validator(whole, validate_formats=True)
        return self._validators[key]


@pytest.fixture(scope="module")
def http(server: RunningServer) -> Checked:
    return Checked(server.url)


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
        answer = case.call(timeout=20)
        case.validate_response(answer, checks=CHECKS)
        if mode is GenerationMode.POSITIVE and answer.status_code == 400:
            # Defect Q23: a request that the document allows is refused.
            assert answer.json()["error"].startswith(UNTOLD), answer.json()["error"]

    send()
    return sent


def test_every_operation_tells_the_shape_of_its_answers(http: Checked) -> None:
    document = http("GET", "/openapi.json").body
    schemas = document["components"]["schemas"]
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            where = f"{method.upper()} {path}"
            responses = operation["responses"]
            assert sum(status.startswith("2") for status in responses) == 1, where
            assert ("413" in responses) == ("requestBody" in operation), where
            assert ("201" in responses) == ((method, path) in MAKES), where
            for status, response in responses.items():
                for content in response["content"].values():
                    schema = content["schema"]
                    assert schema, f"{where} {status}"
                    if "$ref" in schema:
                        assert schemas[schema["$ref"].rpartition("/")[2]]["properties"], f"{where} {status}"


def test_pushes_are_answered_as_the_document_tells(http: Checked, queue: str) -> None:
    http.push(queue, 1, 2, None)
    http.push(queue, "x", transactionId="once")
    http.push(queue, "x", transactionId="once", headers={"a": "b"}, traceId=LOST)
    http.push(queue, "later", delaySeconds=3600)
    assert http("POST", "/api/v1/push", {"items": []}).body == []
    assert http("POST", "/api/v1/push", {"items": [{"queue": ""}]}).status == 400
    http.configure(f"{queue}.small", maxSize=1)
    assert (
        http("POST", "/api/v1/push", {"items": [{"queue": f"{queue}.small", "payload": 1}] * 2}).status == 429
    )


def test_pops_are_answered_as_the_document_tells(http: Checked, queue: str) -> None:
    assert http.pop(queue)["messages"] == []
    assert http.pop(queue, wait="true", timeout=1)["messages"] == []
    http.push(queue, {"a": [1, None]}, 2.5, "x")
    http.push(queue, "text", contentType="text/plain", headers={"a": "b"}, traceId=LOST)
    http.push(queue, "/w==", contentType="application/octet-stream", encoding="base64")
    assert len(http.pop(queue, batch=9)["messages"]) == 5
    assert http.pop(queue, "Default")["success"] is False
    assert http.pop(queue, "other")["success"] is False
    assert len(http.pop(queue, consumerGroup="g", batch=9, autoAck="true")["messages"]) == 5
    http.push(f"{queue}.task", 1)
    found = http("GET", "/api/v1/pop", namespace=queue).body
    assert len(found["messages"]) == 1
    assert http("GET", "/api/v1/pop").status == 400
    http.configure(f"{queue}.window", windowBuffer=3600)
    http.push(f"{queue}.window", 1)
    assert http.pop(f"{queue}.window")["windowBufferActive"] is True
    try:
        http("POST", LEFT_OUT[1], {"enabled": True})
        assert http.pop(queue)["paused"] is True
    finally:
        http("POST", LEFT_OUT[1], {"enabled": False})
    assert http("GET", LEFT_OUT[1]).body["popMaintenanceMode"] is False


def test_acks_are_answered_as_the_document_tells(http: Checked, queue: str) -> None:
    http.push(queue, *range(6))
    one, *some, last = http.pop(queue, batch=6)["messages"]
    assert http.ack(one).status == 200
    assert http.ack(some[0], "failed", error="no").status == 200
    batch = {"acknowledgments": [ack_of(some[1]), ack_of(some[2], "dlq", error="bad")]}
    assert len(http("POST", "/api/v1/ack/batch", batch).body) == 2
    assert http("POST", "/api/v1/ack/batch", {"acknowledgments": []}).body == []
    wrong = [ack_of(last), {**ack_of(last), "transactionId": "never"}]
    refused = http("POST", "/api/v1/ack/batch", {"acknowledgments": wrong})
    assert (refused.status, len(refused.body["results"])) == (409, 2)
    assert http("POST", "/api/v1/ack/batch", {"acknowledgments": wrong[1:], "atomic": False}).status == 200
    assert http("POST", "/api/v1/ack", wrong[1]).status == 404
    assert http("POST", "/api/v1/ack", {**ack_of(last), "leaseId": LOST}).status == 409
    assert http("POST", f"/api/v1/lease/{last['leaseId']}/extend").status == 200
    assert http("POST", f"/api/v1/lease/{LOST}/extend", {"seconds": 5}).status == 404


def test_transactions_are_answered_as_the_document_tells(http: Checked, queue: str) -> None:
    http.push(queue, 1)
    [message] = http.pop(queue)["messages"]
    push = {"type": "push", "items": [{"queue": f"{queue}.out", "payload": n} for n in range(2)]}
    ack = {"type": "ack", **ack_of(message)}
    lost = {**ack, "transactionId": "never"}
    assert http("POST", "/api/v1/transaction", {"operations": [push, lost]}).status == 409
    done = http("POST", "/api/v1/transaction", {"operations": [push, ack]})
    assert [each["type"] for each in done.body["results"]] == ["push", "push", "ack"]
    assert http("POST", "/api/v1/transaction", {"operations": []}).status == 400


def test_pushes_that_are_held_back_are_answered_as_the_document_tells(http: Checked, queue: str) -> None:
    try:
        http("POST", LEFT_OUT[0], {"enabled": True})
        assert http.push(queue, 1, 2)[0]["status"] == "buffered"
        assert http("GET", LEFT_OUT[0]).body["bufferedMessages"] >= 2
    finally:
        http("POST", LEFT_OUT[0], {"enabled": False})
    assert http.pop(queue, wait="true", timeout=30_000, patience=60)["messages"]
