"""What a URL and a subscription say about Redis, checked."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, TypeVar
from urllib.parse import parse_qsl, urlencode, urlunsplit

from redis.asyncio import connection as connections
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from settled.signals import ConfigurationError
from settled.transports.base import Source
from settled.transports.urls import certificates, file, flag, option, port_of, split

DEFAULT_GROUP = "settled"


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisStream:
    """How a subscription reads a stream; what is None is as the URL says."""

    lease: float | None = None
    """After so many seconds a message that nobody settled goes to any consumer of the group."""
    backoff: float | None = None
    """Seconds before a message comes again that failed without a delay of its own; None with the URL's is
    the subscriber's backoff."""
    create: bool | None = None
    """Create the stream and the group if they are missing."""
    start: str = "0"
    """Where a group that is created begins: "0" with the oldest message, "$" with the next one."""
    delete: bool | None = None
    """Delete a message when it is settled; right if this group is the only reader of the stream."""
    confirm: bool | None = None
    """Send each ack before its call returns, at the price of a round trip each, also with a buffer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisList:
    """How a subscription reads a list, which is pushed to on the left; what is None is as the URL says."""

    lease: float | None = None
    """After so many seconds without a sign of life, a consumer's messages go to the others."""
    backoff: float | None = None
    """Seconds before a message comes again that failed without a delay of its own; None with the URL's is
    the subscriber's backoff."""


@dataclass(frozen=True, slots=True)
class Options:
    """What the URL says of everything read and written through it."""

    lease: float = 30.0
    backoff: float | None = None
    create: bool = False
    delete: bool = False
    lists: bool = False
    """Channels are lists, unless a subscription says otherwise."""
    maxlen: int = 0
    """Publishing trims a stream to about so many entries, settled or not; 0 never trims."""
    confirm: bool = False


@dataclass(frozen=True, slots=True)
class Reading:
    """A subscription's settings, with nothing left open."""

    is_list: bool
    lease: float
    backoff: float | None
    create: bool = False
    start: str = "0"
    delete: bool = False
    confirm: bool = True


T = TypeVar("T")


def reading(source: Source, options: Options) -> Reading:
    """A subscription's settings."""
    match source.settings:
        case None:
            given: RedisStream | RedisList = RedisList() if options.lists else RedisStream()
        case RedisStream() | RedisList() as given:
            pass
        case other:
            raise ConfigurationError(
                f"subscriber {source.channel!r}: source must be a RedisStream or a RedisList, got {other!r}"
            )
    lease, backoff = _or(given.lease, options.lease), _or(given.backoff, options.backoff)
    if not lease > 0 or (backoff is not None and not backoff >= 0):
        raise ConfigurationError(
            f"subscriber {source.channel!r}: {type(given).__name__} needs lease > 0 and backoff >= 0, in s, "
            f"got lease={lease!r}, backoff={backoff!r}"
        )
    if isinstance(given, RedisStream):
        create, delete = _or(given.create, options.create), _or(given.delete, options.delete)
        confirm = _or(given.confirm, options.confirm)
        return Reading(False, lease, backoff, create, given.start, delete, confirm)
    if source.group is not None:
        raise ConfigurationError(
            f"subscriber {source.channel!r}: a list has no groups, got group={source.group!r}; read a stream"
        )
    return Reading(True, lease, backoff)


def parse(url: str) -> tuple[Options, dict[str, Any]]:
    """Our own options of a URL, and what redis-py makes of the rest.

    >>> parse("redis://localhost:6379/2?lease=60&lists=true")[0]
    Options(lease=60.0, backoff=None, create=False, delete=False, lists=True, maxlen=0, confirm=False)
    """
    parts = split(url)
    port_of(parts)
    database = parts.path.strip("/")
    if parts.scheme != "unix" and database and not database.isdecimal():
        raise ConfigurationError(f"redis: the database must be a number, got {database!r}")
    options, rest = Options(), {}
    for name, text in parse_qsl(parts.query, keep_blank_values=True):
        match name:
            case "lease":
                options = replace(options, lease=_number(name, text, 0.1))
            case "backoff":
                options = replace(options, backoff=_number(name, text, 0.0))
            case "create":
                options = replace(options, create=_flag(name, text))
            case "delete":
                options = replace(options, delete=_flag(name, text))
            case "confirm":
                options = replace(options, confirm=_flag(name, text))
            case "lists":
                options = replace(options, lists=_flag(name, text))
            case "maxlen":
                options = replace(options, maxlen=int(_number(name, text, 0)))
            case _:
                rest[name] = text
    unknown = rest.keys() - _client_options()
    if unknown:
        raise ConfigurationError(
            f"redis: the URL has no option {', '.join(sorted(unknown))}; there are "
            f"{', '.join(Options.__dataclass_fields__)}, and redis-py's own such as ssl_ca_certs"
        )
    for name in rest:
        rest[name] = option("redis", name, rest[name], _checked(name))
    client = dict(connections.parse_url(urlunsplit(parts._replace(query=urlencode(rest)))))
    # A server that does not answer is an error, which the pump tries to get over; a retry inside would hide
    # a message that was taken and never arrived.
    patience = {"socket_timeout": 10.0, "socket_connect_timeout": 10.0}
    if "path" not in client:
        patience["socket_keepalive"] = True
    return options, {**patience, **client, "protocol": 2, "retry": Retry(NoBackoff(), 0)}


def _checked(name: str) -> Callable[[str], str]:
    """What sees that redis-py can read an option of its own, and takes a flag for what it says."""
    read = connections.URL_QUERY_ARGUMENT_PARSERS.get(name)

    def check(text: str) -> str:
        if read is connections.to_bool:
            return str(flag(text)).lower()
        if name in ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile"):
            return certificates(text) if name == "ssl_ca_certs" else file(text)
        if read is not None:
            read(text)
        return text

    return check


@cache
def _client_options() -> frozenset[str]:
    kinds = (
        connections.AbstractConnection,
        connections.Connection,
        connections.SSLConnection,
        connections.UnixDomainSocketConnection,
    )
    named = {name for kind in kinds for name in inspect.signature(kind.__init__).parameters}
    return frozenset(named | connections.URL_QUERY_ARGUMENT_PARSERS.keys()) - {
        "self", "kwargs", "decode_responses", "protocol", "retry", "encoder_class", "parser_class",
    }  # fmt: skip


def _or(given: T | None, default: T) -> T:
    return default if given is None else given


def _number(name: str, text: str, least: float) -> float:
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not least <= value < float("inf"):
        raise ConfigurationError(f"redis: {name} must be a number from {least:g}, got {text!r}")
    return value


def _flag(name: str, text: str) -> bool:
    if text not in ("true", "false"):
        raise ConfigurationError(f"redis: {name} must be true or false, got {text!r}")
    return text == "true"
