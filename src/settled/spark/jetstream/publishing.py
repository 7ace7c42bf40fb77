"""Publishing many messages, each acknowledged, without waiting for one before the next is sent."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec
import nats.errors
import nats.js.errors
from nats.aio.msg import Msg

from settled.queue.errors import Conflict
from settled.transports.nats import Connection
from settled.transports.nats.connection import wire_size

AT_ONCE = 1_000
_SILENCE = 3.0
_WRONG_LAST_SEQUENCE = 10071


class Outgoing(NamedTuple):
    """A message to be stored once: its headers have a `Nats-Msg-Id`."""

    subject: str
    data: bytes
    headers: Mapping[str, str]

    @property
    def size(self) -> int:
        """What the server holds against its max_payload."""
        return wire_size(self.data, self.headers)


async def publish_all(connection: Connection, messages: Sequence[Outgoing]) -> None:
    """Store messages, in their order; those that are there already are left as they are.

    Raises what passes by itself (a server that is away) so that the caller tries all of it again.
    """
    for at in range(0, len(messages), AT_ONCE):
        await _publish(connection, messages[at : at + AT_ONCE])


async def _publish(connection: Connection, messages: Sequence[Outgoing]) -> None:
    client = await connection.open()
    waiting = set(range(len(messages)))
    refused: list[str] = []
    unheard: list[str] = []
    changed = asyncio.Event()

    async def acknowledged(answer: Msg) -> None:
        place = int(answer.subject.rpartition(".")[2])
        if (answer.headers or {}).get("Status") == "503":
            unheard.append(messages[place].subject)
        else:
            error = msgspec.json.decode(answer.data).get("error")
            # The last sequence is wrong where something may be stored only once, and is.
            if error and error.get("err_code") != _WRONG_LAST_SEQUENCE:
                refused.append(f"subject {messages[place].subject!r}: {error.get('description')}")
        waiting.discard(place)
        if refused or unheard or not waiting:
            changed.set()

    inbox = client.new_inbox()
    subscription = await client.subscribe(f"{inbox}.*", cb=acknowledged)
    try:
        for place, message in enumerate(messages):
            await client.publish(
                message.subject, message.data, reply=f"{inbox}.{place}", headers=dict(message.headers)
            )
        before = -1
        while waiting and not (refused or unheard):
            try:
                await asyncio.wait_for(changed.wait(), _SILENCE)
            except TimeoutError:
                if len(waiting) == before:
                    raise nats.errors.TimeoutError from None
                before = len(waiting)
    finally:
        await subscription.unsubscribe()
    if unheard and not refused:
        try:
            await connection.jetstream.find_stream_name_by_subject(unheard[0])
        except nats.js.errors.NotFoundError:
            refused.append(f"no stream takes subject {unheard[0]!r}; create one that does")
        else:
            raise nats.errors.NoRespondersError
    if refused:
        raise Conflict(f"publish: {refused[0]}")
