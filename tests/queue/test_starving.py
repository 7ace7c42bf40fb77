"""No consumer that could have a message waits longer than a second for it, whatever becomes of the news."""

from __future__ import annotations

import asyncio

import pytest

from settled.server.testing import running_server
from tests.queue.starving import run_engines, run_server


@pytest.mark.parametrize("workers", [2, 4])
def test_nobody_starves_beside_waiting_messages_on_a_server_with_several_workers(
    dsn: str, workers: int
) -> None:
    """Defect Q1: 30 s, with acks that reach only workers which no pop reaches."""
    with running_server(dsn=dsn, workers=workers) as server:
        one = asyncio.run(run_server(dsn, server.url, workers, "told", 30, seed=workers))
    assert not one.starved
    assert len(one.pushed) > 100


@pytest.mark.parametrize("news", ["lost", "late"])
def test_nobody_starves_on_a_server_whose_workers_hear_nothing_or_too_late(dsn: str, news: str) -> None:
    """Defect Q1: rows of activity are dropped, put off and shuffled between the processes."""
    with running_server(dsn=dsn, workers=2) as server:
        one = asyncio.run(run_server(dsn, server.url, 2, news, 5, seed=1))
    assert not one.starved


@pytest.mark.parametrize("news", ["told", "lost", "late"])
@pytest.mark.parametrize("workers", [2, 4])
def test_nobody_starves_whatever_becomes_of_the_news_between_workers(
    dsn: str, workers: int, news: str
) -> None:
    """Defect Q1: all lost, rows and bells; or late and in another order."""
    one = asyncio.run(run_engines(dsn, workers, news, 5, seed=workers))
    assert not one.starved
