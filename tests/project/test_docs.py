"""What the docs say is so: every Python block runs, every doctest holds, every numbered test exists."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest

import settled

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
NEED_A_SERVER = {"queue.md", "from-queen.md", "nats.md", "router.md", "spark.md"}
"""Their blocks are run by tests beside the part they describe."""


def blocks() -> list[tuple[str, str]]:
    found = []
    for page in PAGES:
        if page.name in NEED_A_SERVER:
            continue
        for number, code in enumerate(re.findall(r"^```python\n(.*?)^```", page.read_text(), re.S | re.M), 1):
            found.append((f"{page.name}-{number}", code))
    return found


@pytest.mark.parametrize("code", [pytest.param(code, id=name) for name, code in blocks()])
def test_a_block_of_the_docs_runs(code: str, tmp_path: Path) -> None:
    script = tmp_path / "block.py"
    script.write_text(code)
    # As a module: a block that runs for ever when it is the program is typed by the tests of installs.
    result = subprocess.run(
        [sys.executable, "-c", "import block"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert result.returncode == 0, result.stderr


def modules() -> list[str]:
    return [
        module.name
        for module in pkgutil.walk_packages(settled.__path__, "settled.")
        if not module.name.endswith("__main__")
    ]


@pytest.mark.parametrize("name", modules())
def test_the_examples_in_docstrings_hold(name: str) -> None:
    failed, _ = doctest.testmod(importlib.import_module(name))
    assert failed == 0


def anchors(page: Path) -> set[str]:
    """What the headings of a page are called in links."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize(
    "page", [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))], ids=lambda page: page.name
)
def test_links_in_the_docs_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        there = page.parent / path if path else page
        assert there.exists(), target
        assert not anchor or anchor in anchors(there), target


def test_the_constraints_hold_names_and_versions_only() -> None:
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        assert re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.+!]+", line), line


def test_the_public_names_are_few_and_all_there() -> None:
    assert len(settled.__all__) <= 22
    assert all(hasattr(settled, name) for name in settled.__all__)


@pytest.mark.parametrize(
    "number", [*(f"fr_{n}" for n in range(1, 13)), *(f"ac_{n}" for n in [*range(1, 13), 17])]
)
def test_every_requirement_of_the_pump_has_a_test_that_carries_its_number(number: str) -> None:
    text = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    assert re.search(rf"def test_\w*{number}_", text)
