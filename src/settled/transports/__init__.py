"""Brokers, one file each, behind one protocol."""

from __future__ import annotations

from collections.abc import Callable
from urllib.parse import urlsplit

from settled.clock import Clock
from settled.signals import ConfigurationError
from settled.transports.base import Transport


def _memory(url: str, clock: Clock) -> Transport:
    from settled.transports.memory import MemoryTransport

    return MemoryTransport(clock=clock)


def _nats(url: str, clock: Clock) -> Transport:
    try:
        from settled.transports.nats import NatsTransport
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "nats":
            raise
        raise ConfigurationError(
            "app: NATS is an extra; install it with: pip install 'settled[nats]'"
        ) from error
    return NatsTransport(url)


_SCHEMES: dict[str, Callable[[str, Clock], Transport]] = {"memory": _memory, "nats": _nats, "tls": _nats}


def connect(url: str, clock: Clock) -> Transport:
    """The transport for a URL; nothing is opened yet."""
    scheme = urlsplit(url).scheme
    if scheme not in _SCHEMES:
        known = ", ".join(f"{name}://" for name in sorted(_SCHEMES))
        raise ConfigurationError(f"app: no transport for {url!r}; use one of {known}")
    return _SCHEMES[scheme](url, clock)
