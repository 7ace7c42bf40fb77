"""The API document, made from the route table, the request bodies and the answers' shapes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, NotRequired, TypedDict

import msgspec

from settled._version import __version__

from .schemas import NAME, OPTIONAL_NAME, RULES

if TYPE_CHECKING:
    from collections.abc import Iterable

    from .router import Route

_PARAMETER = re.compile(r"{(\w+)}")
_NOT_WORD = re.compile(r"\W+")
_UUID = "[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}"
# Bodies that may be left out.
_OPTIONAL = frozenset({"ExtendBody"})
# A time with its offset.
Time = Annotated[datetime, msgspec.Meta(tz=True)]
_REF = "#/components/schemas/{name}"
_SAID = {
    200: "Done.",
    201: "Stored.",
    400: "The request is wrong; `error` names the field.",
    404: "It is not there.",
    409: "It contradicts what is stored; nothing was changed.",
    413: "The body is too large.",
    429: "The queue is full; try again when some messages are settled.",
    503: "The database is away; try again after Retry-After.",
}


class Error(TypedDict):
    """Why a request was refused, and which field was wrong."""

    error: str
    field: NotRequired[str]
    success: NotRequired[bool]
    message: NotRequired[str]
    code: NotRequired[str]
    limit: NotRequired[int]


class Data(TypedDict):
    """A payload: JSON as it is; other content as text, or as base64 where `encoding` says so."""

    data: Any
    contentType: NotRequired[str]
    encoding: NotRequired[Literal["base64"]]


class Pagination(TypedDict):
    """Which part of how many rows this is."""

    limit: int
    offset: int
    total: int


class Paged(TypedDict):
    """How many rows there are in all, and which part of them this is."""

    total: int
    pagination: Pagination


class PushedItem(TypedDict):
    """One element of the answer to a push; while pushes are held back, `buffered` and without ids."""

    index: int
    transaction_id: str
    status: Literal["queued", "duplicate", "scheduled", "buffered"]
    message_id: str | None
    partition_id: str | None
    trace_id: str | None
    queueName: str
    queue: NotRequired[str]


class PartlyPushed(TypedDict):
    """An item of a push that failed for a part: `failed` is not stored, `unknown` may be."""

    index: int
    transaction_id: str | None
    status: Literal["queued", "duplicate", "scheduled", "failed", "unknown"]
    message_id: str | None
    partition_id: str | None
    queueName: str


class PushFailed(TypedDict):
    """A push over several partitions, each stored for itself; `results` where a part of it is stored."""

    error: str
    results: NotRequired[list[PartlyPushed]]


class DeliveredMessage(Data):
    """One message of a pop; `retryCount` tells how often it failed before, `messageId` repeats `id`."""

    id: str
    messageId: str
    transactionId: str
    traceId: str | None
    producerSub: str | None
    createdAt: Time
    headers: NotRequired[dict[str, str]]
    retryCount: int
    queue: str
    partition: str
    partitionId: str
    leaseId: str
    consumerGroup: str


class Delivery(TypedDict):
    """The answer to a pop, with where its first message lies; without messages, `success` may be false."""

    success: bool
    messages: list[DeliveredMessage]
    consumerGroup: str
    queue: str | None
    partition: str | None
    partitionId: NotRequired[str | None]
    leaseId: NotRequired[str | None]
    leaseExpiresAt: NotRequired[Time | None]
    partitionsClaimed: NotRequired[int]
    paused: NotRequired[bool]
    windowBufferActive: NotRequired[bool]
    error: NotRequired[str]


class Answered(NamedTuple):
    """What a route answers: a value of this shape with this status, or a refusal of one of these.

    `refused` are refusals that say more than an Error. What every route answers that has parameters (400), a
    body (413) or needs the `database` (503) is not repeated here.
    """

    shape: Any
    refusals: tuple[int, ...] = ()
    status: int = 200
    refused: Mapping[int, Any] = {}
    database: bool = True


class Parameter(NamedTuple):
    """A query parameter."""

    name: str
    kind: Literal["string", "integer", "boolean"]
    description: str
    low: int | None = None
    high: int | None = None
    choices: tuple[str, ...] = ()
    told: Mapping[str, Any] = {}

    def schema(self) -> dict[str, Any]:
        """Its JSON schema; text without choices is a name unless `told` says otherwise."""
        schema: dict[str, Any] = {"type": self.kind, **self.told}
        if self.kind == "string" and not self.told and not self.choices:
            schema |= OPTIONAL_NAME
        if self.low is not None:
            schema["minimum"] = self.low
        if self.high is not None:
            schema["maximum"] = self.high
        if self.choices:
            schema["enum"] = list(self.choices)
        return schema


def document(routes: Iterable[Route]) -> bytes:
    """An OpenAPI 3.1 document as JSON."""
    routes = list(routes)
    types = sorted({route.body for route in routes if route.body is not None}, key=lambda body: body.__name__)
    _, taken = msgspec.json.schema_components(types, ref_template=_REF)
    told = [Error]
    for route in routes:
        told += [route.answer.shape, *route.answer.refused.values()]
    shapes, given = msgspec.json.schema_components(told, ref_template=_REF)
    if both := taken.keys() & given.keys():
        raise ValueError(f"a body and an answer must not have the same name: {', '.join(sorted(both))}")
    for schema in given.values():
        _always(schema)
    for name in RULES:
        taken[name] |= RULES[name]
    left = iter(shapes)
    error = next(left)
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        shape = next(left)
        refused = {status: {"anyOf": [next(left), error]} for status in route.answer.refused}
        operation = _operation(route, _responses(route, shape, error, refused))
        paths.setdefault(route.path, {})[route.method.lower()] = operation
    return msgspec.json.encode(
        {
            "openapi": "3.1.0",
            "info": {
                "title": "Settled",
                "version": __version__,
                "description": "A partitioned, leased queue.",
            },
            "paths": paths,
            "components": {"schemas": {**taken, **given}},
        }
    )


def _always(schema: dict[str, Any]) -> None:
    """An answer carries a field also where it has its default."""
    for name, each in schema.get("properties", {}).items():
        if "default" in each:
            del each["default"]
            schema["required"].append(name)


def _operation(route: Route, responses: dict[str, Any]) -> dict[str, Any]:
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": _path_schema(name)}
        for name in _PARAMETER.findall(route.path)
    ]
    parameters += [
        {"name": p.name, "in": "query", "description": p.description, "schema": p.schema()}
        for p in route.parameters
    ]
    operation: dict[str, Any] = {
        "summary": route.summary,
        "operationId": route.method.lower() + _NOT_WORD.sub("_", route.path),
        "parameters": parameters,
        "responses": responses,
    }
    if route.body is not None:
        operation["requestBody"] = {
            "required": route.body.__name__ not in _OPTIONAL,
            "content": {"application/json": {"schema": {"$ref": _REF.format(name=route.body.__name__)}}},
        }
    return operation


def _responses(route: Route, shape: Any, error: Any, refused: dict[int, Any]) -> dict[str, Any]:
    answer = route.answer
    statuses = {*answer.refusals, *refused}
    if route.parameters or route.body is not None or "{" in route.path:
        statuses.add(400)
    if route.body is not None:
        statuses.add(413)
    if answer.database:
        statuses.add(503)
    kind = "text/plain" if answer.shape is str else "application/json"
    schemas = {answer.status: {kind: {"schema": shape}}}
    for status in sorted(statuses):
        schemas[status] = {"application/json": {"schema": refused.get(status, error)}}
    return {
        str(status): {"description": _SAID[status], "content": content} for status, content in schemas.items()
    }


def _path_schema(name: str) -> dict[str, Any]:
    if name == "id":
        return {"type": "string", "pattern": f"^(dlq:)?{_UUID}$"}
    if name == "partitionId":
        return {"type": "string", "format": "uuid"}
    return {"type": "string", **NAME}
