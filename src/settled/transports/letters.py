"""Dead letters as messages on a channel of their own."""

from __future__ import annotations

import hashlib
from dataclasses import replace

from settled.message import Delivery
from settled.settlement import Reason, Reject, one_line
from settled.transports.base import Outgoing, Source


def destination(source: Source, rejection: Reject) -> str | None:
    """The channel that a subscription wants this one rejected to; None if it named none.

    >>> source = Source(channel="orders", dead_letter="orders-dead")
    >>> destination(source, Reject(Reason.UNACCEPTABLE, "no such field"))
    'orders-dead'
    """
    if rejection.reason is Reason.UNACCEPTABLE and source.invalid is not None:
        return source.invalid
    return source.dead_letter


def is_undecodable_letter(delivery: Delivery) -> bool:
    """Whether it is a dead letter, on another channel, of a message that could not be decoded."""
    headers = delivery.headers
    unacceptable = headers.get("settled-reason") == Reason.UNACCEPTABLE.value
    return unacceptable and headers.get("settled-subject") not in (None, delivery.subject)


def letter(delivery: Delivery, rejection: Reject, group: str, to: str) -> Outgoing:
    """The message itself, with why and where it failed in its headers.

    Its id is the same each time, so that a crash between the letter and the settlement does not make two
    where the broker knows duplicates.
    """
    why = {
        "settled-subject": delivery.subject,
        "settled-group": group,
        "settled-reason": rejection.reason.value,
        "settled-error": rejection.error,
        "settled-attempts": str(delivery.attempt),
    }
    # A letter that cannot be read where letters are read keeps its first reason.
    again = rejection.reason is Reason.UNACCEPTABLE and is_undecodable_letter(delivery)
    headers = {**why, **delivery.headers} if again else {**delivery.headers, **why}
    # One letter a group and message, also if the same id was rejected in two lanes.
    identity = ":".join(part for part in (delivery.id, group, delivery.lane) if part)
    if identity != delivery.id:  # which there was room for
        identity = _short(identity)
    return Outgoing(subject=to, data=delivery.data, headers=headers, id=identity, lane=delivery.lane)


def without_body(dead: Outgoing, where: str) -> Outgoing:
    """What to write where the whole is too large for the broker, and the message itself stays there.

    >>> dead = Outgoing(subject="dead", data=b"x" * 2_000_000, headers={"settled-error": "no card"})
    >>> without_body(dead, "offset 7").headers
    {'settled-error': 'no card (too large to be copied: offset 7)'}
    """
    facts = {name: value for name, value in dead.headers.items() if name.startswith("settled-")}
    facts["settled-error"] = too_large(facts["settled-error"], where)
    return replace(dead, data=b"", headers=facts)


def too_large(error: str, where: str) -> str:
    """The error in a letter that is not the whole message."""
    return f"{one_line(error, 1000)} (too large to be copied: {where})"


def _short(identity: str) -> str:
    """An id that every broker has room for, which is 128 bytes; the same for the same.

    >>> _short("m-1:billing")
    'm-1:billing'
    >>> _short("m" * 200)[:64], len(_short("m" * 200))
    ('mmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmm~', 128)
    """
    raw = identity.encode(errors="surrogatepass")
    if len(raw) <= _LONGEST_ID:
        return identity
    digest = hashlib.sha256(raw).hexdigest()
    return f"{raw[: _LONGEST_ID - len(digest) - 1].decode(errors='ignore')}~{digest}"


_LONGEST_ID = 128
