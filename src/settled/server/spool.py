"""Pushes that come while pushing is switched off: kept in files of this server, pushed afterwards."""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import struct
import time
import uuid
import zlib
from typing import TYPE_CHECKING

import msgspec

from settled.queue import sealing
from settled.queue.errors import Conflict, QueueError, QueueFull, Unavailable
from settled.queue.types import PushItem

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

    from settled.queue.engine import Engine

log = logging.getLogger("settled.server")

LOOK_EVERY = 0.5
TOGETHER = 1000
FILE_LIMIT = 64 * 2**20
_head = struct.Struct("<II")  # length and checksum of a record


class Kept(msgspec.Struct, array_like=True):
    """One message; it has an id, so that it is pushed once though it be tried twice."""

    queue: str
    partition: str
    transaction_id: str
    payload: bytes
    content_type: str
    headers: dict[str, str] | None
    delay_seconds: float
    trace_id: str | None
    producer: str | None


class Entry(msgspec.Struct, array_like=True):
    """One request's messages, and when they came."""

    at: float
    items: list[Kept]


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Entry).decode


def pack(entry: Entry) -> bytes:
    """A record as it is stored; encrypted where the server has a key."""
    raw = _encode(entry)
    raw = sealing.seal_value(raw) if sealing.keys() else raw
    return _head.pack(len(raw), zlib.crc32(raw)) + raw


def unpack(stored: bytes) -> Iterator[Entry]:
    """The records of a file, up to one that was cut off: that one was answered to nobody."""
    at = 0
    while at + _head.size <= len(stored):
        size, checksum = _head.unpack_from(stored, at)
        raw = stored[at + _head.size : at + _head.size + size]
        if len(raw) < size or zlib.crc32(raw) != checksum:
            return
        yield _decode(sealing.open_value(raw))
        at += _head.size + size


class _Part:
    """A file that is being pushed: its messages that are not pushed yet, each with the time when it came."""

    def __init__(self, path: Path, entries: Iterable[Entry]) -> None:
        self.path = path
        self.left = dict(enumerate((item, entry.at) for entry in entries for item in entry.items))

    def now(self, blocked: set[str]) -> Iterator[list[int]]:
        """Messages in order, some at a time; none that must wait for a queue that is full."""
        places = [at for at, (item, _) in self.left.items() if item.queue not in blocked]
        for start in range(0, len(places), TOGETHER):
            yield places[start : start + TOGETHER]


class Spool:
    """Files in `folder`, each locked by the process that writes it; what nobody has locked, any pushes."""

    def __init__(self, folder: Path, engine: Engine) -> None:
        self._folder = folder
        self._engine = engine
        self._file: int | None = None
        self._size = 0
        self._waiting: list[tuple[bytes, asyncio.Future[None]]] = []
        self._writer: asyncio.Task[None] | None = None
        self._pusher: asyncio.Task[None] | None = None
        self._parts: dict[Path, _Part] = {}
        self._own: set[Path] = set()
        self._closed: set[Path] = set()
        self.pending = 0
        self.refused = 0

    def start(self) -> None:
        """Push what there is whenever pushing is switched on."""
        self._pusher = asyncio.create_task(self._run())

    async def close(self) -> None:
        """Stop; what is in the files stays there for the next start."""
        if self._pusher is not None:
            self._pusher.cancel()
            await asyncio.gather(self._pusher, return_exceptions=True)
        if self._writer is not None:
            await asyncio.gather(self._writer, return_exceptions=True)
        self._leave()

    async def keep(self, items: Sequence[PushItem]) -> list[Kept]:
        """Store messages, with an id where they had none; they are on disk when this returns."""
        named = [kept(item) for item in items]
        waiting: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((pack(Entry(time.time(), named)), waiting))
        if self._writer is None or self._writer.done():
            self._writer = asyncio.create_task(self._write())
        await waiting
        self.pending += len(named)
        return named

    async def _write(self) -> None:
        while self._waiting:
            records, self._waiting = self._waiting, []
            error: Exception | None = None
            try:
                await asyncio.to_thread(self._append, b"".join(record for record, _ in records))
            except OSError as problem:
                why = f"pushes are switched off and cannot be kept in {self._folder}: {problem}"
                error = Unavailable(why, 5)
            for _, waiting in records:
                if not waiting.done():
                    waiting.set_result(None) if error is None else waiting.set_exception(error)

    def _append(self, records: bytes) -> None:
        if self._file is None:
            self._folder.mkdir(parents=True, exist_ok=True)
            path = self._folder / f"{time.time_ns():020d}-{uuid.uuid4().hex[:8]}.pushes"
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._file, fcntl.LOCK_EX)
            self._size = 0
            self._own.add(path)
        try:
            done = 0
            while done < len(records):
                done += os.write(self._file, records[done:])
            os.fsync(self._file)
        except OSError:
            os.ftruncate(self._file, self._size)  # or what comes next would be lost behind half a record
            raise
        self._size += len(records)
        if self._size > FILE_LIMIT:
            self._leave()

    def _leave(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    async def _run(self) -> None:
        while True:
            try:
                await self._push_all(paused=self._engine.pushes_paused)
            except Unavailable:
                pass
            except Exception:
                log.exception("pushes that were kept could not be pushed; trying again")
            await asyncio.sleep(LOOK_EVERY)

    async def _push_all(self, *, paused: bool) -> None:
        """Push what there is; while pushing is switched off, only see how much it is."""
        for path in [path for path in self._parts if not path.exists()]:  # another process pushed it
            self.pending -= len(self._parts.pop(path).left)
        if not paused and (self._writer is None or self._writer.done()):
            self._leave()
        blocked: set[str] = set()
        for path in sorted(self._folder.glob("*.pushes")):
            try:
                file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            except FileNotFoundError:
                continue
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if path.exists():
                    part = await self._read(path)
                    if part is not None and not paused:
                        await self._push(part, blocked)
            except BlockingIOError:
                continue
            finally:
                os.close(file)

    async def _read(self, path: Path) -> _Part | None:
        part = self._parts.get(path)
        if part is None:
            stored = await asyncio.to_thread(path.read_bytes)
            try:
                part = _Part(path, unpack(stored))
            except Conflict as error:
                if path not in self._closed:
                    self._closed.add(path)
                    log.error("kept pushes in %s wait for their key: %s", path, error)  # noqa: TRY400
                return None
            self._parts[path] = part
            if path not in self._own:
                self.pending += len(part.left)
        return part

    async def _push(self, part: _Part, blocked: set[str]) -> None:
        for group in part.now(blocked):
            if not await self._try(part, group, blocked):
                for at in group:
                    await self._try(part, [at], blocked)
        if not part.left:
            os.unlink(part.path)
            del self._parts[part.path]
            self._own.discard(part.path)

    async def _try(self, part: _Part, group: list[int], blocked: set[str]) -> bool:
        """Push some messages; False if one of several is in the way of the others."""
        queues = {part.left[at][0].queue for at in group}
        if not blocked.isdisjoint(queues):
            return False
        try:
            await self._engine.push([_pushed(*part.left[at]) for at in group])
        except Unavailable:
            raise
        except QueueError as error:
            if len(group) > 1:
                return False
            if isinstance(error, QueueFull):
                blocked |= queues
                return False
            self._refuse(part, *part.left[group[0]], error)
        for at in group:
            del part.left[at]
        self.pending -= len(group)
        return True

    def _refuse(self, part: _Part, item: Kept, came: float, error: QueueError) -> None:
        """What can never be pushed is put aside, so that nothing waits behind it."""
        aside = part.path.with_suffix(".refused")
        with aside.open("ab") as file:
            file.write(pack(Entry(came, [item])))
            file.flush()
            os.fsync(file.fileno())
        self.refused += 1
        log.error("a kept message cannot be pushed, it is in %s: %s", aside, error)


def kept(item: PushItem) -> Kept:
    """A message as it is stored."""
    return Kept(
        item.queue,
        item.partition,
        item.transaction_id or str(uuid.uuid4()),
        bytes(item.payload),
        item.content_type,
        None if item.headers is None else dict(item.headers),
        item.delay_seconds,
        item.trace_id,
        item.producer,
    )


def _pushed(item: Kept, since: float) -> PushItem:
    """The message again; its delay counts from when it came."""
    return PushItem(
        item.queue,
        item.payload,
        item.partition,
        item.transaction_id,
        item.headers,
        item.content_type,
        max(0.0, item.delay_seconds - (time.time() - since)) if item.delay_seconds else 0,
        item.trace_id,
        item.producer,
    )
