"""Which transaction ids a lane has seen: hashes in memory, about 14 bytes an id; callers verify each hit.

The newest few of a lane are in a dict, at ten times that, until it is full or the lane is left alone.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from itertools import islice
from struct import Struct
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from settled.queue.options import setting

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from numpy.typing import NDArray

MEMORY = "SETTLED_DEDUP_BYTES"
ID_BYTES = 14
LEAST = 100_000
"""Messages of a partition whose ids are remembered whatever others take."""
FRESH_LIMIT = 4096
FEW = 12
SIEVE_FROM = 16_384
SIEVE_BITS = 16
_BIT = np.array([1 << at for at in range(8)], np.uint8)
_3, _7, _32 = np.uint64(3), np.uint64(7), np.uint64(32)
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


class Run:
    """Sorted hashes with their sequence numbers, as offsets from the smallest one."""

    __slots__ = ("base", "keys", "seqs", "view")

    def __init__(self, keys: NDArray[np.uint64], seqs: NDArray[np.int64]) -> None:
        order = np.argsort(keys, kind="stable")
        self.keys = keys[order]
        self.base = int(seqs.min())
        self.seqs = (seqs[order] - self.base).astype(np.uint32)
        self.view = memoryview(self.keys)  # type: ignore[arg-type]

    def merge(self, other: Run) -> Run:
        seqs = np.concatenate((self.seqs + np.int64(self.base), other.seqs + np.int64(other.base)))
        return Run(np.concatenate((self.keys, other.keys)), seqs)

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

    def since(self, seq: int) -> Run | None:
        """Without what is before a sequence number."""
        return self._only(self.seqs + np.int64(self.base) >= seq)

    def before(self, seq: int) -> Run | None:
        """Without what is at a sequence number or after it."""
        return self._only(self.seqs + np.int64(self.base) < seq)

    def _only(self, chosen: NDArray[np.bool_]) -> Run | None:
        if bool(chosen.all()):
            return self
        return Run(self.keys[chosen], self.seqs[chosen] + np.int64(self.base)) if chosen.any() else None


class Sieve:
    """Says of most hashes, by one bit for each, that they are in no run: long runs are seldom searched."""

    __slots__ = ("_bits", "_slots", "_view", "room")

    def __init__(self, runs: Sequence[Run]) -> None:
        size = sum(len(run.keys) for run in runs)
        self.room = size  # so many may be added before it says too little
        self._slots = size * SIEVE_BITS
        self._bits = np.zeros((self._slots >> 3) + 1, np.uint8)
        self._view = memoryview(self._bits)  # type: ignore[arg-type]
        for run in runs:
            self._set(run.keys)

    def add(self, keys: NDArray[np.uint64]) -> None:
        """Let these through."""
        self.room -= len(keys)
        self._set(keys)

    def _set(self, keys: NDArray[np.uint64]) -> None:
        at = self._places(keys)
        np.bitwise_or.at(self._bits, (at >> _3).astype(np.int64), _BIT[at & _7])

    def _places(self, keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
        places: NDArray[np.uint64] = ((keys >> _32) * np.uint64(self._slots)) >> _32
        return places

    def one(self, key: int) -> bool:
        """Whether the hash may be in a run."""
        at = ((key >> 32) * self._slots) >> 32
        return bool(self._view[at >> 3] >> (at & 7) & 1)

    def all(self, keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """The hashes that may be in a run."""
        at = self._places(keys)
        through: NDArray[np.uint64] = keys[(self._bits[at >> _3] & _BIT[at & _7]) != 0]
        return through


def run_of(segments: Iterable[tuple[int, bytes]]) -> Run | None:
    """The ids of stored segments, as (first_seq, hashes); None if they have none."""
    keys, seqs = [], []
    for first_seq, raw in segments:
        values = np.frombuffer(raw, STORED)
        keys.append(values)
        seqs.append(np.arange(first_seq, first_seq + len(values), dtype=np.int64))
    if not keys:
        return None
    key, seq = np.concatenate(keys), np.concatenate(seqs)
    real = key != 0
    return Run(key[real], seq[real]) if real.any() else None


def sieve_of(runs: Sequence[Run]) -> Sieve | None:
    """A sieve for runs that are long enough to want one."""
    return Sieve(runs) if sum(len(run.keys) for run in runs) >= SIEVE_FROM else None


class Memory:
    """How many ids all lanes of a worker remember, how many may be, and who has some in a dict.

    `rounds` are counted by whoever tidies up, and `forgotten` are ids that were dropped for want of room.
    """

    __slots__ = ("forgotten", "limit", "loose", "rounds", "total")

    def __init__(self) -> None:
        self.total = self.forgotten = 0
        self.limit = setting(MEMORY, ID_BYTES, 512 * 2**20) // ID_BYTES
        self.rounds = 0
        self.loose: set[Remembered] = set()


class Remembered:
    """The ids of one lane, up to and without sequence number `known` (-1: not read yet).

    `used` is the round in which it was last added to.
    """

    __slots__ = ("_doubled", "_fresh", "_marked", "_memory", "_runs", "_sieve", "known", "size", "used")

    def __init__(self, memory: Memory | None = None) -> None:
        self._memory = memory if memory is not None else Memory()
        self.size = self.used = 0
        self.forget()

    def forget(self) -> None:
        """Start over; the ids must be read again before the next push."""
        self._memory.total -= self.size
        self._memory.loose.discard(self)
        self.known = self._marked = -1
        self.size = 0
        self._fresh: dict[int, int | list[int]] = {}
        self._doubled = False  # some hash in there stands for several ids
        self._runs: list[Run] = []
        self._sieve: Sieve | None = None

    def add(self, first_seq: int, hashes: Sequence[int]) -> None:
        """Remember the ids of a segment."""
        fresh = self._fresh
        if len(hashes) == 1 and hashes[0] and hashes[0] not in fresh:  # as most are that come alone
            fresh[hashes[0]] = first_seq
        elif len(own := set(hashes)) == len(hashes) and 0 not in own and fresh.keys().isdisjoint(own):
            fresh.update(zip(hashes, range(first_seq, first_seq + len(hashes)), strict=True))
        else:
            for seq, key in enumerate(hashes, first_seq):
                if key:
                    self._note(key, seq)
        self.size += len(hashes)
        self._memory.total += len(hashes)
        self.used = self._memory.rounds
        self._memory.loose.add(self)
        if len(fresh) > FRESH_LIMIT:
            self.pack()

    def mark(self) -> None:
        """Something is about to be added that may come to nothing."""
        self._marked = self.known

    def rewind(self) -> None:
        """It came to nothing, or nobody knows: the next push hears of what was added after all."""
        if self._marked < 0:
            self.forget()
        elif self.known > self._marked:
            self._filter(lambda run: run.before(self._marked), lambda seq: seq < self._marked)
            self.known = self._marked

    def room(self) -> int:
        """How many ids of this lane there is room for."""
        return max(LEAST, self._memory.limit - self._memory.total)

    def shorten(self, count: int) -> None:
        """Keep the newest ids only, about so many."""
        if count >= self.size:
            return
        seqs = np.concatenate(
            [run.seqs + np.int64(run.base) for run in self._runs]
            + [np.fromiter((seq for _, seq in self._pairs()), np.int64)]
        )
        before = self.size
        self.trim(int(np.partition(seqs, len(seqs) - count)[len(seqs) - count]))
        self._memory.forgotten += before - self.size

    def trim(self, first_seq: int) -> None:
        """Drop the ids of messages before this one."""
        oldest = min(
            [run.base for run in self._runs] + [seq for _, seq in islice(self._pairs(), 1)], default=0
        )
        if oldest < first_seq:
            self._filter(lambda run: run.since(first_seq), lambda seq: seq >= first_seq)

    def _filter(self, runs: Callable[[Run], Run | None], fresh: Callable[[int], bool]) -> None:
        self._runs = [kept for run in self._runs if (kept := runs(run)) is not None]
        pairs = [(k, s) for k, s in self._pairs() if fresh(s)]
        self._fresh, self._doubled = {}, False
        self._sieve = sieve_of(self._runs)
        size = sum(len(run.keys) for run in self._runs) + len(pairs)
        self._memory.total += size - self.size
        self.size = size
        for key, seq in pairs:
            self._note(key, seq)

    def load(self, segments: Iterable[tuple[int, bytes]], known: int) -> None:
        """Take over a lane's stored hashes, as (first_seq, hashes)."""
        run = run_of(segments)
        self.take([run] if run is not None else [], known)

    def take(self, runs: list[Run], known: int, sieve: Sieve | None = None) -> None:
        """Take over a lane's ids up to `known`."""
        self.forget()
        self._runs, self._sieve = runs, sieve or sieve_of(runs)
        self.size = sum(len(run.keys) for run in runs)
        self._memory.total += self.size
        self.used = self._memory.rounds
        self.known = self._marked = known

    def meets(self, hashes: Sequence[int]) -> bool:
        """Whether one of these may be here; nearly always not."""
        if not self._fresh.keys().isdisjoint(hashes):
            return True
        if not self._runs or not any(hashes):
            return False
        runs, likely = self._likely(hashes)
        if len(hashes) > FEW:
            return bool(runs)
        return any(run.find(key) for run in runs for key in likely if key)

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
            runs, likely = self._likely(hashes)
            for run in runs:
                for key in likely:
                    if key and (seqs := run.find(key)):
                        found[key] = found.get(key, []) + [s for s in seqs if s not in found.get(key, ())]
        return found

    def _likely(self, hashes: Sequence[int]) -> tuple[list[Run], Sequence[int]]:
        """Which runs to search for which hashes."""
        sieve = self._sieve
        if len(hashes) <= FEW:
            return self._runs, hashes if sieve is None else [key for key in hashes if sieve.one(key)]
        keys = np.array(hashes, dtype=np.uint64)
        if sieve is not None:
            keys = sieve.all(keys)
            hashes = keys.tolist()
        return [run for run in self._runs if run.any_of(keys)] if len(keys) else [], hashes

    def _note(self, key: int, seq: int) -> None:
        before = self._fresh.setdefault(key, seq)
        if before != seq:  # two ids with one hash: keep both
            self._fresh[key] = [*before, seq] if isinstance(before, list) else [before, seq]
            self._doubled = True

    def _pairs(self) -> Iterator[tuple[int, int]]:
        for key, seqs in self._fresh.items():
            for seq in seqs if isinstance(seqs, list) else (seqs,):
                yield key, seq

    def pack(self) -> None:
        """Bring the newest ids, too, into the form that takes little room."""
        self._memory.loose.discard(self)
        if len(self._fresh) <= FEW:
            return
        keys: Iterable[int] = self._fresh
        seqs: Iterable[Any] = self._fresh.values()
        if self._doubled:
            keys, seqs = zip(*self._pairs(), strict=True)
        run = Run(np.fromiter(keys, np.uint64), np.fromiter(seqs, np.int64))
        self._fresh, self._doubled = {}, False
        sieve = self._sieve
        if sieve is not None and sieve.room >= len(run.keys):
            sieve.add(run.keys)
        else:
            sieve = None
        while self._runs and len(self._runs[-1].keys) < 2 * len(run.keys):
            run = self._runs.pop().merge(run)
        self._runs.append(run)
        self._sieve = sieve or sieve_of(self._runs)
