"""How many messages a receive takes. Defect P14."""

from __future__ import annotations

import pytest

from settled import Policy
from settled.clock import VirtualClock
from settled.message import Delivery
from settled.pump.loop import Room
from settled.transports.base import Capabilities


class Taken:
    """A pump's receives, as far as their size is concerned."""

    def __init__(self, policy: Policy, buffer: int = 100) -> None:
        self.clock = VirtualClock()
        self.room = Room(policy, lambda: Capabilities(buffer=buffer), self.clock.now)

    def take(self, each: float, size: int = 10) -> int:
        """One receive of as many as it may take, each handled in so many seconds."""
        limit = self.room.limit()
        one = Delivery(id="m", subject="orders", data=b"x" * size, headers={})
        self.room.took([one] * limit)
        self.clock.advance(limit * each)
        return limit


def test_it_takes_one_at_first_and_twice_as_many_each_time_while_the_handler_is_quick() -> None:
    taken = Taken(Policy())
    assert [taken.take(0.0001) for _ in range(9)] == [1, 2, 4, 8, 16, 32, 64, 100, 100]


def test_a_slow_handler_has_one_message_and_leaves_the_others_to_others() -> None:
    taken = Taken(Policy())
    assert [taken.take(1.0) for _ in range(4)] == [1, 1, 1, 1]


def test_what_a_receive_takes_is_handled_in_about_a_tenth_of_a_second() -> None:
    taken = Taken(Policy())
    assert [taken.take(0.009) for _ in range(6)] == [1, 2, 4, 8, 11, 11]


def test_a_handler_that_becomes_slow_has_one_message_from_the_next_receive_on() -> None:
    taken = Taken(Policy())
    quick = [taken.take(0.0001) for _ in range(6)]
    assert [*quick, taken.take(0.5), taken.take(0.5)] == [1, 2, 4, 8, 16, 32, 64, 1]


def test_a_buffer_that_somebody_set_is_taken_as_it_is() -> None:
    taken = Taken(Policy(buffer=7))
    assert [taken.take(1.0) for _ in range(3)] == [7, 7, 7]


def test_where_giving_back_is_not_free_it_takes_one() -> None:
    taken = Taken(Policy(), buffer=1)
    assert [taken.take(0.0001) for _ in range(3)] == [1, 1, 1]


@pytest.mark.parametrize("buffer", [None, 100])
def test_large_messages_are_bounded_by_their_bytes(buffer: int | None) -> None:
    taken = Taken(Policy(buffer=buffer, buffer_bytes=1000))
    for _ in range(9):
        taken.take(0.0001, size=200)
    assert taken.take(0.0001, size=200) == 5
    assert taken.take(0.0001, size=5000) == 5
    assert taken.take(0.0001, size=5000) == 1
    assert taken.take(0.0001, size=10) == 1
    assert taken.take(0.0001, size=10) > 1
