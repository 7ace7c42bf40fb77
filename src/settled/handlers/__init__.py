"""Decorators round a handler."""

from settled.backoff import Backoff
from settled.handlers.feature import Features, feature_switch, features
from settled.handlers.on_error import defer_on_error, dont_ack_on_error, reject_on_error
from settled.handlers.retry import retry

__all__ = [
    "Backoff",
    "Features",
    "defer_on_error",
    "dont_ack_on_error",
    "feature_switch",
    "features",
    "reject_on_error",
    "retry",
]
