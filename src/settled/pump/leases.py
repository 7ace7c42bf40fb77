"""Starting the leases of messages anew while they are in hand."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Iterable
from typing import Any

from settled.message import Delivery
from settled.pump.log import logger
from settled.settlement import describe
from settled.transports.base import AsyncChannel, Channel, LeaseLost

# How often to look at a channel that does not know yet how long its leases are.
_LOOK_AGAIN = 0.25
_CALLS = 16


class _Kept:
    """How long one has been in hand, and when its lease began."""

    __slots__ = ("begun", "given_up", "since")

    def __init__(self, now: float) -> None:
        self.since = self.begun = now
        self.given_up = False


class Keeper:
    """Extends the leases of one channel, each when a third of it to a half is over.

    It asks for what is in hand, so that nobody has to tell it of a settlement. A lease that covers several
    messages is extended once for all of them. A message that has been in hand for `longest` seconds is left
    to the broker's timeout.
    """

    def __init__(
        self,
        name: str,
        channel: Channel | AsyncChannel,
        in_hand: Callable[[], Iterable[Delivery]],
        longest: float,
    ) -> None:
        self._name = name
        self._channel = channel
        self._in_hand = in_hand
        self._longest = longest
        self._kept: dict[Delivery, _Kept] = {}
        self._waits = not inspect.iscoroutinefunction(channel.extend)

    async def run(self) -> None:
        """Look after them until cancelled."""
        loop = asyncio.get_running_loop()
        looked = loop.time()
        while True:
            lease = self._channel.capabilities.lease
            await asyncio.sleep(_LOOK_AGAIN if lease is None else lease / 6)
            lease, now = self._channel.capabilities.lease, loop.time()
            known = self._kept
            # What is new came after the last look; when in doubt, right after it.
            self._kept = {one: known.get(one) or _Kept(looked) for one in self._in_hand()}
            looked = now
            if lease is not None:
                await self._extend_all(lease, now)

    async def _extend_all(self, lease: float, now: float) -> None:
        together: dict[str | Delivery, list[Delivery]] = {}
        for delivery, kept in self._kept.items():
            if kept.given_up or now - kept.begun < lease / 3:
                continue
            if now - kept.since >= self._longest:
                kept.given_up = True
                self._warn(delivery, f"it has been in hand for {now - kept.since:.0f} s")
                continue
            together.setdefault(delivery.metadata().lease or delivery, []).append(delivery)
        turns = asyncio.Semaphore(_CALLS)
        await asyncio.gather(*(self._extend(group, lease, turns) for group in together.values()))

    async def _extend(self, group: list[Delivery], lease: float, turns: asyncio.Semaphore) -> None:
        async with turns:
            begun = asyncio.get_running_loop().time()
            try:
                async with asyncio.timeout(lease):
                    await self._call(group[0])
            except Exception as error:
                if any(not one.settled for one in group):
                    self._warn(group[0], describe(error))
                for one in group:
                    self._kept[one].given_up = isinstance(error, LeaseLost)
            else:
                for one in group:
                    self._kept[one].begun = begun

    async def _call(self, delivery: Delivery) -> Any:
        # A blocking channel waits for the very loop this runs on.
        extended: Any = (
            asyncio.to_thread(self._channel.extend, delivery)
            if self._waits
            else self._channel.extend(delivery)
        )
        await extended

    def _warn(self, delivery: Delivery, why: str) -> None:
        logger.warning(
            "%s: the lease is not extended, the message may come twice message_id=%s attempt=%d cause=%r",
            self._name,
            delivery.id,
            delivery.attempt,
            why,
            extra={
                "settled": {
                    "event": "lease not extended",
                    "message_id": delivery.id,
                    "channel": self._name,
                    "attempt": delivery.attempt,
                    "cause": why,
                }
            },
        )
