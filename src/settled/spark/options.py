"""The options of `format("settled")`, read and checked once."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

import msgspec

from settled.queue.errors import BadRequest
from settled.queue.lanes import check_name

NOBODY = "00000000-0000-0000-0000-000000000001"


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What a read or a write was told."""

    url: str
    queue: str
    group: str
    max_rows: int | None
    lease_seconds: float
    ordering: str
    tasks: int
    starting: str
    payload: str
    holder: str
    handler: str
    emit: str
    to: str
    subject: str
    max_deliver: int | None
    backoff: tuple[float, ...]
    dead_letter: str
    window: dict[int, tuple[int, int]]
    lean: bool
    """Leave null what read_queue() puts in itself."""

    @classmethod
    def parse(cls, given: Mapping[str, str]) -> Options:
        """Check options; what is wrong is named, with its value and what it must be."""
        unknown = sorted(name for name in given if name.lower() not in _KNOWN and name.lower() not in _SPARKS)
        if unknown:
            known = ", ".join(name for name in _KNOWN.values() if name not in _INTERNAL)
            raise BadRequest(f"option {unknown[0]}", given[unknown[0]], f"unknown; known are {known}")
        own = {name.lower(): value for name, value in given.items()}
        url = own.get("url") or os.environ.get("SETTLED_URL", "")
        if is_nats(url):
            for ours, theirs in (("queue", "stream"), ("group", "consumer")):
                if own.get(ours) and own.get(theirs) and own[ours] != own[theirs]:
                    raise BadRequest(f"option {ours}", own[ours], f"on NATS it is {theirs}={own[theirs]!r}")
                own[ours] = own.get(theirs) or own.get(ours, "")
            if not own["queue"]:
                raise BadRequest("option stream", own.get("stream"), "name the stream")
        elif not url.startswith(("postgresql://", "postgres://")):
            raise BadRequest(
                "option url",
                url,
                "must be the queue's database, postgresql://…, which `settled serve` prints, or a NATS "
                "server, nats://…; http:// has no segments to read",
            )
        else:
            _nats_only(own)
        if not own.get("queue"):
            raise BadRequest("option queue", own.get("queue"), "name the queue")
        for name in ("queue", "group"):
            if own.get(name):
                check_name(f"option {name}", own[name])
        limit = own.get("maxrows", "500000")
        return cls(
            url=url,
            queue=own["queue"],
            group=own.get("group", ""),
            max_rows=None if limit == "all" else _whole("maxRows", limit, 1),
            lease_seconds=float(_whole("leaseSeconds", own.get("leaseseconds", "60"), 1)),
            ordering=_one_of(
                "ordering", own.get("ordering", "queue"), ("queue", "in_order", "parked", "none")
            ),
            tasks=_whole("tasks", own.get("tasks", "4"), 1),
            starting=_position("startingPosition", own.get("startingposition", "")),
            payload=_one_of("payload", own.get("payload", "bytes"), ("bytes", "string")),
            holder=own.get("holder", NOBODY),
            handler=own.get("handler", ""),
            emit=_one_of("emit", own.get("emit", "all"), ("all", "staged")),
            to=own.get("to", ""),
            subject=own.get("subject", ""),
            max_deliver=_whole("maxDeliver", own["maxdeliver"], 1) if own.get("maxdeliver") else None,
            backoff=_seconds("backoff", own.get("backoff", "")),
            dead_letter=own.get("deadletter", ""),
            window=msgspec.json.decode(own.get("window", "{}"), type=dict[int, tuple[int, int]]),
            lean=_one_of("lean", own.get("lean", "false"), ("false", "true")) == "true",
        )

    @property
    def on_nats(self) -> bool:
        """Whether the broker is JetStream: the queue is a stream there, the group a consumer."""
        return is_nats(self.url)


def is_nats(url: str) -> bool:
    """Whether a URL names NATS servers."""
    return url.startswith(("nats://", "tls://"))


def check_target(to: str, queue: str) -> None:
    """Refuse results that cannot go to a queue, or would go round for ever."""
    if check_name("to", to) == queue:
        raise BadRequest("to", to, "is the queue that is read: a message would go round for ever")


def _nats_only(own: Mapping[str, str]) -> None:
    wrong = [name for name in ("stream", "consumer", *_NATS) if own.get(name.lower())]
    if wrong:
        raise BadRequest(
            f"option {wrong[0]}",
            own[wrong[0].lower()],
            "is for a stream on NATS, give url=nats://…; a queue on Postgres has queue and group",
        )


_NATS = ("subject", "maxDeliver", "backoff", "deadLetter")
_KNOWN = {
    name.lower(): name
    for name in (
        "url",
        "queue",
        "group",
        "maxRows",
        "leaseSeconds",
        "ordering",
        "tasks",
        "startingPosition",
        "payload",
        "holder",
        "handler",
        "emit",
        "to",
        "stream",
        "consumer",
        *_NATS,
        "window",
        "lean",
    )
}
_INTERNAL = ("holder", "handler", "emit", "to", "window", "lean")
_SPARKS = {"path", "checkpointlocation", "queryname", "outputmode", "triggerinterval"}


def _whole(name: str, value: str, least: int) -> int:
    if not value.isascii() or not value.isdigit() or int(value) < least:
        raise BadRequest(f"option {name}", value, f"must be a whole number of at least {least}")
    return int(value)


def _position(name: str, value: str) -> str:
    if value not in ("", "earliest", "latest"):
        try:
            datetime.fromisoformat(value)
        except ValueError:
            raise BadRequest(
                f"option {name}", value, "must be earliest, latest or a time: 2026-01-31T12:00:00Z"
            ) from None
    return value


def _seconds(name: str, value: str) -> tuple[float, ...]:
    try:
        found = tuple(float(part) for part in value.split(",") if part.strip())
    except ValueError:
        found = (-1.0,)
    if any(not 0 <= second < math.inf for second in found):
        raise BadRequest(f"option {name}", value, "must be seconds, one after the other: 1,5,30")
    return found


def _one_of(name: str, value: str, choices: tuple[str, ...]) -> str:
    if value not in choices:
        raise BadRequest(f"option {name}", value, f"must be one of {', '.join(choices)}")
    return value
