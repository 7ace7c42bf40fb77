"""Bytes to a typed payload and back, by content type."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeAlias

import msgspec

from settled import cloudevents
from settled.signals import Invalid

Headers: TypeAlias = Mapping[str, str]
Decode: TypeAlias = Callable[[bytes, Headers], Any]

JSON = "application/json"
MSGPACK = "application/msgpack"
TEXT = "text/plain"
BYTES = "application/octet-stream"


@dataclass(frozen=True, slots=True)
class Format:
    """A content type: how a type's decoder is made, and how a value is encoded."""

    content_type: str
    decoder: Callable[[Any], Callable[[bytes], Any]]
    encode: Callable[[Any], bytes]


_formats: dict[str, Format] = {}


def register(format_: Format) -> None:
    """Teach Settled a content type; a later one of the same name takes its place."""
    _formats[_essence(format_.content_type)] = format_


def decoder(type_: Any) -> Decode:
    """A function from bytes and headers to a value of the type; TypeError if there can be none.

    >>> decoder(dict[str, int])(b'{"a": 1}', {})
    {'a': 1}
    """
    if type_ is bytes:
        return Decoder(type_, BYTES)
    if type_ is str:
        return Decoder(type_, TEXT)
    return Decoder(type_, JSON)


def encode(value: Any, content_type: str | None = None) -> tuple[bytes, str]:
    """The value's bytes, and their content type: as asked, else text, bytes or JSON.

    >>> encode({"a": 1})
    (b'{"a":1}', 'application/json')
    """
    if content_type is None:
        content_type = BYTES if isinstance(value, bytes) else TEXT if isinstance(value, str) else JSON
    return _format(content_type).encode(value), content_type


def content_type_of(headers: Headers) -> str | None:
    """The content type a message's headers give, whatever their case."""
    if not headers:
        return None
    found = headers.get("content-type")
    if found is None:
        found = next((value for name, value in headers.items() if name.lower() == "content-type"), None)
    return found


def encoder(content_type: str) -> Callable[[Any], bytes]:
    """What encodes values of one content type: for who has many of them."""
    return _format(content_type).encode


class Decoder:
    """Decodes one type from every content type; what it needs for each is made once."""

    __slots__ = ("_by_content_type", "_default", "_type")

    def __init__(self, type_: Any, default: str) -> None:
        self._type = type_
        self._default = _format(default).decoder(type_)
        self._by_content_type: dict[str, Callable[[bytes], Any]] = {}

    @property
    def bare(self) -> Callable[[bytes], Any]:
        """What decodes a message without headers: for who has many of them."""
        return self._default

    def __call__(self, data: bytes, headers: Headers) -> Any:
        if not headers:
            return self._default(data)
        decode = self._by_content_type.get(headers.get("content-type", ""))
        return self._look(data, headers) if decode is None else decode(data)

    def _look(self, data: bytes, headers: Headers) -> Any:
        content_type = content_type_of(headers)
        if content_type is None:
            return self._default(data)
        if content_type.startswith(cloudevents.STRUCTURED):
            _, data, content_type = cloudevents.unwrap(data)
        decode = self._by_content_type.get(content_type)
        if decode is None:
            decode = self._learn(content_type)
        return decode(data)

    def _learn(self, content_type: str) -> Callable[[bytes], Any]:
        # Bytes are taken as they are, whatever they are said to be.
        decode = self._default if self._type is bytes else _format(content_type).decoder(self._type)
        if not content_type.startswith(cloudevents.STRUCTURED):
            # An event inside an event is told from the event that is the message, each time.
            self._by_content_type[content_type] = decode
        return decode


def _format(content_type: str) -> Format:
    essence = _essence(content_type)
    found = _formats.get(essence)
    if found is None and cloudevents.is_json(essence):
        found = _formats[JSON]
    if found is None:
        known = ", ".join(sorted(_formats))
        raise Invalid(f"no format for content type {content_type!r}: register one, or use one of {known}")
    return found


def _essence(content_type: str) -> str:
    return content_type.partition(";")[0].strip().lower()


def _json_decoder(type_: Any) -> Callable[[bytes], Any]:
    if _is_pydantic(type_):
        return _adapter(type_).validate_json  # type: ignore[no-any-return]
    _refuse_unknown(type_)
    return msgspec.json.Decoder(type_, dec_hook=_pydantic_inside).decode


def _msgpack_decoder(type_: Any) -> Callable[[bytes], Any]:
    if _is_pydantic(type_):
        return lambda data: _adapter(type_).validate_python(msgspec.msgpack.decode(data))
    _refuse_unknown(type_)
    return msgspec.msgpack.Decoder(type_, dec_hook=_pydantic_inside).decode


def _text_decoder(type_: Any) -> Callable[[bytes], Any]:
    if type_ is str or type_ is Any:
        return _utf8
    return lambda data: msgspec.convert(_utf8(data), type_, strict=False)


def _utf8(data: bytes) -> str:
    return data.decode("utf-8")


def _bytes_decoder(type_: Any) -> Callable[[bytes], Any]:
    if type_ is bytes or type_ is Any:
        return lambda data: data
    raise Invalid(f"a payload of {BYTES!r} is bytes, not {type_!r}: send it with its own content type")


def _bytes_of(value: Any) -> bytes:
    if isinstance(value, str):
        return value.encode()
    if isinstance(value, bytes):
        return value
    raise TypeError(f"a payload of text or bytes must be str or bytes, got {type(value).__name__}")


def _plain_values(value: Any) -> Any:
    """What msgspec does not know: pydantic models."""
    if hasattr(value, "model_dump"):
        return value.model_dump(mode="json")
    raise TypeError(f"cannot encode an object of type {type(value).__name__}")


register(Format(JSON, _json_decoder, msgspec.json.Encoder(enc_hook=_plain_values).encode))
for _name in (MSGPACK, "application/x-msgpack", "application/vnd.msgpack"):
    register(Format(_name, _msgpack_decoder, msgspec.msgpack.Encoder(enc_hook=_plain_values).encode))
register(Format(TEXT, _text_decoder, _bytes_of))
register(Format(BYTES, _bytes_decoder, _bytes_of))


def _is_pydantic(class_: Any) -> bool:
    return isinstance(class_, type) and hasattr(class_, "__pydantic_validator__")


@cache
def _adapter(class_: Any) -> Any:
    from pydantic import TypeAdapter

    return TypeAdapter(class_)


def _pydantic_inside(class_: type, value: Any) -> Any:
    return _adapter(class_).validate_python(value)


def _refuse_unknown(type_: Any) -> None:
    unknown = {class_.__qualname__ for class_ in _custom_classes(type_) if not _is_pydantic(class_)}
    if unknown:
        raise TypeError(
            f"{', '.join(sorted(unknown))} is not a type to decode to: make it a msgspec Struct, dataclass, "
            "TypedDict, attrs class or pydantic model, or take str, bytes, dict or Any"
        )


def _custom_classes(type_: Any) -> Iterator[type]:
    """The classes msgspec does not know by itself, found by walking its description of the type."""
    seen: set[int] = set()
    stack: list[Any] = [msgspec.inspect.type_info(type_)]
    while stack:
        part = stack.pop()
        if isinstance(part, msgspec.inspect.CustomType):
            yield part.cls
        elif isinstance(part, (list, tuple)):
            stack.extend(part)
        elif isinstance(part, (msgspec.inspect.Type, msgspec.inspect.Field)) and id(part) not in seen:
            seen.add(id(part))
            stack.extend(getattr(part, name) for name in part.__struct_fields__)
