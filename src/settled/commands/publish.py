"""The command `settled publish`."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Annotated

import msgspec
import typer

from settled.clock import SystemClock
from settled.codec import JSON, TEXT
from settled.commands.addresses import fail, with_url
from settled.signals import ConfigurationError
from settled.transports import connect, creating
from settled.transports.base import Outgoing, Published, PublishesMany, Transport
from settled.transports.urls import in_one_line, masked

_MOST = 500
_CHUNK = 1 << 18
_USAGE = "[URL] CHANNEL JSON"


@dataclass(frozen=True, slots=True)
class Form:
    """Everything about the messages of one call that is not their body."""

    channel: str
    content_type: str
    headers: dict[str, str]
    id: str | None
    lane: str | None
    delay: float

    def message(self, body: bytes) -> Outgoing:
        """A message with this body; ValueError if it is not JSON and should be."""
        if self.content_type == JSON:
            msgspec.json.decode(body)
        headers = {**self.headers, "content-type": self.content_type}
        return Outgoing(
            subject=self.channel, data=body, headers=headers, id=self.id, lane=self.lane, delay=self.delay
        )


class NotPublished(Exception):
    """The broker did not take a message."""


class BadLine(Exception):
    """A line of the input is no message."""


def publish(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar=_USAGE,
            help="Where the channel is (default: SETTLED_URL), its name, and the message; "
            "with - in its place, one message a line is read from standard input.",
            show_default=False,
        ),
    ],
    id: Annotated[  # noqa: A002 - the option's name
        str | None, typer.Option(help="The message's id; a second publish of it is a duplicate.")
    ] = None,
    lane: Annotated[str | None, typer.Option(help="Messages of one lane stay in order.")] = None,
    header: Annotated[list[str] | None, typer.Option(help="NAME=VALUE; may be given several times.")] = None,
    delay: Annotated[float, typer.Option(min=0, help="Deliver it after so many seconds.")] = 0.0,
    text: Annotated[bool, typer.Option("--text", help="The message is text, not JSON.")] = False,
    content_type: Annotated[
        str | None, typer.Option(help="Send the message as it is, under this content type.")
    ] = None,
    create: Annotated[
        bool, typer.Option("--create", help="Make the channel if it is missing, where that can be.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, a line for each message.")] = False,
) -> None:
    """Publish a message, or one for each line of standard input; print each one's id.

    Exit code 0: all are published. 1: the broker did not take one. 2: the command or a line is wrong.
    """
    show = _in_json if as_json else _in_words
    try:
        url, channel, body = with_url(words, 2, _USAGE)
        form = _form(channel, id, lane, header or [], delay, text, content_type)
        if body == "-" and id is not None:
            raise ConfigurationError("--id names one message, and - reads many")
        if body != "-":
            _checked(form, body.encode(), "the message")
        transport = connect(creating(url) if create else url, SystemClock())
        batches = _lines() if body == "-" else _only(body.encode())
        done = _Done(lambda one: typer.echo(show(channel, one)))
        try:
            asyncio.run(_publish(transport, form, batches, done, masked(url)))
        finally:
            if body == "-":
                typer.echo(f"settled: {done}", err=True)
    except (ConfigurationError, BadLine) as error:
        fail(str(error))
    except NotPublished as error:
        fail(str(error), 1)


def _form(
    channel: str,
    id_: str | None,
    lane: str | None,
    headers: Sequence[str],
    delay: float,
    text: bool,
    content_type: str | None,
) -> Form:
    if text and content_type is not None:
        raise ConfigurationError("--text is --content-type text/plain: give one of them")
    if not channel:
        raise ConfigurationError("CHANNEL must be a name, got ''")
    named = {}
    for each in headers:
        name, equals, value = each.partition("=")
        if not name or not equals:
            raise ConfigurationError(f"--header must be NAME=VALUE, got {each!r}")
        named[name] = value
    return Form(channel, TEXT if text else content_type or JSON, named, id_, lane, delay)


def _checked(form: Form, body: bytes, what: str) -> Outgoing:
    try:
        return form.message(body)
    except ValueError as error:
        shown = body[:60].decode(errors="replace")
        raise BadLine(f"{what} is not JSON ({error}), got {shown!r}; for text, add --text") from error


@dataclass
class _Done:
    """The messages that are published."""

    tell: Callable[[Published], None]
    count: int = 0
    duplicates: int = 0

    def add(self, one: Published) -> None:
        self.count += 1
        self.duplicates += one.duplicate
        self.tell(one)

    def __str__(self) -> str:
        return f"published={self.count - self.duplicates} duplicates={self.duplicates}"


async def _publish(
    transport: Transport, form: Form, batches: AsyncIterator[list[bytes]], done: _Done, name: str
) -> None:
    try:
        await transport.open()
    except ConfigurationError:
        raise
    except Exception as error:  # each client has its own for a broker that is away
        raise NotPublished(f"cannot connect to {name}: {in_one_line(error)}") from error
    try:
        number = 0
        async for lines in batches:
            messages = []
            wrong: BadLine | None = None
            for line in lines:
                number += 1
                if not line.strip():
                    continue
                try:
                    messages.append(_checked(form, line, f"line {number}"))
                except BadLine as error:
                    wrong = error
                    break
            try:
                await _send(transport, messages, done)
            except ConfigurationError:
                raise
            except Exception as error:
                some = f" (of the last {len(messages)}, some may be stored)" if len(messages) > 1 else ""
                raise NotPublished(f"{name} did not take a message{some}: {in_one_line(error)}") from error
            if wrong is not None:
                raise wrong
    finally:
        await transport.close()


async def _send(transport: Transport, messages: Sequence[Outgoing], done: _Done) -> None:
    if len(messages) > 1 and isinstance(transport, PublishesMany):
        for one in await transport.publish_many(messages):
            done.add(one)
        return
    for message in messages:
        done.add(await transport.publish(message))


async def _lines() -> AsyncIterator[list[bytes]]:
    """The lines that standard input has ready, as soon as it has any."""
    loop, chunks = asyncio.get_running_loop(), asyncio.Queue[bytes](maxsize=2)

    def read() -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended
            while True:
                chunk = os.read(sys.stdin.fileno(), _CHUNK)
                asyncio.run_coroutine_threadsafe(chunks.put(chunk), loop).result()
                if not chunk:
                    return

    # A daemon, as nothing ends a read of a terminal when the command is told to stop.
    threading.Thread(target=read, daemon=True).start()
    rest = b""
    while chunk := await chunks.get():
        *lines, rest = (rest + chunk).split(b"\n")
        for start in range(0, len(lines), _MOST):
            yield lines[start : start + _MOST]
    yield [rest]


async def _only(body: bytes) -> AsyncIterator[list[bytes]]:
    yield [body]


def _in_words(channel: str, one: Published) -> str:
    what = "duplicate" if one.duplicate else "published"
    lane = f" lane={one.lane}" if one.lane is not None else ""
    sequence = f" sequence={one.sequence}" if one.sequence is not None else ""
    return f"{what} {channel} id={one.id}{lane}{sequence}"


def _in_json(channel: str, one: Published) -> str:
    fields = {
        "channel": channel,
        "id": one.id,
        "duplicate": one.duplicate,
        "lane": one.lane,
        "sequence": one.sequence,
    }
    return msgspec.json.encode(fields).decode()
