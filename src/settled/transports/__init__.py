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


_SCHEMES: dict[str, Callable[[str, Clock], Transport]] = {"memory": _memory}


def connect(url: str, clock: Clock) -> Transport:
    """The transport for a URL; nothing is opened yet."""
    scheme = urlsplit(url).scheme
    if scheme not in _SCHEMES:
        known = ", ".join(f"{name}://" for name in sorted(_SCHEMES))
        raise ConfigurationError(f"app: no transport for {url!r}; use one of {known}")
    return _SCHEMES[scheme](url, clock)
