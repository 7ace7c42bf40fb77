"""What can go wrong in the queue, as exceptions that name the thing, the value and what to do."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from settled.queue.types import PushResult


class QueueError(Exception):
    """Any refusal or failure of the queue."""


class BadRequest(QueueError):
    """The caller sent something that can never work; `field` names it."""

    def __init__(self, field: str, value: object, hint: str) -> None:
        shown = repr(value)
        super().__init__(f"{field}: {hint}, got {shown if len(shown) <= 120 else shown[:117] + '...'}")
        self.field = field
        self.value = value
        self.hint = hint


class NotFound(QueueError):
    """What was asked for is not there."""

    def __init__(self, what: str, name: str) -> None:
        super().__init__(f"{what} not found: {name}")
        self.what = what
        self.name = name


class Conflict(QueueError):
    """The request contradicts what is already stored."""


class QueueFull(QueueError):
    """The queue holds `max_size` pending messages or more and takes no push until some are settled."""

    def __init__(self, queue: str, size: int, max_size: int, count: int = 1) -> None:
        more = f" and {count} to be pushed" if count > 1 else ""
        super().__init__(
            f"queue {queue!r} is full: {size} pending{more}, maxSize {max_size}; settle some or raise maxSize"
        )
        self.queue = queue
        self.size = size
        self.max_size = max_size


class Unavailable(QueueError):
    """Postgres cannot be reached now; try again after `retry_after` seconds."""

    def __init__(self, why: str, retry_after: float = 1.0) -> None:
        super().__init__(f"the queue's database is unavailable: {why}")
        self.retry_after = retry_after


class PartlyStored(Unavailable):
    """A push over several partitions of which a part is stored; `results` says what became of each item."""

    def __init__(self, results: Sequence[PushResult], cause: Exception) -> None:
        stored = sum(result.status not in ("failed", "unknown") for result in results)
        QueueError.__init__(
            self,
            f"{stored} of {len(results)} items are stored, as results says: push the others again, or all "
            f"under the same transactionIds ({cause})",
        )
        self.retry_after = 1.0
        self.results = results


class Paused(Unavailable):
    """Pushing is switched off for maintenance."""

    def __init__(self) -> None:
        QueueError.__init__(self, "pushes are switched off for maintenance")
        self.retry_after = 5.0


class Fenced(QueueError):
    """The caller's claim was taken over by another holder; nothing was applied."""
