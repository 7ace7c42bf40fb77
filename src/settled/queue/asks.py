"""Pops on their way to a claim: which lanes each may take from, and who shares one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from settled.queue.names import new_lease
from settled.queue.soon import deliver

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from settled.queue.lanes import Lane
    from settled.queue.popped import Empty, Popped
    from settled.queue.ready import ReadySet
    from settled.queue.types import PopRequest


def _nobody(_: Ask) -> None:
    """Nobody waits for this ask."""


class Ask:
    """One pop as it goes through a flush: where it may take from, and what it got.

    `done` is called with it, once. A caller that went away before sets `gone`.
    """

    __slots__ = (
        "answered",
        "done",
        "error",
        "gone",
        "group_id",
        "lane",
        "older_than",
        "popped",
        "request",
        "sets",
        "until",
        "why",
    )

    def __init__(
        self, request: PopRequest, group_id: int, sets: Sequence[ReadySet], lane: Lane | None
    ) -> None:
        self.request = request
        self.group_id = group_id
        self.sets = sets
        self.lane = lane
        self.popped: Popped | None = None
        self.why: Empty = "no_available_partition"
        self.until: float | None = None
        self.older_than: float | None = None
        self.error: Exception | None = None
        self.answered = self.gone = False
        self.done: Callable[[Ask], None] = _nobody

    def finish(self, error: Exception | None = None) -> None:
        """Tell the caller; the two forget each other then."""
        if not self.answered:
            self.answered = True
            self.error = error
            done, self.done = self.done, _nobody
            if not self.gone:
                deliver(done, self)


class Share:
    """One claim's entry: a lane, who shares it, and from which set it was taken."""

    __slots__ = ("asks", "group_id", "lane_id", "lease", "ready", "room", "turn", "want")

    def __init__(
        self, lane_id: int, group_id: int, ready: ReadySet | None, ask: Ask, lease: str | None
    ) -> None:
        self.lane_id = lane_id
        self.group_id = group_id
        self.ready = ready
        self.turn = ready.turn if ready is not None else 0
        self.asks = [ask]
        self.want = ask.request.batch
        self.lease = lease
        self.room = 0


def _lease(ask: Ask, lane_id: int, *, wide: bool) -> str:
    return new_lease(lane_id, ask.group_id, wide=wide, ends_on_nack=ask.request.release_rest)


def assign(asks: list[Ask]) -> list[Share]:
    """Give each ask the lanes that have waited longest, as many as it seems to need.

    Asks that settle at once may share one.
    """
    shares: list[Share] = []
    open_shares: dict[ReadySet, Share] = {}
    for ask in asks:
        request = ask.request
        if ask.lane is not None:
            lease = None if request.auto_ack else _lease(ask, ask.lane.id, wide=False)
            shares.append(Share(ask.lane.id, ask.group_id, None, ask, lease))
            continue
        taken: list[Share] = []
        left = request.batch
        for ready in ask.sets:
            shared = open_shares.get(ready)
            if request.auto_ack and request.partitions == 1 and shared is not None and shared.room > 0:
                shared.asks.append(ask)
                shared.want += request.batch
                shared.room -= request.batch
                taken.append(shared)
                break
            while len(taken) < request.partitions and left > 0 and ready.ready:
                guess = next(iter(ready.ready.values()))
                left -= guess
                lane_id = ready.take()
                assert lane_id is not None  # noqa: S101
                share = Share(lane_id, ask.group_id, ready, ask, None)
                taken.append(share)
                shares.append(share)
                if request.auto_ack and request.partitions == 1:
                    share.room = guess - request.batch
                    open_shares[ready] = share
            if len(taken) >= request.partitions or left <= 0:
                break
        if taken and not request.auto_ack:
            lease = _lease(ask, taken[0].lane_id, wide=len(taken) > 1)
            for share in taken:
                share.lease = lease
    return shares
