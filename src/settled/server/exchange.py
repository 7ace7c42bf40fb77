"""The values of one HTTP exchange: Request, Answer, and HttpError which is an answer too."""

from __future__ import annotations

from http import HTTPStatus
from time import perf_counter
from typing import Final

import msgspec

JSON: Final = b"application/json"
TEXT: Final = b"text/plain; version=0.0.4; charset=utf-8"
HTML: Final = b"text/html; charset=utf-8"


class Request:
    """One parsed request; `segments` are the percent-decoded path parameters the router found."""

    __slots__ = (
        "body",
        "cancellable",
        "gone",
        "html",
        "label",
        "method",
        "path",
        "query",
        "segments",
        "started",
    )

    def __init__(self, method: str, path: bytes, query: bytes, body: bytes) -> None:
        self.method = method
        self.path = path
        self.query = query
        self.body = body
        self.segments: tuple[str, ...] = ()
        # Whether the client asks for a page rather than for JSON.
        self.html = False
        # Under which name it is counted, and since when it is handled.
        self.label = "unknown"
        self.started = perf_counter()
        # A waiting pop sets this, so that a client that hangs up frees its place in the line.
        self.cancellable = False
        self.gone = False


class Answer(msgspec.Struct, frozen=True, gc=False):
    """What goes back: status, body, and header lines beyond the usual (already encoded)."""

    status: int
    body: bytes
    content_type: bytes = JSON
    extra: bytes = b""


class HttpError(Exception):
    """Raised anywhere in a handler to answer `status` with `{"error": ...}`."""

    def __init__(self, status: int, error: str, *, extra: bytes = b"", **fields: object) -> None:
        super().__init__(error)
        self.status = status
        self.error = error
        self.extra = extra
        self.fields = fields

    def answer(self) -> Answer:
        """The JSON answer of this error; what a caller sent is not repeated at length."""
        fields = {
            name: shortened(value) if isinstance(value, str) else value for name, value in self.fields.items()
        }
        return Answer(
            self.status, msgspec.json.encode({"error": shortened(self.error), **fields}), extra=self.extra
        )


def shortened(text: str) -> str:
    """A text of at most about 300 characters: its beginning and its end.

    >>> shortened("x" * 1000)[145:]
    'xxxxx … (800 characters left out) … xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx'
    """
    if len(text) <= 300:
        return text
    return f"{text[:150]} … ({len(text) - 200} characters left out) … {text[-50:]}"


def bad(field: str, problem: str) -> HttpError:
    """A 400 that names the field.

    >>> bad("batch", "must be 1..10000, got 0").error
    'batch must be 1..10000, got 0'
    """
    return HttpError(400, f"{field} {problem}", field=field)


def reason(status: int) -> str:
    """The reason phrase of a status code."""
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        return "Status"


def ok(value: object, status: int = 200) -> Answer:
    """A JSON answer of any value msgspec can encode."""
    return Answer(status, msgspec.json.encode(value))
