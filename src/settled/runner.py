"""Runs the pumps of an app: tasks for async handlers, threads for sync ones, and an orderly end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Coroutine, Iterable, Sequence
from typing import Any

from settled.clock import Clock
from settled.handlers.layers import layers
from settled.policy import OnError
from settled.pump import Counts, Proactor, Reactor, Status
from settled.pump.leases import Keeper
from settled.pump.log import logger
from settled.pump.loop import Strikes
from settled.settlement import describe
from settled.signals import ConfigurationError
from settled.subscriber import Subscription
from settled.transports.base import Attempts, Capabilities, DelayMeans, NackMeans, Prepares, Transport
from settled.transports.urls import in_one_line


class Crew:
    """All performers of one subscription."""

    def __init__(self, subscription: Subscription, clock: Clock) -> None:
        self.subscription = subscription
        self.strikes = Strikes(subscription.policy, clock.now)
        self.pumps: list[Reactor | Proactor] = []
        self.done: list[asyncio.Future[None]] = []
        self._keepers: list[asyncio.Task[None]] = []
        self._clock = clock

    @property
    def status(self) -> Status:
        """Started while any performer is; else how the first that did not end by request ended."""
        states = [pump.status for pump in self.pumps]
        for status in (Status.ERROR, Status.LIMIT_EXCEEDED, Status.STARTED):
            if status in states:
                return status
        return states[0] if states else Status.CREATED

    @property
    def why(self) -> str:
        return next((pump.why for pump in self.pumps if pump.why and pump.status is self.status), "")

    @property
    def running(self) -> int:
        return sum(pump.status is Status.STARTED for pump in self.pumps)

    @property
    def counts(self) -> Counts:
        return sum((pump.counts for pump in self.pumps), Counts())

    @property
    def name(self) -> str:
        return self.subscription.name

    async def prepare(self, transport: Transport) -> None:
        """Let the transport look at, or make, what is read."""
        if isinstance(transport, Prepares):
            await transport.prepare(self.subscription.source)

    def join(self, transport: Transport) -> None:
        """Make the pumps: the broker knows of the group before any of them receives."""
        source = self.subscription.source
        for _ in range(self.subscription.policy.performers):
            if self.subscription.is_async:
                channel = transport.async_channel(source)
                self.pumps.append(Proactor(self.subscription, channel, self._clock, self.strikes))
            else:
                blocking = transport.channel(source)
                self.pumps.append(Reactor(self.subscription, blocking, self._clock, self.strikes))
        self._warn(self.pumps[0].channel.capabilities)

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Run the pumps."""
        for number, pump in enumerate(self.pumps):
            name = f"{self.name}#{number}"
            if isinstance(pump, Proactor):
                self.done.append(asyncio.create_task(self._perform_async(pump), name=name))
            else:
                done: asyncio.Future[None] = loop.create_future()
                self.done.append(done)
                # A daemon: a handler that never ends must not keep the process.
                arguments = (pump, loop, done)
                threading.Thread(target=self._perform, args=arguments, name=name, daemon=True).start()
            self._keep_leases(pump)

    def _keep_leases(self, pump: Reactor | Proactor) -> None:
        longest = self.subscription.policy.extend_for
        if longest > 0 and pump.channel.capabilities.extends:
            keeper = Keeper(self.name, pump.channel, pump.held, longest)
            self._keepers.append(asyncio.create_task(keeper.run(), name=f"{self.name}-leases"))

    async def _perform_async(self, pump: Proactor) -> None:
        try:
            await pump.run()
        except (Exception, asyncio.CancelledError):
            logger.debug("pump of %s ended", self.name, exc_info=True)
        finally:
            self._one_ended(pump)

    def _perform(self, pump: Reactor, loop: asyncio.AbstractEventLoop, done: asyncio.Future[None]) -> None:
        try:
            pump.run()
        except BaseException:
            logger.debug("pump of %s ended", self.name, exc_info=True)
        finally:
            self._one_ended(pump)
            if not loop.is_closed():
                loop.call_soon_threadsafe(_set, done)

    def _one_ended(self, pump: Reactor | Proactor) -> None:
        if pump.status in (Status.LIMIT_EXCEEDED, Status.ERROR):
            # The limit is the subscription's, not a performer's.
            self.stop()

    def stop(self) -> None:
        for pump in self.pumps:
            pump.stop()

    async def close(self) -> None:
        for keeper in self._keepers:
            keeper.cancel()
        for pump in self.pumps:
            if isinstance(pump, Proactor):
                await pump.channel.close()
            else:
                # It may wait for this very loop, so it must not be called in it.
                await asyncio.to_thread(pump.channel.close)
            pump.close()

    def _warn(self, capabilities: Capabilities) -> None:
        policy = self.subscription.policy
        releases = policy.on_error is OnError.DONT_ACK or any(
            layer.releases for layer in layers(self.subscription.handler)
        )
        if capabilities.nack is NackMeans.NONE and releases:
            logger.warning(
                "%s: asks not to acknowledge, but this transport cannot give a message back: it will be lost",
                self.name,
            )
        if capabilities.attempts is Attempts.NONE and policy.requeue_count > 0:
            logger.warning(
                "%s: allows %d attempts, but this broker does not count them: they begin anew with every "
                "delivery of its own",
                self.name,
                policy.requeue_count,
            )
        limit = capabilities.max_attempts
        if limit is not None and capabilities.counts_releases and releases:
            logger.warning(
                "%s: asks not to acknowledge, but the broker gives a message up after %d deliveries: "
                "it does not block for ever",
                self.name,
                limit,
            )
        if limit is not None and not 0 <= policy.requeue_count <= limit:
            parked = capabilities.delay is DelayMeans.PARKED
            logger.log(
                # Who said nothing leaves the budget to the broker.
                logging.INFO if policy.requeue_count < 0 else logging.WARNING,
                "%s: allows %s attempts, but the broker gives a message up after %d deliveries: "
                "the failure of the last one is rejected%s",
                self.name,
                "unlimited" if policy.requeue_count < 0 else policy.requeue_count,
                limit,
                "; those after a delay do not count" if parked else "",
            )


def _set(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


class Runner:
    """One run of an app."""

    def __init__(self, subscriptions: Sequence[Subscription], transport: Transport, clock: Clock) -> None:
        self.crews = [Crew(subscription, clock) for subscription in subscriptions]
        self.is_running = False
        self.trouble = "starting"
        """What keeps it from running; empty when it runs, or has run."""
        self._transport = transport
        self._stop: asyncio.Event | None = None
        self._hurry = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    async def run(self, stop: asyncio.Event) -> None:
        """Check, open, pump until stopped, drain, release, close."""
        try:
            await self._run(stop)
        except BaseException as error:
            self.trouble = self.trouble and describe(error)
            raise

    async def _run(self, stop: asyncio.Event) -> None:
        check_layers(crew.subscription for crew in self.crews)
        self._stop = stop
        if not await _unless(stop, self._transport.open(), "cannot connect"):
            self.trouble = ""
            return
        self.is_running = True
        try:
            for crew in self.crews:
                preparing = crew.prepare(self._transport)
                if not await _unless(stop, preparing, f"cannot prepare {crew.name}"):
                    self.trouble = ""
                    return
            for crew in self.crews:
                crew.join(self._transport)
            for crew in self.crews:
                crew.start(self._loop)
                logger.info("%s: started", crew.name)
            self.trouble = ""
            ended = asyncio.create_task(_all(done for crew in self.crews for done in crew.done))
            stopped = asyncio.create_task(_when(stop))
            try:
                await asyncio.wait({ended, stopped}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                stopped.cancel()
                ended.cancel()
                await self._drain()
        finally:
            for crew in self.crews:
                await crew.close()
            await self._transport.close()
            self.is_running = False

    def stop(self) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: it has ended
            self._loop.call_soon_threadsafe(self._set_stop)

    def _set_stop(self) -> None:
        if self._stop is not None:
            self._stop.set()

    def hurry(self) -> None:
        """Do not wait for handlers any longer."""
        self._hurry.set()

    async def _drain(self) -> None:
        for crew in self.crews:
            crew.stop()
        await asyncio.gather(*(self._drain_crew(crew) for crew in self.crews))

    async def _drain_crew(self, crew: Crew) -> None:
        hurry = asyncio.create_task(_when(self._hurry))
        ended = asyncio.create_task(_all(crew.done))
        await asyncio.wait(
            {ended, hurry},
            timeout=crew.subscription.policy.shutdown_grace,
            return_when=asyncio.FIRST_COMPLETED,
        )
        ended.cancel()
        hurry.cancel()
        for pump, done in zip(crew.pumps, crew.done, strict=True):
            if not done.done():
                if pump.in_hand is not None:
                    logger.warning("%s: a handler goes on after the stop; releasing its message", crew.name)
                if isinstance(pump, Reactor):
                    await asyncio.to_thread(pump.release)
                else:
                    done.cancel()
        # A cancelled task still has to release what it holds; a thread cannot be made to end.
        tasks = [done for pump, done in zip(crew.pumps, crew.done, strict=True) if isinstance(pump, Proactor)]
        if tasks:
            await asyncio.wait(tasks, timeout=_RELEASE_TIMEOUT)


def check_layers(subscriptions: Iterable[Subscription]) -> None:
    """ConfigurationError for a decorator that cannot work, such as a switch nobody knows."""
    for subscription in subscriptions:
        for layer in layers(subscription.handler):
            if layer.check is not None:
                layer.check()


_RELEASE_TIMEOUT = 5.0


async def _unless(stop: asyncio.Event, work: Coroutine[Any, Any, None], failed: str) -> bool:
    """Do a part of the start; False if it was told to stop before the broker answered.

    ConnectionError, with what `failed` and why, for an error of the broker's client.
    """
    working, stopped = asyncio.create_task(work), asyncio.create_task(_when(stop))
    try:
        await asyncio.wait({working, stopped}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            return False
        await working
    except (ConfigurationError, ConnectionError):
        raise
    except Exception as error:  # each client has its own for a server that is away
        raise ConnectionError(f"{failed}: {in_one_line(error)}") from error
    finally:
        stopped.cancel()
        working.cancel()
    return True


async def _all(futures: Iterable[asyncio.Future[None]]) -> None:
    await asyncio.wait([*futures])


async def _when(event: asyncio.Event) -> None:
    await event.wait()
