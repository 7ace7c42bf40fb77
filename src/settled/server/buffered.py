"""A push while pushing is switched off: kept, and answered `buffered`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from settled.queue.errors import Paused

from . import bodies
from .convert import push_items
from .exchange import Answer, Request, ok
from .parse import decode

if TYPE_CHECKING:
    from .router import Endpoint
    from .spool import Spool

_push = msgspec.json.Decoder(bodies.PushBody)


class Buffered:
    """POST /api/v1/push, whether pushes are held back or not."""

    def __init__(self, push: Endpoint, spool: Spool) -> None:
        self._push = push
        self._spool = spool

    async def __call__(self, request: Request) -> Answer:
        """Push; what may not be pushed now is kept."""
        try:
            return await self._push(request)
        except Paused:
            kept = await self._spool.keep(push_items(decode(request.body, _push, stored=True).items))
        return ok(
            [
                {
                    "index": i,
                    "transaction_id": item.transaction_id,
                    "status": "buffered",
                    "message_id": None,
                    "partition_id": None,
                    "trace_id": item.trace_id,
                    "queueName": item.queue,
                    "queue": item.queue,
                }
                for i, item in enumerate(kept)
            ],
            201,
        )
