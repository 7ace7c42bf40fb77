"""The API document, made from the route table and the request bodies."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import msgspec

from settled._version import __version__

if TYPE_CHECKING:
    from collections.abc import Iterable

    from .router import Route

_PARAMETER = re.compile(r"{(\w+)}")
_NOT_WORD = re.compile(r"\W+")
_UUIDS = frozenset({"partitionId", "id"})
# Bodies that may be left out.
_OPTIONAL = frozenset({"ExtendBody"})


class Parameter(NamedTuple):
    """A query parameter."""

    name: str
    kind: Literal["string", "integer", "boolean"]
    description: str
    low: int | None = None
    high: int | None = None
    choices: tuple[str, ...] = ()

    def schema(self) -> dict[str, Any]:
        """Its JSON schema."""
        schema: dict[str, Any] = {"type": self.kind}
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
    _, schemas = msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")
    schemas["Error"] = {
        "type": "object",
        "properties": {"error": {"type": "string"}, "field": {"type": "string"}},
        "required": ["error"],
    }
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route)
    return msgspec.json.encode(
        {
            "openapi": "3.1.0",
            "info": {
                "title": "Settled",
                "version": __version__,
                "description": "A partitioned, leased queue.",
            },
            "paths": paths,
            "components": {"schemas": schemas},
        }
    )


def _operation(route: Route) -> dict[str, Any]:
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": _path_schema(name)}
        for name in _PARAMETER.findall(route.path)
    ]
    parameters += [
        {"name": p.name, "in": "query", "description": p.description, "schema": p.schema()}
        for p in route.parameters
    ]
    text = route.path.startswith("/metrics")
    content = {"text/plain": {"schema": {"type": "string"}}} if text else {"application/json": {"schema": {}}}
    refused = {"content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}}
    settled: dict[str, Any] = {"content": {"application/json": {"schema": {}}}}
    operation: dict[str, Any] = {
        "summary": route.summary,
        "operationId": route.method.lower() + _NOT_WORD.sub("_", route.path),
        "parameters": parameters,
        "responses": {
            "200": {"description": "Done.", "content": content},
            "201": {"description": "Stored.", "content": content},
            "400": {"description": "The request is wrong; `error` names the field.", **refused},
            "404": {"description": "It is not there.", **settled},
            "409": {"description": "It contradicts what is stored; nothing was changed.", **settled},
            "413": {"description": "The body is too large.", **refused},
            "429": {"description": "The queue is full.", **refused},
            "503": {"description": "The database is away; try again after Retry-After.", **settled},
        },
    }
    if route.body is not None:
        operation["requestBody"] = {
            "required": route.body.__name__ not in _OPTIONAL,
            "content": {
                "application/json": {"schema": {"$ref": f"#/components/schemas/{route.body.__name__}"}}
            },
        }
    return operation


def _path_schema(name: str) -> dict[str, Any]:
    if name in _UUIDS:
        return {"type": "string", "format": "uuid"}
    return {"type": "string", "minLength": 1, "maxLength": 255}
