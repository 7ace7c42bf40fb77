"""A program whose handlers and types are all in `__main__`, sent away as Spark would send them."""

import dataclasses
import enum
import json
import sys
import typing
from typing import Any

import msgspec

from settled.policy import Policy
from settled.spark.attempts import Job
from settled.spark.shipping import dumps, names_of

T = typing.TypeVar("T")


class Color(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Size(enum.IntEnum):
    SMALL = 1


@dataclasses.dataclass
class Address:
    city: str
    next: "Address | None" = None


@dataclasses.dataclass
class Unseen:
    color: "Color"


class Optional(msgspec.Struct, kw_only=True):
    note: str | None = None
    id: int


class Node(msgspec.Struct, frozen=True):
    id: int
    children: "list[Node]" = msgspec.field(default_factory=list)

    def total(self) -> int:
        return self.id + sum(child.total() for child in self.children)


class Base(msgspec.Struct, rename="camel", dict=True):
    the_id: int

    def hello(self) -> str:
        return f"hello {self.the_id}"

    def __post_init__(self) -> None:
        if self.the_id < 0:
            raise ValueError("negative")


class Child(Base, kw_only=True):
    LIMIT: typing.ClassVar[int] = 7
    of_mine: int = 1
    needed: str

    def hello(self) -> str:
        return super().hello() + "!" * self.of_mine

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.of_mine > self.LIMIT:
            raise ValueError("too many")

    @classmethod
    def name(cls) -> str:
        return cls.__qualname__

    @property
    def loud(self) -> str:
        return self.needed.upper()


class Rich(msgspec.Struct):
    id: int
    color: Color = Color.RED
    size: Size | None = None
    node: Node | None = None
    address: Address | None = None
    by_color: dict[Color, int] = {}


class Box(msgspec.Struct, typing.Generic[T]):
    content: T


class First(msgspec.Struct, tag="a"):
    id: int


class Second(msgspec.Struct, tag="b"):
    id: int


def kw(o: Optional) -> Any:
    return [o.id, o.note]


def node(o: Node) -> Any:
    return [o.total(), type(o.children[0]) is Node]


def child(o: Child) -> Any:
    return [o.hello(), o.LIMIT, isinstance(o, Base), Child.name(), o.loud]


def rich(o: Rich) -> Any:
    is_blue = o.color is Color.BLUE
    assert o.address is not None
    assert o.address.next is not None
    return [is_blue, o.size is Size.SMALL, isinstance(o.node, Node), o.address.next.city, o.by_color]


def box(o: Box[int]) -> Any:
    return o.content


def boxes(o: Box[list[Node]]) -> Any:
    return o.content[0].total()


def tagged(o: First | Second) -> Any:
    return type(o) is Second


def plain(o: Address) -> Any:
    return [o.city, type(o.next) is Address]


def main() -> None:
    shipped = []
    for handler in (kw, node, child, rich, box, boxes, tagged, plain):
        for again in range(2):  # msgspec remembers what it has seen on the classes
            job = Job(handler, Policy(), names_of(handler), "q", "g", False)
            job.subscription()
            text = dumps(job)
            if again:
                shipped.append((handler.__name__, text))
    json.dump({**dict(shipped), "payload": dumps(Unseen)}, sys.stdout)


if __name__ == "__main__":
    main()
