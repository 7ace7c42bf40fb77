"""The messages a router and a worker exchange, typed and versioned."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar
from uuid import UUID

import msgspec
from msgspec import Meta

from settled.signals import Invalid

NonEmpty = Annotated[str, Meta(min_length=1)]
Milliseconds = Annotated[int, Meta(ge=0)]
C = TypeVar("C", "ExecAssignment", "ExecAssignmentAck", "ExecResult")


class Executor(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Who is to do it, and how it is reached."""

    provider_id: NonEmpty
    channel: Literal["nats", "grpc"]
    endpoint: str | None = None


class Job(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What is to be done."""

    type: NonEmpty
    payload_ref: str | None = None
    payload: Any = None


class Options(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How it is to be done."""

    priority: str | int | None = None
    deadline_ms: Milliseconds | None = None
    retry: dict[str, Any] | None = None


class Correlation(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What ties it to a trace."""

    trace_id: str | None = None


class ExecAssignment(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Work for a worker, on `caf.exec.assign.v1`."""

    version: Literal["1"]
    assignment_id: UUID
    request_id: UUID
    tenant_id: NonEmpty
    executor: Executor
    job: Job
    options: Options | None = None
    correlation: Correlation | None = None
    metadata: dict[str, Any] | None = None


class ExecAssignmentAck(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A worker's word on an assignment, on `caf.exec.assign.v1.ack`."""

    version: Literal["1"]
    assignment_id: UUID
    status: Literal["accepted", "rejected", "error"]
    message: str | None = None
    reason: str | None = None
    tenant_id: str | None = None
    correlation: Correlation | None = None
    metadata: dict[str, Any] | None = None


class ExecResult(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What came of an assignment, on `caf.exec.result.v1`."""

    version: Literal["1"]
    status: Literal["success", "error", "timeout", "cancelled"]
    provider_id: NonEmpty
    job: Job
    timestamp: Milliseconds
    assignment_id: UUID | None = None
    request_id: UUID | None = None
    latency_ms: Milliseconds | None = None
    cost: float | None = None
    trace_id: str | None = None
    tenant_id: str | None = None
    run_id: str | None = None
    msg_id: str | None = None

    def __post_init__(self) -> None:
        if self.assignment_id is None and self.request_id is None:
            raise ValueError("Object missing required field `assignment_id` or `request_id`")


class Violation(Invalid):
    """A message that breaks its contract, and the field; `body` if it is no object. It is never retried."""

    def __init__(self, contract: str, kind: Literal["parse", "validation"], field: str, text: str) -> None:
        super().__init__(f"{contract}: {field}: {text}")
        self.contract = contract
        self.kind = kind
        self.field = field


# These a header may carry, and then the header is right.
_HEADERS = ("trace_id", "tenant_id", "version")


def decode(data: bytes, headers: Mapping[str, str], contract: type[C]) -> C:
    """The message as its contract has it; headers win over the payload. Violation if it breaks the contract.

    >>> decode(b'{"version": "2"}', {}, ExecAssignmentAck)
    Traceback (most recent call last):
    settled.router.contracts.Violation: ExecAssignmentAck: version: Invalid enum value '2'
    """
    name = contract.__name__
    try:
        body = msgspec.json.decode(data, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Violation(name, "parse", "body", str(error)) from error
    if "version" not in body and _header(headers, "version") is None:
        raise Violation(name, "validation", "version", "missing")
    for field in _HEADERS:
        value = _header(headers, field)
        if value is None:
            continue
        if field == "trace_id" and contract is not ExecResult:
            body["correlation"] = {**(body.get("correlation") or {}), "trace_id": value}
        else:
            body[field] = value
    try:
        return msgspec.convert(body, contract)
    except msgspec.ValidationError as error:
        text = str(error)
        raise Violation(name, "validation", _field(text), text.partition(" - at `")[0]) from error


def _header(headers: Mapping[str, str], field: str) -> str | None:
    found = headers.get(field)
    if found is None:
        found = next((v for k, v in headers.items() if k.lower().replace("-", "_") == field), None)
    return found or None


def _field(text: str) -> str:
    """The field an error of msgspec names: by its path, or as the one that is missing."""
    path = re.search(r"at `\$\.?([^`]*)`", text)
    missing = re.search(r"required field `([^`]+)`", text)
    parts = [found.group(1) for found in (path, missing) if found is not None and found.group(1)]
    return ".".join(parts) or "body"


def ids(message: ExecAssignment | ExecAssignmentAck | ExecResult) -> dict[str, str]:
    """The ids that metrics and logs carry."""
    request = getattr(message, "request_id", None)
    return {
        "assignment_id": str(message.assignment_id or ""),
        "request_id": str(request or ""),
    }
