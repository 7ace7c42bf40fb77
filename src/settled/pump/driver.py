"""What both drivers share: a pump's state, and being told to stop. No rules."""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterator, Sequence
from typing import Any, ClassVar, Generic, TypeVar

from settled.clock import Bell, Clock
from settled.message import Delivery
from settled.pump.log import SettlementLog, logger
from settled.pump.loop import Counts, Effect, Status, Stopped, Strikes, pump
from settled.pump.settlers import AwaitableSettler, BlockingSettler
from settled.settlement import Action, describe
from settled.subscriber import Subscription
from settled.transports.base import AsyncChannel, Buffers, Channel

C = TypeVar("C", bound=Channel | AsyncChannel)


class Pump(Generic[C]):
    """One performer of a subscription, on a channel of one kind; its settler is that kind's."""

    settler: ClassVar[type[BlockingSettler] | type[AwaitableSettler]]

    def __init__(
        self,
        subscription: Subscription,
        channel: C,
        clock: Clock,
        strikes: Strikes | None = None,
        *,
        until_idle: bool = False,
    ) -> None:
        self.subscription = subscription
        self.channel = channel
        self.status = Status.CREATED
        self.why = ""
        self.error: BaseException | None = None
        self._counts = Counts()
        """What the pump's own thread has counted."""
        self._later = Counts()
        self._later_lock = threading.Lock()
        self.in_hand: Delivery | None = None
        self.received: Sequence[Delivery] = ()
        self.strikes = strikes or Strikes(subscription.policy, clock.now)
        self._until_idle = until_idle
        self._clock = clock
        self._stop = Bell()
        self._log = SettlementLog(subscription.source.channel, clock.now)
        self._settler: BlockingSettler | AwaitableSettler = self.settler(
            channel,  # type: ignore[arg-type]
            subscription.policy.backoff,
            self._settled_late,
        )

    def stop(self) -> None:
        """End after the message in hand; pauses end at once. Safe from any thread."""
        self._stop.ring()
        self.channel.wake()

    @property
    def stopping(self) -> bool:
        return self._stop.rung > 0

    def close(self) -> None:
        """The channel is closed: from now on a message of it cannot be settled."""
        self._settler.close()

    @property
    def counts(self) -> Counts:
        """How deliveries ended, with what became of those that were left alone."""
        with self._later_lock:
            return self._counts + self._later

    def _settled_late(self, action: Action) -> None:
        with self._later_lock:
            self._later.left -= 1
            self._later.count(action)

    def held(self) -> Iterator[Delivery]:
        """What is in hand, or waits for its turn: here, or inside the channel."""
        # The next receive is made when the last of this one is handled or given back.
        yield from (one for one in self.received if not one.settled and not one.handled)
        channel: object = self.channel
        if isinstance(channel, Buffers):
            yield from channel.buffered()

    def _effects(self) -> Generator[Effect, Any, Stopped]:
        self.status = Status.STARTED
        return pump(
            self.subscription.policy,
            counts=self._counts,
            strikes=self.strikes,
            stopping=lambda: self._stop.rung > 0,
            log=self._log,
            can=lambda: self.channel.capabilities,
            now=self._clock.now,
            until_idle=self._until_idle,
        )

    def _ended(self, stopped: Stopped) -> Stopped:
        self.status, self.why, self.error = stopped.status, stopped.why, stopped.error
        if stopped.status in (Status.LIMIT_EXCEEDED, Status.ERROR):
            logger.error("pump of %s stopped: %s: %s", self.subscription.name, stopped.status, stopped.why)
        return stopped

    def _crashed(self, error: BaseException) -> Stopped:
        return self._ended(Stopped(Status.ERROR, describe(error), error))
