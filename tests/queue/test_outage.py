"""Postgres goes away and comes back: callers are told, nothing answered is lost, everything goes on."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest

from settled.queue.db import connect
from settled.queue.embedded import EmbeddedPostgres
from settled.queue.engine import Engine
from settled.queue.errors import QueueError, Unavailable
from settled.queue.types import PopRequest, PushItem
from tests.queue.conftest import reachable_directory
from tests.queue.helpers import drain, ids, pop, push, settle

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def own_postgres() -> Iterator[EmbeddedPostgres]:
    """A server that the test may stop."""
    directory = reachable_directory()
    server = EmbeddedPostgres.start(directory)
    yield server
    server.stop()
    shutil.rmtree(directory)


def test_an_engine_survives_a_restart_of_postgres(own_postgres: EmbeddedPostgres) -> None:
    async def body() -> None:
        engine = await Engine.open(own_postgres.dsn)
        queued: set[str] = set()
        refused = 0
        stop = asyncio.Event()

        async def produce(number: int) -> None:
            nonlocal refused
            i = 0
            while not stop.is_set():
                name = f"{number}-{i}"
                try:
                    await push(engine, "q", name)
                    queued.add(name)
                    i += 1
                except Unavailable:
                    refused += 1
                    await asyncio.sleep(0.05)

        await push(engine, "leased", "a", "b")
        batch = await pop(engine, "leased")
        waiting = asyncio.create_task(pop(engine, "later", wait=30))
        producers = [asyncio.create_task(produce(i)) for i in range(4)]
        await asyncio.sleep(0.5)
        await asyncio.to_thread(own_postgres.shut_down, "immediate")
        with pytest.raises(Unavailable):
            await pop(engine, "q")
        with pytest.raises(Unavailable):
            await engine.groups()
        await asyncio.sleep(0.3)
        await asyncio.to_thread(own_postgres._launch)
        before = len(queued)
        async with asyncio.timeout(20):
            while len(queued) < before + 50:
                await asyncio.sleep(0.05)
        stop.set()
        await asyncio.gather(*producers)
        assert refused > 0
        got = await drain(engine, "q")
        assert len(got) == len(set(got))
        assert queued <= set(got)
        assert all(r.success for r in await settle(engine, batch, "completed"))
        if not waiting.done():
            await push(engine, "later", "x")
            assert ids(await asyncio.wait_for(waiting, 5)) == ["x"]
        else:
            assert isinstance(waiting.exception(), Unavailable)
        await engine.close()

    asyncio.run(asyncio.wait_for(body(), 90))


def test_a_worker_rings_once_another_has_joined(dsn: str) -> None:
    async def until(wanted: bool, engine: Engine) -> None:
        while engine._core.activity._alone is not wanted:
            await asyncio.sleep(0.01)

    async def main() -> None:
        async with asyncio.timeout(60), await Engine.open(dsn) as one:
            await until(True, one)
            async with await Engine.open(dsn) as two:
                await until(False, one)
                waiting = asyncio.create_task(two.pop(PopRequest("q", wait=30)))
                await one.push([PushItem("q", b"1")])
                assert len(await waiting) == 1
            await until(True, one)

    asyncio.run(main())


def test_opening_without_a_server_says_unavailable(tmp_path: Path) -> None:
    with pytest.raises(Unavailable):
        asyncio.run(Engine.open(f"postgresql://settled@/settled?host={tmp_path}"))


def test_a_newer_schema_is_refused_with_what_to_do(dsn: str) -> None:
    async def body() -> None:
        connection = await connect(dsn)
        await connection.execute("insert into migration (id, name) values (999, '999_future.sql')")
        await connection.close()
        with pytest.raises(QueueError, match=r"version 999.*upgrade"):
            await Engine.open(dsn)

    asyncio.run(body())


def test_migrations_run_once_though_many_start_together(own_postgres: EmbeddedPostgres) -> None:
    async def body() -> None:
        engines = await asyncio.gather(*(Engine.open(own_postgres.dsn, worker=f"w{i}") for i in range(4)))
        await asyncio.gather(*(push(engine, "q", f"m{i}") for i, engine in enumerate(engines)))
        assert len(await drain(engines[0], "q")) == 4
        for engine in engines:
            await engine.close()

    asyncio.run(body())


def test_two_starters_share_one_server_and_the_last_one_stops_it() -> None:
    directory = reachable_directory()
    starter = (
        "import sys; from settled.queue.embedded import EmbeddedPostgres as E;"
        "s = E.start(sys.argv[1]); print(s.dsn, flush=True); sys.stdin.read(); s.stop()"
    )
    command = [sys.executable, "-c", starter, str(directory)]
    others = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ)
        for _ in range(2)
    ]
    dsns = {other.stdout.readline().strip() for other in others if other.stdout}
    server = EmbeddedPostgres.start(directory)
    assert dsns == {server.dsn}
    for other in others:
        other.communicate("", timeout=30)
    assert server.is_running()
    server.stop()
    assert not server.is_running()
    shutil.rmtree(directory)


def test_a_killed_server_leaves_nothing_in_the_way_of_the_next_start(own_postgres: EmbeddedPostgres) -> None:
    async def push_one(name: str) -> list[str]:
        async with await Engine.open(own_postgres.dsn) as engine:
            await push(engine, "q", name)
            return [m.transaction_id for m in await engine.messages(queue="q")]

    asyncio.run(push_one("before"))
    pid = int((own_postgres.data / "postmaster.pid").read_text().splitlines()[0])
    os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + 20
    while own_postgres.is_running() and time.monotonic() < deadline:
        time.sleep(0.05)
    # The number in the file now belongs to another program.
    lines = (own_postgres.data / "postmaster.pid").read_text().splitlines()
    (own_postgres.data / "postmaster.pid").write_text("\n".join([str(os.getpid()), *lines[1:]]) + "\n")
    again = EmbeddedPostgres.start(own_postgres.directory)
    assert again.dsn == own_postgres.dsn
    assert sorted(asyncio.run(push_one("after"))) == ["after", "before"]
    again.stop()


def test_a_directory_with_a_long_name_gets_a_short_socket() -> None:
    parent = reachable_directory()
    directory = parent / ("d" * 120)
    directory.mkdir(mode=0o755)
    server = EmbeddedPostgres.start(directory)
    assert len(server.dsn) < 100
    server.stop()
    shutil.rmtree(parent)
