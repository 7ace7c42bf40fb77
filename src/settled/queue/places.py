"""Which message of a lease is where: a dict for a few, about 25 bytes a message for many."""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

FEW = 256
ONE_BY_ONE = 8


class Places:
    """Sequence numbers by transaction id, in the order in which the messages were handed out."""

    __slots__ = ("_base", "_few", "_keys", "_seqs", "_text", "_view")

    def __init__(self, ids: Sequence[str], seqs: Sequence[int]) -> None:
        self._few: dict[str, int] | None = None
        if len(ids) > FEW:
            # Python's hash of a text is keyed, so nobody can make two ids meet; where two do, a dict it is.
            keys = np.fromiter(map(hash, ids), np.int64, len(ids))
            order = np.argsort(keys, kind="stable")
            self._keys = keys[order]
            self._view = memoryview(self._keys)  # type: ignore[arg-type]
            self._base = min(seqs)
            self._seqs = (np.array(seqs, np.int64)[order] - self._base).astype(np.uint32)
            self._text = "\0".join(ids)
            if bool((self._keys[1:] != self._keys[:-1]).all()):
                return
        self._few = dict(zip(ids, seqs, strict=True))

    def find(self, transaction_id: str) -> int:
        """Where a message is, or -1."""
        if self._few is not None:
            return self._few.get(transaction_id, -1)
        key = hash(transaction_id)
        at = bisect_left(self._view, key)
        return self._base + int(self._seqs[at]) if at < len(self._view) and self._view[at] == key else -1

    def find_all(self, ids: Sequence[str]) -> list[int]:
        """Where messages are, each or -1."""
        if self._few is not None:
            return [self._few.get(each, -1) for each in ids]
        if len(ids) <= ONE_BY_ONE:
            return [self.find(each) for each in ids]
        keys = np.fromiter(map(hash, ids), np.int64, len(ids))
        at = np.minimum(np.searchsorted(self._keys, keys), len(self._keys) - 1)
        found = np.where(self._keys[at] == keys, self._seqs[at] + np.int64(self._base), -1)
        places: list[int] = found.tolist()
        return places

    def ids(self) -> list[str]:
        """All transaction ids."""
        return list(self._few) if self._few is not None else self._text.split("\0")
