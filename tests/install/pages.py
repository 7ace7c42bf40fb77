"""The install lines of the docs, and everything that a reader types below them."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    *sorted(page for page in (ROOT / "docs").rglob("*.md") if page.parent.name != "adr"),
]
"""What a user reads; decisions tell nobody what to type."""
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.S | re.M)
_INSTALL = re.compile(r"pip install (?:-e )?'?(?:settled|\.)(?:\[|'|$|`|\s)")


@dataclass(frozen=True)
class Step:
    """A command as it is typed, and the lines that it must print; `after` those, Ctrl-C has ended it."""

    command: str
    expected: list[str] = field(default_factory=list)
    after: list[str] | None = None


@dataclass(frozen=True)
class Typed:
    """A block of commands, one of which installs Settled."""

    page: Path
    lines: range
    steps: list[Step]

    @property
    def requirement(self) -> str:
        """What it installs, without the quotes: `settled[cli,nats]`."""
        install = next(step.command for step in self.steps if _INSTALL.search(step.command))
        return install.removeprefix("pip install ").partition("#")[0].strip().strip("'")

    @property
    def name(self) -> str:
        return f"{self.page.name}:{self.requirement}"


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def steps(text: str) -> list[Step]:
    """The commands of a console block, each with the output below it.

    A command that ends in a backslash goes on in the next line.
    """
    found: list[Step] = []
    for line in text.splitlines():
        if line.startswith("$ "):
            found.append(Step(line[2:]))
        elif found and found[-1].command.endswith("\\") and not found[-1].expected:
            found[-1] = Step(found[-1].command[:-1] + line.strip())
        elif line == "^C":
            found[-1] = Step(found[-1].command, found[-1].expected, [])
        elif line.strip():
            last = found[-1]
            (last.expected if last.after is None else last.after).append(line)
    return found


def typed() -> list[Typed]:
    """Every console block of the docs that installs Settled."""
    found = []
    for page in PAGES:
        text = page.read_text()
        for block in _FENCE.finditer(text):
            if block[1] == "console" and _INSTALL.search(block[2]):
                first = text.count("\n", 0, block.start()) + 2
                lines = range(first, first + block[2].count("\n"))
                found.append(Typed(page, lines, steps(block[2])))
    return found


def install_lines() -> list[tuple[Path, int, str]]:
    """Every place where the docs install Settled, in a block or not: page, number and line."""
    return [
        (page, number, line)
        for page in PAGES
        for number, line in enumerate(page.read_text().splitlines(), 1)
        if _INSTALL.search(line)
    ]


def files(page: Path) -> dict[str, str]:
    """The files of a page: its Python blocks whose first line is a comment with the file's name."""
    found = {}
    for block in _FENCE.finditer(page.read_text()):
        if block[1] in ("python", "py") and (named := re.match(r"# (\S+\.py)\n", block[2])):
            found[named[1]] = block[2]
    return found


def named_extras() -> list[str]:
    """Each set of extras that the docs name anywhere, as `cli,nats`; without any, an empty text."""
    found = {""}
    for page in PAGES:
        found |= set(re.findall(r"settled\[([a-z,-]+)\]", page.read_text()))
        found |= set(re.findall(r"pip install '?\.\[([a-z,-]+)\]", page.read_text()))
    return sorted(found)
