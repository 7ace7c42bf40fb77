"""CloudEvents 1.0: read and written in binary mode (`ce-` headers) and in structured mode (JSON)."""

from __future__ import annotations

import base64
import binascii
import re
import uuid
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any
from urllib.parse import unquote

import msgspec

from settled.signals import Invalid

STRUCTURED = "application/cloudevents+json"
_PREFIX = "ce-"
_REQUIRED = ("id", "source", "specversion", "type")
_OPTIONAL = ("subject", "time", "datacontenttype", "dataschema")
_NAME = re.compile(r"[a-z0-9]+")


class CloudEvent(msgspec.Struct, frozen=True, kw_only=True):
    """The attributes of an event; its data is the message's payload.

    >>> event = CloudEvent(type="order.placed", source="/shop", id="1", extensions={"tenant": "a"})
    >>> event["type"], event["tenant"]
    ('order.placed', 'a')
    """

    type: str
    source: str
    id: str = msgspec.field(default_factory=lambda: str(uuid.uuid4()))
    specversion: str = "1.0"
    subject: str | None = None
    time: datetime | None = msgspec.field(default_factory=lambda: datetime.now(UTC))
    datacontenttype: str | None = None
    dataschema: str | None = None
    extensions: dict[str, str | int | bool] = {}

    def __post_init__(self) -> None:
        for name in _REQUIRED:
            if not getattr(self, name):
                raise Invalid(f"CloudEvent: {name} must not be empty")
        if not self.specversion.startswith("1."):
            raise Invalid(f"CloudEvent: specversion must be 1.x, got {self.specversion!r}")
        for name in self.extensions:
            if not _NAME.fullmatch(name) or name in _REQUIRED or name in _OPTIONAL or name == "data":
                raise Invalid(f"CloudEvent: {name!r} cannot name an extension; use a-z and 0-9")

    def __getitem__(self, name: str) -> Any:
        if name in _REQUIRED or name in _OPTIONAL:
            return getattr(self, name)
        return self.extensions[name]

    def attributes(self) -> dict[str, Any]:
        """All attributes that are set, by their CloudEvents names."""
        named = {name: getattr(self, name) for name in (*_REQUIRED, *_OPTIONAL)}
        if self.time is not None:
            named["time"] = self.time.isoformat().replace("+00:00", "Z")
        return {name: value for name, value in named.items() if value is not None} | self.extensions


def from_headers(headers: Mapping[str, str], content_type: str | None = None) -> CloudEvent | None:
    """The event that `ce-` headers describe; None where there are none."""
    found = {
        name[len(_PREFIX) :].lower(): unquote(value)
        for name, value in headers.items()
        if name[: len(_PREFIX)].lower() == _PREFIX
    }
    if "specversion" not in found:
        return None
    if content_type is not None:
        found["datacontenttype"] = content_type
    return _event(found)


def to_headers(event: CloudEvent) -> dict[str, str]:
    """The event as `ce-` headers; the data content type travels as `content-type`."""
    headers = {}
    for name, value in event.attributes().items():
        if name == "datacontenttype":
            headers["content-type"] = value
        else:
            text = str(value).lower() if isinstance(value, bool) else str(value)
            headers[_PREFIX + name] = _percent_encode(text)
    return headers


def unwrap(data: bytes) -> tuple[CloudEvent, bytes, str]:
    """A structured event taken apart: attributes, data, and the data's content type."""
    try:
        envelope = _ENVELOPE.decode(data)
    except msgspec.MsgspecError as error:
        raise Invalid(f"CloudEvent: {error}", cause=error) from error
    inner = envelope.pop("data", None)
    encoded = envelope.pop("data_base64", None)
    event = _event({name: msgspec.json.decode(raw) for name, raw in envelope.items()})
    content_type = event.datacontenttype or "application/json"
    if encoded is not None:
        return event, _from_base64(encoded), content_type
    if inner is None:
        return event, b"", content_type
    if not is_json(content_type):
        text = msgspec.json.decode(inner)
        if not isinstance(text, str):
            raise Invalid(f"CloudEvent: data of {content_type!r} must be a string, got {bytes(inner)[:60]!r}")
        return event, text.encode(), content_type
    return event, bytes(inner), content_type


def wrap(event: CloudEvent, data: bytes, content_type: str) -> bytes:
    """One JSON document of the event and its data."""
    envelope: dict[str, Any] = {**event.attributes(), "datacontenttype": content_type}
    if is_json(content_type):
        envelope["data"] = msgspec.Raw(data)
    else:
        envelope["data_base64"] = base64.b64encode(data).decode()
    return msgspec.json.encode(envelope)


def is_json(content_type: str) -> bool:
    """Whether a content type is JSON or a kind of it."""
    essence = content_type.partition(";")[0].strip().lower()
    return essence in ("application/json", "text/json") or essence.endswith("+json")


_ENVELOPE = msgspec.json.Decoder(dict[str, msgspec.Raw])


def _event(found: dict[str, Any]) -> CloudEvent:
    missing = [name for name in _REQUIRED if name not in found]
    if missing:
        raise Invalid(f"CloudEvent: {', '.join(missing)} missing")
    found = {name: value for name, value in found.items() if value is not None}
    named = {name: found.pop(name) for name in (*_REQUIRED, *_OPTIONAL) if name in found}
    try:
        return msgspec.convert({"time": None, **named, "extensions": found}, CloudEvent)
    except msgspec.ValidationError as error:
        raise Invalid(f"CloudEvent: {error}", cause=error) from error


def _from_base64(raw: msgspec.Raw) -> bytes:
    try:
        return base64.b64decode(msgspec.json.decode(raw, type=str), validate=True)
    except (binascii.Error, msgspec.MsgspecError) as error:
        raise Invalid(f"CloudEvent: data_base64: {error}", cause=error) from error


def _percent_encode(text: str) -> str:
    # The HTTP and NATS bindings encode what is not printable ASCII, and space, quote and percent.
    return "".join(
        char if "!" <= char <= "~" and char not in '"%' else "".join(f"%{b:02X}" for b in char.encode())
        for char in text
    )
