"""Messages that died without a word from us: the server's advisories, turned into dead letters."""

from __future__ import annotations

import asyncio
import base64
from typing import Any

import msgspec
import nats.js.errors
from nats.js.api import AckPolicy, ConsumerConfig

from settled.settlement import Reason
from settled.transports.base import Source
from settled.transports.nats.connection import Connection, logger
from settled.transports.nats.delivery import MSG_ID, NatsDelivery
from settled.transports.nats.feeds import ConsumerGone, PullFeed
from settled.transports.nats.letters import Letter, Office
from settled.transports.nats.sources import Consumer, Durable

OURS = "settled: "
"""How the reason of a termination begins that we have written a letter for already."""
_KINDS = ("MAX_DELIVERIES", "MSG_TERMINATED")
_RETRY_DELAY = 1.0


class Advisory(msgspec.Struct):
    """What the server says of a message it will not deliver again."""

    type: str
    stream: str
    consumer: str
    stream_seq: int
    deliveries: int
    reason: str = ""


class Coroner:
    """Reads the advisories on one consumer; all processes that read that consumer share them."""

    def __init__(self, connection: Connection, office: Office, consumer: Consumer, source: Source) -> None:
        self._connection = connection
        self._office = office
        self._consumer = consumer
        self._source = source
        self._feed: PullFeed | None = None
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Make what is needed, then go on in the background."""
        consumer = self._consumer
        subjects = [
            f"$JS.EVENT.ADVISORY.CONSUMER.{kind}.{consumer.stream}.{consumer.name}" for kind in _KINDS
        ]
        stream = await self._office.make_advisories(subjects, consumer)
        if stream is None:
            return
        name = f"settled-{consumer.stream}-{consumer.name}"
        config = ConsumerConfig(
            name=name,
            durable_name=None if consumer.is_ephemeral else name,
            filter_subjects=subjects,
            ack_policy=AckPolicy.EXPLICIT,
            ack_wait=30,
            # Long: the durable one is what remembers the deaths of a time when nobody was here.
            inactive_threshold=300 if consumer.is_ephemeral else 30 * 86400,
        )
        info = await self._connection.ask(lambda jetstream: jetstream.add_consumer(stream, config))
        mine = Consumer.of(info, Durable(stream=stream, consumer=name))
        self._feed = PullFeed(self._connection, mine)
        self._task = asyncio.create_task(self._run(self._feed), name=f"advisories of {consumer.name}")

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        if self._feed is not None:
            await self._feed.close()

    async def _run(self, feed: PullFeed) -> None:
        while True:
            try:
                for delivery in await feed.take(16, timeout=5):
                    await self._examine(delivery)
            except ConsumerGone as error:
                logger.warning("nats: advisories on %s: %s", self._consumer.name, error)
                await asyncio.sleep(_RETRY_DELAY)
            except Exception as error:
                logger.debug("nats: advisories on %s: %s", self._consumer.name, error)
                await asyncio.sleep(_RETRY_DELAY)

    async def _examine(self, delivery: NatsDelivery) -> None:
        client = self._connection.sending
        try:
            advisory = msgspec.json.decode(delivery.data, type=Advisory)
            if not advisory.reason.startswith(OURS):
                await self._bury(advisory)
        except Exception as error:
            logger.error("nats: advisory %s not dealt with, again later: %s", delivery.data, error)
            await client.publish(delivery.reply, b'-NAK {"delay": %d}' % int(_RETRY_DELAY * 1e9))
        else:
            await client.publish(delivery.reply, b"+ACK")

    async def _bury(self, advisory: Advisory) -> None:
        if advisory.type.endswith(".terminated"):
            error = f"terminated: {advisory.reason}" if advisory.reason else "terminated"
        else:
            error = f"no deliveries left after {advisory.deliveries}, the last one not settled in time"
        letter = await self._letter(advisory, error)
        if await self._office.write(letter, self._source):
            logger.error(
                "dead letter message_id=%s channel=%s attempt=%d cause=%r",
                letter.id,
                self._source.channel,
                letter.attempts,
                error,
            )
        # Given up is not gone: in a work queue it would stay for ever.
        settle = (
            f"$JS.ACK.{advisory.stream}.{advisory.consumer}.{advisory.deliveries}.{advisory.stream_seq}.0.0.0"
        )
        if not advisory.type.endswith(".terminated"):
            await self._connection.sending.publish(settle, b"+ACK")

    async def _letter(self, advisory: Advisory, error: str) -> Letter:
        found = await self._original(advisory)
        headers = _headers(base64.b64decode(found.get("hdrs", "")))
        if not found:
            error = f"{error}; its body is gone from the stream"
        return Letter(
            stream=advisory.stream,
            consumer=advisory.consumer,
            sequence=advisory.stream_seq,
            stored_ns=_nanoseconds(found.get("time", "")),
            id=headers.get(MSG_ID) or f"{advisory.stream}:{advisory.stream_seq}",
            subject=found.get("subject", ""),
            data=base64.b64decode(found.get("data", "")),
            headers=headers,
            attempts=advisory.deliveries,
            reason=Reason.DELIVERY_ERROR,
            error=error,
        )

    async def _original(self, advisory: Advisory) -> dict[str, Any]:
        """The message as stored, with its time to the nanosecond, which the client's own call rounds."""
        answer = await self._connection.client.request(
            f"$JS.API.STREAM.MSG.GET.{advisory.stream}",
            b'{"seq": %d}' % advisory.stream_seq,
            timeout=self._connection.timeout,
        )
        reply = msgspec.json.decode(answer.data, type=dict[str, Any])
        if "error" in reply:
            failed = nats.js.errors.APIError.from_error(reply["error"])
            if isinstance(failed, nats.js.errors.NotFoundError):
                return {}
            raise failed
        message: dict[str, Any] = reply["message"]
        return message


def _headers(raw: bytes) -> dict[str, str]:
    found = {}
    for line in raw.split(b"\r\n")[1:]:
        name, colon, value = line.partition(b":")
        if colon:
            found[name.decode("ascii", "replace").strip()] = value.decode("utf-8", "replace").strip()
    return found


def _nanoseconds(time: str) -> int:
    """RFC 3339 to nanoseconds since the epoch.

    >>> _nanoseconds("2026-11-15T22:44:17.99537888Z")
    1794782657995378880
    """
    from datetime import datetime

    if not time:
        return 0
    whole, _, fraction = time.rstrip("Z").partition(".")
    seconds = int(datetime.fromisoformat(f"{whole}+00:00").timestamp())
    return seconds * 1_000_000_000 + int(fraction.ljust(9, "0") or 0)
