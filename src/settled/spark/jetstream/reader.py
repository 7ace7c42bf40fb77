"""One holder's hold on a group's batches: every step of it is one compare-and-set of the group's books."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
import nats.errors
from nats.aio.msg import Msg
from pyspark.sql.datasource import InputPartition

from settled.queue.errors import Conflict, Fenced
from settled.queue.manifest import Settled
from settled.spark.jetstream import books as ledger
from settled.spark.jetstream import outbox, setting
from settled.spark.jetstream.books import Books, Outcome, Piece, Read, Settlement
from settled.spark.jetstream.bucket import BUCKET, Bucket, Value
from settled.spark.jetstream.link import Link
from settled.transports.nats import Connection

if TYPE_CHECKING:
    from settled.spark.options import Options

log = logging.getLogger("settled.spark")
PATIENCE = 10.0
_ANSWER = 1.0
_decode = msgspec.json.Decoder(Books).decode


class Hold(msgspec.Struct, frozen=True):
    """Who may write the books, and until when."""

    holder: str
    kind: str
    until: float


_decode_hold = msgspec.json.Decoder(Hold).decode
_decode_read = msgspec.json.Decoder(tuple[int, int, int]).decode


@dataclass
class Task(InputPartition):
    """What one task reads."""

    batch: int
    place: int
    piece: Piece
    subjects: tuple[str, ...]
    attempts: dict[int, int]


@dataclass(frozen=True, slots=True)
class Horizon:
    """A moment of a stream."""

    at: float
    last: int


class Reader:
    """A hold on a stream's group. Whoever took the books over last has them; what others try is refused."""

    def __init__(self, settings: Options, link: Link | None = None) -> None:
        self._settings = settings
        self._link = link or Link(settings.url)
        self._bucket = Bucket(self._link)
        self._key = f"{settings.queue}.{settings.group}"
        self._holder = settings.holder
        self._in_order = settings.ordering == "in_order"
        self._finished = 0
        self._missed = 0
        self._fresh = 0
        self._name = ""

    def hold(self, *, streaming: bool) -> None:
        """Become the holder, taking over from one that is gone; Conflict if another one lives.

        A streaming holder answers when it is asked whether it is there, so a killed one is replaced at once
        and a paused one when its lease is over.
        """
        found = self._link.run(lambda c: setting.look_up(c, self._settings), patience=PATIENCE)
        self._bucket.make(found.replicas)
        outbox.prepare(self._link, found.terms, found.replicas)
        deadline = time.monotonic() + PATIENCE
        while not self._take(streaming):
            if time.monotonic() > deadline:
                until = time.strftime("%H:%M:%S", time.gmtime(self._read_hold()[0].until))
                raise Conflict(
                    f"consumer {self._settings.group!r} of stream {self._settings.queue!r} is read by "
                    f"another Spark query until {until} UTC; stop that one, or read as another consumer"
                )
            time.sleep(0.1)
        value = self._open_books(found)
        self._bucket.sweep(self._key, value)
        self._finish(_decode(value.data))

    def _read_hold(self) -> tuple[Hold, Value]:
        value = self._bucket.get(f"{self._key}.hold")
        return (_decode_hold(value.data) if value.data else Hold("", "", 0.0)), value

    def _take(self, streaming: bool) -> bool:
        hold, value = self._read_hold()
        # A second query of the same rows has the same name, and is another one all the same.
        others = hold.until > time.time() and (hold.holder != self._holder or streaming)
        if others and (hold.kind != "stream" or self._link.run(lambda c: _lives(c, hold.holder))):
            return False
        if streaming:
            self._link.run(self._answer)
        kind = "stream" if streaming else "batch"
        mine = Hold(self._holder, kind, time.time() + self._settings.lease_seconds)
        return self._bucket.replace(f"{self._key}.hold", msgspec.json.encode(mine), value) is not None

    async def _answer(self, connection: Connection) -> None:
        """Answer who asks whether this holder lives."""

        async def here(question: Msg) -> None:
            await question.respond(b"here")

        client = await connection.open()
        await client.subscribe(_address(self._holder), cb=here)

    def _open_books(self, found: setting.Setting) -> Value:
        """Write our name into the books: from then on nobody else's steps count."""
        while True:
            value = self._bucket.get(self._key)
            if value.data:
                now = _decode(value.data)
                if now.born != found.born:
                    raise Conflict(
                        f"stream {self._settings.queue!r} was deleted and made anew since consumer "
                        f"{self._settings.group!r} read it, so its place is lost; read as another consumer, "
                        f"or forget the place: nats kv del {BUCKET} {self._key}"
                    )
            else:
                start = self._link.run(
                    lambda c: setting.position(c, self._settings.queue, self._settings.starting)
                )
                self._bucket.remove(f"{self._key}.batch.>")  # of books that somebody deleted
                name = uuid.uuid4().hex[:12]
                now = Books(name=name, write="", holder="", epoch=0, born=found.born, cursor=start)
            ours = now.holder == self._holder
            now = msgspec.structs.replace(
                now,
                holder=self._holder,
                epoch=now.epoch if ours else now.epoch + 1,
                serving=now.serving if ours else 0,
                terms=found.terms,
            )
            written = self._write(now, value)
            if written is not None:
                return written
            if self._read_hold()[0].holder != self._holder:
                raise self._fenced(now)

    def _write(self, now: Books, seen: Value) -> Value | None:
        now = msgspec.structs.replace(now, write=uuid.uuid4().hex)
        return self._bucket.replace(self._key, msgspec.json.encode(now), seen)

    def _fenced(self, now: Books) -> Fenced:
        return Fenced(
            f"another Spark query took over this reader (consumer {self._settings.group!r} of stream "
            f"{self._settings.queue!r}, epoch {now.epoch}); nothing was applied"
        )

    def _own_books(self) -> tuple[Books, Value]:
        value = self._bucket.get(self._key)
        if not value.data:
            raise Conflict(
                f"the books of consumer {self._settings.group!r} of stream {self._settings.queue!r} are gone "
                f"from bucket {BUCKET}; start the query again, with a new checkpoint location"
            )
        now = _decode(value.data)
        if now.holder != self._holder:
            raise self._fenced(now)
        return now, value

    def renew(self) -> None:
        """Push the expiry of the hold."""
        hold, value = self._read_hold()
        if hold.holder != self._holder:
            raise self._fenced(_decode(self._bucket.get(self._key).data))
        mine = Hold(hold.holder, hold.kind, time.time() + self._settings.lease_seconds)
        if self._bucket.replace(f"{self._key}.hold", msgspec.json.encode(mine), value) is None:
            self.renew()

    def horizon(self) -> Horizon:
        """Now, on this stream."""

        async def work(connection: Connection) -> int:
            info = await connection.jetstream.stream_info(self._settings.queue)
            return int(info.state.last_seq)

        return Horizon(time.time(), self._link.run(work))

    def source(self) -> str:
        """The name of the books, which are of one stream and consumer, and of no later ones."""
        if not self._name:
            self._name = self._own_books()[0].name
        return self._name

    def settled_up_to(self) -> int:
        """The number of the last batch that is done."""
        now, _ = self._own_books()
        return now.newest if now.open is None else now.newest - 1

    def claim(self, limit: int | None, horizon: Horizon | None) -> int | None:
        """The open batch's number, or that of a new one, written down; None if there is nothing to read."""
        settings = self._settings
        while True:
            now, value = self._own_books()
            if now.open is not None:
                return now.open.number
            self._finish(now)
            span = self._span(now)
            self._warn_missed(now.cursor, span.missed)
            if horizon is not None:
                span = span._replace(last=min(span.last, horizon.last))
            at = time.time()
            batch = ledger.claim(
                now,
                span,
                limit=limit,
                now=at,
                as_of=at if horizon is None else min(at, horizon.at),
                in_order=self._in_order,
                tasks=settings.tasks if settings.ordering in ("queue", "none") else 1,
            )
            if batch is None:
                skipped = ledger.skip(now, span)
                if skipped is None or self._write(skipped, value) is not None:
                    return None
                continue
            now = msgspec.structs.replace(
                ledger.forgetting(now), open=batch, newest=batch.number, serving=batch.number
            )
            if self._write(now, value) is not None:
                self._fresh = batch.number
                return batch.number

    def _span(self, now: Books) -> ledger.Span:
        async def work(connection: Connection) -> ledger.Span:
            info = await setting.same_stream(connection, self._settings.queue, now.born)
            return await setting.span_of(connection, info, now.cursor, now.terms.subjects)

        return self._link.run(work)

    def _warn_missed(self, cursor: int, missed: int) -> None:
        if not missed or self._missed == cursor:
            return
        self._missed = cursor
        log.warning(
            "stream %r, consumer %r: sequences %d to %d were removed from the stream before they were read; "
            "its limits are too tight, or it was purged",
            self._settings.queue, self._settings.group, cursor, cursor + missed - 1,
        )  # fmt: skip

    def plan(self, number: int) -> list[Task]:
        """A batch as tasks; none if it is settled."""
        while True:
            now, value = self._own_books()
            if number > now.newest:
                raise Conflict(
                    f"batch {number} is not known to consumer {self._settings.group!r} (the newest is "
                    f"{now.newest}): the checkpoint belongs to another server, or the books in bucket "
                    f"{BUCKET} were deleted; start with a new checkpoint location"
                )
            batch = now.open if now.open is not None and now.open.number == number else None
            if batch is not None and number != self._fresh:
                batch = msgspec.structs.replace(batch, repeated=True)
            planned = msgspec.structs.replace(now, serving=number, open=batch or now.open)
            if planned == now or self._write(planned, value) is not None:
                break
        self._fresh = 0
        if batch is None:
            return []
        tasks = []
        for place, piece in enumerate(batch.pieces):
            due = set(piece.due)
            failed = {
                seq: n
                for seq, (n, _) in now.retries.items()
                if n and (seq in due or piece.first <= seq < piece.end)
            }
            tasks.append(Task(number, place, piece, now.terms.subjects, failed))
        return tasks

    def settle(
        self, number: int | None, outcomes: Sequence[Outcome], pushed: int, repeated: Collection[int] = ()
    ) -> Settled:
        """Settle a batch with what its tasks say; doing it again changes nothing.

        `repeated` are the sequences, of those in `outcomes`, of tasks that ran more than once.
        """
        while True:
            now, value = self._own_books()
            chosen = now.serving if number is None else number
            if chosen == 0:
                return Settled(0, 0, 0, 0, 0, 0, 0)
            if now.open is None or now.open.number != chosen:
                return self._settled_before(now, chosen)
            if chosen != now.serving:
                raise Conflict(
                    f"rows of batch {chosen} came to be settled while batch {now.serving} is being read"
                )
            # Rows of a stream that was made anew meanwhile are not those of this batch.
            self._span(now)
            read = self._read(now.open)
            after = ledger.settle(
                now, now.open, outcomes, read,
                pushed=pushed, now=time.time(), in_order=self._in_order, repeated=repeated,
            )  # fmt: skip
            if self._write(after, value) is not None:
                break
        self._finish(after)
        if read.removed:
            log.warning(
                "stream %r, consumer %r: %d messages of batch %d were removed from the stream before they "
                "were read; its limits are too tight, or it was purged",
                self._settings.queue, self._settings.group, read.removed, chosen,
            )  # fmt: skip
        self._let_go()
        return _as_settled(after.last)

    def _settled_before(self, now: Books, number: int) -> Settled:
        if number > now.newest:
            raise Conflict(f"batch {number} is not known to consumer {self._settings.group!r}")
        self._finish(now)
        return _as_settled(now.last if now.last is not None and now.last.number == number else None, number)

    def note_read(self, task: Task, found: int, removed: int) -> None:
        """What a task found of its piece."""
        key = f"{self._key}.read.{task.place}"
        self._bucket.put(key, msgspec.json.encode((task.batch, found, removed)))

    def _read(self, batch: ledger.Manifest) -> Read:
        messages = removed = 0
        for place, piece in enumerate(batch.pieces):
            value = self._bucket.get(f"{self._key}.read.{place}")
            number, found, gone = _decode_read(value.data) if value.data else (0, 0, 0)
            # A task whose rows nobody asked for has told nothing.
            messages += found if number == batch.number else len(piece)
            removed += gone if number == batch.number else 0
        return Read(messages, removed)

    def _finish(self, now: Books) -> None:
        """Send what the last settlement promised, unless that is done."""
        if now.last is not None and self._finished < now.last.number:
            outbox.deliver(self._link, self._settings, now)
            self._finished = now.last.number

    def _let_go(self) -> None:
        """A batch read has nothing to hold once it is settled."""
        hold, value = self._read_hold()
        if hold.holder == self._holder and hold.kind == "batch":
            self._bucket.replace(
                f"{self._key}.hold", msgspec.json.encode(Hold(hold.holder, hold.kind, 0.0)), value
            )

    def close(self) -> None:
        """Disconnect; who asks then whether this holder lives hears nothing."""
        self._link.close()


def _address(holder: str) -> str:
    return f"settled.spark.holder.{holder}"


async def _lives(connection: Connection, holder: str) -> bool:
    client = await connection.open()
    try:
        await client.request(_address(holder), b"", timeout=_ANSWER)
    except nats.errors.NoRespondersError:
        return False
    except (TimeoutError, nats.errors.TimeoutError):
        return True
    return True


def _as_settled(one: Settlement | None, number: int = 0) -> Settled:
    if one is None:
        return Settled(number, 0, 0, 0, 0, 0, 0)
    return Settled(one.number, one.messages, one.acked, one.retried, one.dead, one.released, one.pushed)
