"""Publishing assignments: acknowledged, tried again with backoff, within a deadline."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import StrEnum

import msgspec
import nats.errors
import nats.js.errors

from settled.observe import tracing
from settled.observe.metrics import Metrics
from settled.router.config import RouterConfig, deadline_ms
from settled.router.contracts import ExecAssignment, ids
from settled.router.memory import Memory
from settled.transports.nats import Connection

logger = logging.getLogger("settled.router")


class Outcome(StrEnum):
    """What became of an assignment that raised nothing."""

    PUBLISHED = "published"
    SKIPPED = "skipped"
    """The kill switch is off."""
    BLOCKED = "blocked"
    """Its tenant is not served."""


class PublishError(Exception):
    """An assignment was not published; nothing will bring it again but a new call."""

    def __init__(self, text: str, kind: str, retries: int) -> None:
        super().__init__(text)
        self.kind = kind
        self.retries = retries


@dataclass(frozen=True, slots=True)
class Fault:
    """An error as the router sees it."""

    kind: str
    retriable: bool


RETRIABLE = ("timeout", "no_responders", "server_error", "connection_failed")
KINDS = (
    *RETRIABLE,
    "payload_too_large",
    "invalid_message",
    "unauthorized",
    "rejected_by_stream",
    "unknown",
)

# The server's code for any failed store; only its text tells a full stream from a broken disk.
_STORE_FAILED = 10077
_FULL = ("maximum messages exceeded", "maximum bytes exceeded", "maximum messages per subject exceeded")


def classify(error: BaseException, *, connected: bool = True) -> Fault:
    """Which kind an error is, and whether another try may go better.

    A timeout while the connection was lost is the connection's failure, not the stream's slowness.

    >>> classify(TimeoutError()), classify(nats.errors.MaxPayloadError())
    (Fault(kind='timeout', retriable=True), Fault(kind='payload_too_large', retriable=False))
    >>> classify(TimeoutError(), connected=False).kind
    'connection_failed'
    """
    match error:
        case TimeoutError() if not connected:
            return Fault("connection_failed", True)
        case TimeoutError():
            return Fault("timeout", True)
        case nats.js.errors.NoStreamResponseError() | nats.errors.NoRespondersError():
            return Fault("no_responders", True)
        case nats.errors.MaxPayloadError():
            return Fault("payload_too_large", False)
        case nats.errors.BadSubjectError() | nats.errors.BadHeaderError():
            return Fault("invalid_message", False)
        case nats.errors.AuthorizationError():
            return Fault("unauthorized", False)
        case nats.js.errors.APIError() if _is_full(error):
            return Fault("rejected_by_stream", False)
        case nats.js.errors.APIError() if (error.code or 0) >= 500:
            return Fault("server_error", True)
        case nats.js.errors.APIError():
            return Fault("rejected_by_stream", False)
        case nats.errors.Error() | ConnectionError() | OSError():
            return Fault("connection_failed", True)
        case _:
            return Fault("unknown", False)


def _is_full(error: nats.js.errors.APIError) -> bool:
    return error.err_code == _STORE_FAILED and any(word in (error.description or "") for word in _FULL)


class AssignmentPublisher:
    """Publishes assignments. Time and chance come in as arguments, so that tests can set them."""

    def __init__(
        self,
        connection: Connection,
        config: RouterConfig,
        metrics: Metrics,
        memory: Memory,
        *,
        enabled: Callable[[], bool] | None = None,
        random: Callable[[], float],
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._connection = connection
        self._config = config
        self._metrics = metrics
        self.memory = memory
        self.enabled = enabled or (lambda: config.push_assignment_enabled)
        self._random = random
        self._sleep = sleep

    async def publish(self, assignment: ExecAssignment, *, expected_latency_ms: float = 1_000) -> Outcome:
        """Publish with the broker's acknowledgement; PublishError if that was not to be had."""
        known = ids(assignment)
        if not self.enabled():
            self._metrics.count("router_assignment_skipped_total", reason="disabled")
            logger.info("assignment skipped: publishing is switched off", extra={"settled": known})
            return Outcome.SKIPPED
        if not self._config.serves(assignment.tenant_id):
            self._metrics.count(
                "router_assignment_blocked_total",
                tenant_id=assignment.tenant_id,
                reason="tenant_not_allowed",
            )
            logger.warning(
                "assignment blocked: tenant %r is not served", assignment.tenant_id, extra={"settled": known}
            )
            return Outcome.BLOCKED
        with tracing.span("router.assignment.publish", kind="producer", attributes=known):
            await self._publish(assignment, known, deadline_ms(expected_latency_ms) / 1000)
        return Outcome.PUBLISHED

    async def _publish(self, assignment: ExecAssignment, known: dict[str, str], allowed: float) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + allowed
        headers = tracing.inject(
            {
                # The stream drops a second copy, so a try whose answer was lost may be repeated.
                "Nats-Msg-Id": known["assignment_id"],
                "content-type": "application/json",
                "version": assignment.version,
                "tenant_id": assignment.tenant_id,
            }
        )
        data = msgspec.json.encode(assignment)
        retries, patience = 0, min(self._config.publish_timeout_seconds, allowed)
        while True:
            generation = self._connection.generation
            try:
                await self._once(assignment, data, headers, patience)
            except Exception as error:
                same = self._connection.generation == generation
                fault = classify(error, connected=same and self._connection.status().connected)
                failed = error
            else:
                self._metrics.count("router_assignment_published_total", known)
                return
            delay = self._delay(retries)
            if not fault.retriable:
                raise self._given_up(known, fault, retries, "cannot be published", failed) from failed
            if retries >= self._config.caf_max_retries or loop.time() + delay > deadline:
                self._metrics.count(
                    "router_retry_exhausted_total", known, error_kind=fault.kind, retries=str(retries)
                )
                raise self._given_up(known, fault, retries, "retries exhausted", failed) from failed
            retries += 1
            self._metrics.count("router_assignment_retry_total", known)
            logger.warning(
                "assignment publish failed, retry %d in %.3f s: %s",
                retries,
                delay,
                fault.kind,
                extra={"settled": {**known, "error_kind": fault.kind, "retries": retries}},
            )
            await self._sleep(delay)

    async def _once(
        self, assignment: ExecAssignment, data: bytes, headers: dict[str, str], timeout: float
    ) -> None:
        # First, so that a result which comes at once finds it.
        await asyncio.wait_for(
            self.memory.put("tenant", str(assignment.assignment_id), assignment.tenant_id), timeout
        )
        await self._connection.publish_once(self._config.assign_subject, data, headers, timeout)

    def _delay(self, retries: int) -> float:
        """Doubling, give or take a fifth."""
        base: float = self._config.caf_retry_base_ms / 1000 * 2**retries
        return base * (0.8 + 0.4 * self._random())

    def _given_up(
        self, known: dict[str, str], fault: Fault, retries: int, what: str, error: BaseException
    ) -> PublishError:
        subject = self._config.assign_subject
        self._metrics.count(
            "router_assignment_publish_failures_total", known, error_kind=fault.kind, subject=subject
        )
        text = (
            f"assignment {known['assignment_id']} on {subject}: {what} after {retries} retries: "
            f"{fault.kind}: {error}"
        )
        logger.error(text, extra={"settled": {**known, "error_kind": fault.kind, "retries": retries}})
        return PublishError(text, fault.kind, retries)
