"""Whether two URLs mean the same broker, and a channel there what is written to another."""

from __future__ import annotations

import re
from urllib.parse import parse_qsl

from settled.transports.urls import split

_PORTS = {
    "amqp": "5672",
    "amqps": "5671",
    "http": "80",
    "https": "443",
    "kafka": "9092",
    "mqtt": "1883",
    "mqtts": "8883",
    "nats": "4222",
    "postgresql": "5432",
    "redis": "6379",
    "rediss": "6379",
    "tls": "4222",
}
# Options that lead elsewhere on the same address.
_ELSEWHERE = {
    "credentials",
    "db",
    "dbname",
    "emulator",
    "endpoint",
    "exchange",
    "host",
    "nkey",
    "port",
    "profile",
    "region",
}


def same_broker(one: str, other: str) -> bool:
    """By scheme, servers, path and user, and by the options that lead elsewhere; `memory://` never is.

    >>> same_broker("amqp://ann:x@Host/?backoff=5", "amqp://ann:x@host:5672")
    True
    >>> same_broker("kafka://one,two:9092", "kafka://two")
    True
    >>> same_broker("nats://localhost", "nats://127.0.0.1:4222")
    True
    >>> same_broker("redis://host/1", "redis://host/2"), same_broker("amqp://host?exchange=a", "amqp://host")
    (False, False)
    """
    scheme, *place, servers = _parts(one)
    other_scheme, *other_place, other_servers = _parts(other)
    if "memory" in (scheme, other_scheme):
        return False
    return (scheme, place) == (other_scheme, other_place) and bool(servers & other_servers)


def reads(url: str, channel: str, subject: str) -> bool:
    """Whether who reads this channel is given what is published to the subject, on the same broker.

    >>> reads("nats://host", "orders.*", "orders.eu"), reads("nats://host", "orders.*", "orders.eu.new")
    (True, False)
    >>> reads("nats://host", "orders.>", "orders.eu.new"), reads("mqtt://host", "orders/#", "orders")
    (True, True)
    >>> reads("mqtt://host", "+/new", "orders/new"), reads("redis://host", "orders.*", "orders.eu")
    (True, False)
    """
    between, one, rest = _PATTERNS.get(split(url).scheme, ("", "", ""))
    if not between:
        return channel == subject
    wanted = re.sub(r"^\$share/[^/]+/", "", channel).split(between)
    found = subject.split(between)
    for at, part in enumerate(wanted):
        if part == rest:
            # What is under it; in MQTT it is one of these itself.
            return len(found) > at or (between == "/" and len(found) == at)
        if at >= len(found) or part not in (one, found[at]):
            return False
    return len(wanted) == len(found)


_PATTERNS = {
    **dict.fromkeys(("nats", "tls"), (".", "*", ">")),
    **dict.fromkeys(("mqtt", "mqtts"), ("/", "+", "#")),
}


def _parts(url: str) -> tuple[str, str, str, dict[str, str], set[str]]:
    parts = split(url)
    user, _, hosts = parts.netloc.rpartition("@")
    servers = {_server(host.lower(), parts.scheme) for host in hosts.split(",")}
    path = parts.path.strip("/")
    if parts.scheme.startswith("redis") and path == "0":
        path = ""
    elsewhere = {name: value for name, value in parse_qsl(parts.query) if name in _ELSEWHERE}
    return parts.scheme, user.partition(":")[0], path, elsewhere, servers


def _server(host: str, scheme: str) -> str:
    host = re.sub(r"^(localhost|\[::1\])(?=$|:)", "127.0.0.1", host)
    has_port = ":" in host.rpartition("]")[2]
    return host if has_port or scheme not in _PORTS else f"{host}:{_PORTS[scheme]}"
