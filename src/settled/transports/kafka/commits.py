"""Commits of a classic group's consumer: when they are made, and what becomes of one that is refused."""

from __future__ import annotations

import asyncio
import logging
import math
import threading
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import TypeAlias

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition

from settled.transports.base import LeaseLost
from settled.transports.kafka.lane import Lane

logger = logging.getLogger("settled.kafka")

COMMIT_WITHIN = 0.05
"""How many seconds what is settled waits for the rest of its batch."""

_FENCED = {KafkaError.ILLEGAL_GENERATION, KafkaError.UNKNOWN_MEMBER_ID, KafkaError.FENCED_INSTANCE_ID}
# The next commit, at the latest the one when the partition is given up, says the same.
_PASSING = {KafkaError.REBALANCE_IN_PROGRESS, KafkaError._NO_OFFSET}

Wanted: TypeAlias = tuple[Lane, int, str]
"""A lane, and the offset and note the broker should have of it."""


def uncommitted(lanes: Iterable[Lane]) -> list[Wanted]:
    """What the broker does not know yet."""
    return [(lane, *wanted) for lane in lanes if (wanted := lane.uncommitted()) is not None]


class Commits:
    """One commit after the other; what is settled while one is made goes with the next."""

    def __init__(
        self,
        topic: str,
        lanes: Mapping[tuple[str, int], Lane],
        lock: threading.Lock,
        heard: Callable[[], None],
        commit: Callable[[list[Wanted]], Awaitable[None]],
    ) -> None:
        """`commit` has `make` called in the client's thread; `lock` is that of the lanes."""
        self._topic = topic
        self._lanes = lanes
        self._lock = lock
        self._heard = heard
        self._commit = commit
        self._turn = asyncio.Lock()
        # When what is settled is committed, if no commit has been begun for it; those that will.
        self._within = math.inf
        self._later: set[asyncio.Task[None]] = set()

    def due(self, seconds: float) -> bool:
        """Whether there will be a commit by then, without another word. From any thread."""
        return self._within <= seconds

    def within(self, seconds: float) -> None:
        """Commit by then, unless one is due anyway."""
        if not self.due(seconds):
            self._within = seconds
            task = asyncio.create_task(self._make_later(seconds), name="kafka-commit")
            self._later.add(task)
            task.add_done_callback(self._later.discard)

    async def flush(self) -> None:
        """Wait for what is under way, and make what is due."""
        if self._turn.locked() or self._within < math.inf:
            await self._make_later(0)

    async def now(self) -> None:
        async with self._turn:
            # What is settled from here on needs another.
            self._within = math.inf
            with self._lock:
                wanted = uncommitted(self._lanes.values())
            if wanted:
                await self._commit(wanted)

    def make(self, consumer: Consumer, wanted: list[Wanted]) -> None:
        """In the client's thread: commit, and wait until the broker has it."""
        if not wanted:
            return
        places = [TopicPartition(lane.topic, lane.number, at, note) for lane, at, note in wanted]
        try:
            answers = consumer.commit(offsets=places, asynchronous=False) or []
        except KafkaException as error:
            self._refused(error)
            return
        failed = [answer.error for answer in answers if answer.error is not None]
        if failed:
            self._refused(KafkaException(failed[0]))
            return
        with self._lock:
            for lane, at, note in wanted:
                lane.committed = (at, note)
        self._heard()

    def close(self) -> None:
        """Begin no more."""
        for task in self._later:
            task.cancel()

    def _refused(self, error: KafkaException) -> None:
        code = error.args[0].code()
        if code in _FENCED:
            raise LeaseLost(f"topic {self._topic!r}: the group goes on without this consumer") from error
        if code not in _PASSING:
            raise error
        logger.info("%s: committed later: %s", self._topic, error)

    async def _make_later(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
        try:
            await self.now()
        except Exception as error:
            logger.error("%s: not committed yet: %s", self._topic, error)  # noqa: TRY400
