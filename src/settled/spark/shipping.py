"""Handlers on their way to the executors: functions of modules by name, those of `__main__` whole."""

from __future__ import annotations

import base64
import inspect
import io
import pickle
import re
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

import msgspec
from pyspark.cloudpickle import cloudpickle

if TYPE_CHECKING:
    from collections.abc import Callable

StructMeta = type(msgspec.Struct)
_SETTINGS = (
    "frozen",
    "eq",
    "order",
    "array_like",
    "gc",
    "repr_omit_defaults",
    "omit_defaults",
    "forbid_unknown_fields",
    "weakref",
    "dict",
    "cache_hash",
    "tag_field",
    "tag",
)


class _Pickler(cloudpickle.Pickler):
    """Also ships Structs that were defined in `__main__`, whose fields exist only from their making on."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, StructMeta) and not _by_name(obj):
            return _rebuild, _describe(obj)
        return super().reducer_override(obj)  # type: ignore[no-untyped-call]


def _by_name(obj: Any) -> bool:
    return bool(cloudpickle._should_pickle_by_reference(obj))  # type: ignore[no-untyped-call]


def _describe(struct: Any) -> tuple[Any, ...]:
    fields = [
        (f.name, f.type, f.default, f.default_factory, f.encode_name) for f in msgspec.structs.fields(struct)
    ]
    settings = {name: getattr(struct.__struct_config__, name) for name in _SETTINGS}
    own = {
        name: value
        for name, value in vars(struct).items()
        if inspect.isfunction(value) or isinstance(value, (property, classmethod, staticmethod))
    }
    return struct.__name__, struct.__module__, fields, settings, own


def _rebuild(name: str, module: str, fields: list[Any], settings: dict[str, Any], own: dict[str, Any]) -> Any:
    made: list[Any] = []
    for field, type_, default, factory, _ in fields:
        if factory is not msgspec.NODEFAULT:
            made.append((field, type_, msgspec.field(default_factory=factory)))
        elif default is not msgspec.NODEFAULT:
            made.append((field, type_, default))
        else:
            made.append((field, type_))
    rename = {field: encoded for field, _, _, _, encoded in fields if field != encoded}
    return msgspec.defstruct(name, made, module=module, namespace=own, rename=rename or None, **settings)


def dumps(value: Any) -> str:
    """A value as text that fits into an option."""
    buffer = io.BytesIO()
    _Pickler(buffer).dump(value)  # type: ignore[no-untyped-call]
    return base64.b64encode(buffer.getvalue()).decode()


@lru_cache(maxsize=64)
def loads(text: str) -> Any:
    """The value again; the same text gives the same value, so decoders are made once in a worker."""
    return pickle.loads(base64.b64decode(text))  # noqa: S301 - the driver's own


def names_of(handler: Callable[..., Any]) -> dict[str, Any]:
    """What the handler's annotations name where it is defined, for annotations that are still text."""
    function: Any = handler
    while isinstance(function, partial):
        function = function.func
    if not inspect.isroutine(function) and not inspect.isfunction(function):
        function = type(function).__call__
    function = inspect.unwrap(function)
    function = getattr(function, "__func__", function)
    texts = [a for a in getattr(function, "__annotations__", {}).values() if isinstance(a, str)]
    words = {word for text in texts for word in re.findall(r"\w+", text)}
    scope = dict(getattr(function, "__globals__", {}))
    if inspect.isfunction(function):
        scope |= inspect.getclosurevars(function).nonlocals
    return {word: scope[word] for word in words if word in scope}
