"""The key-value bucket that the books are in: values replaced only by who has seen the last one."""

from __future__ import annotations

import uuid
import zlib
from dataclasses import dataclass

import msgspec
import nats.js.errors
from nats.js.api import KeyValueConfig

from settled.spark.jetstream.link import Link
from settled.transports.nats import Connection
from settled.transports.nats.delivery import MSG_ID

BUCKET = "SETTLED_SPARK"
STREAM = f"KV_{BUCKET}"
_INLINE = 64_000
_PART = 400_000
_WRONG_LAST_SEQUENCE = 10071
_EXPECTED = "Nats-Expected-Last-Subject-Sequence"


class _Parts(msgspec.Struct, tag="parts", tag_field="kind"):
    """In place of a value that is too large for one message."""

    name: str
    count: int


_parts = msgspec.json.Decoder(_Parts)


@dataclass(frozen=True, slots=True)
class Value:
    """A value as it was read, and its revision."""

    data: bytes
    revision: int
    parts: str = ""


NOTHING = Value(b"", 0)


def subject_of(key: str) -> str:
    """The subject of a key, which may have wildcards."""
    return f"$KV.{BUCKET}.{key}"


class Bucket:
    """The bucket over a link. It reads from the leader: a follower may not know yet what was written."""

    def __init__(self, link: Link) -> None:
        self._link = link

    def make(self, replicas: int) -> None:
        """Make the bucket if it is not there."""

        async def work(connection: Connection) -> None:
            jetstream = connection.jetstream
            try:
                await jetstream.stream_info(STREAM)
            except nats.js.errors.NotFoundError:
                await jetstream.create_key_value(
                    KeyValueConfig(
                        bucket=BUCKET,
                        history=1,
                        replicas=replicas,
                        direct=True,
                        description="Batches of Spark queries, made by Settled.",
                    )
                )

        self._link.run(work)

    def get(self, key: str) -> Value:
        """The value under a key; NOTHING if there is none, or no bucket."""
        found = self._raw(key)
        if not found.data.startswith(b'{"kind":"parts"'):
            return found
        named = _parts.decode(found.data)
        pieces = [self._raw(f"{key}.part.{named.name}.{i}").data for i in range(named.count)]
        if not all(pieces):
            # It was replaced while it was read.
            again = self._raw(key)
            if again.revision != found.revision:
                return self.get(key)
            raise RuntimeError(f"bucket {BUCKET}: parts of {key} are missing")
        return Value(zlib.decompress(b"".join(pieces)), found.revision, named.name)

    def _raw(self, key: str) -> Value:
        async def work(connection: Connection) -> Value:
            try:
                found = await connection.jetstream.get_last_msg(STREAM, subject_of(key))
            except nats.js.errors.NotFoundError:
                return NOTHING
            if "KV-Operation" in (found.headers or {}):  # deleted, by hand
                return Value(b"", found.seq or 0)
            return Value(found.data or b"", found.seq or 0)

        return self._link.run(work)

    def put(self, key: str, data: bytes) -> None:
        """Write a value, whatever was there."""
        self._publish(key, data, {})

    def replace(self, key: str, data: bytes, seen: Value) -> Value | None:
        """Write a value in place of the one that was seen; None if somebody else has replaced it already."""
        parts = ""
        if len(data) > _INLINE:
            packed, parts = zlib.compress(data, 1), uuid.uuid4().hex
            count = 0
            for count, at in enumerate(range(0, len(packed), _PART), 1):
                self.put(f"{key}.part.{parts}.{count - 1}", packed[at : at + _PART])
            stored = msgspec.json.encode(_Parts(parts, count))
        else:
            stored = data
        try:
            revision = self._publish(key, stored, {_EXPECTED: str(seen.revision)})
        except nats.js.errors.APIError as error:
            if error.err_code != _WRONG_LAST_SEQUENCE:
                raise
            # Ours may have been stored without us hearing of it.
            now = self._raw(key)
            if now.data != stored:
                return None
            revision = now.revision
        if seen.parts:
            self.remove(f"{key}.part.{seen.parts}.>")
        return Value(data, revision, parts)

    def sweep(self, key: str, value: Value) -> None:
        """Remove parts that a writer left behind who died before it could use them."""

        async def work(connection: Connection) -> list[str]:
            info = await connection.jetstream.stream_info(STREAM, subjects_filter=subject_of(f"{key}.part.>"))
            return list(info.state.subjects or ())

        prefix = subject_of(f"{key}.part.")
        found = {subject.removeprefix(prefix).partition(".")[0] for subject in self._link.run(work)}
        for name in found - {value.parts}:
            self.remove(f"{key}.part.{name}.>")

    def remove(self, key: str) -> None:
        """Remove what is under a key, without a trace; the key may have wildcards."""

        async def work(connection: Connection) -> None:
            await connection.jetstream.purge_stream(STREAM, subject=subject_of(key))

        self._link.run(work)

    def _publish(self, key: str, data: bytes, headers: dict[str, str]) -> int:
        # With an id, so that what is sent again after a lost answer is stored once.
        headers = {**headers, MSG_ID: uuid.uuid4().hex}

        async def work(connection: Connection) -> int:
            return (await connection.publish(subject_of(key), data, headers)).sequence

        return self._link.run(work)
