"""Records as Kafka has them, and as we do."""

from __future__ import annotations

import uuid
from collections.abc import Mapping

from confluent_kafka import Message

from settled.transports.base import Outgoing

ID = "settled-id"
KEY = "kafka-key"
"""The header under which a handler finds a record's key."""

# Whatever bytes another producer wrote come back as they were when a dead letter is made of them.
_ANY = "surrogateescape"
# CloudEvents' binding for Kafka has an underscore where every other has a dash.
_HERE, _ELSEWHERE = "ce_", "ce-"


def headers_of(record: Message) -> dict[str, str]:
    """A record's headers and key."""
    found: dict[str, str] = {}
    given: list[tuple[str, bytes | str | None]] = record.headers() or ()  # type: ignore[assignment]
    for name, value in given:
        text = value.decode("utf-8", _ANY) if isinstance(value, bytes) else str(value or "")
        found[_ELSEWHERE + name[3:] if name.startswith(_HERE) else name] = text
    key = record.key()
    if key is not None:
        found[KEY] = key.decode("utf-8", _ANY) if isinstance(key, bytes) else str(key)
    return found


def identity(record: Message, headers: Mapping[str, str]) -> str:
    """The id its publisher gave it, else its place in the topic: the same at every delivery."""
    return headers.get(ID) or f"{record.topic()}:{record.partition()}:{record.offset()}"


def stored_at(record: Message) -> int | None:
    """Milliseconds since the epoch, if the broker knows."""
    kind, milliseconds = record.timestamp()
    return milliseconds if kind else None


def outgoing(message: Outgoing) -> tuple[str, bytes | None, list[tuple[str, bytes]]]:
    """Id, key and headers of the record for a message: its lane is the key, or the key it came with."""
    id_ = message.id or uuid.uuid4().hex
    given = {**message.headers, ID: id_}
    key = given.pop(KEY, None)
    if message.lane is not None:
        key = message.lane
    named = (
        (_HERE + name[3:] if name.startswith(_ELSEWHERE) else name, value) for name, value in given.items()
    )
    headers = [(name, value.encode(errors=_ANY)) for name, value in named]
    return id_, None if key is None else key.encode(errors=_ANY), headers
