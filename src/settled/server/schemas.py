"""Types of request fields with the limits that the API document tells; the handlers check them by name.

The limits are `extra_json_schema`: they are for the document only, so that a field that breaks one is refused
with the server's own words.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_args, get_origin

import msgspec
from msgspec import Meta

from settled.queue.options import RANGES, QueueOptions

from .parse import NAME_LIMIT

NO_NUL = r"^[^\u0000]*$"
NAME: dict[str, Any] = {"minLength": 1, "maxLength": NAME_LIMIT, "pattern": NO_NUL}
# Where empty means absent.
OPTIONAL_NAME: dict[str, Any] = {"maxLength": NAME_LIMIT, "pattern": NO_NUL}
TIME: dict[str, Any] = {"anyOf": [{"format": "date-time"}, {"format": "date"}]}
START: dict[str, Any] = {
    "anyOf": [*TIME["anyOf"], {"enum": ["now", "new", "beginning", "all"]}],
}
LEASE = r"^[0-9a-f]{8}-[0-9a-f]{4}-8[0-9a-f]{3}-[0-9a-f]{4}-[0-9a-f]{12}$"
BASE64 = r"^(?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?$"
ITEMS_LIMIT = 10_000
HEADERS_LIMIT = 64
HEADER_VALUE_LIMIT = 8192
DELAY_LIMIT = 366 * 86_400
LEASE_LIMIT = 86_400
KEYS_LIMIT = 10_000
KEY_LIMIT = 4096


def _told(**schema: Any) -> Meta:
    return Meta(extra_json_schema=schema)


def _option(field: msgspec.structs.FieldInfo) -> dict[str, Any]:
    """The schema of one option of a queue; null resets it."""
    if field.encode_name in RANGES:
        low, high = RANGES[field.encode_name]
        return {"type": ["integer", "null"], "minimum": low, "maximum": high}
    if get_origin(field.type) is Literal:
        return {"enum": [*get_args(field.type), None]}
    return {"type": ["boolean", "null"]}


Name = Annotated[str, _told(**NAME)]
OptionalName = Annotated[str, _told(**OPTIONAL_NAME)]
Uuid = Annotated[str, _told(format="uuid")]
Timestamp = Annotated[str, _told(**TIME)]
LeaseId = Annotated[str, _told(pattern=LEASE)]
Delay = Annotated[float, _told(minimum=0, maximum=DELAY_LIMIT)]
Extension = Annotated[float, _told(exclusiveMinimum=0, maximum=LEASE_LIMIT)]
Milliseconds = Annotated[float, _told(minimum=0, maximum=2**53 - 1)]
Key = Annotated[str, _told(maxLength=KEY_LIMIT, pattern=NO_NUL)]
Headers = Annotated[
    dict[str, Annotated[str, _told(maxLength=HEADER_VALUE_LIMIT, pattern=NO_NUL)]],
    _told(maxProperties=HEADERS_LIMIT, propertyNames={**NAME, "pattern": r"^[^\u0000:][^\u0000]*$"}),
]
Options = Annotated[
    dict[str, Any],
    _told(
        properties={field.encode_name: _option(field) for field in msgspec.structs.fields(QueueOptions)},
        additionalProperties=False,
    ),
]
# Rules between fields, by the name of the body.
RULES: dict[str, dict[str, Any]] = {
    "SeekBody": {
        "anyOf": [
            {"properties": {"toEnd": {"const": True}}, "required": ["toEnd"]},
            {"properties": {"toBeginning": {"const": True}}, "required": ["toBeginning"]},
            {"properties": {"timestamp": {"type": "string"}}, "required": ["timestamp"]},
        ]
    },
    "DeadLettersBody": {
        "anyOf": [
            {"properties": {"all": {"const": True}}, "required": ["all"]},
            *(
                {"properties": {field: {"not": {"type": "null"}}}, "required": [field]}
                for field in ("queue", "partition", "consumerGroup", "error", "from", "to", "ids")
            ),
        ]
    },
    "PushItem": {
        "if": {
            "properties": {
                "contentType": {
                    "anyOf": [{"type": "null"}, {"type": "string", "pattern": r"^application/json$|\+json$"}]
                }
            }
        },
        "else": {
            "properties": {"payload": {"type": "string"}, "data": {"type": "string"}},
            "anyOf": [{"required": ["payload"]}, {"required": ["data"]}],
            "if": {"properties": {"encoding": {"const": "base64"}}, "required": ["encoding"]},
            "then": {"properties": {"payload": {"pattern": BASE64}, "data": {"pattern": BASE64}}},
        },
    },
}
