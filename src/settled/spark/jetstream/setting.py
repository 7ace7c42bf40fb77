"""What a query reads on NATS, checked: the stream, and the consumer that the group is named after."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING

import nats.js.errors
from nats.js.api import RetentionPolicy, StreamConfig, StreamInfo

from settled.queue.errors import BadRequest, Conflict, NotFound
from settled.signals import ConfigurationError
from settled.spark.jetstream.books import ATTEMPTS, Span, Terms
from settled.spark.jetstream.gets import fetch, next_sequence
from settled.transports.nats import Connection, Durable
from settled.transports.nats.sources import Consumer, overlap

if TYPE_CHECKING:
    from settled.spark.options import Options


@dataclass(frozen=True, slots=True)
class Setting:
    """A stream and the terms of a group on it."""

    born: str
    replicas: int
    terms: Terms


async def look_up(connection: Connection, settings: Options) -> Setting:
    """The stream and the consumer, if there is one of the group's name; what cannot work is said here."""
    info = await stream_of(connection, settings.queue)
    terms = Terms(dead_letter=settings.dead_letter)
    if settings.group:
        terms = await _terms(connection, settings)
    if settings.dead_letter:
        await _check_dead_letter(connection, settings.dead_letter, info, terms)
    return Setting(born_at(info), info.config.num_replicas or 1, terms)


def born_at(info: StreamInfo) -> str:
    """When a stream was made, which tells it from a later one of its name."""
    return info.created.isoformat() if info.created else ""


async def same_stream(connection: Connection, name: str, born: str) -> StreamInfo:
    """The stream that was made at `born`; Conflict if it was deleted."""
    try:
        info = await connection.jetstream.stream_info(name)
    except nats.js.errors.NotFoundError:
        raise Conflict(f"stream {name!r} was deleted while this query read it; nothing was settled") from None
    if born_at(info) != born:
        raise Conflict(
            f"stream {name!r} was deleted and made anew while this query read it, so its place is lost; "
            "read as another consumer, or forget the place, with a new checkpoint location"
        )
    return info


async def stream_of(connection: Connection, name: str) -> StreamInfo:
    """A stream whose messages can be read by their sequences, again and again."""
    try:
        info = await connection.jetstream.stream_info(name)
    except (nats.js.errors.NotFoundError, ValueError) as error:
        raise NotFound("stream", f"{name} on {connection.where} (create it first)") from error
    config = info.config
    if not (config.allow_direct or config.mirror_direct):
        raise Conflict(
            f"stream {name!r}: tasks read it by direct get, which it does not allow; set allow_direct "
            f"(nats stream edit {name} --allow-direct)"
        )
    if config.retention not in (None, RetentionPolicy.LIMITS):
        raise Conflict(
            f"stream {name!r} has {config.retention} retention: a message is gone once its consumers have "
            "it, so a batch cannot be read again; read a stream with limits retention that has it as source"
        )
    return info


async def _terms(connection: Connection, settings: Options) -> Terms:
    try:
        name = Durable(stream=settings.queue, consumer=settings.group)
    except ConfigurationError as error:
        raise BadRequest("option consumer", settings.group, str(error)) from error
    try:
        info = await connection.jetstream.consumer_info(settings.queue, settings.group)
        consumer: Consumer | None = Consumer.of(info, name)
    except nats.js.errors.NotFoundError:
        consumer = None
    theirs = consumer.subjects if consumer is not None else ()
    subjects = (settings.subject,) if settings.subject else theirs
    if settings.subject and theirs and not any(overlap(settings.subject, one) for one in theirs):
        raise BadRequest(
            "option subject",
            settings.subject,
            f"consumer {settings.group!r} reads {', '.join(theirs)}; leave it out, or name another consumer",
        )
    return Terms(
        subjects=tuple(subjects),
        max_deliver=settings.max_deliver or (consumer.max_deliver if consumer is not None else ATTEMPTS),
        backoff=settings.backoff or (consumer.backoff if consumer is not None else ()),
        dead_letter=settings.dead_letter,
    )


async def target_of(connection: Connection, subject: str, what: str) -> StreamInfo:
    """The stream that takes a subject."""
    try:
        name = await connection.jetstream.find_stream_name_by_subject(subject)
    except nats.js.errors.NotFoundError as error:
        raise BadRequest(what, subject, "no stream takes this subject; create one that does") from error
    return await connection.jetstream.stream_info(name)


async def check_target(connection: Connection, settings: Options, to: str) -> StreamConfig:
    """The stream that results go to; not the one that is being read."""
    target = await target_of(connection, to, "to")
    own = (await look_up(connection, settings)).terms.subjects or tuple(target.config.subjects or ())
    if target.config.name == settings.queue and any(overlap(to, one) for one in own):
        raise BadRequest("to", to, "is read by this query: a message would go round for ever")
    return target.config


async def _check_dead_letter(connection: Connection, subject: str, info: StreamInfo, terms: Terms) -> None:
    target = await target_of(connection, subject, "option deadLetter")
    own = terms.subjects or tuple(info.config.subjects or ())
    if target.config.name == info.config.name and any(overlap(subject, one) for one in own):
        raise BadRequest("option deadLetter", subject, "is read by this query; name another one")


async def span_of(connection: Connection, info: StreamInfo, cursor: int, subjects: tuple[str, ...]) -> Span:
    """From the first message at or behind the cursor that the group reads to the last one there is."""
    state, stream = info.state, info.config.name or ""
    first, last = max(cursor, state.first_seq), state.last_seq
    missed = max(state.first_seq - cursor, 0)
    if first > last or not subjects:
        return Span(first, last, missed)
    found = [await next_sequence(connection, stream, first, one) for one in subjects]
    known = [seq for seq in found if seq is not None]
    return Span(min(known, default=last + 1), last, missed)


async def position(connection: Connection, stream: str, starting: str) -> int:
    """The sequence a new group begins with: of `earliest`, `latest` or a time."""
    state = (await connection.jetstream.stream_info(stream)).state
    if starting in ("", "earliest"):
        return max(state.first_seq, 1)
    if starting == "latest":
        return state.last_seq + 1
    try:
        at = datetime.fromisoformat(starting)
    except ValueError as error:
        raise BadRequest("startingPosition", starting, "must be earliest, latest or a time") from error
    found = await fetch(connection, stream, start_time=at.astimezone().isoformat(), batch=1)
    return found.messages[0].sequence if found.messages else state.last_seq + 1


async def waiting(connection: Connection, stream: str, cursor: int, subjects: tuple[str, ...]) -> int:
    """How many messages the group has before it."""
    total = 0
    for subject in subjects or (">",):
        found = await fetch(connection, stream, seq=max(cursor, 1), batch=1, next_by_subj=subject)
        if found.messages:
            total += 1 + found.messages[0].pending
    return total
