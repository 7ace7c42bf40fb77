"""The wheel, a copy of the tree, and pip's constraints for each."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from settled import __version__
from tests.install.pages import ROOT


@pytest.fixture(scope="session")
def folder() -> Iterator[Path]:
    """A folder outside the tree."""
    found = Path(tempfile.mkdtemp(prefix="settled-wheel-"))
    found.chmod(0o755)
    yield found
    shutil.rmtree(found)


@pytest.fixture(scope="session")
def clone(folder: Path) -> Path:
    """A copy of the files that are, or would be, in the repository."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    found = folder / "settled"
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            (found / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, found / name)
    return found


@pytest.fixture(scope="session")
def released(folder: Path, clone: Path) -> Path:
    """Constraints under which `settled` is the wheel of this tree, and all else what we test with.

    Its version has a label that no index has, so that pip cannot take another `settled` for it.
    """
    source = shutil.copytree(clone, folder / "labelled")
    version = source / "src" / "settled" / "_version.py"
    label = f"{__version__}+tree"
    version.write_text(version.read_text().replace(__version__, label))
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(source)],
        check=True,
        capture_output=True,
        timeout=300,
    )
    found = folder / "released.txt"
    found.write_text(f"{(ROOT / 'constraints.txt').read_text()}settled=={label}\n")
    return found
