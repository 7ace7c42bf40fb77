"""Every example runs, and does what it says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

EXPECTED = {
    "implicit": ["charged order 1 on attempt 1", "charged order 2 on attempt 2", "acked=2"],
    "explicit": ["order 1, attempt 1: settled=True", "order 2, attempt 2: settled=True"],
    "feature_off": ["billing is off\nbilling is off\nbilling is on\nbilled order 1"],
    "backoff_to_dead_letter": [
        "trying order 1\n" * 3 + "dead: order 1: Defer: no attempts left after 3; TimeoutError"
    ],
    "sync_and_async": ["'async-7'", "'sync-7'", "16 handlers of 0.1 s took 0."],
    "queue_orders": ["88 dead: ValidationError", "pushed=5000 acked=4808 retried=", "dead=192 lost=0"],
    "settle_orders": ["pushed=1000 acked=944 retried=154 dead=56 lost=0"],
}


def test_every_example_is_tested() -> None:
    found = {path.stem for path in (ROOT / "examples").glob("*.py")} - {"__init__"}
    assert found == set(EXPECTED)


@pytest.mark.parametrize("name", EXPECTED)
def test_an_example_does_what_it_says(name: str) -> None:
    result = subprocess.run(
        [sys.executable, "-m", f"examples.{name}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    for text in EXPECTED[name]:
        assert text in result.stdout


def test_make_run_ends_with_the_counts() -> None:
    makefile = (ROOT / "Makefile").read_text()
    (command,) = re.findall(r"^run:.*\n\t@?\$\(BIN\)/python -m (\S+)", makefile, re.MULTILINE)
    result = subprocess.run(
        [sys.executable, "-m", command], cwd=ROOT, capture_output=True, text=True, timeout=600, check=True
    )
    last = result.stdout.strip().splitlines()[-1]
    found = re.fullmatch(r"pushed=(\d+) acked=(\d+) retried=(\d+) dead=(\d+) lost=0", last)
    assert found, last
    pushed, acked, _, dead = map(int, found.groups())
    duplicates = re.search(r"duplicates ([\d,]+)", result.stdout)
    assert duplicates, result.stdout
    assert pushed == acked + dead + int(duplicates[1].replace(",", ""))
