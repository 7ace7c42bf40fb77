"""Manifests: a group's batches as Spark claims, reads and settles them, over blocking connections."""

from __future__ import annotations

import os
import re
import socket
import time
import uuid
from dataclasses import dataclass
from importlib import resources
from typing import TYPE_CHECKING, Any, Self, TypeVar

import psycopg
from psycopg import errors
from psycopg.rows import dict_row

from settled.queue import sealing
from settled.queue.errors import BadRequest, Conflict, Fenced, NotFound, QueueError, Unavailable
from settled.queue.names import SCHEMA, new_lease
from settled.queue.options import QueueOptions

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from datetime import datetime

T = TypeVar("T")
Row = dict[str, Any]
READER_LOCK = 0x5E77
PATIENCE = 10.0
RECONNECT_FOR = 30.0
WORKER = f"spark:{socket.gethostname()}:{os.getpid()}"
CODES = {"SE001": Fenced, "SE002": Unavailable, "SE003": Conflict, "SE004": Conflict, "SE005": Conflict}


def _load() -> dict[str, str]:
    text = resources.files("settled.queue").joinpath("schema", "manifest.sql").read_text()
    parts = re.split(r"^-- name: (\w+)\n", text, flags=re.M)[1:]
    return {name: body.strip() for name, body in zip(parts[::2], parts[1::2], strict=True)}


SQL = _load()


def connect(dsn: str) -> psycopg.Connection[Row]:
    """A connection with the queue's schema on its path; each statement commits unless told otherwise."""
    if not dsn.startswith(("postgresql://", "postgres://")):
        hint = "Spark reads the queue's database: give its postgresql:// address; `settled serve` prints it"
        raise BadRequest("url", dsn, hint)
    options = f"-c search_path={SCHEMA} -c timezone=UTC -c jit=off"
    return psycopg.connect(
        dsn, autocommit=True, row_factory=dict_row, options=options, application_name="settled-spark",
        connect_timeout=10, keepalives_idle=10, keepalives_interval=5, keepalives_count=3,
    )  # fmt: skip


class Link:
    """A connection that is opened when it is needed, and again after it was lost."""

    def __init__(self, dsn: str) -> None:
        self._dsn = dsn
        self._connection: psycopg.Connection[Row] | None = None

    def get(self) -> psycopg.Connection[Row]:
        """The open connection."""
        if self._connection is None or self._connection.closed:
            self._connection = connect(self._dsn)
        return self._connection

    def run(self, work: Callable[[psycopg.Connection[Row]], T], patience: float = RECONNECT_FOR) -> T:
        """Do work that may be done twice: again if the connection breaks, for `patience` seconds."""
        deadline = time.monotonic() + patience
        while True:
            try:
                return work(self.get())
            except (errors.DeadlockDetected, errors.SerializationFailure):
                if time.monotonic() > deadline:
                    raise
            except psycopg.OperationalError as error:
                self.close()
                if time.monotonic() > deadline:
                    raise Unavailable(str(error).strip() or type(error).__name__) from error
                time.sleep(0.2)
            except psycopg.DatabaseError as error:
                refusal = CODES.get(error.sqlstate or "")
                if refusal is None:
                    raise
                raise refusal(error.diag.message_primary or str(error)) from error

    def rows(self, name: str, **values: Any) -> list[Row]:
        """Run a statement of schema/manifest.sql."""
        return self.run(lambda connection: connection.execute(SQL[name], values).fetchall())

    def call(self, function: str, *values: Any) -> list[Row]:
        """Call a function of the schema."""
        query = f"select * from {function}({', '.join(['%s'] * len(values))})"  # noqa: S608 - our own names
        return self.run(lambda connection: connection.execute(query, values).fetchall())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Disconnect; the next use connects again."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None


@dataclass(frozen=True, slots=True)
class Range:
    """Messages of one lane in a manifest: [first, end) without `skip`, and single ones that were parked."""

    lane: int
    partition: str
    first: int
    end: int
    count: int
    skip: str
    parked: tuple[int, ...]
    attempts: dict[int, int]

    @classmethod
    def of(cls, row: Row) -> Range:
        """A range as the database answers it."""
        failed = dict(zip(row["failed_seqs"], row["failed_counts"], strict=True))
        return cls(
            row["lane_id"], row["partition"], row["first_seq"], row["end_seq"], row["n"], row["skip"],
            tuple(row["parked"]), failed,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Settled:
    """What became of a batch."""

    number: int
    messages: int
    acked: int
    retried: int
    dead: int
    released: int
    pushed: int


def begin_group(link: Link, queue: str, group: str, starting: str = "") -> list[Row]:
    """Let a group read a queue, if it does not yet; returns its reader, none if there is no such queue."""
    names = {"queue": queue, "group": group}

    def make(connection: psycopg.Connection[Row]) -> list[Row]:
        connection.execute(SQL["make_group"], names)
        if starting:
            connection.execute(SQL["subscribe"], {**names, "at": starting})
        connection.execute(SQL["make_reader"], names)
        return connection.execute(SQL["find_reader"], names).fetchall()

    return link.run(make)


class Reader:
    """One holder's hold on a group's batches of a queue."""

    def __init__(
        self, dsn: str, queue: str, group: str, holder: str, lease_seconds: float, starting: str = ""
    ) -> None:
        self.queue = queue
        self.group = group
        self.link = Link(dsn)
        self._holder = uuid.UUID(holder)
        self._seconds = lease_seconds
        self._starting = starting
        self._row: Row | None = None

    @property
    def row(self) -> Row:
        """The reader as it is stored; it is made when it is first asked for."""
        if self._row is None:
            rows = begin_group(self.link, self.queue, self.group, self._starting)
            if not rows:
                raise NotFound("queue", self.queue)
            if rows[0]["encrypted"]:
                sealing.check(self.queue)
            self._row = rows[0]
        return self._row

    @property
    def id(self) -> int:
        """The reader's number."""
        return int(self.row["id"])

    def hold(self, *, streaming: bool) -> None:
        """Become the holder, taking over from one that is gone; Conflict if another one lives.

        A streaming holder keeps a session lock, so one that ended or was killed is replaced at once, and a
        paused one when its lease is over.
        """
        deadline = time.monotonic() + min(PATIENCE, self._seconds + 1)
        kind = "stream" if streaming else "batch"
        while True:
            locked = self.lock()  # a batch's is gone when it disconnects
            [row] = self.link.call("take_reader", self.id, self._holder, kind, float(self._seconds), locked)
            if row["holder"] == self._holder:
                return
            if time.monotonic() > deadline:
                raise Conflict(
                    f"group {self.group!r} of queue {self.queue!r} is read by another Spark query until "
                    f"{row['held_until']:%H:%M:%S} UTC; stop that one, or read as another group"
                )
            time.sleep(0.1)

    def lock(self) -> bool:
        """Take the reader's session lock, if no other session has it."""
        query = "select pg_try_advisory_lock(%s, %s) as locked"
        rows = self.link.run(lambda c: c.execute(query, (READER_LOCK, self.id)).fetchall())
        return bool(rows[0]["locked"])

    def renew(self) -> None:
        """Push the expiry of the hold and of the open batch's leases."""
        self.link.call("renew_reader", self.id, self._holder, float(self._seconds))

    def tidy(self) -> None:
        """Remove what tasks left behind."""
        self.link.call("tidy_staging", self.id)

    def settled_up_to(self) -> int:
        """The number of the last batch that is done."""
        return int(self.link.rows("last_settled", reader=self.id)[0]["number"])

    def open_batch(self) -> int | None:
        """The number of the batch that is out, if one is; Conflict if the queue was deleted."""
        rows = self.link.rows("open_manifest", reader=self.id)
        if not rows:
            raise Conflict(
                f"queue {self.queue!r} was deleted, and perhaps made anew, while group {self.group!r} read "
                "it; start again with a new checkpoint location"
            )
        if rows[0]["holder"] != self._holder:
            raise Fenced(
                f"another Spark query took over this reader (queue {self.queue!r}, group {self.group!r}); "
                "nothing was applied"
            )
        number: int | None = rows[0]["number"]
        return number

    def claim(self, limit: int | None, as_of: datetime | None) -> int | None:
        """The open batch's number, or that of a new one; None if there is nothing to read."""
        found = self.open_batch()
        if found is not None:
            return found
        lanes = [(row["lane_id"], row["available"]) for row in self.link.call("claimable", self.id, as_of)]
        wants = dict(share(lanes, limit))
        if not wants:
            return None
        order = sorted(wants)
        lease = uuid.UUID(new_lease(order[0], self.row["group_id"], wide=True))
        [row] = self.link.call(
            "claim_manifest", self.id, self._holder, lease, float(self._seconds), order,
            [wants[lane] for lane in order], as_of,
        )  # fmt: skip
        number: int | None = row["claim_manifest"]
        return number

    def serve(self, number: int) -> list[Range]:
        """What there is to read of a batch: nothing if it is settled; 0 is a batch without messages."""
        [row] = self.link.call("serve_manifest", self.id, self._holder, number, float(self._seconds))
        if not row["serve_manifest"]:
            return []
        return [Range.of(r) for r in self.link.rows("ranges", reader=self.id, number=number)]

    def settle(
        self,
        number: int | None,
        writes: Sequence[uuid.UUID],
        outcomes: int,
        segments: int,
        parked: bool | None = None,
    ) -> Settled:
        """Settle a batch with what the tasks staged; doing it again changes nothing.

        `parked` overrides what the queue says a lane does when one of its messages fails.
        """
        [row] = self.link.call(
            "settle_manifest", self.id, self._holder, number, WORKER, list(writes), outcomes, segments,
            QueueOptions().to_json().decode(), parked,
        )  # fmt: skip
        if segments:
            self.link.run(lambda c: c.execute("select pg_notify('settled', %s)", (WORKER,)).fetchall())
        return Settled(*(row[name] or 0 for name in Settled.__slots__))


def share(lanes: Sequence[tuple[int, int]], limit: int | None) -> list[tuple[int, int]]:
    """How much to take of each lane, evenly: no lane waits because another one is long.

    >>> share([(1, 10), (2, 1000), (3, 1000)], 100)
    [(1, 10), (2, 45), (3, 45)]
    """
    if limit is None:
        return [(lane, min(available, 2**31 - 1)) for lane, available in lanes]
    lanes = lanes[:limit]
    left, shares = limit, []
    for place, (lane, available) in enumerate(sorted(lanes, key=lambda item: item[1])):
        take = min(available, left // (len(lanes) - place))
        left -= take
        shares.append((lane, take))
    return [(lane, take) for lane, take in shares if take]


def log_ranges(link: Link, queue: str) -> list[Range]:
    """All that a queue's log holds now, for who only looks."""
    return [Range.of(row) for row in link.rows("log_ranges", queue=queue)]


__all__ = ["Link", "QueueError", "Range", "Reader", "Settled", "connect", "log_ranges", "share"]
