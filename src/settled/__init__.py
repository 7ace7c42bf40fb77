"""Settled: every message handed to your code is settled exactly one way."""

from settled._version import __version__
from settled.app import App, AppStatus
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
from settled.pump import Status
from settled.signals import ConfigurationError, Defer, DontAck, Invalid, Reject

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
