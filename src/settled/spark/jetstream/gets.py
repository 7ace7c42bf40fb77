"""Direct gets: messages of a stream by their sequences, many at a time, from any server that has a copy."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import nats.errors
import nats.js.errors
from nats.aio.client import Client

from settled.spark.jetstream.link import Away
from settled.transports.nats import Connection
from settled.transports.nats.delivery import MSG_ID

FETCH, FETCH_BYTES = 5_000, 16_000_000
_SILENCE = 5.0
_NEAR = 8
_TOGETHER = 128
_TAPS = "_settled_taps"
# What the server adds to a message that is got directly; in a batch, the last two as well.
_ADDED = tuple(
    f"Nats-{name}" for name in ("Stream", "Subject", "Sequence", "Time-Stamp", "Num-Pending", "Last-Sequence")
)
_BEGIN = b"\r\nNats-Stream: "


class Stored(msgspec.Struct):
    """A message as a stream has it."""

    sequence: int
    subject: str
    time: str
    """When the stream took it, in UTC, without a zone."""
    data: bytes
    headers: dict[str, str]
    pending: int = 0
    """How many are behind it."""

    @property
    def own_id(self) -> str | None:
        """The id its publisher gave it."""
        return self.headers.get(MSG_ID)


class Found(msgspec.Struct):
    """Some messages of a stream, and whether there are more behind them as far as this server knows."""

    messages: list[Stored]
    more: bool = False


def _lift(data: bytes, headers: Mapping[str, str]) -> Stored:
    own = {name: value for name, value in headers.items() if name not in _ADDED}
    return Stored(
        int(headers["Nats-Sequence"]),
        headers["Nats-Subject"],
        headers["Nats-Time-Stamp"].rstrip("Z"),
        data,
        own,
        int(headers.get("Nats-Num-Pending", 0)),
    )


def parse(data: bytes, raw: bytes) -> Stored:
    """A message from its bytes; the server's headers come last, so the publisher's need not be looked at."""
    at = raw.rindex(_BEGIN)
    facts = dict(line.split(": ", 1) for line in raw[at + 2 : -4].decode().split("\r\n"))
    own: dict[str, str] = {}
    if at > 8:
        for line in raw[10:at].decode("utf-8", "replace").split("\r\n"):
            name, _, value = line.partition(":")
            own[name.strip()] = value.strip()
    return Stored(
        int(facts["Nats-Sequence"]),
        facts["Nats-Subject"],
        facts["Nats-Time-Stamp"].rstrip("Z"),
        data,
        own,
        int(facts.get("Nats-Num-Pending", 0)),
    )


def _taps(client: Client) -> dict[int, Callable[[bytes, bytes], None]]:
    """Who takes a subscription's messages off the wire, before the client makes a task's work of each."""
    found: dict[int, Callable[[bytes, bytes], None]] | None = getattr(client, _TAPS, None)
    if found is not None:
        return found
    taps: dict[int, Callable[[bytes, bytes], None]] = {}
    process = client._process_msg

    async def tapped(sid: int, subject: bytes, reply: bytes, data: bytes, headers: bytes) -> None:
        take = taps.get(sid)
        if take is None:
            await process(sid, subject, reply, data, headers)
        else:
            take(data, headers)

    client._process_msg = tapped  # type: ignore[method-assign]
    setattr(client, _TAPS, taps)
    return taps


async def fetch(connection: Connection, stream: str, **request: Any) -> Found:
    """Get messages directly: `seq` or `start_time`, `batch`, and perhaps `next_by_subj`."""
    client = await connection.open()
    taken: list[tuple[bytes, bytes]] = []
    ended = asyncio.Event()

    def take(data: bytes, headers: bytes) -> None:
        taken.append((data, headers))
        if not headers.startswith(b"NATS/1.0\r"):  # a status ends it
            ended.set()

    inbox, taps = client.new_inbox(), _taps(client)
    subscription = await client.subscribe(inbox, future=asyncio.get_running_loop().create_future())
    taps[subscription._id] = take
    try:
        asked = msgspec.json.encode({"max_bytes": FETCH_BYTES, **request})
        await client.publish(f"$JS.API.DIRECT.GET.{stream}", asked, reply=inbox)
        seen = -1
        while not ended.is_set():
            try:
                await asyncio.wait_for(ended.wait(), _SILENCE)
            except TimeoutError:
                if len(taken) == seen:
                    raise nats.errors.TimeoutError from None
                seen = len(taken)
    finally:
        del taps[subscription._id]
        await subscription.unsubscribe()
    last = taken.pop()[1].decode()
    status, facts = last[9:12], dict(line.split(": ", 1) for line in last.split("\r\n") if ": " in line)
    messages = [parse(data, headers) for data, headers in taken]
    match status:
        case "204" if messages and int(facts["Nats-Last-Sequence"]) == messages[-1].sequence:
            return Found(messages, facts["Nats-Num-Pending"] != "0")
        case "404":
            return Found([])
        case "503":
            raise nats.errors.NoRespondersError
        case "204":
            raise nats.errors.TimeoutError  # something got lost on the way
        case _:
            raise Away(f"stream {stream!r}: a direct get of {request} was answered {last.strip()}")


async def next_sequence(connection: Connection, stream: str, at: int, subject: str) -> int | None:
    """The first message from a sequence on, as the stream's leader knows it, which knows all."""
    try:
        found = await connection.jetstream.get_msg(stream, seq=at, subject=subject, next=True)
    except nats.js.errors.NotFoundError:
        return None
    return found.seq


async def singly(connection: Connection, stream: str, sequences: Sequence[int]) -> list[Stored]:
    """Messages by their sequences, in order; those that are not there any more are left out."""
    groups: list[list[int]] = []
    for sequence in sequences:
        if groups and sequence - groups[-1][-1] <= _NEAR and sequence - groups[-1][0] < FETCH:
            groups[-1].append(sequence)
        else:
            groups.append([sequence])
    found: list[Stored] = []
    for at in range(0, len(groups), _TOGETHER):
        tasks = (_group(connection, stream, group) for group in groups[at : at + _TOGETHER])
        for messages in await asyncio.gather(*tasks):
            found += messages
    return found


async def _between(connection: Connection, stream: str, at: int, last: int) -> list[Stored]:
    messages: list[Stored] = []
    while at <= last:
        found = await fetch(connection, stream, seq=at, batch=last - at + 1)
        messages += found.messages
        if not found.more:
            break
        at = messages[-1].sequence + 1
    return messages


async def _group(connection: Connection, stream: str, group: list[int]) -> list[Stored]:
    first, last = group[0], group[-1]
    if first == last:
        client = await connection.open()
        asked = msgspec.json.encode({"seq": first})
        answer = await client.request(f"$JS.API.DIRECT.GET.{stream}", asked, timeout=_SILENCE)
        headers = answer.headers or {}
        messages = [] if headers.get("Status") == "404" else [_lift(answer.data, headers)]
    else:
        messages = await _between(connection, stream, first, last)
    wanted = set(group)
    found = [m for m in messages if m.sequence in wanted]
    missing = wanted - {m.sequence for m in found}
    for sequence in missing:
        # A copy may be behind; the leader is not.
        if await next_sequence(connection, stream, sequence, ">") == sequence:
            raise nats.errors.TimeoutError
    return found
