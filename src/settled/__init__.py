"""Settled: every message handed to your code is settled exactly one way."""

from typing import TYPE_CHECKING, Any

from settled._version import __version__
from settled.cloudevents import CloudEvent
from settled.handlers import (
    Backoff,
    defer_on_error,
    dont_ack_on_error,
    feature_switch,
    features,
    reject_on_error,
    retry,
)
from settled.message import Message, Metadata, current_message
from settled.policy import OnError, Policy
from settled.signals import ConfigurationError, Defer, DontAck, Invalid, Reject

if TYPE_CHECKING:
    from settled.app import App, AppStatus
    from settled.pump import Status

__all__ = [
    "App",
    "AppStatus",
    "Status",
    "Message",
    "Metadata",
    "CloudEvent",
    "current_message",
    "Policy",
    "OnError",
    "DontAck",
    "Defer",
    "Reject",
    "Invalid",
    "ConfigurationError",
    "feature_switch",
    "features",
    "dont_ack_on_error",
    "defer_on_error",
    "reject_on_error",
    "retry",
    "Backoff",
    "__version__",
]


def __getattr__(name: str) -> Any:
    # The app and its pumps are for who runs one; a Spark task only needs signals and messages.
    match name:
        case "App" | "AppStatus":
            from settled import app

            return getattr(app, name)
        case "Status":
            from settled.pump import Status

            return Status
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
