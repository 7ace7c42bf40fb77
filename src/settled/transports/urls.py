"""Options in the query of a transport's URL."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import SplitResult, parse_qsl, urlsplit

from settled.signals import ConfigurationError


def parse(url: str, known: Mapping[str, Callable[[str], Any]]) -> tuple[SplitResult, dict[str, Any]]:
    """The parts of a URL, and its options read by the function each has.

    >>> parse("sqs://eu-west-1?wait=5", {"wait": float})[1]
    {'wait': 5.0}
    """
    parts = urlsplit(url)
    options: dict[str, Any] = {}
    for name, value in parse_qsl(parts.query, keep_blank_values=True):
        if name not in known:
            raise ConfigurationError(
                f"{parts.scheme}: no option {name!r} in the URL; there are {', '.join(sorted(known))}"
            )
        try:
            options[name] = known[name](value)
        except ValueError as error:
            raise ConfigurationError(f"{parts.scheme}: option {name}={value!r}: {error}") from error
    return parts, options


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
