"""A JetStream server as a test on Spark uses it: put, look, and a query's steps without Spark."""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Callable
from typing import Any

import msgspec
from nats.js.api import ConsumerConfig, StreamConfig

from settled.spark.attempts import ACK
from settled.spark.broker import broker_of
from settled.spark.jetstream.books import Books
from settled.spark.jetstream.bucket import Bucket
from settled.spark.jetstream.gets import fetch
from settled.spark.jetstream.link import Link, link_to
from settled.spark.jetstream.reader import Reader
from settled.spark.jetstream.staging import Staging
from settled.spark.options import Options
from settled.spark.source import new_holder
from settled.transports.nats import Connection

_numbers = itertools.count()
LETTERS = "SETTLED_DEAD_LETTERS"
Decide = Callable[[dict[str, Any]], "tuple[str, float | None, str | None] | None"]


class Stall:
    """One server; every test has a stream of its own on it."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.link = Link(url)

    def stream(self, *extra: str, **config: Any) -> str:
        """A new stream; its subjects begin with its name."""
        name = f"S{os.getpid()}-{next(_numbers)}"
        config = {"allow_direct": True, **config}

        async def work(connection: Connection) -> None:
            await connection.jetstream.add_stream(
                StreamConfig(name=name, subjects=[f"{name}.>", *extra], **config)
            )

        self.link.run(work)
        return name

    def consumer(self, stream: str, name: str = "g", **config: Any) -> None:
        async def work(connection: Connection) -> None:
            await connection.jetstream.add_consumer(stream, ConsumerConfig(durable_name=name, **config))

        self.link.run(work)

    def put(self, stream: str, values: list[Any], subject: str = "new", **headers: str) -> None:
        async def work(connection: Connection) -> None:
            publish = connection.jetstream.publish
            for at in range(0, len(values), 500):
                some = [v if isinstance(v, bytes) else msgspec.json.encode(v) for v in values[at : at + 500]]
                await asyncio.gather(
                    *(publish(f"{stream}.{subject}", v, headers=headers or None) for v in some)
                )

        self.link.run(work)

    def call(self, what: Callable[[Any], Any]) -> Any:
        """Do something with the JetStream context."""

        async def work(connection: Connection) -> Any:
            return await what(connection.jetstream)

        return self.link.run(work)

    def all(self, stream: str, subject: str = ">") -> list[Any]:
        """All messages of a stream."""

        async def work(connection: Connection) -> list[Any]:
            found: list[Any] = []
            while True:
                at = found[-1].sequence + 1 if found else 1
                some = await fetch(connection, stream, seq=at, batch=5000, next_by_subj=subject)
                found += some.messages
                if not some.more:
                    return found

        return self.link.run(work)

    def letters(self, stream: str, group: str = "g") -> list[Any]:
        async def work(connection: Connection) -> list[Any]:
            from nats.js.errors import NotFoundError

            found, at = [], 1
            while True:
                try:
                    one = await connection.jetstream.get_msg(
                        LETTERS, seq=at, subject=f"settled.dead.{stream}.{group}.>", next=True
                    )
                except NotFoundError:
                    return found
                found.append(one)
                at = (one.seq or 0) + 1

        return self.link.run(work)

    def books(self, stream: str, group: str = "g") -> Books:
        return msgspec.json.decode(Bucket(self.link).get(f"{stream}.{group}").data, type=Books)

    def totals(self, stream: str, group: str = "g") -> dict[str, int]:
        return {k: v for k, v in msgspec.structs.asdict(self.books(stream, group).totals).items() if v}

    def query(self, stream: str, group: str = "g", **options: str) -> Query:
        return Query(self.url, stream, group, options)

    def close(self) -> None:
        self.link.close()


class Query:
    """The steps that Spark takes for a query, one at a time."""

    def __init__(self, url: str, stream: str, group: str, options: dict[str, str]) -> None:
        given = {"url": url, "stream": stream, "consumer": group, "holder": new_holder(), "ordering": "none"}
        self.settings = Options.parse({**given, **options})
        self.broker = broker_of(self.settings)
        self.reader: Reader = self.broker.reader()  # type: ignore[assignment]

    def hold(self) -> Query:
        self.reader.hold(streaming=True)
        return self

    def rows(self, number: int) -> list[dict[str, Any]]:
        from settled.spark.rows import ARROW

        found = []
        for task in self.reader.plan(number):
            for chunk in self.broker.chunks(task):
                arrays = chunk.arrays(number)
                columns = [a.to_pylist() for a in arrays]
                found += [dict(zip(ARROW.names, row, strict=True)) for row in zip(*columns, strict=True)]
        return found

    def stage(self, number: int, decide: Decide) -> Any:
        """Read, decide and stage; without a decision a row is acknowledged."""
        staging = Staging(self.settings, link_to(self.settings.url))
        rows = self.rows(number)
        if rows:
            staging.number([number])
        for row in rows:
            made = decide(row)
            outcome, delay, error = made or (ACK, None, None)
            if outcome != ACK:
                staging.outcome({**row, "outcome": outcome, "delay": delay, "error": error})
            elif self.settings.to:
                staging.push(row["sequence"], None, row["payload"])
        return staging.finish()

    def batch(self, decide: Decide = lambda _: None, limit: int | None = None) -> Any:
        """One whole batch; None if there is nothing."""
        number = self.reader.claim(limit, None)
        return None if number is None else self.broker.settle([self.stage(number, decide)])

    def close(self) -> None:
        self.reader.close()
