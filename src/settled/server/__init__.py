"""The queue's HTTP server."""

from .process import serve

__all__ = ["serve"]
