"""A simulated worker: takes assignments, and answers as well or as badly as it is told to."""

from __future__ import annotations

import asyncio
import random as chance
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, fields
from typing import Any
from uuid import uuid4

import msgspec
from nats.js.api import ConsumerConfig

from settled.app import App, AppStatus
from settled.message import Message
from settled.observe import tracing
from settled.router.config import RouterConfig
from settled.router.contracts import ExecAssignment, ExecAssignmentAck, ExecResult, Executor, Job
from settled.transports.base import Outgoing
from settled.transports.nats import Durable, NatsTransport


@dataclass(frozen=True, slots=True, kw_only=True)
class Behaviour:
    """How likely, from 0 to 1, each misdeed is; and how long work takes."""

    work_seconds: float = 0.01
    slow: float = 0.0
    """Takes `slow_seconds` more."""
    slow_seconds: float = 1.0
    reject: float = 0.0
    """Says `rejected` and sends no result."""
    fail: float = 0.0
    """The result is an error."""
    crash: float = 0.0
    """Dies in the middle: the assignment is not settled, and comes again after its ack_wait."""
    duplicate: float = 0.0
    """Sends the result twice."""
    late: float = 0.0
    """Answers `late_seconds` after it was done."""
    late_seconds: float = 2.0
    poison: float = 0.0
    """Sends a result that breaks the contract, and then the right one."""
    impostor: float = 0.0
    """Sends a result in the name of another tenant, and then the right one."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            highest = float("inf") if field.name.endswith("_seconds") else 1
            if not 0 <= value <= highest:
                raise ValueError(f"worker: {field.name} must be from 0 to {highest:g}, got {value!r}")


class Worker:
    """Reads assignments as the durable consumer `caf-worker`, and answers."""

    def __init__(
        self,
        config: RouterConfig,
        behaviour: Behaviour,
        *,
        random: Callable[[], float] = chance.random,
        ack_wait: float = 2.0,
        performers: int = 8,
    ) -> None:
        self.behaviour = behaviour
        self.done: Counter[str] = Counter()
        self._config = config
        self._random = random
        self._transport = NatsTransport(config.url, name="caf-worker")
        self.app = App(transport=self._transport)
        self._later: set[asyncio.Task[None]] = set()

        @self.app.subscriber(
            config.assign_subject,
            source=Durable(
                stream=config.assign_stream,
                consumer="caf-worker",
                create=True,
                config=ConsumerConfig(ack_wait=ack_wait, max_deliver=-1),
            ),
            performers=performers,
        )
        async def work(message: Message[ExecAssignment]) -> None:
            with tracing.span("worker.execute", message.headers):
                await self._work(message)

    async def serve(self, stop: asyncio.Event | None = None) -> AppStatus:
        try:
            return await self.app.serve(stop)
        finally:
            for task in self._later:
                task.cancel()

    def _chance(self, misdeed: str) -> bool:
        happens: bool = self._random() < getattr(self.behaviour, misdeed)
        self.done[misdeed] += happens
        return happens

    async def _work(self, message: Message[ExecAssignment]) -> None:
        assignment = message.payload
        if self._chance("crash"):
            return
        if self._chance("reject"):
            await self._acknowledge(assignment, "rejected")
            await message.ack()
            return
        await self._acknowledge(assignment, "accepted")
        began = time.monotonic()
        await asyncio.sleep(self.behaviour.work_seconds)
        if self._chance("slow"):
            await asyncio.sleep(self.behaviour.slow_seconds)
        result = ExecResult(
            version="1",
            assignment_id=assignment.assignment_id,
            request_id=assignment.request_id,
            status="error" if self._chance("fail") else "success",
            provider_id=assignment.executor.provider_id,
            job=Job(type=assignment.job.type),
            timestamp=int(time.time() * 1000),
            latency_ms=int((time.monotonic() - began) * 1000),
            tenant_id=assignment.tenant_id,
            msg_id=f"result-{assignment.assignment_id}",
        )
        if self._chance("poison"):
            await self._send(self._config.result_subject, b'{"version": "1", "status": "splendid"}')
        if self._chance("impostor"):
            lie = msgspec.structs.replace(result, tenant_id="somebody-else", msg_id=str(uuid4()))
            await self._send(self._config.result_subject, msgspec.json.encode(lie))
        if self._chance("late"):
            self._remember(self._answer_late(result))
        else:
            await self._answer(result)
        await message.ack()

    async def _answer(self, result: ExecResult) -> None:
        for _ in range(1 + self._chance("duplicate")):
            await self._send(self._config.result_subject, msgspec.json.encode(result))

    async def _answer_late(self, result: ExecResult) -> None:
        await asyncio.sleep(self.behaviour.late_seconds)
        await self._answer(result)

    def _remember(self, call: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(call)
        self._later.add(task)
        task.add_done_callback(self._later.discard)

    async def _acknowledge(self, assignment: ExecAssignment, status: str) -> None:
        ack = ExecAssignmentAck(
            version="1",
            assignment_id=assignment.assignment_id,
            status="accepted" if status == "accepted" else "rejected",
            tenant_id=assignment.tenant_id,
            reason=None if status == "accepted" else "simulated",
        )
        await self._send(self._config.ack_subject, msgspec.json.encode(ack))

    async def _send(self, subject: str, data: bytes) -> None:
        headers = {"content-type": "application/json"}
        await self._transport.publish(Outgoing(subject=subject, data=data, headers=headers))


def new_assignment(tenant: str = "tenant-1", **job: object) -> ExecAssignment:
    """An assignment with fresh ids, for tests and demonstrations."""
    return ExecAssignment(
        version="1",
        assignment_id=uuid4(),
        request_id=uuid4(),
        tenant_id=tenant,
        executor=Executor(provider_id="provider-1", channel="nats"),
        job=Job(type="text.generate", payload=job or None),
    )
