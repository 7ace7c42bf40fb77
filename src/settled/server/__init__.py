"""The queue's HTTP server; nothing heavy is imported before it is used."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .process import serve

__all__ = ["serve"]


def __getattr__(name: str) -> Any:
    if name == "serve":
        from .process import serve

        return serve
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
