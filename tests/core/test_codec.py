from __future__ import annotations

import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Generic, TypedDict, TypeVar

import attrs
import msgspec
import pydantic
import pytest

from settled import codec
from settled.signals import Invalid

V = TypeVar("V")


class Struct(msgspec.Struct):
    id: int


@dataclass
class Data:
    id: int


class Typed(TypedDict):
    id: int


@attrs.define
class Attrs:
    id: int


class Model(pydantic.BaseModel):
    id: int


class Page(msgspec.Struct, Generic[V]):
    items: list[V]


class Opaque:
    def __init__(self, secret: object) -> None: ...


@pytest.mark.parametrize(
    ("type_", "expected"),
    [
        (Struct, Struct(1)),
        (Data, Data(1)),
        (Typed, {"id": 1}),
        (Attrs, Attrs(1)),
        (Model, Model(id=1)),
        (dict, {"id": 1}),
        (dict[str, int], {"id": 1}),
        (Any, {"id": 1}),
        (Struct | None, Struct(1)),
    ],
)
@pytest.mark.parametrize("content_type", [None, "application/json; charset=utf-8", "application/msgpack"])
def test_every_kind_of_type_decodes(type_: Any, expected: Any, content_type: str | None) -> None:
    headers = {} if content_type is None else {"Content-Type": content_type}
    data = (
        msgspec.msgpack.encode({"id": 1})
        if content_type == "application/msgpack"
        else msgspec.json.encode({"id": 1})
    )
    assert codec.decoder(type_)(data, headers) == expected


@pytest.mark.parametrize("inner", [Struct, Data, Attrs, Model])
def test_generics_of_those_decode(inner: Any) -> None:
    data = b'{"items": [{"id": 1}]}'
    assert codec.decoder(Page[inner])(data, {}) == Page([inner(id=1)])
    assert codec.decoder(list[inner])(b'[{"id": 1}]', {}) == [inner(id=1)]


def test_text_and_bytes_are_taken_as_they_are() -> None:
    assert codec.decoder(str)("grün".encode(), {}) == "grün"
    assert codec.decoder(bytes)(b"\x00\xff", {}) == b"\x00\xff"
    assert codec.decoder(bytes)(b'{"id": 1}', {"content-type": "application/json"}) == b'{"id": 1}'
    assert codec.decoder(str)(b'"quoted"', {"content-type": "application/json"}) == "quoted"
    assert codec.decoder(Any)(b"hello", {"content-type": "text/plain"}) == "hello"
    assert codec.decoder(Any)(b"\x00", {"content-type": "application/octet-stream"}) == b"\x00"
    assert codec.decoder(int)(b"17", {"content-type": "text/plain"}) == 17


def test_richer_scalars_decode() -> None:
    moment = "2026-01-02T03:04:05Z"
    assert codec.decoder(datetime)(f'"{moment}"'.encode(), {}) == datetime.fromisoformat(moment)
    assert codec.decoder(uuid.UUID)(b'"a1a2a3a4-0000-4000-8000-000000000001"', {}).version == 4


@pytest.mark.parametrize("type_", [Opaque, list[Opaque], Page[Opaque], "Order", 3, Struct | Data])
def test_a_type_nobody_can_decode_is_refused_at_once(type_: Any) -> None:
    with pytest.raises(TypeError):
        codec.decoder(type_)


def test_the_refusal_says_what_to_do() -> None:
    with pytest.raises(TypeError, match="Opaque is not a type to decode to: make it a msgspec Struct"):
        codec.decoder(Opaque)


@pytest.mark.parametrize("data", [b"", b"{", b'{"id": "x"}', b"[]", b"\xff\xfe"])
@pytest.mark.parametrize("type_", [Struct, Data, Typed, Attrs, Model])
def test_bad_bytes_raise(type_: Any, data: bytes) -> None:
    with pytest.raises((msgspec.MsgspecError, pydantic.ValidationError, UnicodeDecodeError)):
        codec.decoder(type_)(data, {})


def test_an_unknown_content_type_is_invalid_and_names_those_known() -> None:
    with pytest.raises(Invalid, match=r"no format for content type 'application/xml'.*application/json"):
        codec.decoder(Struct)(b"<id>1</id>", {"content-type": "application/xml"})


@pytest.fixture
def csv() -> Iterator[None]:
    codec.register(
        codec.Format(
            "text/csv",
            lambda type_: lambda data: msgspec.convert(data.decode().split(","), type_, strict=False),
            lambda value: ",".join(map(str, value)).encode(),
        )
    )
    yield
    del codec._formats["text/csv"]


@pytest.mark.usefixtures("csv")
def test_other_content_types_plug_in() -> None:
    assert codec.decoder(list[int])(b"1,2", {"content-type": "text/csv"}) == [1, 2]
    assert codec.encode([1, 2], "text/csv") == (b"1,2", "text/csv")


@pytest.mark.parametrize(
    ("value", "data", "content_type"),
    [
        (Struct(1), b'{"id":1}', "application/json"),
        (Model(id=1), b'{"id":1}', "application/json"),
        ([Model(id=1)], b'[{"id":1}]', "application/json"),
        ("text", b"text", "text/plain"),
        (b"\x00", b"\x00", "application/octet-stream"),
        (None, b"null", "application/json"),
    ],
)
def test_values_are_encoded_by_what_they_are(value: Any, data: bytes, content_type: str) -> None:
    assert codec.encode(value) == (data, content_type)


def test_what_cannot_be_encoded_says_its_type() -> None:
    with pytest.raises(TypeError, match="cannot encode an object of type Opaque"):
        codec.encode(Opaque(1))
    with pytest.raises(TypeError, match="must be str or bytes, got int"):
        codec.encode(3, "text/plain")
