"""What comes back from workers: decoded, checked, and handled once."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

from settled.message import Message
from settled.observe import tracing
from settled.observe.metrics import Metrics
from settled.router.config import RouterConfig
from settled.router.contracts import ExecAssignmentAck, ExecResult, Violation, decode, ids
from settled.router.memory import DeliveryCounts, Memory

logger = logging.getLogger("settled.router")
audit = logging.getLogger("settled.router.audit")

C = TypeVar("C", ExecAssignmentAck, ExecResult)

EXHAUSTED = "max deliveries exhausted: "
"""How the error of a dead letter begins whose message had its last delivery; the reason follows."""


NOT_SETTLED = "not_settled_in_time"
TENANT_REASONS = ("tenant_not_allowed", "tenant_mismatch")
REASONS = (*TENANT_REASONS, "processing_error", NOT_SETTLED)
"""Why a message can be given up, as metrics say it."""


class _Consumer(ABC, Generic[C]):
    """One contract on one subject: decode, validate, drop a duplicate, check the tenant, handle, ack."""

    contract: type[C]
    source: str
    """As metrics call it: `results` or `acks`."""

    def __init__(
        self,
        config: RouterConfig,
        metrics: Metrics,
        memory: Memory,
        handle: Callable[[C], Awaitable[None]],
    ) -> None:
        self._config = config
        self._metrics = metrics
        self.memory = memory
        self._handle: Callable[[C], Awaitable[None]] = handle
        self.deliveries = DeliveryCounts()

    async def __call__(self, message: Message[bytes]) -> None:
        self.deliveries.note(message.id, message.attempt)
        try:
            body = decode(message.data, message.headers, self.contract)
        except Violation as violation:
            self._count_violation(violation)
            self.deliveries.forget(message.id)
            raise
        known = ids(body)
        with tracing.span(f"router.{self.source}.process", message.headers, attributes=known):
            await self._process(message, body, known)

    async def _process(self, message: Message[bytes], body: C, known: dict[str, str]) -> None:
        identity = getattr(body, "msg_id", None) or message.id
        try:
            if await self.memory.get(f"done-{self.source}", identity) is not None:
                self._metrics.count(f"router_{self.source}_duplicate_total")
                logger.info("duplicate dropped", extra={"settled": {**known, "msg_id": identity}})
                await self._ack(message)
                return
            wrong = await self._wrong_tenant(body)
            if wrong is not None:
                self._metrics.count(f"router_{self.source}_tenant_rejected_total", reason=wrong)
                audit.warning(
                    "tenant rejected",
                    extra={"settled": {**known, "tenant_id": body.tenant_id, "reason": wrong}},
                )
                await self._again(message, known, wrong)
                return
            await self._handle(body)
            await self.memory.put(f"done-{self.source}", identity, "1")
        except Exception as error:
            logger.exception("%s failed", self.source, extra={"settled": {**known, "msg_id": identity}})
            if not message.settled:
                await self._again(message, known, "processing_error", f"{type(error).__name__}: {error}")
            return
        self._count_handled(body)
        await self._ack(message)

    async def _wrong_tenant(self, body: C) -> str | None:
        if not self._config.serves(body.tenant_id):
            return "tenant_not_allowed"
        if body.assignment_id is None or body.tenant_id is None:
            return None
        owner = await self.memory.get("tenant", str(body.assignment_id))
        return None if owner is None or owner == body.tenant_id else "tenant_mismatch"

    async def _ack(self, message: Message[bytes]) -> None:
        await message.ack()
        self.deliveries.forget(message.id)

    async def _again(
        self, message: Message[bytes], known: dict[str, str], reason: str, detail: str = ""
    ) -> None:
        """Ask for it once more after the backoff; on its last delivery, to the dead letters."""
        if message.attempt >= self._config.nats_js_max_deliver:
            self.deliveries.forget(message.id)
            await message.term(f"{EXHAUSTED}{reason}" + (f"; {detail}" if detail else ""))
            return
        self._metrics.count("router_jetstream_redelivery_total", known, reason=reason, source=self.source)
        fields = {**known, "msg_id": message.id, "reason": reason, "source": self.source}
        logger.info(
            "Message redelivery requested",
            extra={"settled": {**fields, "delivery_count": message.attempt}},
        )
        await message.nak()

    def _count_violation(self, violation: Violation) -> None:
        if violation.kind == "parse":
            self._metrics.count(f"router_{self.source}_parse_failed_total")
        else:
            self._metrics.count(
                f"router_{self.source}_validation_failed_total",
                field=_bounded(violation.field, self.contract),
            )

    @abstractmethod
    def _count_handled(self, body: C) -> None:
        """Count one that was handled, under its own labels."""


class ResultConsumer(_Consumer[ExecResult]):
    """Results on `caf.exec.result.v1`, as the durable consumer `router-results`."""

    contract = ExecResult
    source = "results"

    def _count_handled(self, body: ExecResult) -> None:
        self._metrics.count(
            "router_results_total",
            status=body.status,
            job_type=body.job.type,
            provider_id=body.provider_id,
        )


class AckConsumer(_Consumer[ExecAssignmentAck]):
    """Acknowledgements on `caf.exec.assign.v1.ack`, as the durable consumer `router-acks`."""

    contract = ExecAssignmentAck
    source = "acks"

    def _count_handled(self, body: ExecAssignmentAck) -> None:
        self._metrics.count("router_acks_total", status=body.status)


def _bounded(field: str, contract: type) -> str:
    """A label of few values: the contract's own field, else `other`."""
    first = field.partition(".")[0]
    return first if first in contract.__struct_fields__ or first == "body" else "other"  # type: ignore[attr-defined]
