"""The options of `format("settled")`, read and checked once."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from settled.queue.errors import BadRequest
from settled.queue.manifest import Reader

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
    window: dict[int, tuple[int, int]]

    @classmethod
    def parse(cls, given: Mapping[str, str]) -> Options:
        """Check options; what is wrong is named, with its value and what it must be."""
        unknown = sorted(name for name in given if name.lower() not in _KNOWN and name.lower() not in _SPARKS)
        if unknown:
            known = ", ".join(_KNOWN.values())
            raise BadRequest(f"option {unknown[0]}", given[unknown[0]], f"unknown; known are {known}")
        own = {name.lower(): value for name, value in given.items()}
        url = own.get("url") or os.environ.get("SETTLED_URL", "")
        if not url.startswith(("postgresql://", "postgres://")):
            raise BadRequest(
                "option url",
                url,
                "must be the queue's database, postgresql://…; http:// has no segments to read",
            )
        if not own.get("queue"):
            raise BadRequest("option queue", own.get("queue"), "name the queue")
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
            starting=own.get("startingposition", ""),
            payload=_one_of("payload", own.get("payload", "bytes"), ("bytes", "string")),
            holder=own.get("holder", NOBODY),
            handler=own.get("handler", ""),
            emit=_one_of("emit", own.get("emit", "all"), ("all", "failures")),
            to=own.get("to", ""),
            window=msgspec.json.decode(own.get("window", "{}"), type=dict[int, tuple[int, int]]),
        )

    def reader(self) -> Reader:
        """The hold these options ask for, not yet taken."""
        return Reader(self.url, self.queue, self.group, self.holder, self.lease_seconds, self.starting)


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
        "window",
    )
}
_SPARKS = {"path", "checkpointlocation", "queryname", "outputmode", "triggerinterval"}


def _whole(name: str, value: str, least: int) -> int:
    if not value.isascii() or not value.isdigit() or int(value) < least:
        raise BadRequest(f"option {name}", value, f"must be a whole number of at least {least}")
    return int(value)


def _one_of(name: str, value: str, choices: tuple[str, ...]) -> str:
    if value not in choices:
        raise BadRequest(f"option {name}", value, f"must be one of {', '.join(choices)}")
    return value
