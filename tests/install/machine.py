"""A new user's machine: a home, a folder and a virtual environment with nothing in them, and a terminal."""

from __future__ import annotations

import contextlib
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from tests.install.pages import Step

_PROMPT = re.compile(r"<<(\d+)>> ")
_FOR_PIP = re.compile(
    r"PIP_\w+|(SSL|REQUESTS|CURL)_(CERT_FILE|CERT_DIR|CA_BUNDLE)|https?_proxy|no_proxy", re.I
)


class Wrong(AssertionError):
    """A command of the docs does not do what they say."""


class Machine:
    """A terminal in an environment of its own; nothing of ours is on its path."""

    def __init__(self, root: Path, constraint: Path, variables: Mapping[str, str] | None = None) -> None:
        self.root = root
        self.work = root / "work"
        self.home = root / "home"
        for folder in (self.work, self.home):
            folder.mkdir()
        self.environment = root / "environment"
        subprocess.run([sys.executable, "-m", "venv", self.environment], check=True, timeout=120)
        self.replaced: dict[str, str] = {}
        self._log = ""
        self._constraint = constraint
        self._terminal, theirs = os.openpty()
        self._shell = subprocess.Popen(
            ["setsid", "--ctty", "--wait", "bash", "--noprofile", "--norc", "--noediting", "-i"],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            cwd=self.work,
            env={
                "PATH": f"{self.environment / 'bin'}:/usr/local/bin:/usr/bin:/bin",
                "HOME": str(self.home),
                "LANG": "C.UTF-8",
                "TERM": "dumb",
                "COLUMNS": "200",
                "PS1": "<<$?>> ",
                **self._for_pip(),
                **(variables or {}),
            },
        )
        os.close(theirs)
        self._until_prompt(0, 30)
        self.run("stty -echo cols 200")

    def _for_pip(self) -> dict[str, str]:
        """Settings that this machine's pip needs to reach its index, and its cache, which is warm."""
        passed = {key: value for key, value in os.environ.items() if _FOR_PIP.fullmatch(key)}
        cache = subprocess.run(
            [sys.executable, "-m", "pip", "cache", "dir"],
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        )
        return {
            **passed,
            "PIP_CACHE_DIR": cache.stdout.strip(),
            "PIP_CONSTRAINT": str(self._constraint),
            "PIP_FIND_LINKS": f"{self._constraint.parent} {passed.get('PIP_FIND_LINKS', '')}".strip(),
            "PIP_DISABLE_PIP_VERSION_CHECK": "1",
            "PIP_PROGRESS_BAR": "off",
            "PIP_NO_INPUT": "1",
            "PIP_ROOT_USER_ACTION": "ignore",
        }

    def real(self, text: str) -> str:
        """A text of the docs with the addresses of this machine."""
        for shown, real in self.replaced.items():
            text = text.replace(shown, real)
        return text

    def write(self, files: Mapping[str, str]) -> None:
        """Save files where the terminal is."""
        for name, text in files.items():
            (self.work / name).parent.mkdir(parents=True, exist_ok=True)
            (self.work / name).write_text(self.real(text))

    def run(self, command: str, timeout: float = 120) -> str:
        """Type a command, wait for its end, and return what was printed meanwhile; it must exit with 0."""
        start = len(self._log)
        self._type(f"{command}\n")
        code = self._until_prompt(start, timeout)
        if code:
            raise Wrong(f"exit code {code} of: {command}\n{self._log[start:]}")
        return self._log[start:]

    def follow(self, step: Step, timeout: float = 600) -> None:
        """Type a step of the docs; it must print the lines below it."""
        command, start = self.real(step.command), len(self._log)
        if step.after is None:
            self.run(command, timeout)
            self._until_printed(command, step.expected, start, 60)
            return
        self._type(f"{command}\n")
        self._until_printed(command, step.expected, start, timeout)
        self._type("\x03")
        if code := self._until_prompt(start, 60):
            raise Wrong(f"exit code {code} after Ctrl-C of: {command}\n{self._log[start:]}")
        self._until_printed(command, [*step.expected, *step.after], start, 60)

    def _type(self, text: str) -> None:
        os.write(self._terminal, text.encode())

    def _until_printed(self, command: str, expected: Sequence[str], start: int, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        while (missing := self._missing(expected, start)) is not None:
            if time.monotonic() > deadline:
                raise Wrong(f"{command} did not print: {missing}\nbut: {self._log[start:]}")
            self._read(0.2)

    def _missing(self, expected: Sequence[str], start: int) -> str | None:
        """The first of the lines that was not printed; `…` stands for anything.

        Their order is not looked at: programs in the background print when they like.
        """
        printed = _PROMPT.sub("", self._log[start:])
        for line in expected:
            pattern = ".*".join(map(re.escape, self.real(line.rstrip()).split("…")))
            if re.search(f"^.*{pattern} *$", printed, re.M) is None:
                return line
        return None

    def _until_prompt(self, start: int, timeout: float) -> int:
        deadline = time.monotonic() + timeout
        while (found := _PROMPT.search(self._log, start)) is None:
            if time.monotonic() > deadline:
                raise Wrong(f"no end after {timeout:.0f} s: {self._log[start:]}")
            self._read(0.2)
        # Each prompt is taken once: what follows it belongs to the next command.
        code, at = int(found[1]), found
        self._log = self._log[: at.start()] + self._log[at.end() :]
        return code

    def _read(self, wait: float) -> None:
        ready, _, _ = select.select([self._terminal], [], [], wait)
        if ready:
            with contextlib.suppress(OSError):  # the shell has ended
                self._log += os.read(self._terminal, 65536).decode(errors="replace").replace("\r", "")
        if self._shell.poll() is not None:
            raise Wrong(f"the shell ended: {self._log[-2000:]}")

    def close(self) -> None:
        """End what still runs in this terminal, and wait for it."""
        for number, patience in ((signal.SIGTERM, 60), (signal.SIGKILL, 10)):
            deadline = time.monotonic() + patience
            for pid in self._processes():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
            while self._processes() and time.monotonic() < deadline:
                time.sleep(0.05)
        self._shell.kill()
        self._shell.wait(30)
        os.close(self._terminal)

    def _processes(self) -> list[int]:
        """The processes of this terminal's session, apart from its shell."""
        found = []
        session = os.getsid(self._shell.pid)
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError, IndexError):
                    state, _, _, its = (entry / "stat").read_text().rpartition(")")[2].split()[:4]
                    if int(its) == session and state != "Z" and int(entry.name) != session:
                        found.append(int(entry.name))
        return found


@contextlib.contextmanager
def machine(constraint: Path, variables: Mapping[str, str] | None = None) -> Iterator[Machine]:
    """A new machine, which is thrown away at the end."""
    root = Path(tempfile.mkdtemp(prefix="settled-install-"))
    root.chmod(0o755)  # the account of the embedded Postgres must be able to come here
    found = None
    try:
        found = Machine(root, constraint, variables)
        yield found
    finally:
        if found is not None:
            found.close()
        shutil.rmtree(root, ignore_errors=True)
