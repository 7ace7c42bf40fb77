"""A pop hands out a bounded number of bytes, at least one message, and loses and repeats nothing."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING
from zlib import crc32

import pytest

from settled.queue.engine import Engine
from settled.queue.pieces import OVERHEAD
from settled.queue.types import AckItem, PopRequest, PushItem

if TYPE_CHECKING:
    from settled.queue.popped import Popped

LIMIT = 100_000


def body(size: int, seed: int = 0) -> bytes:
    """JSON of about this size that does not compress."""
    return b'"%b"' % random.Random(seed).randbytes(size // 2).hex().encode()


def weight(popped: Popped) -> int:
    return sum(len(message.payload) + OVERHEAD for message in popped.messages())


async def drain(engine: Engine, request: PopRequest) -> tuple[list[str], list[Popped]]:
    """Pop and ack until nothing comes."""
    seen: list[str] = []
    batches: list[Popped] = []
    async with asyncio.timeout(60):
        while True:
            batch = await engine.pop(request)
            if not batch.lanes:
                return seen, batches
            batches.append(batch)
            seen += [message.transaction_id for message in batch.messages()]
            if batch.lease_id is not None:
                acks = [
                    AckItem(m.transaction_id, m.partition_id, lease_id=m.lease_id) for m in batch.messages()
                ]
                assert all(result.success for result in await engine.ack(acks, request.group))


@pytest.mark.parametrize("auto_ack", [False, True])
@pytest.mark.parametrize("together", [1, 7, 40])
@pytest.mark.parametrize("cached", [True, False])
def test_a_pop_ends_before_it_has_too_many_bytes(
    dsn: str, auto_ack: bool, together: int, cached: bool
) -> None:
    """Defect Q4: one answer had whatever size the messages had."""

    async def main() -> None:
        async with await Engine.open(dsn, pop_bytes=LIMIT) as engine:
            names = [f"t{i:02}" for i in range(40)]
            for start in range(0, 40, together):
                part = names[start : start + together]
                await engine.push([PushItem("q", body(15_000, crc32(n.encode())), "p", n) for n in part])
            if not cached:
                for lane_id in list(engine._core.cache._starts):
                    engine._core.cache.forget_lane(lane_id)
            seen, batches = await drain(engine, PopRequest("q", batch=10_000, auto_ack=auto_ack))
            assert seen == names
            assert all(0 < weight(batch) <= LIMIT for batch in batches)
            assert len(batches) == 7  # six of them fit into one

    asyncio.run(main())


def test_one_message_is_handed_out_though_it_is_larger_than_the_limit(dsn: str) -> None:
    async def main() -> None:
        async with await Engine.open(dsn, pop_bytes=LIMIT) as engine:
            for name in "abc":
                await engine.push([PushItem("q", body(3 * LIMIT), "p", name)])
            seen, batches = await drain(engine, PopRequest("q", batch=100))
            assert (seen, [len(batch) for batch in batches]) == (["a", "b", "c"], [1, 1, 1])

    asyncio.run(main())


def test_a_pop_of_several_partitions_shares_the_limit_and_frees_what_it_does_not_hand_out(dsn: str) -> None:
    async def main() -> None:
        async with await Engine.open(dsn, pop_bytes=LIMIT) as engine:
            names = {f"{lane}{i}" for lane in "abcdef" for i in range(5)}
            await engine.push(
                [PushItem("q", body(15_000, crc32(n.encode())), n[0], n) for n in sorted(names)]
            )
            first = await engine.pop(PopRequest("q", batch=10_000, partitions=10))
            assert 0 < weight(first) <= LIMIT
            second = await engine.pop(PopRequest("q", batch=10_000, partitions=10))
            got = [message.transaction_id for batch in (first, second) for message in batch.messages()]
            assert len(got) == len(set(got))
            assert len(second.lanes) > 0
            for batch in (first, second):
                acks = [
                    AckItem(m.transaction_id, m.partition_id, lease_id=m.lease_id) for m in batch.messages()
                ]
                assert all(result.success for result in await engine.ack(acks))
            seen, _ = await drain(engine, PopRequest("q", batch=10_000, partitions=10))
            assert sorted(seen + got) == sorted(names)

    asyncio.run(main())


def test_messages_that_failed_come_again_under_the_same_limit(dsn: str) -> None:
    async def main() -> None:
        async with await Engine.open(dsn, pop_bytes=LIMIT) as engine:
            await engine.configure("q", {"retry": "parked", "retryDelay": 0, "retryLimit": 10})
            names = [f"t{i:02}" for i in range(40)]
            await engine.push([PushItem("q", body(15_000, crc32(n.encode())), "p", n) for n in names])
            failed: list[str] = []
            while len(failed) < 30:
                batch = await engine.pop(PopRequest("q", batch=10_000))
                assert weight(batch) <= LIMIT
                fresh = [m for m in batch.messages() if not m.attempts]
                failed += [m.transaction_id for m in fresh]
                acks = [
                    AckItem(m.transaction_id, m.partition_id, "retry" if m.attempts else "failed", m.lease_id)
                    for m in batch.messages()
                ]
                assert all(result.success for result in await engine.ack(acks))
                if not fresh:
                    break
            seen, batches = await drain(engine, PopRequest("q", batch=10_000))
            assert sorted(seen) == names
            assert all(weight(batch) <= LIMIT for batch in batches)

    asyncio.run(main())


@pytest.mark.parametrize("auto_ack", [False, True])
def test_many_consumers_at_once_get_every_message_once(dsn: str, auto_ack: bool) -> None:
    async def main() -> None:
        async with await Engine.open(dsn, pop_bytes=LIMIT) as engine:
            names = [f"t{i:03}" for i in range(120)]
            await engine.push(
                [
                    PushItem("q", body(20_000, crc32(n.encode())), f"p{crc32(n.encode()) % 3}", n)
                    for n in names
                ]
            )
            request = PopRequest("q", batch=1000, auto_ack=auto_ack, wait=1)
            found = await asyncio.gather(*(drain(engine, request) for _ in range(8)))
            assert sorted(name for seen, _ in found for name in seen) == names

    asyncio.run(main())
