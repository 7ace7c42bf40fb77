"""Telling a caller that did not wait in a coroutine what became of its request."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol, TypeVar

log = logging.getLogger("settled.queue")

T = TypeVar("T")
# Called once: with the result, with what went wrong, or with None if nothing was done and the method of the
# same name that is a coroutine must be asked.
Done = Callable[[T | Exception | None], None]


class Answered(Protocol):
    """Something that was asked for, with what became of it."""

    error: Exception | None


A = TypeVar("A", bound=Answered)


def deliver(done: Callable[[A], None], asked: A) -> None:
    """Call `done`; requests share a flush, so one that cannot take its answer must not stop the others."""
    try:
        done(asked)
    except Exception as error:
        log.exception("an answer could not be delivered")
        asked.error = error
        with suppress(Exception):
            done(asked)


def tell(done: Done[T], outcome: T | Exception | None) -> None:
    """Like `deliver`, of a bare outcome."""
    try:
        done(outcome)
    except Exception as error:
        log.exception("an answer could not be delivered")
        with suppress(Exception):
            done(error)
