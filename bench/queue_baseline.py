"""What to compare with: a plain queue, one row a message, SKIP LOCKED, behind the same HTTP listener."""

from __future__ import annotations

import asyncio
import socket
import sys
from pathlib import Path
from typing import Any

import asyncpg
import msgspec
import uvloop

from settled.server.bodies import PushBody
from settled.server.exchange import Answer, Request
from settled.server.listener import Listener
from settled.server.parse import Query

SQL = {file.stem: file.read_text() for file in (Path(__file__).parent / "plain").glob("*.sql")}
ACK = "delete from plain.message where id = any($1::bigint[])"

_push = msgspec.json.Decoder(PushBody)


class Plain:
    """Push, pop and ack, one statement each."""

    def __init__(self, pool: Any) -> None:
        self.pool = pool

    async def __call__(self, request: Request) -> Answer:
        if request.path == b"/push":
            items = _push.decode(request.body).items
            partitions = [item.partition for item in items]
            ids = [item.transaction_id for item in items]
            rows = await self.pool.fetch(
                SQL["push"], partitions, ids, [bytes(item.payload).decode() for item in items]
            )
            return Answer(201, msgspec.json.encode([row[0] for row in rows]))
        if request.path == b"/ack":
            await self.pool.execute(ACK, msgspec.json.decode(request.body, type=list[int]))
            return Answer(200, b"{}")
        query = Query(request.query)
        statement = SQL["take"] if query.flag("autoAck") else SQL["lease"]
        rows = await self.pool.fetch(statement, query.integer("batch", 1, 1, 10_000))
        shown = b",".join(b'{"transactionId":"%d","data":%b}' % (row[0], row[1].encode()) for row in rows)
        return Answer(200, b'{"messages":[%b]}' % shown)


async def main(dsn: str) -> None:
    """Serve until killed; prints the port."""
    pool = await asyncpg.create_pool(dsn, min_size=20, max_size=20)
    await pool.execute(SQL["schema"])
    sock = socket.socket()
    sock.bind(("127.0.0.1", 0))
    await Listener(Plain(pool), body_limit=1 << 24).start(sock)
    print(sock.getsockname()[1], flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(main(sys.argv[1]))
