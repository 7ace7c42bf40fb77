"""What a channel has to know of the options of a queue."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Rules:
    """How a queue leases and retries."""

    lease: float = 300.0
    in_order: bool = True
    """A lane waits for a message that failed."""
    max_attempts: int | None = 3
    """The attempt with which the queue itself makes a dead letter of a message that fails; None for never."""

    @classmethod
    def of(cls, *, lease: float, retry: str, retry_limit: int, gives_up: bool) -> Rules:
        """From the options, as the queue names them."""
        return cls(lease, retry == "in_order", max(1, retry_limit) if gives_up else None)
