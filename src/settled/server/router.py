"""Finds the handler of a method and a path; path parameters are percent-decoded a segment at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import unquote_to_bytes

from .exchange import Answer, HttpError, Request, bad

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from .openapi import Answered, Parameter

    Endpoint = Callable[[Request], Awaitable[Answer]]
    Reply = Callable[[Answer | Exception | None], None]
    # Answers later by calling the Reply once, without a coroutine; False: the endpoint must answer.
    Shortcut = Callable[[Request, Reply], bool]

FOUND_LIMIT = 4096
# A name of 255 characters, each of four bytes, percent-encoded.
SEGMENT_LIMIT = 255 * 4 * 3
POPS = b"/api/v1/pop"
SEE = {"routes": "/openapi.json", "health": "/health", "metrics": "/metrics", "about": "/"}
# Routes of newer versions of Queen MQ, by what they are: its clients should hear that they are not here.
FOREIGN = {
    b"/api/v1/kv": "the key-value store",
    b"/api/v1/timers": "timers",
    b"/api/v1/locks": "locks",
    b"/api/v1/fetch": "reading by offset",
    b"/api/v1/partitions/changed": "listing changed partitions",
    b"/api/v1/ephemeral": "ephemeral queues",
}


class Route(NamedTuple):
    """A method, a path like `/api/v1/dlq/{id}`, who answers it, and what the API document says of it."""

    method: str
    path: str
    endpoint: Endpoint
    summary: str
    answer: Answered
    body: type | None = None
    parameters: tuple[Parameter, ...] = ()
    shortcut: Shortcut | None = None


class Node:
    """One level of the path tree."""

    __slots__ = ("children", "methods", "parameter")

    def __init__(self) -> None:
        self.children: dict[bytes, Node] = {}
        self.parameter: Node | None = None
        self.methods: dict[str, Route] = {}


class Router:
    """A tree of path segments; fixed words win over parameters."""

    def __init__(self, routes: list[Route]) -> None:
        self._root = Node()
        self._found: dict[tuple[str, bytes], tuple[Route, tuple[str, ...]]] = {}
        self.routes = routes
        for route in routes:
            self._add(route)

    def _add(self, route: Route) -> None:
        node = self._root
        for part in route.path.encode().split(b"/")[1:]:
            if part.startswith(b"{"):
                node.parameter = node.parameter or Node()
                node = node.parameter
            else:
                node = node.children.setdefault(part, Node())
        node.methods[route.method] = route

    def find(self, request: Request) -> Route:
        """The route of this request, with its `segments` set; 404, 405 or 400 otherwise."""
        key = (request.method, request.path)
        known = self._found.get(key)
        if known is None:
            known = self._look(request)
            if len(self._found) >= FOUND_LIMIT:
                self._found.clear()
            self._found[key] = known
        route, request.segments = known
        request.label = route.path
        return route

    def _look(self, request: Request) -> tuple[Route, tuple[str, ...]]:
        # A pop hands out messages, so it must not be answered to somebody who does not read the body.
        headed = request.method == "HEAD" and not request.path.startswith(POPS)
        method = "GET" if headed else request.method
        found = _walk(self._root, request.path.split(b"/"), 1, ())
        if found is None:
            raise HttpError(404, _missing(request), see=SEE)
        node, raw = found
        request.label = next(iter(node.methods.values())).path
        route = node.methods.get(method)
        if route is None:
            allowed = ", ".join(sorted(node.methods))
            raise HttpError(
                405,
                f"{request.method} is not allowed here; use {allowed}",
                extra=b"allow: " + allowed.encode() + b"\r\n",
            )
        return route, tuple(_decode(part) for part in raw)


def _missing(request: Request) -> str:
    """The text of a 404: a route of Queen MQ that this server does not have is named as such."""
    asked = f"{request.method} {request.path.decode('latin-1')}"
    for path, name in FOREIGN.items():
        if request.path == path or request.path.startswith(path + b"/"):
            return (
                f"{asked} is not served: {name} of Queen MQ is not part of Settled, "
                "which speaks the HTTP API of Queen MQ 0.15 and 1.x (docs/from-queen.md)"
            )
    return f"no such route: {asked}"


def _walk(
    node: Node, parts: list[bytes], depth: int, values: tuple[bytes, ...]
) -> tuple[Node, tuple[bytes, ...]] | None:
    if depth == len(parts):
        return (node, values) if node.methods else None
    part = parts[depth]
    child = node.children.get(part)
    if child is not None:
        found = _walk(child, parts, depth + 1, values)
        if found is not None:
            return found
    if node.parameter is None:
        return None
    return _walk(node.parameter, parts, depth + 1, (*values, part))


def _decode(part: bytes) -> str:
    """A percent-decoded path parameter.

    >>> _decode(b"c%2Fd e")
    'c/d e'
    """
    if not part:
        raise bad("path", "has an empty segment")
    if len(part) > SEGMENT_LIMIT:
        raise bad("path", f"segment must be at most {SEGMENT_LIMIT} bytes, got {len(part)}")
    try:
        text = unquote_to_bytes(part).decode()
    except UnicodeDecodeError as error:
        raise bad("path", f"segment is not UTF-8: {error}") from None
    if "\x00" in text:
        raise bad("path", "segment must not contain NUL")
    return text
