"""Every violation of a contract is found, and says which field."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

import msgspec
import pytest

from settled.router.contracts import ExecAssignment, ExecAssignmentAck, ExecResult, Violation, decode, ids

ASSIGNMENT = {
    "version": "1",
    "assignment_id": str(uuid4()),
    "request_id": str(uuid4()),
    "tenant_id": "t1",
    "executor": {"provider_id": "p1", "channel": "nats"},
    "job": {"type": "text"},
}
ACK = {"version": "1", "assignment_id": str(uuid4()), "status": "accepted"}
RESULT = {
    "version": "1",
    "assignment_id": str(uuid4()),
    "status": "success",
    "provider_id": "p1",
    "job": {"type": "text"},
    "timestamp": 1_700_000_000_000,
}


def without(body: dict[str, Any], field: str) -> dict[str, Any]:
    return {name: value for name, value in body.items() if name != field}


@pytest.mark.parametrize(
    ("contract", "body"), [(ExecAssignment, ASSIGNMENT), (ExecAssignmentAck, ACK), (ExecResult, RESULT)]
)
def test_a_good_message_survives_the_way_there_and_back(contract: Any, body: dict[str, Any]) -> None:
    message = decode(msgspec.json.encode(body), {}, contract)
    assert msgspec.json.decode(msgspec.json.encode(message)) == body


@pytest.mark.parametrize(
    ("contract", "body", "field"),
    [
        *((ExecAssignment, without(ASSIGNMENT, name), name) for name in ASSIGNMENT),
        *((ExecAssignmentAck, without(ACK, name), name) for name in ACK),
        *((ExecResult, without(RESULT, name), name) for name in RESULT if name != "assignment_id"),
        (ExecResult, without(RESULT, "assignment_id"), "assignment_id"),
        (ExecAssignment, {**ASSIGNMENT, "version": "2"}, "version"),
        (ExecAssignment, {**ASSIGNMENT, "assignment_id": "seven"}, "assignment_id"),
        (ExecAssignment, {**ASSIGNMENT, "tenant_id": ""}, "tenant_id"),
        (ExecAssignment, {**ASSIGNMENT, "executor": {"provider_id": "p1"}}, "executor.channel"),
        (
            ExecAssignment,
            {**ASSIGNMENT, "executor": {"provider_id": "p1", "channel": "post"}},
            "executor.channel",
        ),
        (ExecAssignment, {**ASSIGNMENT, "options": {"deadline_ms": -1}}, "options.deadline_ms"),
        (ExecAssignmentAck, {**ACK, "status": "perhaps"}, "status"),
        (ExecResult, {**RESULT, "status": "splendid"}, "status"),
        (ExecResult, {**RESULT, "job": {}}, "job.type"),
        (ExecResult, {**RESULT, "timestamp": "now"}, "timestamp"),
        (ExecResult, {**RESULT, "latency_ms": -5}, "latency_ms"),
    ],
)
def test_a_violation_names_its_field(contract: Any, body: dict[str, Any], field: str) -> None:
    with pytest.raises(Violation) as found:
        decode(msgspec.json.encode(body), {}, contract)
    assert (found.value.kind, found.value.contract) == ("validation", contract.__name__)
    assert found.value.field.split(" ")[0] == field
    assert field in str(found.value)


@pytest.mark.parametrize("data", [b"", b"not json", b"[]", b'"text"', b"\xff\xfe", b"null"])
def test_what_is_no_object_fails_to_parse(data: bytes) -> None:
    with pytest.raises(Violation) as found:
        decode(data, {}, ExecResult)
    assert (found.value.kind, found.value.field) == ("parse", "body")


def test_headers_win_over_the_payload() -> None:
    body = {**RESULT, "tenant_id": "from-payload", "trace_id": "from-payload", "version": "0"}
    headers = {"Tenant-Id": "from-header", "trace_id": "from-header", "version": "1"}
    result = decode(msgspec.json.encode(body), headers, ExecResult)
    assert (result.tenant_id, result.trace_id, result.version) == ("from-header", "from-header", "1")
    with pytest.raises(Violation, match="version"):
        decode(msgspec.json.encode(RESULT), {"version": "9"}, ExecResult)
    ack = decode(msgspec.json.encode(ACK), {"trace_id": "t"}, ExecAssignmentAck)
    assert ack.correlation is not None
    assert ack.correlation.trace_id == "t"


def test_a_result_may_carry_either_id() -> None:
    request = str(uuid4())
    body = {**without(RESULT, "assignment_id"), "request_id": request}
    result = decode(msgspec.json.encode(body), {}, ExecResult)
    assert ids(result) == {"assignment_id": "", "request_id": request}
