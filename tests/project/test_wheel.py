"""The wheel, built and used as a user would: in an environment with nothing else in it."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

import settled

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("dist")
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(ROOT)],
        check=True,
        capture_output=True,
        timeout=300,
    )
    (built,) = out.glob("*.whl")
    return built


def test_the_wheel_has_the_package_its_types_and_its_licence(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert "settled/py.typed" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert not any(name.startswith(("tests/", "examples/", "bench/")) for name in names)


def test_it_works_in_a_clean_environment(wheel: Path, tmp_path: Path) -> None:
    home = tmp_path / "venv"
    venv.create(home, with_pip=True)
    run = home / "bin"
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "VIRTUAL"))}

    def call(*command: str | Path) -> str:
        result = subprocess.run(
            command, cwd=tmp_path, env=clean, capture_output=True, text=True, timeout=300, check=False
        )
        assert result.returncode == 0, result.stderr
        return result.stdout

    call(run / "pip", "install", "--quiet", "-c", ROOT / "constraints.txt", wheel)
    installed = call(run / "pip", "list", "--format=freeze").split()
    names = {line.split("==")[0] for line in installed} - {"pip", "setuptools", "wheel"}
    assert names == {"settled", "msgspec"}
    assert call(run / "settled", "--version") == f"settled {settled.__version__}\n"
    assert "charged order 2 on attempt 2" in call(run / "python", ROOT / "examples" / "implicit.py")
