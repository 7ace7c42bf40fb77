"""The server and the Postgres it brings: told to stop early, short of descriptors, and with hiccups."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from settled.queue.embedded import EmbeddedPostgres, temporary_directory
from settled.server import process
from settled.server.config import Config, data_directory
from settled.server.testing import running_server
from tests.server.http import Http

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

COMMAND = [sys.executable, "-m", "settled.server.command", "serve", "--port", "0"]


@pytest.fixture
def home() -> Iterator[Path]:
    with temporary_directory() as folder:
        yield folder


def wait_for(condition: Callable[[], object], seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


def servers_of(home: Path) -> list[int]:
    """The numbers of the Postgres servers on a data directory, ready or not."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            words = path.read_bytes().split(b"\0")
            if words[0].endswith(b"/postgres") and os.fsencode(home / "postgres") in words:
                found.append(int(path.parent.name))
    return found


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize("moment", ["while the database is made", "while Postgres starts"])
def test_a_stop_before_it_listens_says_so_and_leaves_no_postgres(
    home: Path, number: signal.Signals, code: int, moment: str
) -> None:
    """Defect I6."""
    if moment == "while Postgres starts":
        EmbeddedPostgres.start(home).stop()
    with subprocess.Popen(
        [*COMMAND, "--data", str(home)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout is not None
        assert server.stdout.readline() == f"starting Postgres in {home}\n"
        wait_for(lambda: (home / "postgres.new").exists() or servers_of(home))
        server.send_signal(number)
        out, err = server.communicate(timeout=60)
    assert (server.returncode, out) == (code, ""), err
    assert err == "settled: stopped before it listened\n"
    assert servers_of(home) == []


def test_a_server_without_a_home_directory_is_told_to_name_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Defect I8."""
    monkeypatch.setattr(os, "geteuid", lambda: 54_321)
    monkeypatch.setattr(os, "getuid", lambda: 54_321)
    for name in ("HOME", "SETTLED_HOME", "XDG_DATA_HOME"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(OSError, match=r"user id 54321 has no home directory.*--data"):
        data_directory(None)


def test_a_server_short_of_descriptors_says_so_and_still_looks_after_its_postgres(home: Path) -> None:
    """Defect Q24: the keeper ended without a word, and a stop left Postgres running."""

    def few() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100))

    with (
        subprocess.Popen(
            [*COMMAND, "--workers", "1", "--data", str(home)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=few,
        ) as server,
        contextlib.ExitStack() as stack,
    ):
        assert server.stdout is not None
        lines = [server.stdout.readline() for _ in range(4)]
        url = lines[1].split()[-1]
        port = int(url.rpartition(":")[2])
        Http(url).push("q", 1)
        held = [
            stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=10)) for _ in range(120)
        ]
        assert b"503" in held[-1].recv(100)
        (pid,) = servers_of(home)
        os.kill(pid, signal.SIGKILL)
        wait_for(lambda: servers_of(home) not in ([], [pid]))
        for each in held:
            each.close()
        http = Http(url)
        wait_for(lambda: _pushed(http))
        server.send_signal(signal.SIGTERM)
        _, err = server.communicate(timeout=60)
    assert server.returncode == 0
    assert "the limit of open files allows no more; refusing new ones: raise `ulimit -n`" in err
    assert servers_of(home) == []


def _pushed(http: Http) -> bool:
    try:
        return http("POST", "/api/v1/push", {"items": [{"queue": "q"}]}).status == 201
    except Exception:  # a connection that is still refused
        return False


def test_nothing_that_goes_wrong_ends_the_watch_over_postgres(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Defect Q24."""
    monkeypatch.setattr(process, "WATCH_EVERY", 0.01)
    looked: list[int] = []

    class Failing(EmbeddedPostgres):
        def keep(self) -> None:
            looked.append(1)
            raise OSError(24, "Too many open files")

    async def main(home: Path) -> None:
        watch = asyncio.create_task(process._keep_postgres(Failing(home)))
        async with asyncio.timeout(10):
            while len(looked) < 3:
                await asyncio.sleep(0.01)
        assert not watch.done()
        watch.cancel()
        await asyncio.gather(watch, return_exceptions=True)

    with temporary_directory() as home:
        asyncio.run(main(home))
    assert caplog.text.count("Too many open files") == 1


def test_a_hiccup_while_a_later_worker_starts_does_not_end_the_server(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Defect Q6: the server had clients by then."""
    started: list[int] = []
    usual = process._Worker

    class Worker(usual):  # type: ignore[misc, valid-type]
        """The second one meets a database that is away."""

        def __init__(self, config: Config, *rest: object) -> None:
            started.append(config.index)
            if started.count(1) == 1 and config.index == 1:
                away = "postgresql://nobody@127.0.0.1:1/none"
                config = Config(away, index=1, spool=config.spool, board=config.board)
            super().__init__(config, *rest)

    monkeypatch.setattr(process, "_Worker", Worker)
    said: list[str] = []

    async def main(dsn: str) -> None:
        sock = process.listen("127.0.0.1", 0)
        config = Config(dsn, spool=str(tmp_path / "spool"), board=str(tmp_path), grace=1)
        server = asyncio.create_task(process._supervise(config, 2, sock, None, lambda: said.append("ready")))
        async with asyncio.timeout(60):
            while started.count(1) < 2 or not said:
                await asyncio.sleep(0.05)
                assert not server.done(), server.exception()
        os.kill(os.getpid(), signal.SIGTERM)
        await server
        sock.close()

    with EmbeddedPostgres.start(home) as postgres:
        asyncio.run(main(postgres.dsn))
    assert started[:3] == [0, 1, 1]
    assert "worker 1 did not start; its error is above; trying again" in caplog.text


def test_a_stop_while_postgres_is_started_again_leaves_none() -> None:
    """Defect Q6: a Postgres that the watch had just started was left without an owner."""
    with running_server() as server:
        assert server.data is not None
        home = Path(server.data)
        (pid,) = servers_of(home)
        os.kill(pid, signal.SIGKILL)
        wait_for(lambda: servers_of(home) not in ([], [pid]))
        assert server.terminate() == 0
        assert servers_of(home) == []
