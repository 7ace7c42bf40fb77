"""Settled: every message handed to your code is settled exactly one way."""

import importlib
from typing import TYPE_CHECKING, Any

from settled._version import __version__

if TYPE_CHECKING:
    from settled.app import App, AppStatus
    from settled.cloudevents import CloudEvent
    from settled.handlers import (
        Backoff,
        defer_on_error,
        dont_ack_on_error,
        feature_switch,
        features,
        reject_on_error,
    )
    from settled.handlers.retry import retry
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

_MODULES = {
    "settled.app": ("App", "AppStatus"),
    "settled.cloudevents": ("CloudEvent",),
    "settled.handlers": (
        "Backoff",
        "defer_on_error",
        "dont_ack_on_error",
        "feature_switch",
        "features",
        "reject_on_error",
        "retry",
    ),
    "settled.message": ("Message", "Metadata", "current_message"),
    "settled.policy": ("OnError", "Policy"),
    "settled.pump": ("Status",),
    "settled.signals": ("ConfigurationError", "Defer", "DontAck", "Invalid", "Reject"),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    # Imported on first use: a Spark task needs no app, and the command line handles Ctrl-C early.
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = getattr(importlib.import_module(_MODULE_OF[name]), name)
    return found
