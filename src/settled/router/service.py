"""The router as an app: two consumers, a publisher, and the streams they need."""

from __future__ import annotations

import asyncio
import logging
import random as chance
from collections.abc import Awaitable, Callable

import nats.js.errors
from nats.js.api import AckPolicy, ConsumerConfig, KeyValueConfig, StreamConfig

from settled.app import App, AppStatus
from settled.message import Message
from settled.observe.metrics import Metrics
from settled.router.assignments import KINDS, RETRIABLE, AssignmentPublisher
from settled.router.config import RouterConfig
from settled.router.consumers import (
    EXHAUSTED,
    NOT_SETTLED,
    REASONS,
    TENANT_REASONS,
    AckConsumer,
    ResultConsumer,
)
from settled.router.contracts import ExecAssignmentAck, ExecResult, Violation, decode, ids
from settled.router.memory import LocalMemory, Memory, SharedMemory
from settled.settlement import Reason
from settled.transports.nats import Durable, Letter, NatsTransport

logger = logging.getLogger("settled.router")

OnResult = Callable[[ExecResult], Awaitable[None]]
OnAck = Callable[[ExecAssignmentAck], Awaitable[None]]

# As long as letters of one message may be apart: a crash between letter and settlement, and a restart.
_DUPLICATE_WINDOW = 3600.0


async def _log_result(result: ExecResult) -> None:
    logger.info("result %s", result.status, extra={"settled": ids(result)})


async def _log_ack(ack: ExecAssignmentAck) -> None:
    logger.info("assignment %s", ack.status, extra={"settled": ids(ack)})


class Router:
    """Publishes assignments and consumes what comes back. Run as many as you like: they share the work."""

    def __init__(
        self,
        config: RouterConfig,
        *,
        on_result: OnResult = _log_result,
        on_ack: OnAck = _log_ack,
        metrics: Metrics | None = None,
        random: Callable[[], float] = chance.random,
    ) -> None:
        self.config = config
        self.metrics = metrics or Metrics(
            id_labels=config.metrics_id_labels,
            known={"job_type": config.metrics_job_types, "provider_id": config.metrics_providers},
            label_values=config.metrics_label_values,
        )
        self.transport = NatsTransport(
            config.url, name="router", on_dead_letter=self._count_letter, random=random
        )
        self.app = App(transport=self.transport)
        memory: Memory = LocalMemory()
        self.assignments = AssignmentPublisher(
            self.transport.connection, config, self.metrics, memory, random=random
        )
        self.results = ResultConsumer(config, self.metrics, memory, on_result)
        self.acks = AckConsumer(config, self.metrics, memory, on_ack)
        self._subscribe()
        self._expect()

    def _expect(self) -> None:
        """Series of alerts: what happens before a series is seen for the first time is no increase of it."""
        config, expect = self.config, self.metrics.expect
        for kind in KINDS:
            expect("router_assignment_publish_failures_total", error_kind=kind, subject=config.assign_subject)
        for kind in RETRIABLE:
            for retries in range(config.caf_max_retries + 1):
                expect("router_retry_exhausted_total", error_kind=kind, retries=str(retries))
        for reason in REASONS:
            expect("router_jetstream_maxdeliver_exhausted_total", reason=reason)
            for source in ("results", "acks"):
                expect("router_jetstream_redelivery_total", reason=reason, source=source)
        for reason in TENANT_REASONS:
            for source in ("results", "acks"):
                expect(f"router_{source}_tenant_rejected_total", reason=reason)

    def _subscribe(self) -> None:
        config = self.config

        @self.app.subscriber(
            config.result_subject,
            source=self._durable(config.result_stream, "router-results"),
            dead_letter=config.dead_letter_subject,
            performers=config.performers,
            requeue_count=config.nats_js_max_deliver,
        )
        async def results(message: Message[bytes]) -> None:
            await self.results(message)

        @self.app.subscriber(
            config.ack_subject,
            source=self._durable(config.ack_stream, "router-acks"),
            dead_letter=config.dead_letter_subject,
            performers=config.performers,
            requeue_count=config.nats_js_max_deliver,
        )
        async def acks(message: Message[bytes]) -> None:
            await self.acks(message)

    def _durable(self, stream: str, name: str) -> Durable:
        if not self.config.create:
            return Durable(stream=stream, consumer=name)
        return Durable(
            stream=stream,
            consumer=name,
            create=True,
            config=ConsumerConfig(
                ack_policy=AckPolicy.EXPLICIT,
                deliver_subject=f"_router.{name}",
                deliver_group=name,
                max_deliver=self.config.nats_js_max_deliver,
                backoff=list(self.config.nats_js_backoff_seconds),
            ),
        )

    async def serve(self, stop: asyncio.Event | None = None) -> AppStatus:
        """Connect, make what is missing, and run until stopped."""
        await self.open()
        return await self.app.serve(stop)

    async def open(self) -> None:
        """Connect and find, or make, the streams and the bucket; enough to publish assignments."""
        await self.transport.open()
        ask, config = self.transport.connection.ask, self.config
        if config.create:
            for stream, subject in (
                (config.assign_stream, config.assign_subject),
                (config.ack_stream, config.ack_subject),
                (config.result_stream, config.result_subject),
                (config.dead_letter_stream, config.dead_letter_subject),
            ):
                await self._make_stream(stream, subject)
        try:
            bucket = await ask(lambda jetstream: jetstream.key_value(config.bucket))
        except nats.js.errors.BucketNotFoundError:
            if not config.create:
                raise
            wanted = KeyValueConfig(
                bucket=config.bucket, ttl=config.bucket_ttl_seconds, replicas=config.replicas, history=1
            )
            bucket = await self.transport.connection.jetstream.create_key_value(wanted)
        memory = SharedMemory(bucket)
        self.assignments.memory = self.results.memory = self.acks.memory = memory

    async def _make_stream(self, name: str, subject: str) -> None:
        connection = self.transport.connection
        try:
            await connection.ask(lambda jetstream: jetstream.stream_info(name))
        except nats.js.errors.NotFoundError:
            await connection.jetstream.add_stream(
                StreamConfig(
                    name=name,
                    subjects=[subject],
                    num_replicas=self.config.replicas,
                    duplicate_window=_DUPLICATE_WINDOW,
                    allow_direct=True,  # a pipeline on Spark reads it so
                )
            )

    def _count_letter(self, letter: Letter) -> None:
        """A dead letter was stored: told once, whichever router wrote it, and for whatever reason."""
        known = _ids_of(letter, is_result=letter.subject == self.config.result_subject)
        if letter.reason is Reason.UNACCEPTABLE:
            self.metrics.count("router_dlq_total", reason="contract_violation")
            return
        reason = NOT_SETTLED
        if letter.error.startswith(EXHAUSTED):
            reason = letter.error.removeprefix(EXHAUSTED).partition(";")[0]
        elif letter.attempts < self.config.nats_js_max_deliver:
            self.metrics.count("router_dlq_total", reason="terminated")
            return
        self.metrics.count("router_dlq_total", reason="max_deliver_exhausted")
        self.metrics.count("router_jetstream_maxdeliver_exhausted_total", known, reason=reason)
        logger.error(
            "Message deliveries exhausted",
            extra={
                "settled": {**known, "msg_id": letter.id, "reason": reason, "deliveries": letter.attempts}
            },
        )


def _ids_of(letter: Letter, *, is_result: bool) -> dict[str, str]:
    try:
        if is_result:
            return ids(decode(letter.data, letter.headers, ExecResult))
        return ids(decode(letter.data, letter.headers, ExecAssignmentAck))
    except Violation:
        return {}
