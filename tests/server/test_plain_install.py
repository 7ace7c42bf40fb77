"""A server whose environment has no extra beyond `server`: encryption is asked for only by a key."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from settled.queue import sealing
from settled.server.testing import running_server
from tests.server.http import Http

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def without_cryptography(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python processes started now cannot import `cryptography`."""
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['cryptography'] = None\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.delenv(sealing.VARIABLE, raising=False)


@pytest.mark.usefixtures("without_cryptography")
def test_a_server_without_the_package_of_encryption_starts_pushes_and_keeps_pushes() -> None:
    """Defect I1."""
    with running_server() as server:
        http = Http(server.url)
        assert http.push("q", 1)[0]["status"] == "queued"
        assert http("POST", "/api/v1/system/maintenance", {"enabled": True}).status == 200
        assert http.push("q", 2)[0]["status"] == "buffered"
        assert http("POST", "/api/v1/system/maintenance", {"enabled": False}).status == 200
        found: list[int] = []
        while len(found) < 2:
            popped = http.pop("q", batch=10, wait="true", timeout=10_000, autoAck="true")
            assert popped["messages"], found
            found += [message["data"] for message in popped["messages"]]
        assert found == [1, 2]


@pytest.mark.usefixtures("without_cryptography")
def test_a_key_without_the_package_of_encryption_names_the_extra_to_install(tmp_path: Path) -> None:
    """Defect I1."""
    command = [sys.executable, "-m", "settled.server.command", "serve", "--port", "0"]
    done = subprocess.run(
        [*command, "--data", str(tmp_path / "data")],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, sealing.VARIABLE: "11" * 32},
    )
    assert done.returncode == 1
    assert "pip install 'settled[encryption]'" in done.stderr
    assert "Traceback" not in done.stderr
