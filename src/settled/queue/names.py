"""Names the queue gives: that of its schema, and those of leases."""

from __future__ import annotations

import os
from uuid import UUID

SCHEMA = "settled"


def new_lease(lane_id: int, group_id: int, *, wide: bool, ends_on_nack: bool = False) -> str:
    """A lease id, a UUIDv8: 40 bits lane, 20 bits group, 1 bit "covers other lanes too", 61 random bits.

    `ends_on_nack` is the lower bit of the variant: a nack ends such a lease, see `releases`.
    """
    random = int.from_bytes(os.urandom(8), "big") & (2**61 - 1)
    high = lane_id << 24 | (group_id >> 12) << 16 | 0x8000 | group_id & 0xFFF
    return str(UUID(int=high << 64 | (0b10 | ends_on_nack) << 62 | wide << 61 | random))


def ends_on_nack(lease_id: str) -> bool:
    """Whether a nack ends this lease.

    >>> ends_on_nack(new_lease(1, 2, wide=False, ends_on_nack=True)), ends_on_nack(new_lease(1, 2, wide=True))
    (True, False)
    """
    return read_lease(lease_id) is not None and UUID(lease_id).int >> 62 & 0b11 == 0b11


def lane_of(lease_id: str) -> int:
    """The first lane of a lease of ours."""
    return UUID(lease_id).int >> 88


def read_lease(lease_id: str) -> tuple[int, int, bool] | None:
    """(lane, group, covers other lanes too) of a lease id, or None if it is not one of ours."""
    try:
        number = UUID(lease_id).int
    except (ValueError, AttributeError, TypeError):
        return None
    high = number >> 64
    if high >> 12 & 0xF != 8:
        return None
    return high >> 24, (high >> 16 & 0xFF) << 12 | high & 0xFFF, bool(number >> 61 & 1)
