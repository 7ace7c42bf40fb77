"""The code blocks of docs/queue.md are run as they stand."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from settled.server.testing import RunningServer

DOCUMENT = Path(__file__).parents[2] / "docs" / "queue.md"


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", DOCUMENT.read_text(), re.MULTILINE | re.DOTALL)


def test_the_curl_lines_work(server: RunningServer) -> None:
    script = "\n".join(blocks("sh"))
    calls = script.count("curl ")
    assert calls >= 12
    # --fail-with-body makes curl say so when the server refuses.
    script = f"set -eu -o pipefail\nQUEUE={server.url}\n" + script.replace(
        "curl -s ", "curl -sS --fail-with-body "
    )
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert '"status":"queued"' in done.stdout
    assert '"message":"acknowledged"' in done.stdout
    assert '"configured":true' in done.stdout


def test_the_python_examples_work(server: RunningServer) -> None:
    examples = blocks("python")
    assert len(examples) == 2
    for example in examples:
        source = example.replace("http://127.0.0.1:6632", server.url)
        done = subprocess.run(
            [sys.executable, "-W", "error", "-c", source],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
