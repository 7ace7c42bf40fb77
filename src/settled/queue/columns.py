"""Segments to columns, many at a time, without making rows."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import zstandard

from settled.queue import segment
from settled.queue.sealing import SEALED, unseal
from settled.queue.segment import APART, EXPLICIT_IDS, HEADERS, OWN_TX, PLAIN, TIMES, ZSTD, ZSTD_APART

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

_single = struct.Struct("<BBHI")
_decompress = zstandard.ZstdDecompressor().decompress
_GROUPS = ((0, 8), (8, 12), (12, 16), (16, 20), (20, 32))  # the digits between the dashes


class Columns(NamedTuple):
    """Messages of one lane in order; `tx` and `headers` are None where no message has any of its own."""

    seqs: NDArray[np.int64]
    created: NDArray[np.int64]
    ids: NDArray[np.uint8]
    """Sixteen bytes a message."""
    tx: list[bytes] | None
    headers: list[bytes] | None
    payload: bytes
    offsets: NDArray[np.int32]


def id_texts(ids: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Sixteen bytes a row as the usual 36 characters a row."""
    digits = np.frombuffer(ids.tobytes().hex().encode(), np.uint8).reshape(-1, 32)
    texts = np.full((len(ids), 36), ord("-"), np.uint8)
    for at, (first, last) in enumerate(_GROUPS):
        texts[:, first + at : last + at] = digits[:, first:last]
    return texts


class _Optional:
    """A column that most segments lack: it begins when the first value comes."""

    def __init__(self) -> None:
        self.values: list[bytes] | None = None

    def add(self, at: int, values: list[bytes]) -> None:
        """Values of the rows from `at` on."""
        self.values = self.values or []
        self.values += [b""] * (at - len(self.values)) + values

    def end(self, total: int) -> list[bytes] | None:
        """The whole column."""
        if self.values is not None:
            self.values += [b""] * (total - len(self.values))
        return self.values


def decode(rows: Iterable[tuple[int, int, int, bytes]]) -> Columns:
    """Columns of segments given as (first sequence, count, created in µs, body), in order."""
    firsts: list[int] = []
    counts: list[int] = []
    times: list[int] = []
    bases: list[bytes] = []
    lengths: list[bytes] = []
    payloads: list[bytes] = []
    explicit: list[tuple[int, int, bytes, bytes]] = []  # first row, count, ids, times
    tx, headers, total = _Optional(), _Optional(), 0
    for first, n, created, raw in rows:
        firsts.append(first)
        counts.append(n)
        times.append(created)
        kind = raw[0]
        if kind == SEALED:
            raw = unseal(raw)
            kind = raw[0]
        if kind == segment.SINGLE:
            _, _, tx_size, head_size = _single.unpack_from(raw)
            at = 24 + tx_size + head_size
            bases.append(raw[8:24])
            if tx_size:
                tx.add(total, [raw[24 : 24 + tx_size]])
            if head_size:
                headers.add(total, [raw[24 + tx_size : at]])
            lengths.append(struct.pack("<I", len(raw) - at))
            payloads.append(raw[at:])
        elif kind in (PLAIN, ZSTD, APART, ZSTD_APART):
            flags, apart = raw[1], kind in (APART, ZSTD_APART)
            body = _decompress(raw[6:]) if kind in (ZSTD, ZSTD_APART) else raw[6:]
            at = 16
            if flags:
                at = 16 * n if flags & EXPLICIT_IDS else 16
                ids = body[:at] if flags & EXPLICIT_IDS else b""
                if flags & OWN_TX:
                    values, at = segment.values(body, at, n, "H", apart)
                    tx.add(total, values)
                if flags & HEADERS:
                    values, at = segment.values(body, at, n, "I", apart)
                    headers.add(total, values)
                own = body[at : at + 8 * n] if flags & TIMES else b""
                at += len(own)
                if ids or own:
                    explicit.append((total, n, ids, own))
            bases.append(body[:16])
            lengths.append(body[at : at + 4 * n])
            texts = body[at + 4 * n :]
            payloads.append(texts.replace(b"\0", b"") if apart else texts)
        else:
            raise ValueError(f"segment version {kind} is newer than this program; upgrade it")
        total += n
    each = np.array(counts, np.int64)
    within = np.arange(total) - np.repeat(np.cumsum(each) - each, each)
    all_ids = np.repeat(np.frombuffer(b"".join(bases), np.uint8).reshape(-1, 16), each, axis=0)
    low = all_ids[:, 12:].view(">u4")
    low += within.astype(">u4").reshape(-1, 1)
    created_at = np.repeat(np.array(times, np.int64), each)
    for at, n, ids, own in explicit:
        if ids:
            all_ids[at : at + n] = np.frombuffer(ids, np.uint8).reshape(n, 16)
        if own:
            created_at[at : at + n] = np.frombuffer(own, "<i8")
    offsets = np.zeros(total + 1, np.int32)
    np.cumsum(np.frombuffer(b"".join(lengths), "<u4"), out=offsets[1:])
    seqs = np.repeat(np.array(firsts, np.int64), each) + within
    return Columns(seqs, created_at, all_ids, tx.end(total), headers.end(total), b"".join(payloads), offsets)
