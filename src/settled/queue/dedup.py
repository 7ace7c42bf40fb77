"""Which transaction ids a lane has seen: hashes in memory, twelve bytes an id; callers verify each hit."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from struct import Struct
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

FRESH_LIMIT = 4096
FEW = 12
STORED = np.dtype("<u8")
_one = Struct("<Q")


def fingerprint(tx: bytes) -> int:
    """The 64-bit hash of a transaction id; 0 is kept for "has none"."""
    return xxhash.xxh3_64_intdigest(tx) or 1


def fingerprints(ids: Iterable[bytes]) -> list[int]:
    """The hashes of transaction ids."""
    found = [*map(xxhash.xxh3_64_intdigest, ids)]
    return [key or 1 for key in found] if 0 in found else found


def pack(hashes: Sequence[int]) -> bytes | None:
    """Hashes as a segment stores them, or None if no message has one."""
    if len(hashes) == 1:
        return _one.pack(hashes[0]) if hashes[0] else None
    return array("Q", hashes).tobytes() if any(hashes) else None


class _Run:
    """Sorted hashes with their sequence numbers, as offsets from the smallest one."""

    __slots__ = ("base", "keys", "seqs", "view")

    def __init__(self, keys: NDArray[np.uint64], seqs: NDArray[np.int64]) -> None:
        order = np.argsort(keys, kind="stable")
        self.keys = keys[order]
        self.base = int(seqs.min())
        self.seqs = (seqs[order] - self.base).astype(np.uint32)
        self.view = memoryview(self.keys)  # type: ignore[arg-type]

    def merge(self, other: _Run) -> _Run:
        seqs = np.concatenate((self.seqs + np.int64(self.base), other.seqs + np.int64(other.base)))
        return _Run(np.concatenate((self.keys, other.keys)), seqs)

    def find(self, key: int) -> list[int]:
        at = bisect_left(self.view, key)
        found = []
        while at < len(self.view) and self.view[at] == key:
            found.append(self.base + int(self.seqs[at]))
            at += 1
        return found

    def any_of(self, keys: NDArray[np.uint64]) -> bool:
        at = np.minimum(np.searchsorted(self.keys, keys), len(self.keys) - 1)
        return bool((self.keys[at] == keys).any())


class Remembered:
    """The ids of one lane, up to and without sequence number `known` (-1: not read yet)."""

    __slots__ = ("_doubled", "_fresh", "_runs", "known", "size")

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Start over; the ids must be read again before the next push."""
        self.known = -1
        self.size = 0
        self._fresh: dict[int, int | list[int]] = {}
        self._doubled = False  # some hash in there stands for several ids
        self._runs: list[_Run] = []

    def add(self, first_seq: int, hashes: Sequence[int]) -> None:
        """Remember the ids of a segment."""
        fresh = self._fresh
        if len(hashes) == 1 and hashes[0] and hashes[0] not in fresh:  # as most are that come alone
            fresh[hashes[0]] = first_seq
            self.size += 1
            if len(fresh) > FRESH_LIMIT:
                self._pack()
            return
        own = set(hashes)
        if len(own) == len(hashes) and 0 not in own and fresh.keys().isdisjoint(own):
            fresh.update(zip(hashes, range(first_seq, first_seq + len(hashes)), strict=True))
        else:
            for seq, key in enumerate(hashes, first_seq):
                if key:
                    before = fresh.setdefault(key, seq)
                    if before != seq:  # two ids with one hash: keep both
                        fresh[key] = [*before, seq] if isinstance(before, list) else [before, seq]
                        self._doubled = True
        self.size += len(hashes)
        if len(fresh) > FRESH_LIMIT:
            self._pack()

    def load(self, segments: Iterable[tuple[int, bytes]], known: int) -> None:
        """Take over a lane's stored hashes, as (first_seq, hashes)."""
        self.forget()
        keys, seqs = [], []
        for first_seq, raw in segments:
            values = np.frombuffer(raw, STORED)
            keys.append(values)
            seqs.append(np.arange(first_seq, first_seq + len(values), dtype=np.int64))
        if keys:
            key, seq = np.concatenate(keys), np.concatenate(seqs)
            real = key != 0
            if real.any():
                self._runs = [_Run(key[real], seq[real])]
                self.size = int(real.sum())
        self.known = known

    def meets(self, hashes: Sequence[int]) -> bool:
        """Whether one of these may be here; nearly always not."""
        if not self._fresh.keys().isdisjoint(hashes):
            return True
        if not self._runs or not any(hashes):
            return False
        if len(hashes) > FEW:
            keys = np.array(hashes, dtype=np.uint64)
            return any(run.any_of(keys) for run in self._runs)
        return any(run.find(key) for run in self._runs for key in hashes if key)

    def suspects(self, hashes: Sequence[int]) -> dict[int, list[int]]:
        """Sequence numbers with one of these hashes, by hash; nearly always empty."""
        found: dict[int, list[int]] = {}
        fresh = self._fresh
        if not fresh.keys().isdisjoint(hashes):
            for key in hashes:
                if key and key in fresh:
                    before = fresh[key]
                    found[key] = list(before) if isinstance(before, list) else [before]
        if self._runs:
            if len(hashes) > FEW:
                keys = np.array(hashes, dtype=np.uint64)
                runs = [run for run in self._runs if run.any_of(keys)]
            else:
                runs = self._runs
            for run in runs:
                for key in hashes:
                    if key and (seqs := run.find(key)):
                        found[key] = found.get(key, []) + [s for s in seqs if s not in found.get(key, ())]
        return found

    def _pack(self) -> None:
        keys: Iterable[int] = self._fresh
        seqs: Iterable[Any] = self._fresh.values()
        if self._doubled:
            pairs = [(k, s) for k, v in self._fresh.items() for s in (v if isinstance(v, list) else (v,))]
            keys, seqs = zip(*pairs, strict=True)
        run = _Run(np.fromiter(keys, np.uint64), np.fromiter(seqs, np.int64))
        self._fresh, self._doubled = {}, False
        while self._runs and len(self._runs[-1].keys) < 2 * len(run.keys):
            run = self._runs.pop().merge(run)
        self._runs.append(run)
