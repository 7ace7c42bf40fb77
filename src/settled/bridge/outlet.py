"""Writing to the target: what it takes, what it will never take, and waiting while it is away."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from settled.signals import ConfigurationError
from settled.transports.base import Outgoing, Published, PublishesMany, Refuses, Transport
from settled.transports.urls import in_one_line

logger = logging.getLogger("settled")

_FIRST_PAUSE = 0.1
_LONGEST_PAUSE = 5.0
_MOST = 100
CALLS = 64
"""How many calls to one broker are under way at most: clients have pools of connections, and bounds."""


class Refused(Exception):
    """The target will never take this message."""


class Outlet:
    """Publishes to one transport, for as long as it takes.

    After a failure only one call at a time is made, with growing pauses, until one gets through: a target
    that is away, or full, is not stormed by all that is in flight.
    """

    def __init__(self, target: Transport, name: str) -> None:
        self._target = target
        self._name = name
        self._failures = 0
        self._one_at_a_time = asyncio.Lock()
        self._some_at_a_time = asyncio.Semaphore(CALLS)
        self.why_away = ""

    @property
    def is_away(self) -> bool:
        """Whether the last try failed."""
        return self._failures > 0

    @property
    def most(self) -> int:
        """How many messages one call may take."""
        return _MOST if isinstance(self._target, PublishesMany) else 1

    async def write(self, messages: Sequence[Outgoing]) -> Sequence[Published]:
        """Publish, confirmed, in order; Refused if one is never taken, ConfigurationError if nothing is."""
        while True:
            if not self._failures:
                published = await self._try(messages)
            else:
                async with self._one_at_a_time:
                    if self._failures:
                        await asyncio.sleep(self._pause())
                    published = await self._try(messages)
            if published is not None:
                return published

    def _pause(self) -> float:
        return float(min(_LONGEST_PAUSE, _FIRST_PAUSE * 2 ** min(self._failures - 1, 10)))

    async def _publish(self, messages: Sequence[Outgoing]) -> Sequence[Published]:
        async with self._some_at_a_time:
            if len(messages) > 1 and isinstance(self._target, PublishesMany):
                return await self._target.publish_many(messages)
            return [await self._target.publish(message) for message in messages]

    async def _try(self, messages: Sequence[Outgoing]) -> Sequence[Published] | None:
        tried_after = self._failures
        try:
            published = await self._publish(messages)
        except ConfigurationError:
            raise
        except Exception as error:
            if isinstance(self._target, Refuses) and self._target.refuses(error):
                raise Refused(f"{self._name} does not take it: {in_one_line(error)}") from error
            self._failed(messages[0], error, tried_after)
            return None
        if self._failures:
            logger.info("bridge: %s takes messages again", self._name)
            self._failures, self.why_away = 0, ""
        return published

    def _failed(self, message: Outgoing, error: Exception, tried_after: int) -> None:
        self.why_away = in_one_line(error)
        if tried_after != self._failures:
            # One of many that were in flight when the first failed.
            return
        self._failures += 1
        logger.warning(
            "bridge: %s did not take message_id=%s, again in %g s: %s",
            self._name,
            message.id,
            self._pause(),
            self.why_away,
        )
