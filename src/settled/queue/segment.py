"""The stored form of a run of messages: columns behind a version byte, compressed by us when that pays."""

from __future__ import annotations

import base64
import os
import struct
import time
from array import array
from datetime import UTC, datetime
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import zstandard

from settled.queue.sealing import SEALED, seal_value, unseal

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

JSON = "application/json"
SINGLE, PLAIN, ZSTD = 1, 2, 3
APART, ZSTD_APART = 5, 6  # as PLAIN and ZSTD, with a NUL after each value, so that they can be split at once
EXPLICIT_IDS, OWN_TX, HEADERS, TIMES = 1, 2, 4, 8
COMPRESS_FROM = 512

_single = struct.Struct("<BBHI")
_columns = struct.Struct("<BBI")
_compressor = zstandard.ZstdCompressor(level=1, write_content_size=True)
_decompressor = zstandard.ZstdDecompressor()
_SEVEN = bytes(0x70 | i & 0x0F for i in range(256))
_EIGHT = bytes(0x80 | i & 0x3F for i in range(256))
_ESCAPED = b'"\\' + bytes(range(32))  # what a string of JSON may not hold as it is
_DIGITS = [f"{i:08x}" for i in range(4096)]
_NUMBERS = [each.encode() for each in _DIGITS]
_encode = msgspec.json.encode
_decode = msgspec.json.decode

# Headers of the engine itself; a `:` keeps them apart from any HTTP-like header a caller may send.
TYPE_KEY, TRACE_KEY, PRODUCER_KEY = ":type", ":trace", ":producer"


class Row(NamedTuple):
    """One message of a segment, decoded."""

    id: str
    transaction_id: str
    payload: bytes
    content_type: str
    headers: dict[str, str]
    trace_id: str | None
    producer: str | None
    created_us: int


def _make_tails() -> Iterator[bytes]:
    """What follows the time in a UUIDv7: version, variant and random bits, then four zero bytes."""
    while True:
        block = bytearray(os.urandom(6000))
        block[0::6] = block[0::6].translate(_SEVEN)
        block[2::6] = block[2::6].translate(_EIGHT)
        yield from [bytes(block[i : i + 6]) + b"\0\0\0\0" for i in range(0, 6000, 6)]


def _renew_tails() -> None:
    global _tails  # a forked process must not draw what its parent draws
    _tails = _make_tails()


_tails = _make_tails()
os.register_at_fork(after_in_child=_renew_tails)


def new_base() -> bytes:
    """A UUIDv7 whose last four bytes are zero: message i of a segment has this id plus i."""
    return int(time.time() * 1000).to_bytes(6, "big") + next(_tails)


def uuid_text(raw: bytes) -> str:
    """Sixteen bytes as the usual 36 characters."""
    h = raw.hex()
    return f"{h[:8]}-{h[8:12]}-{h[12:16]}-{h[16:20]}-{h[20:]}"


def id_texts(base: bytes, n: int) -> list[str]:
    """The ids of a segment whose ids count up from `base`."""
    if n == 1:
        return [uuid_text(base)]
    prefix = uuid_text(base)[:28]
    start = int.from_bytes(base[12:], "big")
    if start + n > len(_NUMBERS):
        return [f"{prefix}{i:08x}" for i in range(start, start + n)]
    return [prefix + number for number in _DIGITS[start : start + n]]


def encode(
    base: bytes,
    tx: Sequence[bytes],
    payloads: Sequence[bytes],
    headers: Sequence[bytes] | None = None,
    ids: bytes | None = None,
    times: Sequence[int] | None = None,
) -> bytes:
    """Messages to stored bytes; an empty transaction id means "the same as the message id".

    `ids` (16 bytes each) and `times` (µs) are given only where they cannot be counted up from `base` and the
    row's time, as after merging segments.
    """
    n = len(payloads)
    if n == 1 and ids is None and times is None:
        head = headers[0] if headers else b""
        return b"".join((_single.pack(SINGLE, 0, len(tx[0]), len(head)), base, tx[0], head, payloads[0]))
    end = b"\0"
    texts = end.join(payloads) + end
    if texts.count(end) != n:  # a payload that is not JSON may hold one itself
        end, texts = b"", b"".join(payloads)
    flags = 0
    parts: list[bytes] = [base]
    if ids is not None:
        flags |= EXPLICIT_IDS
        parts = [ids]
    if any(tx):
        flags |= OWN_TX
        parts += (array("H", map(len, tx)).tobytes(), end.join(tx), end)
    if headers and any(headers):
        flags |= HEADERS
        parts += (array("I", map(len, headers)).tobytes(), end.join(headers), end)
    if times is not None:
        flags |= TIMES
        parts.append(array("q", times).tobytes())
    parts += (array("I", map(len, payloads)).tobytes(), texts)
    return _pack(flags, n, b"".join(parts), bool(end))


def encode_plain(base: bytes, n: int, lengths: bytes, payloads: bytes) -> bytes:
    """Messages without ids or headers of their own, given as columns: n lengths (uint32) and all payloads."""
    return _pack(0, n, b"".join((base, lengths, payloads)))


def _pack(flags: int, n: int, body: bytes, apart: bool = False) -> bytes:
    if len(body) < COMPRESS_FROM:
        return _columns.pack(APART if apart else PLAIN, flags, n) + body
    return _columns.pack(ZSTD_APART if apart else ZSTD, flags, n) + _compressor.compress(body)


def count(raw: bytes) -> int:
    """How many messages a stored segment has."""
    return 1 if raw[0] == SINGLE else int(_columns.unpack_from(raw)[2])


def pack_headers(
    headers: dict[str, str] | None, content_type: str, trace_id: str | None, producer: str | None
) -> bytes:
    """Headers and the engine's own fields as one JSON object, or nothing at all for a plain JSON message."""
    own = dict(headers) if headers else {}
    if content_type != JSON:
        own[TYPE_KEY] = content_type
    if trace_id is not None:
        own[TRACE_KEY] = trace_id
    if producer is not None:
        own[PRODUCER_KEY] = producer
    return _encode(own) if own else b""


def iso(created_us: int) -> str:
    """Microseconds since 1970 as ISO 8601 in UTC."""
    return f"{_second(created_us // 1_000_000)}.{created_us % 1_000_000:06d}Z"


@lru_cache(maxsize=1024)
def _second(at: int) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%dT%H:%M:%S")


def values(body: bytes, at: int, n: int, kind: str, apart: bool) -> tuple[list[bytes], int]:
    """The values of a column that begins with their lengths, and where it ends."""
    lengths = array(kind, body[at : (first := at + n * array(kind).itemsize)])
    if apart:
        end = first + sum(lengths) + n
        return body[first : end - 1].split(b"\0"), end
    starts = list(accumulate(lengths, initial=first))
    return [body[a:b] for a, b in pairwise(starts)], starts[-1]


class Segment:
    """A decoded segment: its values as stored, texts of ids and JSON when they are asked for."""

    __slots__ = (
        "_base",
        "_headers",
        "_ids",
        "_payloads",
        "_texts",
        "_times",
        "_tx",
        "created_us",
        "first_seq",
        "n",
        "sealed",
        "size",
    )

    def __init__(self, first_seq: int, created_us: int, raw: bytes) -> None:
        self.first_seq = first_seq
        self.created_us = created_us
        self.size = len(raw)
        self._texts: tuple[bytes, bytes, bytes, list[bytes]] | None = None
        self._ids: list[str] | None = None
        self._base = b""
        self._headers: list[bytes] | None = None
        self._times: array[int] | None = None
        self.sealed = raw[0] == SEALED
        if self.sealed:
            raw = unseal(raw)
        match raw[0]:
            case 1:
                _, _, tx, head = _single.unpack_from(raw)
                at = 24 + tx + head
                self.n = 1
                self._base = raw[8:24]
                self._tx: list[bytes] | None = [raw[24 : 24 + tx]] if tx else None
                self._headers = [raw[24 + tx : at]] if head else None
                self._payloads = [raw[at:]]
            case 2 | 3 | 5 | 6:
                kind, flags, self.n = _columns.unpack_from(raw)
                body = _decompressor.decompress(raw[6:]) if kind in (ZSTD, ZSTD_APART) else raw[6:]
                self._split(body, flags, kind in (APART, ZSTD_APART))
            case other:
                raise ValueError(f"segment version {other} is newer than this program; upgrade it")

    def _split(self, body: bytes, flags: int, apart: bool) -> None:
        n, at = self.n, 16
        if flags & EXPLICIT_IDS:
            at = 16 * n
            self._ids = [uuid_text(body[i : i + 16]) for i in range(0, at, 16)]
        self._base = body[:16]
        self._tx = None
        if flags & OWN_TX:
            self._tx, at = values(body, at, n, "H", apart)
        if flags & HEADERS:
            self._headers, at = values(body, at, n, "I", apart)
        if flags & TIMES:
            self._times = array("q", body[at : at + 8 * n])
            at += 8 * n
        self._payloads, _ = values(body, at, n, "I", apart)
        self.size = len(body)

    @property
    def plain(self) -> bool:
        """Whether all messages are JSON without headers, appended at the same time."""
        return self._headers is None and self._times is None

    @property
    def end_seq(self) -> int:
        """The sequence number after the last message."""
        return self.first_seq + self.n

    def ids(self) -> list[str]:
        """All message ids."""
        if self._ids is None:
            self._ids = id_texts(self._base, self.n)
        return self._ids

    def id(self, offset: int) -> str:
        """One message's id."""
        if self._ids is not None:
            return self._ids[offset]
        return f"{uuid_text(self._base)[:28]}{int.from_bytes(self._base[12:], 'big') + offset:08x}"

    def tx(self, offset: int) -> str:
        """One message's transaction id."""
        return (self._tx[offset].decode() if self._tx is not None else "") or self.id(offset)

    def txs(self) -> list[str]:
        """All transaction ids."""
        return self.txs_of(range(self.n)) if self._tx is not None else self.ids()

    def txs_of(self, offsets: range | Sequence[int]) -> list[str]:
        """The transaction ids of some messages."""
        if self._tx is None:
            ids = self.ids()
            return [ids[offset] for offset in offsets]
        if isinstance(offsets, range):
            own = [tx.decode() for tx in self._tx[offsets.start : offsets.stop]]
        else:
            own = [self._tx[offset].decode() for offset in offsets]
        return own if all(own) else [tx or self.id(at) for tx, at in zip(own, offsets, strict=True)]

    def own_tx(self) -> list[bytes] | None:
        """Transaction ids as pushed (UTF-8, empty where none was given), or None where no message had one."""
        return self._tx

    def payload(self, offset: int) -> bytes:
        """One message's payload."""
        return self._payloads[offset]

    def header(self, offset: int) -> bytes:
        """One message's headers as stored: a JSON object, or nothing."""
        return self._headers[offset] if self._headers is not None else b""

    def weight(self, offset: int) -> int:
        """How many bytes one message holds."""
        tx = len(self._tx[offset]) if self._tx is not None else 0
        return tx + len(self.header(offset)) + len(self._payloads[offset])

    def stored(self, offset: int) -> tuple[bytes, bytes]:
        """Headers and payload of one message for a copy of it, sealed if the message was."""
        headers, payload = self.header(offset), self.payload(offset)
        return (seal_value(headers), seal_value(payload)) if self.sealed else (headers, payload)

    def created(self, offset: int) -> int:
        """When the message was appended, in µs since 1970."""
        return self._times[offset] if self._times is not None else self.created_us

    def row(self, offset: int) -> Row:
        """One message, decoded."""
        own: dict[str, str] = _decode(self.header(offset) or b"{}")
        kind = own.pop(TYPE_KEY, JSON)
        trace, producer = own.pop(TRACE_KEY, None), own.pop(PRODUCER_KEY, None)
        return Row(self.id(offset), self.tx(offset), self.payload(offset), kind, own, trace, producer,
                   self.created(offset))  # fmt: skip

    def json(self, low: int, high: int, tail: bytes) -> bytes:
        """Messages [low, high) as JSON objects with commas between; `tail` ends each and closes it."""
        if self._texts is None:
            self._texts = self._json_texts()
        start, again, end, txs = self._texts
        if not start or high > len(_NUMBERS):
            return (tail + b",").join([self._rich_head(i) for i in range(low, high)]) + tail
        count = high - low
        end += tail
        if count == 1:
            text = b'%b%b%b%b","transactionId":"%b","traceId":null,"data":%b%b'
            number = _NUMBERS[low]
            return text % (start, number, again, number, txs[low], self._payloads[low], end)
        # Eight pieces a message, laid out column by column: nothing is copied before the join.
        parts = [end + b"," + start] * (8 * count)
        parts[0] = start
        parts[1::8] = parts[3::8] = _NUMBERS[low:high]
        parts[2::8] = [again] * count
        parts[4::8] = [b'","transactionId":"'] * count
        parts[5::8] = txs[low:high]
        parts[6::8] = [b'","traceId":null,"data":'] * count
        parts[7::8] = self._payloads[low:high]
        parts.append(end)
        return b"".join(parts)

    def _json_texts(self) -> tuple[bytes, bytes, bytes, list[bytes]]:
        """The beginning of each message up to the last digits of its id, the same of `messageId`, the end,
        and the transaction ids.

        Only where messages differ in nothing else; else all is empty.
        """
        if not self.plain or self._ids is not None or self._base[12:] != b"\0\0\0\0":
            return b"", b"", b"", []
        own = uuid_text(self._base)[:28].encode()
        if self._tx is None:
            txs = [own + number for number in _NUMBERS[: self.n]]
        elif all(self._tx) and len(raw := b"".join(self._tx)) == len(raw.translate(None, _ESCAPED)):
            txs = self._tx
        else:
            txs = [_encode(tx)[1:-1] for tx in self.txs()]
        end = b',"producerSub":null,"createdAt":"%b"' % iso(self.created_us).encode()
        return b'{"id":"' + own, b'","messageId":"' + own, end, txs

    def _rich_head(self, offset: int) -> bytes:
        if not self.header(offset):  # as most are in a merged segment
            own, at = self.id(offset).encode(), iso(self.created(offset)).encode()
            text = (
                b'{"id":"%b","messageId":"%b","transactionId":%b,"traceId":null,"data":%b,'
                b'"producerSub":null,"createdAt":"%b"'
            )
            return text % (own, own, _encode(self.tx(offset)), self.payload(offset), at)
        row = self.row(offset)
        fields: dict[str, object] = {
            "id": row.id,
            "messageId": row.id,
            "transactionId": row.transaction_id,
            "traceId": row.trace_id,
        }
        if row.content_type == JSON or row.content_type.endswith("+json"):
            fields["data"] = msgspec.Raw(row.payload)
        else:
            try:
                fields["data"] = row.payload.decode()
            except UnicodeDecodeError:
                fields["data"] = base64.b64encode(row.payload).decode()
                fields["encoding"] = "base64"
        if row.content_type != JSON:
            fields["contentType"] = row.content_type
        fields |= {"producerSub": row.producer, "createdAt": iso(row.created_us)}
        if row.headers:
            fields["headers"] = row.headers
        return _encode(fields)[:-1]
