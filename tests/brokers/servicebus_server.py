"""A stand-in for Azure Service Bus: AMQP 1.0 as its client speaks it, on SQLite.

Run as `python -m tests.brokers.servicebus_server PORT FILE LOCK_SECONDS`. Its rules are a reading of the
client and of the service's documentation; it has queues, topics with subscriptions, peek-lock with expiry,
abandon, release, dead-letter subqueues, renewal, scheduled messages, sessions and batched sends. Every name
exists, except those that begin with `missing`.
"""

from __future__ import annotations

import sqlite3
import sys
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from proton import (
    UNDESCRIBED,
    Array,
    Condition,
    Data,
    Delivery,
    Endpoint,
    Handler,
    Message,
    Terminus,
    int32,
    symbol,
    timestamp,
)
from proton.reactor import Container

SCHEMA = """
CREATE TABLE IF NOT EXISTS message (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, queue TEXT, session TEXT, raw BLOB, enqueued REAL,
    count INTEGER DEFAULT 0, hidden REAL DEFAULT 0, token BLOB
);
CREATE TABLE IF NOT EXISTS subscription (topic TEXT, queue TEXT, PRIMARY KEY (topic, queue));
CREATE INDEX IF NOT EXISTS ready ON message (queue, session, seq);
CREATE INDEX IF NOT EXISTS tokens ON message (token);
CREATE INDEX IF NOT EXISTS locks ON message (hidden) WHERE token IS NOT NULL;
"""
SESSION_FILTER = "com.microsoft:session-filter"
LOCK_LOST = "com.microsoft:message-lock-lost"
TICKS = 621355968000000000
MAX_DELIVERY_COUNT = 10
LARGEST = 256 * 1024
DEAD = "/$deadletterqueue"


def new_token() -> bytes:
    """Sixteen bytes that proton's Python, which takes a delivery's tag for text, can read again."""
    return bytes(byte & 0x7F for byte in uuid.uuid4().bytes_le)


class Store:
    """The messages, and who has a lock on which."""

    def __init__(self, path: str, lock: float) -> None:
        self.lock = lock
        self.db = sqlite3.connect(path, isolation_level=None)
        self.db.execute("PRAGMA journal_mode=WAL")
        self.db.execute("PRAGMA synchronous=OFF")
        self.db.executescript(SCHEMA)

    def subscribe(self, queue: str) -> None:
        topic, found, _ = queue.partition("/subscriptions/")
        if found:
            self.db.execute("INSERT OR IGNORE INTO subscription VALUES (?, ?)", (topic, queue))

    def put(self, queue: str, raw: bytes) -> None:
        message = Message()
        message.decode(raw)
        due = (message.annotations or {}).get(symbol("x-opt-scheduled-enqueue-time"))
        hidden = float(due) / 1000 if due else 0.0
        rows = self.db.execute("SELECT queue FROM subscription WHERE topic = ?", (queue,)).fetchall()
        for (target,) in rows or [(queue,)]:
            self.db.execute(
                "INSERT INTO message (queue, session, raw, enqueued, hidden) VALUES (?, ?, ?, ?, ?)",
                (target, message.group_id or "", raw, max(time.time(), hidden), hidden),
            )

    def take(self, queue: str, session: str | None, limit: int) -> Iterator[tuple[bytes, bytes]]:
        """Locks up to `limit`, and gives each with its token."""
        now = time.time()
        rows = self.db.execute(
            "SELECT seq, raw, enqueued, count FROM message WHERE queue = ? "
            "AND session = coalesce(?, session) AND hidden <= ? AND token IS NULL ORDER BY seq LIMIT ?",
            (queue, session, now, limit),
        ).fetchall()
        until = now + self.lock
        tokens = [new_token() for _ in rows]
        self.db.execute("BEGIN")
        self.db.executemany(
            "UPDATE message SET token = ?, hidden = ? WHERE seq = ?",
            [(token, until, row[0]) for token, row in zip(tokens, rows, strict=True)],
        )
        self.db.execute("COMMIT")
        for token, (seq, raw, enqueued, count) in zip(tokens, rows, strict=True):
            message = Message()
            message.decode(raw)
            message.delivery_count = count
            message.annotations = {
                **(message.annotations or {}),
                symbol("x-opt-sequence-number"): seq,
                symbol("x-opt-enqueued-time"): timestamp(int(enqueued * 1000)),
                symbol("x-opt-locked-until"): timestamp(int(until * 1000)),
            }
            yield token, message.encode()

    def next_session(self, queue: str, taken: set[str]) -> str | None:
        rows = self.db.execute(
            "SELECT session FROM message WHERE queue = ? AND session != '' AND hidden <= ? AND token IS NULL "
            "GROUP BY session ORDER BY min(seq)",
            (queue, time.time()),
        )
        return next((session for (session,) in rows if session not in taken), None)

    def settle(self, token: bytes, how: str, facts: dict[str, str] | None = None) -> bool:
        """False if the lock is gone."""
        if how == "completed":
            done = self.db.execute("DELETE FROM message WHERE token = ? AND hidden > ?", (token, time.time()))
            return done.rowcount > 0
        row = self.db.execute(
            "SELECT seq, queue, raw, count FROM message WHERE token = ? AND hidden > ?", (token, time.time())
        ).fetchone()
        if row is None:
            return False
        seq, queue, raw, count = row
        match how:
            case "abandoned":
                self._back(seq, queue, raw, count + 1)
            case "released":
                self._back(seq, queue, raw, count)
            case "suspended":
                self._bury(seq, queue, raw, facts or {})
            case _:
                raise ValueError(how)
        return True

    def _back(self, seq: int, queue: str, raw: bytes, count: int) -> None:
        if count >= MAX_DELIVERY_COUNT and not queue.endswith(DEAD):
            self._bury(seq, queue, raw, {"DeadLetterReason": "MaxDeliveryCountExceeded"})
            return
        self.db.execute("UPDATE message SET token = NULL, hidden = 0, count = ? WHERE seq = ?", (count, seq))

    def _bury(self, seq: int, queue: str, raw: bytes, facts: dict[str, str]) -> None:
        message = Message()
        message.decode(raw)
        message.properties = {**(message.properties or {}), **facts}
        self.db.execute("BEGIN")
        self.db.execute("DELETE FROM message WHERE seq = ?", (seq,))
        self.db.execute(
            "INSERT INTO message (queue, session, raw, enqueued) VALUES (?, '', ?, ?)",
            (queue + DEAD, message.encode(), time.time()),
        )
        self.db.execute("COMMIT")

    def renew(self, token: bytes) -> float | None:
        until = time.time() + self.lock
        done = self.db.execute(
            "UPDATE message SET hidden = ? WHERE token = ? AND hidden > ?", (until, token, time.time())
        )
        return until if done.rowcount else None

    def renew_session(self, queue: str, session: str) -> None:
        self.db.execute(
            "UPDATE message SET hidden = ? WHERE queue = ? AND session = ? AND token IS NOT NULL",
            (time.time() + self.lock, queue, session),
        )

    def expire(self) -> None:
        now = time.time()
        rows = self.db.execute(
            "SELECT seq, queue, raw, count FROM message WHERE token IS NOT NULL AND hidden <= ?", (now,)
        )
        for seq, queue, raw, count in rows.fetchall():
            self._back(seq, queue, raw, count + 1)

    def release_session(self, queue: str, session: str) -> None:
        self.db.execute(
            "UPDATE message SET token = NULL, hidden = 0 "
            "WHERE queue = ? AND session = ? AND token IS NOT NULL",
            (queue, session),
        )


@dataclass
class Reader:
    """A client's receiver."""

    link: Any
    queue: str
    session: str | None = None
    until: float = 0.0


def path_of(address: str) -> str:
    return (urlsplit(address).path if "://" in address else address).strip("/").lower()


def parts_of(raw: bytes) -> list[bytes]:
    """The messages of a batch, which are data sections of one; or the one message itself."""
    found, rest = [], raw
    while rest:
        data = Data()
        size = data.decode(rest)
        data.rewind()
        data.next()
        if data.is_described():
            data.enter()
            data.next()
            code = data.get_object()
            data.next()
            if int(code) == 0x75:
                found.append(bytes(data.get_binary()))
        rest = rest[size:]
    return found if found and all(part[:2] == b"\x00\x53" for part in found) else [raw]


class Broker(Handler):
    def __init__(self, port: int, store: Store) -> None:
        super().__init__()
        self._port = port
        self._store = store
        self._readers: dict[Any, Reader] = {}
        self._waiting: list[Reader] = []

    def on_reactor_init(self, event: Any) -> None:
        self._container = event.container
        event.container.listen(f"127.0.0.1:{self._port}")
        event.container.schedule(0.02, self)

    def on_timer_task(self, event: Any) -> None:
        now = time.time()
        self._store.expire()
        for reader in [r for r in self._readers.values() if r.session is not None and r.until <= now]:
            self._detach(reader.link, "com.microsoft:session-lock-lost", "the session lock expired")
        for reader in list(self._waiting):
            if reader.until <= now:
                self._refuse(reader.link, "com.microsoft:timeout", "no session is available")
            else:
                self._accept_session(reader)
        for reader in list(self._readers.values()):
            self._serve(reader)
        self._container.schedule(0.02, self)

    def on_connection_remote_open(self, event: Any) -> None:
        event.connection.open()

    def on_session_remote_open(self, event: Any) -> None:
        event.session.open()

    def on_connection_remote_close(self, event: Any) -> None:
        event.connection.close()

    def on_session_remote_close(self, event: Any) -> None:
        event.session.close()

    def on_transport_closed(self, event: Any) -> None:
        for reader in [*self._readers.values(), *self._waiting]:
            if reader.link.connection == event.connection:
                self._forget(reader.link)

    def on_link_remote_close(self, event: Any) -> None:
        self._forget(event.link)
        event.link.close()

    on_link_remote_detach = on_link_remote_close

    def _forget(self, link: Any) -> None:
        self._waiting = [reader for reader in self._waiting if reader.link != link]
        reader = self._readers.pop(link, None)
        if reader is not None and reader.session is not None:
            self._store.release_session(reader.queue, reader.session)

    def _refuse(self, link: Any, condition: str, why: str) -> None:
        """An attach that leads nowhere, and a detach that says why."""
        link.source.type = link.target.type = Terminus.UNSPECIFIED
        link.open()
        self._detach(link, condition, why)

    def _detach(self, link: Any, condition: str, why: str) -> None:
        self._forget(link)
        link.condition = Condition(condition, why)
        link.close()

    def on_link_remote_open(self, event: Any) -> None:
        link = event.link
        address = link.remote_source.address if link.is_sender else link.remote_target.address
        link.source.copy(link.remote_source)
        link.target.copy(link.remote_target)
        link.rcv_settle_mode = link.remote_rcv_settle_mode
        link.snd_settle_mode = link.remote_snd_settle_mode
        queue = path_of(address)
        if queue.startswith("missing"):
            self._refuse(link, "amqp:not-found", f"the messaging entity {queue!r} could not be found")
        elif link.is_receiver:
            link.open()
            link.flow(500)
        elif queue.startswith("$cbs") or queue.endswith("$management"):
            link.open()
        else:
            self._store.subscribe(queue)
            reader = Reader(link, queue)
            found, wanted = _session_filter(link.remote_source.filter)
            if found:
                limit = (link.remote_properties or {}).get(symbol("com.microsoft:timeout"), 65_000)
                reader.session, reader.until = wanted, time.time() + int(limit) / 1000
                self._waiting.append(reader)
                self._accept_session(reader)
            else:
                link.open()
                self._readers[link] = reader

    def _accept_session(self, reader: Reader) -> None:
        taken = {
            r.session for r in self._readers.values() if r.queue == reader.queue and r.session is not None
        }
        session = reader.session or self._store.next_session(reader.queue, taken)
        if session is None:
            return
        self._waiting.remove(reader)
        link = reader.link
        if session in taken:
            self._refuse(link, "com.microsoft:session-cannot-be-locked", f"session {session!r} is locked")
            return
        reader.session, reader.until = session, time.time() + self._store.lock
        link.source.filter.clear()
        link.source.filter.put_dict({symbol(SESSION_FILTER): session})
        ticks = int(reader.until * 10_000_000) + TICKS
        link.properties = {symbol("com.microsoft:locked-until-utc"): ticks}
        link.open()
        self._readers[link] = reader

    def on_link_flow(self, event: Any) -> None:
        reader = self._readers.get(event.link)
        if reader is not None:
            self._serve(reader)

    def _serve(self, reader: Reader) -> None:
        link = reader.link
        if link.state & Endpoint.REMOTE_CLOSED:
            return
        if link.credit > 0:
            for token, encoded in self._store.take(reader.queue, reader.session, link.credit):
                link.delivery(token)
                link.send(encoded)
                link.advance()
        if link.drain_mode:
            link.drained()

    def on_delivery(self, event: Any) -> None:
        delivery, link = event.delivery, event.delivery.link
        if link.is_receiver:
            if delivery.readable and not delivery.partial:
                raw = link.recv(delivery.pending)
                link.advance()
                self._take_in(link, delivery, raw)
                link.flow(1)
        elif delivery.updated:
            self._settle(delivery)

    def _take_in(self, link: Any, delivery: Any, raw: bytes) -> None:
        queue = path_of(link.remote_target.address)
        if queue.startswith("$cbs") or queue.endswith("$management"):
            request = Message()
            request.decode(raw)
            self._reply(link, request, queue)
        elif len(raw) > LARGEST:
            delivery.local.condition = Condition(
                "amqp:link:message-size-exceeded", f"{len(raw)} bytes", {symbol("largest"): str(LARGEST)}
            )
            delivery.update(Delivery.REJECTED)
            delivery.settle()
            return
        else:
            self._store.db.execute("BEGIN")
            for part in parts_of(raw):
                self._store.put(queue, part)
            self._store.db.execute("COMMIT")
        delivery.update(Delivery.ACCEPTED)
        delivery.settle()

    def _settle(self, delivery: Any) -> None:
        token = delivery.tag.encode()
        match delivery.remote_state:
            case Delivery.ACCEPTED:
                held = self._store.settle(token, "completed")
            case Delivery.RELEASED:
                held = self._store.settle(token, "released")
            case Delivery.MODIFIED:
                held = self._store.settle(token, "abandoned")
            case Delivery.REJECTED:
                info = delivery.remote.condition.info if delivery.remote.condition else {}
                facts = {str(name): str(value) for name, value in (info or {}).items()}
                held = self._store.settle(token, "suspended", facts)
            case _:
                return
        if held:
            delivery.update(delivery.remote_state)
        else:
            delivery.local.condition = Condition(LOCK_LOST, "the lock supplied is invalid")
            delivery.update(Delivery.REJECTED)
        delivery.settle()

    def _reply(self, link: Any, request: Message, queue: str) -> None:
        status, body, condition = 200, None, None
        entity = queue.removesuffix("/$management")
        asked = request.body if isinstance(request.body, dict) else {}
        match str((request.properties or {}).get("operation")):
            case "com.microsoft:renew-lock":
                times = [self._store.renew(_token(token)) for token in asked["lock-tokens"].elements]
                if None in times:
                    status, condition = 410, LOCK_LOST
                else:
                    stamps = [timestamp(int((until or 0) * 1000)) for until in times]
                    body = {"expirations": Array(UNDESCRIBED, Data.TIMESTAMP, *stamps)}
            case "com.microsoft:update-disposition":
                how = str(asked["disposition-status"])
                facts = {
                    "DeadLetterReason": str(asked.get("deadletter-reason", "")),
                    "DeadLetterErrorDescription": str(asked.get("deadletter-description", "")),
                }
                tokens = [_token(token) for token in asked["lock-tokens"].elements]
                held = [self._store.settle(token, how, facts) for token in tokens]
                if False in held:
                    status, condition = 410, LOCK_LOST
            case "com.microsoft:renew-session-lock":
                until = self._renew_session(entity, str(asked["session-id"]))
                if until is None:
                    status, condition = 410, "com.microsoft:session-lock-lost"
                else:
                    body = {"expiration": timestamp(int(until * 1000))}
            case "put-token":
                status = 202
            case other:
                status, condition = 501, f"no operation {other}"
        properties: dict[str, Any] = {
            "statusCode": int32(status),
            "status-code": int32(status),
            "statusDescription": condition or "OK",
            "status-description": condition or "OK",
        }
        if condition:
            properties["errorCondition"] = symbol(condition)
        answer = Message(body=body, correlation_id=request.id, properties=properties)
        for other in _links(link.connection):
            if other.is_sender and path_of(other.remote_source.address or "") == queue:
                other.delivery(new_token())
                other.send(answer.encode())
                other.advance()
                return

    def _renew_session(self, queue: str, session: str) -> float | None:
        for reader in self._readers.values():
            if (reader.queue, reader.session) == (queue, session):
                reader.until = time.time() + self._store.lock
                self._store.renew_session(queue, session)
                return reader.until
        return None


def _session_filter(found: Any) -> tuple[bool, str | None]:
    found.rewind()
    if not found.next():
        return False, None
    for name, value in found.get_dict().items():
        if str(name) == SESSION_FILTER:
            value = getattr(value, "value", value)
            return True, None if value is None else str(value)
    return False, None


def _token(token: uuid.UUID) -> bytes:
    return token.bytes_le


def _links(connection: Any) -> Iterator[Any]:
    link = connection.link_head(0)
    while link is not None:
        yield link
        link = link.next(0)


if __name__ == "__main__":
    _, port, path, lock = sys.argv
    Container(Broker(int(port), Store(path, float(lock)))).run()
