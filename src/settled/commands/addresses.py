"""The URL that a command works on: an argument, or the variable SETTLED_URL."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import NoReturn

import typer

from settled.app import URL
from settled.signals import ConfigurationError
from settled.transports.urls import split


def with_url(words: Sequence[str], others: int, usage: str) -> list[str]:
    """A URL and `others` further arguments: where there are no more than those, SETTLED_URL is the URL.

    >>> with_url(["nats://127.0.0.1:4222", "orders", "{}"], 2, "[URL] CHANNEL JSON")
    ['nats://127.0.0.1:4222', 'orders', '{}']
    """
    given = list(words)
    if len(given) == others:
        url = os.environ.get(URL)
        if not url:
            raise ConfigurationError(f"no URL: write it first ({usage}), or set {URL}")
        given.insert(0, url)
    if len(given) != others + 1:
        raise ConfigurationError(f"expected {usage}, got {len(words)} arguments")
    if split(given[0]).scheme == "memory":
        raise ConfigurationError("memory:// lives in one process, and this command is another one")
    return given


def fail(text: str, code: int = 2) -> NoReturn:
    """Say in one line what is wrong, and leave."""
    typer.echo(f"settled: {' '.join(text.split())}", err=True)
    raise typer.Exit(code)
