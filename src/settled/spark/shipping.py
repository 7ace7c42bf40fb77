"""Handlers on their way to the executors: functions of modules by name, those of `__main__` whole."""

from __future__ import annotations

import base64
import contextlib
import inspect
import io
import pickle
import re
import typing
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

import msgspec
from pyspark.cloudpickle import cloudpickle

from settled.handlers.feature import features
from settled.handlers.layers import layers
from settled.signals import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Callable

StructMeta: Any = type(msgspec.Struct)
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
_MADE_ANEW = {
    "__annotations__",
    "__dict__",
    "__doc__",
    "__match_args__",
    "__module__",
    "__orig_bases__",
    "__parameters__",
    "__post_init__",
    "__qualname__",
    "__slots__",
    "__weakref__",
}
_CACHE = "__msgspec_cache__"


class _Pickler(cloudpickle.Pickler):
    """Also ships Structs that were defined in `__main__`, whose fields exist only from their making on."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, StructMeta) and not _by_name(obj):
            return _make, _outside(obj), _inside(obj), None, None, _fill
        reduced: Any = super().reducer_override(obj)  # type: ignore[no-untyped-call]
        if isinstance(obj, type) and isinstance(reduced, tuple) and len(reduced) > 2:
            namespace, _ = reduced[2]
            namespace.pop(_CACHE, None)  # what msgspec knows of an enum or a dataclass it finds out again
            _resolve(obj, namespace)
        return reduced


def _by_name(obj: Any) -> bool:
    return bool(cloudpickle._should_pickle_by_reference(obj))  # type: ignore[no-untyped-call]


def _outside(struct: Any) -> tuple[Any, ...]:
    """What a Struct is made with: all that does not name the Struct itself."""
    own = set(inspect.get_annotations(struct))
    fields = [f for f in msgspec.structs.fields(struct) if f.name in own]
    defaults = [(f.name, f.default, f.default_factory) for f in fields]
    config = struct.__struct_config__
    settings = {name: getattr(config, name) for name in _SETTINGS}
    parameters = inspect.signature(struct).parameters
    settings["kw_only"] = any(parameters[f.name].kind is inspect.Parameter.KEYWORD_ONLY for f in fields)
    settings["rename"] = {f.name: f.encode_name for f in fields if f.name != f.encode_name} or None
    names = {name: vars(struct)[name] for name in ("__module__", "__orig_bases__") if name in vars(struct)}
    names |= {"__qualname__": struct.__qualname__, "__doc__": struct.__doc__}
    checks = "__post_init__" in vars(struct)
    return struct.__name__, struct.__bases__, names, defaults, settings, checks


def _inside(struct: Any) -> dict[str, Any]:
    """What may name the Struct itself: its annotations, methods and other attributes."""
    own = {
        name: value
        for name, value in vars(struct).items()
        if name not in _MADE_ANEW and name not in struct.__struct_fields__ and name != _CACHE
    }
    own["__annotations__"] = inspect.get_annotations(struct)
    _resolve(struct, own)
    if "__post_init__" in vars(struct):
        own["__post_init__"] = vars(struct)["__post_init__"]
    return own


def _resolve(class_: type, namespace: dict[str, Any]) -> None:
    """Annotations that are text name what only this process's `__main__` has: put the types in."""
    own = namespace.get("__annotations__")
    if own:
        with contextlib.suppress(Exception):  # of a name that is nowhere, who uses the type is told
            found = typing.get_type_hints(class_, include_extras=True)
            namespace["__annotations__"] = {name: found.get(name, kind) for name, kind in own.items()}


def _make(
    name: str,
    bases: tuple[type, ...],
    names: dict[str, Any],
    defaults: list[tuple[str, Any, Any]],
    settings: dict[str, Any],
    checks: bool,
) -> Any:
    namespace = {**names, "__annotations__": {field: Any for field, _, _ in defaults}}
    for field, default, factory in defaults:
        if factory is not msgspec.NODEFAULT:
            namespace[field] = msgspec.field(default_factory=factory)
        elif default is not msgspec.NODEFAULT:
            namespace[field] = default
    if checks:

        def __post_init__(self: Any) -> None:  # noqa: N807
            __post_init__.real(self)  # type: ignore[attr-defined]

        namespace["__post_init__"] = __post_init__  # a Struct looks for it once, when it is made
    return StructMeta(name, bases, namespace, **settings)


def _fill(struct: Any, own: dict[str, Any]) -> None:
    check = own.pop("__post_init__", None)
    if check is not None:
        struct.__post_init__.real = check
    for name, value in own.items():
        setattr(struct, name, value)


def dumps(value: Any) -> str:
    """A value as text that fits into an option."""
    buffer = io.BytesIO()
    _Pickler(buffer).dump(value)  # type: ignore[no-untyped-call]
    return base64.b64encode(buffer.getvalue()).decode()


@lru_cache(maxsize=64)
def loads(text: str) -> Any:
    """The value again; the same text gives the same value, so decoders are made once in a worker."""
    return pickle.loads(base64.b64decode(text))  # noqa: S301 - the driver's own


def flags_of(handler: Callable[..., Any]) -> dict[str, Any]:
    """The feature flags of this process that can be sent; those the handler names must be among them."""
    named = {layer.feature for layer in layers(handler)}
    found: dict[str, Any] = {}
    for name, flag in features.items():
        try:
            dumps(flag)
        except Exception as error:
            if name in named:
                raise ConfigurationError(
                    f"feature {name!r}: its flag cannot be sent to executors ({error}); give a bool, or a "
                    "function of a module that they have"
                ) from error
        else:
            found[name] = flag
    return found


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
