"""What a worker remembers of the leases it handed out."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from settled.queue import leases, places
from settled.queue.types import AckItem
from tests.queue.helpers import ids, pop, push, settle, with_engine

if TYPE_CHECKING:
    from settled.queue.engine import Engine


@with_engine
async def test_acks_of_far_more_messages_than_are_remembered_whole_need_no_look_up(engine: Engine) -> None:
    async def never(*_: object) -> None:
        raise AssertionError("looked up")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(leases, "REMEMBERED_MESSAGES", 30)
        for lane in range(10):
            await push(engine, "q", *(f"é{lane}-{i}" for i in range(20)), partition=f"p{lane}")
        batches = [await pop(engine, "q", 20) for _ in range(10)]
        known = engine._core.leases
        assert (len(known), known._messages, known._shrunk) == (10, 20, 180)
        patch.setattr(known, "find", never)
        for batch in batches:
            partition = next(batch.messages()).partition_id
            assert all(r.success for r in await settle(engine, batch, "completed", *ids(batch)[3:]))
            (wrong,) = await engine.ack([AckItem("nobody", partition, lease_id=batch.lease_id)])
            assert (wrong.success, wrong.message) == (False, "not_found")
            assert all(r.success for r in await settle(engine, batch, "completed", *ids(batch)[:3]))
    assert (len(known), known._messages, known._shrunk) == (0, 0, 0)
    figures = engine.metrics()
    assert (figures["acknowledged_messages_total"], figures["refused_acks_total"]) == (200, 10)


@with_engine
async def test_a_lease_with_two_ids_of_one_hash_is_forgotten_rather_than_confused(engine: Engine) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(leases, "REMEMBERED_MESSAGES", 2)
        patch.setattr(places, "hash", lambda _: 7, raising=False)
        for lane in range(3):
            await push(engine, "q", f"{lane}a", f"{lane}b", partition=f"p{lane}")
        batches = [await pop(engine, "q", 2) for _ in range(3)]
        assert len(engine._core.leases) == 1
        for batch in batches:
            assert all(r.success for r in await settle(engine, batch, "completed", ids(batch)[1]))
            assert all(r.success for r in await settle(engine, batch, "completed", ids(batch)[0]))
