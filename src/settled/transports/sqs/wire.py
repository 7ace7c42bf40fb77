"""Bodies and headers in the form that SQS takes: text, and at most ten attributes."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Mapping
from typing import Any

import msgspec

FOLDED = "settled-headers"
_MOST = 10
_NAME = re.compile(r"(?!aws\.|amazon\.)[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*", re.I)
_TEXT = re.compile("[\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]+")


def body_of(data: bytes) -> tuple[str, str | None]:
    r"""The body as text, and how it is encoded if it had to be.

    >>> body_of(b'{"id": 1}'), body_of(b"\xff"), body_of(b"")
    (('{"id": 1}', None), ('/w==', 'base64'), ('-', 'empty'))
    """
    if not data:
        return "-", "empty"
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return base64.b64encode(data).decode(), "base64"
    # A carriage return may not survive, as in XML.
    if _TEXT.fullmatch(text) and "\r" not in text:
        return text, None
    return base64.b64encode(data).decode(), "base64"


def data_of(body: str, encoding: str) -> bytes:
    """The bytes again."""
    match encoding:
        case "base64":
            try:
                return base64.b64decode(body)
            except ValueError:
                # Not ours after all; a body that cannot be read must not stop the queue.
                return body.encode()
        case "empty":
            return b""
        case _:
            return body.encode()


def in_attributes(headers: Mapping[str, str], ours: Mapping[str, str | None]) -> dict[str, Any]:
    """Headers as attributes; those that do not fit, by number, name or value, are folded into one.

    >>> sorted(in_attributes({"tenant": "acme", "trace id": "1"}, {"settled-id": "m-1"}))
    ['settled-headers', 'settled-id', 'tenant']
    """
    found: dict[str, Any] = {}
    folded: dict[str, str] = {}
    for name, value in {**{name: value for name, value in ours.items() if value}, **headers}.items():
        # One place is kept for what is folded.
        if len(found) < _MOST - 1 and _NAME.fullmatch(name) and _TEXT.fullmatch(value):
            found[name] = _string(value)
        else:
            folded[name] = value
    if folded:
        found[FOLDED] = _string(json.dumps(folded))
    return found


def _string(value: str) -> dict[str, str]:
    return {"DataType": "String", "StringValue": value}


def headers_of(attributes: Mapping[str, Any]) -> dict[str, str]:
    """The headers again; what other producers wrote as binary is base64 here."""
    headers = {
        name: value["StringValue"]
        if "StringValue" in value
        else base64.b64encode(value.get("BinaryValue", b"")).decode()
        for name, value in attributes.items()
    }
    try:
        folded = msgspec.json.decode(headers.get(FOLDED, "{}"), type=dict[str, str])
    except msgspec.MsgspecError:
        return headers
    headers.pop(FOLDED, None)
    return {**headers, **folded}
