"""Assignments out, acknowledgements and results back: a router on NATS JetStream."""

from settled.router.assignments import AssignmentPublisher, Outcome, PublishError
from settled.router.config import RouterConfig
from settled.router.contracts import ExecAssignment, ExecAssignmentAck, ExecResult, Violation
from settled.router.service import Router

__all__ = [
    "AssignmentPublisher",
    "ExecAssignment",
    "ExecAssignmentAck",
    "ExecResult",
    "Outcome",
    "PublishError",
    "Router",
    "RouterConfig",
    "Violation",
]
