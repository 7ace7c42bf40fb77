"""The order within a lane, when the bridge that carries it is killed."""

from __future__ import annotations

import asyncio
import random
import signal
import uuid
from collections.abc import Awaitable, Callable, Iterator
from itertools import pairwise

import msgspec
import pytest
from nats.js.api import ConsumerConfig

from settled.queue.engine import Engine
from settled.queue.types import AckItem, PopRequest
from settled.transports.base import Outgoing
from settled.transports.redis import RedisTransport
from tests.bridge.test_command import Running
from tests.brokers.redis import Server as RedisServer
from tests.brokers.redis import server as redis_server
from tests.nats.conftest import desk_on, until
from tests.nats.servers import Server

LANES = 10
KILLS = 2


@pytest.fixture(scope="module")
def valkey() -> Iterator[RedisServer]:
    with redis_server("valkey") as one:
        yield one


class Target:
    """A queue, read as it is written: the numbers in each partition, in its order."""

    def __init__(self, engine: Engine, queue: str) -> None:
        self._engine = engine
        self._request = PopRequest(queue=queue, group="reader", batch=1000, partitions=100)
        self.lanes: dict[str, list[int]] = {}

    async def count(self) -> int:
        """Read on, and say how many there are."""
        while batch := list((await self._engine.pop(self._request)).messages()):
            for message in batch:
                self.lanes.setdefault(message.partition, []).append(msgspec.json.decode(message.payload))
            items = [AckItem(m.transaction_id, m.partition_id, lease_id=m.lease_id) for m in batch]
            await self._engine.ack(items, self._request.group)
        return sum(map(len, self.lanes.values()))


async def carry_with_kills(
    dsn: str, queue: str, messages: int, command: tuple[str, ...], put: Callable[[int], Awaitable[object]]
) -> None:
    """Kill the bridge at random times and start it anew at once, while messages go on coming."""
    chance = random.Random(5)
    part = messages // (KILLS + 1)
    engine = await Engine.open(dsn)
    target = Target(engine, queue)
    try:
        for kill in range(KILLS + 1):
            for number in range(kill * part, (kill + 1) * part):
                await put(number)
            running = Running(*command, "--buffer", "200")
            last = kill == KILLS
            enough = messages if last else (kill + chance.uniform(0.1, 0.4)) * part

            async def far_enough(running: Running = running, enough: float = enough) -> bool:
                assert running.process.poll() is None, running.lines
                return await target.count() >= enough

            try:
                await until(far_enough, 90)
            finally:
                running.end(signal.SIGTERM if last else signal.SIGKILL)
        await target.count()
    finally:
        await engine.close()
    assert {lane: len(numbers) for lane, numbers in target.lanes.items()} == {
        f"lane-{number}": messages // LANES for number in range(LANES)
    }
    back = {lane: [b for a, b in pairwise(numbers) if b < a] for lane, numbers in target.lanes.items()}
    assert not any(back.values()), back


def test_a_lane_read_from_nats_keeps_its_order_when_the_bridge_is_killed(
    nats_server: Server, dsn: str
) -> None:
    """Defect P16."""
    queue = f"orders-{uuid.uuid4().hex[:8]}"

    async def main() -> None:
        async with desk_on(nats_server.url) as desk:
            config = ConsumerConfig(name="bridge", durable_name="bridge", ack_wait=9)
            await desk.jetstream.add_consumer(desk.stream, config)

            async def put(number: int) -> None:
                headers = {"settled-lane": f"lane-{number % LANES}", "Nats-Msg-Id": f"m{number}"}
                await desk.client.publish(desk.subject(), b"%d" % number, headers=headers)

            command = (desk.url, dsn, "--from", desk.subject(), "--to", queue, "--group", "bridge")
            await carry_with_kills(dsn, queue, 24_000, command, put)

    asyncio.run(asyncio.wait_for(main(), 240))


@pytest.mark.parametrize("lists", ["false", "true"])
def test_a_lane_read_from_redis_keeps_its_order_when_the_bridge_is_killed(
    valkey: RedisServer, dsn: str, lists: str
) -> None:
    """Defect P16."""
    queue = f"orders-{uuid.uuid4().hex[:8]}"
    url = f"{valkey.url}?create=true&lease=6&lists={lists}"

    async def main() -> None:
        transport = RedisTransport(url)

        async def put(number: int) -> None:
            headers = {"settled-lane": f"lane-{number % LANES}"}
            await transport.push(
                Outgoing(subject=queue, data=b"%d" % number, id=f"m{number}", headers=headers)
            )

        await carry_with_kills(dsn, queue, 4_500, (url, dsn, "--from", queue), put)
        await transport.close()

    asyncio.run(asyncio.wait_for(main(), 240))
