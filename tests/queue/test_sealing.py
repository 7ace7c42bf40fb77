"""Encrypted queues: nothing of a message can be read in the database, and everything through the engine."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from settled.queue import compact, sealing
from settled.queue.manifest import Reader
from settled.queue.types import BadRequest, Conflict, PushItem
from tests.queue.helpers import drain, ids, pop, settle, with_engine

if TYPE_CHECKING:
    from collections.abc import Iterator

    from settled.queue.engine import Engine

OLD, NEW = "11" * 32, "22" * 32
SECRET = b'"the secret"'


@pytest.fixture(autouse=True)
def keyed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A key, and segments that are merged at once."""
    monkeypatch.setenv(sealing.VARIABLE, OLD)
    monkeypatch.setattr(compact, "AGE", -1.0)
    monkeypatch.setattr(compact, "IDLE", -1.0)
    yield
    sealing._keys.cache_clear()


async def _seen(engine: Engine) -> bytes:
    """All bytes the database stores of messages, by hand."""
    tables = {
        "segment": ("body",),
        "dead_letter": ("headers", "payload"),
        "scheduled": ("headers", "payload"),
    }
    found = b""
    for table, columns in tables.items():
        for row in await engine._core.pool.fetch(f"select {', '.join(columns)} from {table}"):
            found += b"".join(row)
    return found


async def _push(engine: Engine, *names: str, delay: float = 0) -> None:
    headers = {"tenant": "hidden"}
    for name in names:
        await engine.push([PushItem("safe", SECRET, "Default", name, headers, delay_seconds=delay)])


@with_engine
async def test_an_encrypted_queue_stores_nothing_in_clear_and_reads_as_any_other(engine: Engine) -> None:
    options = {"encryptionEnabled": True, "retryLimit": 1}
    assert (await engine.configure("safe", options)).options.encryption_enabled
    await _push(engine, *"abcdef")
    await engine.push([PushItem("safe", SECRET, transaction_id=f"x{i}") for i in range(200)])
    await _push(engine, "later", delay=0.3)
    await engine.push([PushItem("open", SECRET)])
    batch = await pop(engine, "safe", 2)
    assert [(m.payload, m.headers) for m in batch.messages()] == [(SECRET, {"tenant": "hidden"})] * 2
    await settle(engine, batch, "failed", "a", error="no")
    await settle(engine, batch, "completed", "b")
    await engine.bury_message(next(batch.messages()).partition_id, "c")
    sealed = "select count(*) from segment where get_byte(body, 0) = 4"
    async with asyncio.timeout(30):  # until they are merged: a lane that is in use is left for the next round
        while await engine._core.pool.fetchval(sealed) > 3:
            await engine.tidy()
            await asyncio.sleep(0.01)
    stored = await _seen(engine)
    assert stored.count(b"secret") == 1  # the open one
    assert b"hidden" not in stored
    letters = (await engine.dead_letters(queue="safe")).rows
    assert [(d.transaction_id, d.payload, d.headers) for d in letters] == [
        ("c", SECRET, {"tenant": "hidden"}),
        ("a", SECRET, {"tenant": "hidden"}),
    ]
    again = await engine.requeue(letters[1].id)
    view = await engine.message(again.partition_id, "e")
    assert (view.payload, view.encrypted) == (SECRET, True)
    engine._core.cache.forget_lane(engine._core.registry.lanes[("safe", "Default")].id)
    got: list[str] = []
    while "later" not in got:
        got += ids(await pop(engine, "safe", 1000, auto_ack=True, wait=1))
    assert got[:5] == ["a", "d", "e", "f", "x0"]
    assert len(got) == 205
    assert b"hidden" not in await _seen(engine)


@with_engine
async def test_keys_are_replaced_by_naming_the_new_one_first(engine: Engine) -> None:
    await engine.configure("safe", {"encryptionEnabled": True})
    await _push(engine, "old")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(sealing.VARIABLE, f"{NEW}, {OLD}")
        await _push(engine, "new")
        engine._core.cache.forget_lane(engine._core.registry.lanes[("safe", "Default")].id)
        assert await drain(engine, "safe", "g") == ["old", "new"]
        patch.setenv(sealing.VARIABLE, NEW)
        engine._core.cache.forget_lane(engine._core.registry.lanes[("safe", "Default")].id)
        with pytest.raises(Conflict, match="not in SETTLED_ENCRYPTION_KEY"):
            await pop(engine, "safe", group="h")


@with_engine
async def test_what_cannot_be_read_is_kept_for_who_can(engine: Engine) -> None:
    await engine.configure("safe", {"encryptionEnabled": True, "retryLimit": 0, "leaseTime": 300})
    await _push(engine, "dead")
    await settle(engine, await pop(engine, "safe"), "failed")
    (letter,) = (await engine.dead_letters(queue="safe")).rows
    await engine._core.pool.fetch("update dead_letter set seq = -1")  # as if its message were gone
    await _push(engine, "a", "b", "c")
    await _push(engine, "later", delay=0.2)
    lane = engine._core.registry.lanes[("safe", "Default")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(sealing.VARIABLE, NEW)
        for auto_ack in (True, False, True):
            engine._core.cache.forget_lane(lane.id)
            await engine.push([PushItem("open", b"1", transaction_id=f"x{auto_ack}{lane.id}")])
            refused, fine = await asyncio.gather(  # they share a claim
                pop(engine, "safe", 2, auto_ack=auto_ack), drain(engine, "open"), return_exceptions=True
            )
            assert isinstance(refused, Conflict)
            assert not isinstance(fine, BaseException)
        with pytest.raises(Conflict, match="not in SETTLED_ENCRYPTION_KEY"):
            await engine.requeue(letter.id)
        (closed,) = (await engine.dead_letters(queue="safe")).rows
        assert (closed.content_type, closed.headers) == ("application/octet-stream", {})
        await asyncio.sleep(0.4)  # due, and not for this worker
        await engine._core.scheduler.move()
    engine._core.cache.forget_lane(lane.id)
    first = await pop(engine, "safe", 2)
    assert [(m.transaction_id, m.payload) for m in first.messages()] == [("a", SECRET), ("b", SECRET)]
    await settle(engine, first, "completed")
    await engine.requeue(letter.id)
    rest: list[str] = []
    async with asyncio.timeout(20):
        while len(rest) < 3:
            rest += ids(await pop(engine, "safe", auto_ack=True, wait=1))
    assert sorted(rest)[:1] == ["c"]
    assert "later" in rest


@with_engine
async def test_without_a_key_nothing_is_stored_in_clear_and_others_are_not_disturbed(engine: Engine) -> None:
    await engine.configure("safe", {"encryptionEnabled": True})
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv(sealing.VARIABLE)
        reader = Reader(engine._core.dsn, "safe", "g", "00000000-0000-4000-8000-000000000001", 10)
        with (
            reader.link,
            pytest.raises(Conflict, match="queue 'safe' is encrypted: set SETTLED_ENCRYPTION_KEY"),
        ):
            reader.hold(streaming=False)
        for refused in (
            lambda: engine.configure("other", {"encryptionEnabled": True}),
            lambda: engine.push([PushItem("open", b"1"), PushItem("safe", b"1")]),
            lambda: pop(engine, "safe"),
        ):
            with pytest.raises(Conflict, match="SETTLED_ENCRYPTION_KEY"):
                await refused()
        await engine.push([PushItem("open", b"1", transaction_id="fine")])
        assert await drain(engine, "open") == ["fine"]
        patch.setenv(sealing.VARIABLE, "short")
        with pytest.raises(Conflict, match="64 hex digits"):
            await engine.configure("other", {"encryptionEnabled": True})
    with pytest.raises(BadRequest, match="encryptionEnabled"):
        await engine.configure("safe", {"encryptionEnabled": "yes"})


def test_what_only_looks_sealed_is_left_alone() -> None:
    looks = sealing.seal_value(b"x")[:9]
    for value in (b"", b"plain", looks, looks + b"1234567890" * 5):
        assert sealing.unseal_value(value) == value
    assert sealing.unseal_value(sealing.seal_value(b"x")) == b"x"
    changed = bytearray(sealing.seal(b"body", 1))
    changed[-1] ^= 1
    with pytest.raises(Conflict, match="changed"):
        sealing.unseal(bytes(changed))
