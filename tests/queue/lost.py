"""Losing, delaying and reordering what workers tell each other, and turning off what makes up for it."""

from __future__ import annotations

import asyncio
import random
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING

import asyncpg

from settled.queue.names import SCHEMA

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from settled.queue.engine import Engine

LOSE = f"""
create function {SCHEMA}.lose() returns trigger language plpgsql as 'begin return null; end';
create trigger lose before insert on {SCHEMA}.activity for each row execute function {SCHEMA}.lose();
"""
# A row that was put off is written again later by `put_off`, in another order and under another transaction.
PUT_OFF = f"""
create table {SCHEMA}.put_off as select * from {SCHEMA}.activity with no data;
create function {SCHEMA}.put_off() returns trigger language plpgsql as $$
begin
    if current_setting('settled.late', true) = 'yes' then
        return new;
    end if;
    insert into {SCHEMA}.put_off select new.*;
    return null;
end
$$;
create trigger put_off before insert on {SCHEMA}.activity for each row execute function {SCHEMA}.put_off();
"""
LATE = f"""
with taken as (
    delete from {SCHEMA}.put_off where ctid = any (array(
        select ctid from {SCHEMA}.put_off where random() < 0.3 order by random())) returning *
)
insert into {SCHEMA}.activity (worker, kind, queues, lanes, groups, until)
select worker, kind, queues, lanes, groups, until from taken where random() < 0.7
"""


async def lose_everything(dsn: str, *engines: Engine) -> None:
    """From now on no worker hears of another: neither rows nor bells."""
    connection = await asyncpg.connect(dsn)
    await connection.execute(LOSE)
    await connection.close()
    for engine in engines:
        engine._core.activity.ring = lambda: None  # type: ignore[method-assign]


@asynccontextmanager
async def late_and_shuffled(dsn: str) -> AsyncIterator[None]:
    """Rows come late and in another order; three of ten never come. Most bells ring for nothing."""
    connection = await asyncpg.connect(dsn, server_settings={"settled.late": "yes"})
    await connection.execute(PUT_OFF)

    async def go_on() -> None:
        while True:
            await asyncio.sleep(random.random() * 0.5)
            await connection.execute(LATE)
            if random.random() < 0.3:
                await connection.execute("select pg_notify('settled', 'somebody')")

    task = asyncio.create_task(go_on())
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        await connection.close()


async def unaudited(*engines: Engine) -> None:
    """Memory is not checked against the tables: what is told must be enough."""

    async def nothing(*_: object) -> None:
        """Check nothing."""

    for engine in engines:
        auditor = engine._core.auditor
        assert auditor._task is not None
        auditor._task.cancel()
        auditor.check = nothing  # type: ignore
        auditor.recent = lambda: True  # type: ignore[method-assign]
