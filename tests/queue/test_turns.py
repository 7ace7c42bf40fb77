"""When the next shared call starts."""

import asyncio

import pytest

from settled.queue import turns as module
from settled.queue.turns import Turns


def test_a_call_starts_at_once_when_none_is_out() -> None:
    async def main() -> None:
        assert Turns().may_start(1)

    asyncio.run(main())


def test_a_second_call_starts_when_as_much_waits_as_the_first_took() -> None:
    async def main() -> None:
        turns = Turns()
        with turns.out(3):
            assert not turns.may_start(2)
            assert turns.may_start(3)
        assert turns.may_start(1)

    asyncio.run(main())


def test_whoever_waits_wakes_for_enough_but_not_for_less(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PATIENCE", 60.0)

    async def main() -> None:
        turns = Turns()
        with turns.out(2):
            waiting = asyncio.create_task(turns.wait())
            await asyncio.sleep(0)
            turns.ring(1)
            await asyncio.sleep(0)
            assert not waiting.done()
            turns.ring(2)
            await asyncio.wait_for(waiting, 10)

    asyncio.run(main())


def test_whoever_waits_wakes_when_a_call_comes_back() -> None:
    async def main() -> None:
        turns = Turns()
        with turns.out(2):
            waiting = asyncio.create_task(turns.wait())
            await asyncio.sleep(0)
        await asyncio.wait_for(waiting, 10)
        assert turns.may_start(1)

    asyncio.run(main())


def test_a_call_that_is_stuck_holds_nobody_back() -> None:
    async def main() -> None:
        turns = Turns()
        with turns.out(5):
            assert not turns.may_start(1)
            await asyncio.wait_for(turns.wait(), 10)
            assert turns.may_start(1)
            with turns.out(2):
                assert not turns.may_start(1)
        assert turns.may_start(0)
        with turns.out(1):
            assert turns.may_start(1)

    asyncio.run(main())
