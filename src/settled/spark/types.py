"""Python types as Spark types: what a payload or a result looks like in a DataFrame."""

from __future__ import annotations

import datetime
import decimal
import enum
import uuid
from typing import TYPE_CHECKING, Any

import msgspec
import msgspec.inspect as mi
import pyarrow as pa
from pyspark.sql.pandas.types import to_arrow_type
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    DataType,
    DateType,
    DecimalType,
    DoubleType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampType,
    _parse_datatype_json_string,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

_PLAIN: dict[type, DataType] = {
    mi.BoolType: BooleanType(),
    mi.IntType: LongType(),
    mi.FloatType: DoubleType(),
    mi.StrType: StringType(),
    mi.BytesType: BinaryType(),
    mi.ByteArrayType: BinaryType(),
    mi.DateTimeType: TimestampType(),
    mi.DateType: DateType(),
    mi.DecimalType: DecimalType(38, 18),
    mi.UUIDType: StringType(),
    mi.TimeType: StringType(),
    mi.TimeDeltaType: StringType(),
}


def spark_type(type_: Any) -> DataType:
    """The Spark type of a Python type that msgspec knows; a Spark type or DDL text is taken as it is.

    >>> spark_type(dict[str, int]).simpleString()
    'map<string,bigint>'
    """
    if isinstance(type_, DataType):
        return type_
    if isinstance(type_, str):
        return DataType.fromDDL(type_)
    return _convert(mi.type_info(type_), str(type_))


def _convert(info: Any, where: str) -> DataType:
    plain = _PLAIN.get(type(info))
    if plain is not None:
        return plain
    match info:
        case mi.UnionType(types=types):
            some = [t for t in types if not isinstance(t, mi.NoneType)]
            if len(some) == 1:
                return _convert(some[0], where)
        case mi.ListType() | mi.SetType() | mi.FrozenSetType() | mi.VarTupleType():
            return ArrayType(_convert(info.item_type, where))
        case mi.DictType(key_type=key, value_type=value):
            return MapType(_convert(key, where), _convert(value, where))
        case mi.StructType() | mi.DataclassType() | mi.TypedDictType() | mi.NamedTupleType():
            fields = [StructField(f.name, _convert(f.type, f"{where}.{f.name}")) for f in info.fields]
            return StructType(fields)
        case mi.EnumType(cls=cls):
            return LongType() if issubclass(cls, int) else StringType()
        case mi.LiteralType(values=values):
            return LongType() if all(isinstance(v, int) for v in values) else StringType()
    raise TypeError(
        f"{where}: a {type(info).__name__} has no Spark type; use a Struct, a dataclass or a plain type"
    )


_KEPT = (datetime.datetime, datetime.date, bytes, decimal.Decimal)


def to_plain(value: Any) -> Any:
    """A value as dicts, lists and scalars that Arrow takes."""
    if value is None or isinstance(value, (bool, int, float, str, bytes)):
        return value
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, uuid.UUID):
        return str(value)
    if isinstance(value, msgspec.Struct):
        return {f: to_plain(getattr(value, f)) for f in value.__struct_fields__}
    if hasattr(value, "model_dump"):
        value = value.model_dump()
    return msgspec.to_builtins(value, builtin_types=_KEPT)


def arrow_type(kind: str | None) -> pa.DataType:
    """The Arrow type of a Spark type as JSON; None is bytes."""
    if kind is None:
        return pa.binary()
    return to_arrow_type(_parse_datatype_json_string(kind), timezone="UTC")


def fitting(values: Sequence[Any], kind: pa.DataType) -> tuple[pa.Array, dict[int, Exception]]:
    """Values as Arrow; those that are not of the type are null there, and named by their place."""
    try:
        return pa.array(values, kind), {}
    except Exception:  # whatever Arrow has against one of them; which one it does not say
        misfits: dict[int, Exception] = {}
    for place, value in enumerate(values):
        try:
            pa.array([value], kind)
        except Exception as error:
            misfits[place] = error
    return pa.array([None if i in misfits else value for i, value in enumerate(values)], kind), misfits
