"""From any transport to any other: read, write with dedup by id, then acknowledge."""

from settled.bridge.bridge import Bridge, Totals

__all__ = ["Bridge", "Totals"]
