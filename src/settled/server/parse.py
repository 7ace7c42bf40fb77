"""From the bytes of a request to checked values, or a 400 that names the field; pure functions."""

from __future__ import annotations

import re
import uuid
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import parse_qsl

import msgspec
from msgspec import inspect

from .exchange import HttpError, bad
from .numbers import unbounded

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

T = TypeVar("T")

NAME_LIMIT = 255
BATCH_LIMIT = 10_000
PARTITIONS_LIMIT = 1000
TIMEOUT_LIMIT = 3_600_000
LIMIT = 1000
OFFSET = 2**31 - 1
FIRST, LAST = datetime(1970, 1, 1, tzinfo=UTC), datetime(9000, 1, 1, tzinfo=UTC)
AUTOPILOT_BATCH = 200
AUTOPILOT_PARTITIONS = 10
QUEUE_MODE = "__QUEUE_MODE__"
# Where a new group starts: the words that clients send, and the mode each means.
SUBSCRIPTION_MODES = {"all": "all", "new": "new", "new-only": "new", "from_beginning": "all"}

_AT = re.compile(r"^(?P<what>.*?)(?: - at `\$\.?(?P<where>.*)`)?$", re.DOTALL)
_EXPECTED = re.compile(r"^Expected `(?P<wanted>[^`]+)`, got `(?P<got>[^`]+)`$")
_UNKNOWN = re.compile(r"^Invalid (?:enum )?value (?P<got>'.*')$", re.DOTALL)
_MISSING = re.compile(r"^Object missing required field `(?P<field>[^`]+)`$")
_WORDS = {
    "str": "a string",
    "int": "an integer",
    "float": "a number",
    "bool": "true or false",
    "array": "an array",
    "object": "an object",
}
_LONE_SURROGATE = re.compile(
    # Half of a pair, and what follows is not the other half; a backslash before it makes it plain text.
    rb"(?<!\\)(?:\\\\)*(?P<half>\\u[dD][89abAB][0-9a-fA-F]{2})"
    rb"(?=[^\\]|\\[^u]|\\u[^dD]|\\u[dD][^c-fC-F])"
)
_STEP = re.compile(r"\[[^\]]*\]|[^.\[]+")


def decode(body: bytes, decoder: msgspec.json.Decoder[T], *, stored: bool = False) -> T:
    """A checked body; `stored` is for one with values that are kept as they came, for others to decode.

    >>> import msgspec
    >>> decode(b'{"a": 1}', msgspec.json.Decoder(dict[str, int]))
    {'a': 1}
    """
    if not body:
        raise HttpError(400, "Empty request body: send a JSON object")
    try:
        # Payloads are passed through as bytes, so nothing else would notice a bad byte inside them.
        if not body.isascii():
            body.decode()
        checked = decoder.decode(body)
    except msgspec.ValidationError as error:
        raise explain(str(error), decoder.type) from None
    except msgspec.DecodeError as error:
        raise HttpError(400, f"Invalid JSON: {_unreadable(body) or error}") from None
    except UnicodeDecodeError as error:
        raise HttpError(400, f"Invalid JSON: not UTF-8 at byte {error.start}") from None
    except RecursionError:
        raise HttpError(400, "Invalid JSON: nested too deeply") from None
    if stored and (beyond := unbounded(body)) is not None:
        field, number = beyond
        raise bad(field, f"must be a number that a 64-bit float can hold, got {number[:64]}")
    return checked


def _unreadable(body: bytes) -> str | None:
    """What the decoder takes for the end of the text, or for a bad escape, without saying why."""
    found = _LONE_SURROGATE.search(body)
    if found is None:
        return None
    return f"{found['half'].decode()} at byte {found.start('half')} is half a character, not valid UTF-8 text"


def explain(error: str, type_: Any = Any) -> HttpError:
    """A decoder's complaint in our words: which field, what it must be, what came.

    >>> explain("Expected `str`, got `int` - at `$.items[0].queue`").error
    'items[0].queue must be a string, got int'
    >>> explain("Object missing required field `queue` - at `$.items[0]`").error
    'items[0].queue is required'
    """
    found = _AT.match(error)
    what, where = (found["what"], found["where"] or "") if found else (error, "")
    missing = _MISSING.match(what)
    if missing:
        field = missing["field"]
        why = "is required to ensure message uniqueness" if field == "partitionId" else "is required"
        return bad(f"{where}.{field}" if where else field, why)
    expected = _EXPECTED.match(what)
    if expected and expected["wanted"] == "null":
        return bad(where, "is not supported by this server; leave it out")
    if expected:
        wanted = " or ".join(_WORDS.get(word.strip(), word.strip()) for word in expected["wanted"].split("|"))
        return bad(where or "body", f"must be {wanted}, got {expected['got']}")
    unknown = _UNKNOWN.match(what)
    allowed = choices(type_, where) if unknown else []
    if unknown and allowed:
        return bad(where, f"must be one of {', '.join(allowed)}, got {unknown['got']}")
    return bad(where or "body", f"is not valid: {what}")


def choices(type_: Any, where: str) -> list[str]:
    """The words a field of a body may hold, if it is one of a few.

    >>> from typing import Literal
    >>> choices(dict[str, list[Literal["on", "off"]]], "[...][0]")
    ['off', 'on']
    """
    found = list(_members(inspect.type_info(type_)))
    for step in _STEP.findall(where):
        found = [member for part in found for inner in _inside(part, step) for member in _members(inner)]
    words = [str(value) for part in found if isinstance(part, inspect.LiteralType) for value in part.values]
    return list(dict.fromkeys(words))


def _members(part: inspect.Type) -> Sequence[inspect.Type]:
    if isinstance(part, inspect.Metadata):
        return _members(part.type)
    return part.types if isinstance(part, inspect.UnionType) else (part,)


def _inside(part: inspect.Type, step: str) -> Iterator[inspect.Type]:
    match part:
        case inspect.ListType(item_type=inner) | inspect.DictType(value_type=inner) if step.startswith("["):
            yield inner
        case inspect.StructType(tag_field=field, tag=str(tag)) if field == step:
            yield inspect.LiteralType((tag,))
        case inspect.StructType():
            yield from (field.type for field in part.fields if field.encode_name == step)


def name(value: str, field: str) -> str:
    """A queue, partition or group name, or an id: 1 to 255 characters, none of them NUL."""
    if not 0 < len(value) <= NAME_LIMIT:
        raise bad(field, f"must have 1..{NAME_LIMIT} characters, got {len(value)}")
    if "\x00" in value:
        raise bad(field, "must not contain NUL")
    return value


def uuid_of(value: str, field: str) -> uuid.UUID:
    """A uuid, or a 400."""
    try:
        return uuid.UUID(value)
    except ValueError:
        raise bad(field, f"must be a uuid, got {value[:64]!r}") from None


def end_of(value: str, field: str) -> datetime:
    """A time up to which something is asked for; of a day, its end.

    >>> end_of("2026-01-31", "to").isoformat()
    '2026-02-01T00:00:00+00:00'
    """
    moment = timestamp(value, field)
    return moment + timedelta(days=1) if len(value) <= len("2026-01-31") else moment


def timestamp(value: str, field: str) -> datetime:
    """An ISO 8601 time or date; without an offset it is UTC.

    >>> timestamp("2024-01-15", "from").isoformat()
    '2024-01-15T00:00:00+00:00'
    >>> timestamp("0001-01-01", "from").isoformat()
    '1970-01-01T00:00:00+00:00'
    """
    try:
        # A "+" of an offset that a client did not quote arrives as a space.
        moment = datetime.fromisoformat(value.replace(" ", "+") if "T" in value else value)
    except ValueError:
        raise bad(
            field, f"must be an ISO 8601 time such as 2026-01-31T12:00:00Z, got {value[:64]!r}"
        ) from None
    # Postgres and the arithmetic of time zones both end somewhere; no message is older or newer than these.
    if moment.year < FIRST.year:
        return FIRST
    if moment.year > LAST.year:
        return LAST
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)


class Query:
    """The parameters of a query string, each read with its type; the first of a repeated name counts."""

    def __init__(self, raw: bytes) -> None:
        try:
            pairs = parse_qsl(raw.decode(), keep_blank_values=True, errors="strict", max_num_fields=100)
        except (UnicodeDecodeError, ValueError) as error:
            raise bad("query", f"string cannot be read: {error}") from None
        self._values: dict[str, str] = {}
        for key, value in pairs:
            if "\x00" in value:
                raise bad(key, "must not contain NUL")
            self._values.setdefault(key, value)

    def text(self, field: str) -> str | None:
        """A parameter as it is; empty counts as absent."""
        return self._values.get(field) or None

    def name(self, field: str) -> str | None:
        """A parameter that is a name."""
        value = self.text(field)
        return None if value is None else name(value, field)

    def integer(self, field: str, default: int, low: int, high: int) -> int:
        """A whole number within bounds."""
        value = self._values.get(field)
        if value is None or value == "":
            return default
        try:
            if len(value) > 20 or not value.isascii():
                raise ValueError
            number = int(value)
        except ValueError:
            raise bad(field, f"must be an integer, got {value[:64]!r}") from None
        if not low <= number <= high:
            raise bad(field, f"must be {low}..{high}, got {number}")
        return number

    def page(self) -> tuple[int, int]:
        """`limit` and `offset` of a long list."""
        return self.integer("limit", LIMIT, 1, LIMIT), self.integer("offset", 0, 0, OFFSET)

    def flag(self, field: str, default: bool = False) -> bool:
        """`true`, `1`, `false` or `0`."""
        match self._values.get(field, "").lower():
            case "":
                return default
            case "true" | "1":
                return True
            case "false" | "0":
                return False
            case value:
                raise bad(field, f"must be true or false, got {value[:64]!r}")

    def time(self, field: str) -> datetime | None:
        """A time, or None if it is not given."""
        value = self.text(field)
        return None if value is None else timestamp(value, field)

    def end(self, field: str) -> datetime | None:
        """A time up to which something is asked for; of a day, its end."""
        value = self.text(field)
        return None if value is None else end_of(value, field)

    def has(self, field: str) -> bool:
        """Whether the parameter is there and not empty."""
        return bool(self._values.get(field))


class PopQuery(msgspec.Struct, frozen=True):
    """The parameters of a pop."""

    batch: int
    partitions: int
    wait: float
    group: str
    auto_ack: bool
    lease_seconds: int | None
    release_rest: bool
    mode: str | None
    origin: str | None
    namespace: str | None
    task: str | None


@lru_cache(maxsize=4096)
def pop_query(raw: bytes) -> PopQuery:
    """The parameters of a pop, remembered, since consumers repeat themselves.

    >>> pop_query(b"batch=5&wait=true&timeout=1500").wait
    1.5
    """
    query = Query(raw)
    autopilot = query.flag("autopilot")
    if query.flag("conflation"):
        raise bad("conflation", "is not supported by this server")
    mode, origin = _start(query)
    timeout = query.integer("timeout", 30_000, 0, TIMEOUT_LIMIT) / 1000
    return PopQuery(
        batch=query.integer("batch", AUTOPILOT_BATCH if autopilot else 1, 1, BATCH_LIMIT),
        partitions=query.integer("partitions", AUTOPILOT_PARTITIONS if autopilot else 1, 1, PARTITIONS_LIMIT),
        wait=timeout if query.flag("wait") else 0.0,
        group=query.name("consumerGroup") or QUEUE_MODE,
        auto_ack=query.flag("autoAck"),
        lease_seconds=query.integer("leaseSeconds", 0, 0, 86_400) or None,
        # Clients that send autopilot (Queen MQ 1.2 and later) drop the rest of their batch after a nack.
        release_rest=query.flag("releaseRest", autopilot),
        mode=mode,
        origin=origin,
        namespace=query.name("namespace"),
        task=query.name("task"),
    )


def _start(query: Query) -> tuple[str | None, str | None]:
    """Where a new group begins: a mode, or the time it starts from; both None for the server's default."""
    origin = query.text("subscriptionFrom")
    mode = query.text("subscriptionMode")
    if mode is not None and mode not in SUBSCRIPTION_MODES:
        raise bad("subscriptionMode", f"must be one of {', '.join(SUBSCRIPTION_MODES)}, got {mode[:64]!r}")
    if origin is None:
        return (None if mode is None else SUBSCRIPTION_MODES[mode]), None
    if origin in ("now", "new"):
        return "new", None
    if origin in ("beginning", "all"):
        return "all", None
    return None, timestamp(origin, "subscriptionFrom").isoformat()
