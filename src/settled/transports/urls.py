"""URLs of transports: their parts, the options in their query, and how they are shown."""

from __future__ import annotations

import re
import ssl
from collections.abc import Callable, Mapping
from typing import Any, TypeVar
from urllib.parse import SplitResult, parse_qsl, urlsplit

from settled.settlement import describe
from settled.signals import ConfigurationError

T = TypeVar("T")


def split(url: str) -> SplitResult:
    """The parts of a URL.

    >>> split("amqp://[::1/orders")
    Traceback (most recent call last):
    settled.signals.ConfigurationError: the URL 'amqp://[::1/orders' cannot be read: Invalid IPv6 URL
    """
    try:
        return urlsplit(url)
    except ValueError as error:
        raise ConfigurationError(f"the URL {masked(url)!r} cannot be read: {error}") from error


def port_of(parts: SplitResult) -> int | None:
    """The port, if there is one.

    >>> port_of(split("mqtt://broker:1883")), port_of(split("mqtt://broker"))
    (1883, None)
    """
    try:
        return parts.port
    except ValueError as error:
        raise ConfigurationError(
            f"{parts.scheme}: the port must be a number up to 65535, got {masked(parts.geturl())!r}"
        ) from error


def masked(url: str) -> str:
    """A URL as it may be shown: without its user, password and options.

    >>> masked("ampq://ann:p@ss@broker/shop?token=x"), masked("localhost:5672")
    ('ampq://broker/shop', 'localhost:5672')
    """
    scheme, colon, rest = url.partition(":")
    if "@" in rest:
        rest = f"//{rest.rpartition('@')[2]}"
    return f"{scheme}{colon}{rest}".partition("?")[0]


def parse(url: str, known: Mapping[str, Callable[[str], Any]]) -> tuple[SplitResult, dict[str, Any]]:
    """The parts of a URL, and its options read by the function each has.

    >>> parse("sqs://eu-west-1?wait=5", {"wait": float})[1]
    {'wait': 5.0}
    """
    parts = split(url)
    port_of(parts)
    options: dict[str, Any] = {}
    for name, value in parse_qsl(parts.query, keep_blank_values=True):
        if name not in known:
            raise ConfigurationError(
                f"{parts.scheme}: no option {name!r} in the URL; there are {', '.join(sorted(known))}"
            )
        options[name] = option(parts.scheme, name, value, known[name])
    return parts, options


def option(scheme: str, name: str, value: str, read: Callable[[str], T]) -> T:
    """An option's value, as the function reads it.

    >>> option("mqtts", "ca_certs", "/no/such.pem", certificates)
    Traceback (most recent call last):
    settled.signals.ConfigurationError: mqtts: option ca_certs='/no/such.pem': No such file or directory
    """
    try:
        return read(value)
    except (ValueError, TypeError) as error:
        raise ConfigurationError(f"{scheme}: option {name}={value!r}: {error}") from error


def flag(value: str) -> bool:
    """A yes or a no.

    >>> flag("true"), flag("0")
    (True, False)
    """
    match value.lower():
        case "true" | "yes" | "on" | "1":
            return True
        case "false" | "no" | "off" | "0":
            return False
        case _:
            raise ValueError("must be true or false")


def seconds(value: str) -> float:
    """A time that is not negative.

    >>> seconds("1.5")
    1.5
    """
    found = float(value)
    if not 0 <= found < float("inf"):
        raise ValueError("must be 0 or more seconds")
    return found


def file(value: str) -> str:
    """The path of a file that can be read."""
    try:
        with open(value, "rb"):
            return value
    except OSError as error:
        raise ValueError(error.strerror) from error


def certificates(value: str) -> str:
    """The path of a file with certificates of authorities."""
    try:
        ssl.create_default_context(cafile=file(value))
    except ssl.SSLError as error:
        raise ValueError(f"no certificates in it: {error.reason}") from error
    return value


def in_one_line(error: Exception) -> str:
    """An error as an operator may see it: without the password of a URL in it.

    >>> in_one_line(OSError("GET http://ann:secret@host/health: refused"))
    'OSError: GET http://host/health: refused'
    """
    return re.sub(r"//[^/\s]*@", "//", " ".join(describe(error).split()))
