"""Brokers, one file each, behind one protocol."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

from settled.clock import Clock
from settled.signals import ConfigurationError
from settled.transports.base import Transport


def _memory(url: str, clock: Clock) -> Transport:
    from settled.transports.memory import MemoryTransport

    return MemoryTransport(clock=clock)


def _postgres(url: str, clock: Clock) -> Transport:
    with _extra("queue", url):
        from settled.transports.postgres import PostgresTransport
    return PostgresTransport(url)


def _http(url: str, clock: Clock) -> Transport:
    with _extra("client", url):
        from settled.transports.http import HttpTransport
    return HttpTransport(url)


def _nats(url: str, clock: Clock) -> Transport:
    with _extra("nats", url):
        from settled.transports.nats import NatsTransport
    return NatsTransport(url)


_SCHEMES: dict[str, Callable[[str, Clock], Transport]] = {
    "memory": _memory,
    "postgresql": _postgres,
    "http": _http,
    "https": _http,
    "nats": _nats,
    "tls": _nats,
}


@contextmanager
def _extra(name: str, url: str) -> Iterator[None]:
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name is not None and error.name.startswith("settled"):
            raise
        raise ConfigurationError(
            f"app: {urlsplit(url).scheme}:// needs {error.name}; run: pip install 'settled[{name}]'"
        ) from error


def connect(url: str, clock: Clock) -> Transport:
    """The transport for a URL; nothing is opened yet."""
    scheme = urlsplit(url).scheme
    if scheme not in _SCHEMES:
        known = ", ".join(f"{name}://" for name in sorted(_SCHEMES))
        raise ConfigurationError(f"app: no transport for {url!r}; use one of {known}")
    return _SCHEMES[scheme](url, clock)
