"""What a bridge does with messages that its target takes, and with those it never will."""

from __future__ import annotations

import asyncio
from typing import Any

from settled.bridge import Bridge, Totals
from settled.transports.base import Outgoing, Transport
from settled.transports.memory import MemoryTransport


def carry(target: str | Transport, to: str, *messages: bytes | Outgoing) -> tuple[Totals, list[str]]:
    """Carry messages to a target; how they ended, and why those of the dead letters did."""
    source = MemoryTransport()
    for number, message in enumerate(messages):
        facts: dict[str, Any] = {"data": message, "id": f"m-{number}"}
        if isinstance(message, Outgoing):
            facts = {"data": message.data, "id": message.id, "headers": message.headers}
        source.put(Outgoing(subject="orders", **facts))
    bridge = Bridge(source, target, channel="orders", to=to, limit=len(messages), buffer=1)
    totals = asyncio.run(asyncio.wait_for(bridge.run(), 60))
    return totals, [letter.error for letter in source.dead_letters("orders")]
