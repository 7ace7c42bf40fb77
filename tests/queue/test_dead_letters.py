"""Dead letters in bulk: chosen by filter, sent again or dropped in parts."""

from __future__ import annotations

import pytest

from settled.queue.engine import Engine
from settled.queue.types import BadRequest, DeadLetterFilter, DeadLettersDone, NotFound
from tests.queue.helpers import drain, ids, pop, push, settle, with_engine

GROUP = "__QUEUE_MODE__"


async def _kill(engine: Engine, queue: str, *names: str, error: str = "boom", group: str = GROUP) -> None:
    """Push messages and make dead letters of them."""
    for name in names:
        await push(engine, queue, name)
    popped = await pop(engine, queue, group=group)
    await settle(engine, popped, "dlq", error=error, group=group)


async def _all(engine: Engine, chosen: DeadLetterFilter, limit: int = 2) -> list[DeadLettersDone]:
    """Send them again, part by part."""
    parts = [await engine.retry_dead_letters(chosen, limit=limit)]
    while parts[-1].next is not None:
        assert len(parts) < 50
        parts.append(await engine.retry_dead_letters(chosen, limit=limit, after=parts[-1].next))
    return parts


@with_engine
async def test_dead_letters_are_sent_again_in_parts_and_by_filter(engine: Engine) -> None:
    """Defect D7."""
    await _kill(engine, "orders", "a", "b", "c", error="the Bank is away")
    await _kill(engine, "orders", "d", error="no card")
    await _kill(engine, "mails", "e", error="the bank is away")
    chosen = DeadLetterFilter(queue="orders", error="bank is AWAY")
    looked = await engine.retry_dead_letters(chosen, dry_run=True)
    assert (looked.matched, looked.done, looked.next) == (3, 0, None)
    parts = await _all(engine, chosen)
    assert [part.done for part in parts] == [2, 1]
    assert [part.matched for part in parts] == [3, None]
    assert sorted(await drain(engine, "orders")) == ["a", "b", "c"]
    left = (await engine.dead_letters()).rows
    assert {(letter.queue, letter.error) for letter in left} == {
        ("orders", "no card"),
        ("mails", "the bank is away"),
    }


@with_engine
async def test_one_that_dies_again_meanwhile_is_not_sent_again(engine: Engine) -> None:
    await _kill(engine, "orders", "a", "b", "c")
    chosen = DeadLetterFilter(queue="orders")
    first = await engine.retry_dead_letters(chosen, limit=1)
    await settle(engine, await pop(engine, "orders"), "dlq", error="again")
    done = first.done
    after = first.next
    while after is not None:
        part = await engine.retry_dead_letters(chosen, limit=1, after=after)
        done, after = done + part.done, part.next
    assert done == 3
    (again,) = (await engine.dead_letters(queue="orders")).rows
    assert again.error == "again"


@with_engine
async def test_a_message_that_is_gone_is_pushed_as_a_copy_and_one_that_cannot_be_stays(
    engine: Engine,
) -> None:
    await _kill(engine, "orders", "a", "b")
    await engine.clear_queue("orders")
    await engine.configure("orders", {"maxSize": 1})
    (part,) = await _all(engine, DeadLetterFilter(queue="orders"), limit=10)
    assert (part.done, len(part.refused)) == (1, 1)
    assert "is full" in part.refused[0].error
    (left,) = (await engine.dead_letters()).rows
    assert left.id == part.refused[0].id
    assert len(await drain(engine, "orders")) == 1


@with_engine
async def test_dead_letters_are_dropped_by_filter(engine: Engine) -> None:
    await _kill(engine, "orders", "a", "b", "c", error="one", group="billing")
    await _kill(engine, "orders", "d", error="two", group="billing")
    letters = (await engine.dead_letters(error="two")).rows
    kept = (await engine.dead_letter(letters[0].id)).transaction_id
    done = await engine.purge_dead_letters(DeadLetterFilter(group="billing", error="one"), limit=2)
    assert (done.matched, done.done) == (3, 2)
    done = await engine.purge_dead_letters(
        DeadLetterFilter(group="billing", error="one"), limit=2, after=done.next
    )
    assert (done.done, done.next) == (1, None)
    assert [letter.transaction_id for letter in (await engine.dead_letters()).rows] == [kept]
    with pytest.raises(NotFound):
        await engine.dead_letter("00000000-0000-0000-0000-000000000000")


@with_engine
async def test_bad_bounds_are_refused(engine: Engine) -> None:
    for more in ({"limit": 0}, {"limit": 1001}, {"after": "nonsense"}, {"after": "a,b,c"}):
        with pytest.raises(BadRequest, match=next(iter(more))):
            await engine.retry_dead_letters(DeadLetterFilter(), **more)  # type: ignore[arg-type]
    with pytest.raises(BadRequest, match="ids"):
        await engine.purge_dead_letters(DeadLetterFilter(ids=["x"]))


@with_engine
async def test_ids_choose_single_ones(engine: Engine) -> None:
    await _kill(engine, "orders", "a", "b", "c")
    letters = {letter.transaction_id: letter.id for letter in (await engine.dead_letters()).rows}
    (part,) = await _all(engine, DeadLetterFilter(ids=[letters["b"], letters["c"]]), limit=100)
    assert part.done == 2
    assert sorted(ids(await pop(engine, "orders"))) == ["b", "c"]
