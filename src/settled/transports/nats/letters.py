"""Dead letters: one entry a message, with the reason, stored before the original is settled."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime

import nats.errors
import nats.js.errors
from nats.js.api import RetentionPolicy, StreamConfig

from settled.settlement import Reason, Reject, one_line
from settled.signals import ConfigurationError
from settled.transports.base import Source
from settled.transports.letters import destination, too_large
from settled.transports.nats.connection import Connection, TooLarge, logger
from settled.transports.nats.delivery import MSG_ID, NatsDelivery
from settled.transports.nats.sources import Consumer

_WRONG_LAST_SEQUENCE = 10071
_NAME_IN_USE = 10058
# No suitable peers; insufficient resources; more replicas than one server can have.
_TOO_FEW_SERVERS = (10005, 10023, 10074)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetters:
    """Where the dead letters of subscriptions without a `dead_letter` subject go. Made if it is not there."""

    stream: str = "SETTLED_DEAD_LETTERS"
    subject: str = "settled.dead"
    """A letter's subject is this, the stream, the consumer, the sequence and the time of the original."""
    replicas: int | None = None
    """Of both streams; None: as many as the stream that is read has. One with fewer gets them, if it can."""
    advisories: str | None = "SETTLED_ADVISORIES"
    """A stream for the server's notes on messages that died without us; None to go without them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Letter:
    """A message that is not delivered again, and why."""

    stream: str
    consumer: str
    sequence: int
    stored_ns: int
    id: str
    subject: str
    data: bytes
    headers: Mapping[str, str]
    attempts: int
    reason: Reason
    error: str

    @classmethod
    def of(cls, delivery: NatsDelivery, rejection: Reject) -> Letter:
        return cls(
            stream=delivery.stream,
            consumer=delivery.consumer,
            sequence=delivery.sequence,
            stored_ns=delivery.stored_ns,
            id=delivery.id,
            subject=delivery.subject,
            data=delivery.data,
            headers=delivery.headers,
            attempts=delivery.attempt,
            reason=rejection.reason,
            error=rejection.error,
        )

    @property
    def identity(self) -> str:
        """The same whoever writes it; with the time, since a stream that was made anew counts from 1."""
        return f"{self.stream}.{self.consumer}.{self.sequence}.{self.stored_ns}"

    def without_body(self) -> Letter:
        """What to write where the whole is too large: where the message itself is."""
        where = f"message {self.sequence} of stream {self.stream}"
        return replace(self, data=b"", headers={}, error=too_large(self.error, where))

    def wire_headers(self) -> dict[str, str]:
        """The original's headers, without those the server acts on, and the facts of its death."""
        kept = {name: value for name, value in self.headers.items() if not name.lower().startswith("nats-")}
        stored = datetime.fromtimestamp(self.stored_ns / 1e9, UTC)
        return {
            **kept,
            "settled-id": self.id,
            "settled-subject": self.subject,
            "settled-group": self.consumer,
            "settled-stream": self.stream,
            "settled-sequence": str(self.sequence),
            "settled-published": stored.isoformat() if self.stored_ns else "",
            "settled-reason": self.reason.value,
            "settled-error": one_line(self.error),
            "settled-attempts": str(self.attempts),
            MSG_ID: f"settled-dead:{self.identity}",
        }


class Office:
    """Writes the letters of one transport."""

    def __init__(
        self,
        connection: Connection,
        settings: DeadLetters,
        on_letter: Callable[[Letter], None] | None = None,
    ) -> None:
        self.settings = settings
        self._on_letter = on_letter
        self._connection = connection
        self._ready: dict[str, int] = {}

    async def prepare(self, consumer: Consumer, source: Source) -> None:
        """Make our own stream, or find the one the user's subject is in: a letter must never get lost."""
        for subject in {source.dead_letter, source.invalid} - {None}:
            await self._check(str(subject), consumer)
        if source.dead_letter is None:
            await self.make(await self._replicas(consumer))

    async def make(self, replicas: int) -> None:
        """Make our own stream, if it is not there."""
        await self._make(self.settings.stream, [f"{self.settings.subject}.>"], replicas)

    async def _replicas(self, consumer: Consumer) -> int:
        """How many our streams need so that none of them goes away before the one that is read does."""
        if self.settings.replicas is not None:
            return self.settings.replicas
        found = await self._connection.ask(lambda jetstream: jetstream.stream_info(consumer.stream))
        return found.config.num_replicas or 1

    async def _check(self, subject: str, consumer: Consumer) -> None:
        jetstream = self._connection.jetstream
        try:
            stream = await jetstream.find_stream_name_by_subject(subject)
        except nats.js.errors.NotFoundError as error:
            raise ConfigurationError(
                f"consumer {consumer.stream}/{consumer.name}: no stream takes the dead letters "
                f"on {subject!r}; create one, or leave dead_letter out"
            ) from error
        window = (await jetstream.stream_info(stream)).config.duplicate_window
        if window < 2 * consumer.ack_wait:
            logger.warning(
                "nats: stream %s remembers message ids for %g s, less than twice the ack_wait of %s/%s: "
                "after a crash a dead letter may be there twice; raise its duplicate_window",
                stream,
                window,
                consumer.stream,
                consumer.name,
            )

    async def make_advisories(self, subjects: list[str], consumer: Consumer) -> str | None:
        """The stream that keeps the server's advisories: the one that takes them already, or ours."""
        if self.settings.advisories is None:
            return None
        ours = self.settings.advisories
        try:
            found = await self._connection.jetstream.find_stream_name_by_subject(subjects[0])
        except nats.js.errors.NotFoundError:
            found = ours
        if found != ours:
            return found
        everyone = [re.sub(r"\.[^.]+\.[^.]+$", ".>", subject) for subject in subjects]
        await self._make(ours, everyone, await self._replicas(consumer), max_age=7 * 86400)
        return ours

    async def _make(self, stream: str, subjects: list[str], replicas: int, max_age: float = 0) -> None:
        if self._ready.get(stream, 0) >= replicas:
            return
        try:
            found = (await self._connection.ask(lambda jetstream: jetstream.stream_info(stream))).config
        except nats.js.errors.NotFoundError:
            wanted = StreamConfig(
                name=stream,
                subjects=subjects,
                num_replicas=replicas,
                duplicate_window=120,
                max_age=max_age,
                description="Made by Settled.",
            )
            await self._add(wanted)
        except (nats.errors.TimeoutError, nats.js.errors.ServiceUnavailableError) as error:
            raise ConnectionError(
                f"nats: stream {stream!r}, which keeps dead letters, does not answer "
                f"({str(error) or 'timeout'}); bring back the server that has it, and give it more replicas"
            ) from error
        else:
            if (found.num_replicas or 1) < replicas:
                await self._raise(found, replicas)
        self._ready[stream] = replicas

    async def _add(self, wanted: StreamConfig) -> None:
        try:
            await self._connection.jetstream.add_stream(wanted)
        except nats.js.errors.APIError as error:
            if error.err_code in _TOO_FEW_SERVERS and (wanted.num_replicas or 1) > 1:
                logger.warning(
                    "nats: stream %s gets 1 replica, not %s, until there are servers for more: %s",
                    wanted.name,
                    wanted.num_replicas,
                    error.description,
                )
                await self._add(wanted.evolve(num_replicas=1))
            # Somebody else may have made it a moment ago, with other replicas say.
            elif error.err_code != _NAME_IN_USE:
                raise ConfigurationError(
                    f"nats: stream {wanted.name!r} for {', '.join(wanted.subjects or ())} cannot be made: "
                    f"{error}; create it, or change NatsTransport(dead_letters=...)"
                ) from error

    async def _raise(self, found: StreamConfig, replicas: int) -> None:
        try:
            await self._connection.jetstream.update_stream(found.evolve(num_replicas=replicas))
        except (nats.errors.Error, nats.js.errors.APIError) as error:
            logger.warning(
                "nats: stream %s has %d replicas, the stream that is read %d; while its server is down no "
                "dead letter is written, and more replicas are not to be had now: %s",
                found.name,
                found.num_replicas or 1,
                replicas,
                error,
            )
        else:
            logger.info("nats: stream %s has %d replicas now", found.name, replicas)

    async def write(self, letter: Letter, source: Source) -> bool:
        """Store a letter, confirmed; False if it was there already.

        Its facts come on top of a message that may fill a packet by itself: the body is left out then, if the
        message stays in its stream.
        """
        try:
            return await self._write(letter, source)
        except TooLarge:
            if not await self._stays(letter.stream):
                raise
            return await self._write(letter.without_body(), source)

    async def _stays(self, stream: str) -> bool:
        """Whether a stream keeps what a consumer is through with."""
        config = (await self._connection.jetstream.stream_info(stream)).config
        return config.retention == RetentionPolicy.LIMITS

    async def _write(self, letter: Letter, source: Source) -> bool:
        to = destination(source, Reject(letter.reason, letter.error))
        headers = letter.wire_headers()
        if to is None:
            to = f"{self.settings.subject}.{letter.identity}"
            # One letter a subject, however long ago the first one was written.
            headers["Nats-Expected-Last-Subject-Sequence"] = "0"
        try:
            stored = await self._connection.publish(to, letter.data, headers)
        except nats.js.errors.APIError as error:
            if error.err_code == _WRONG_LAST_SEQUENCE:
                return False
            raise
        if stored.duplicate and stored.tries == 1:
            return False
        if self._on_letter is not None:
            self._on_letter(letter)
        return True
