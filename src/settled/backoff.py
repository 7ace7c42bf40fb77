"""How long to wait before the n-th retry."""

from __future__ import annotations

import random
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Backoff:
    """Exponential, with jitter, up to a maximum; the same curve as stamina's. Times are in seconds.

    >>> [Backoff(jitter=0).wait(n) for n in (1, 2, 3)]
    [0.1, 0.2, 0.4]
    """

    initial: float = 0.1
    maximum: float = 5.0
    jitter: float = 1.0
    base: float = 2.0

    def __post_init__(self) -> None:
        for name in ("initial", "maximum", "jitter"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"backoff: {name} must be 0 or more seconds, got {getattr(self, name)!r}")
        if not self.base >= 1:
            raise ValueError(f"backoff: base must be at least 1, got {self.base!r}")

    def wait(self, attempt: int) -> float:
        """The wait after the given number of failures."""
        jitter = random.uniform(0, self.jitter) if self.jitter else 0.0  # noqa: S311
        # Past 2 ** 63 any base is over any maximum, and a float would overflow.
        return min(self.maximum, self.initial * self.base ** min(attempt - 1, 63) + jitter)


AFTER_NAK = Backoff(initial=1.0, maximum=60.0, jitter=0.0)
"""How long a failed message waits where neither its subscriber nor its broker says anything."""
