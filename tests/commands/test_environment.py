"""Options by environment variables, and passwords that nobody else sees."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import click
import pytest
import typer

from settled import App, ConfigurationError
from settled.cli import app as command_line
from settled.transports.memory import MemoryTransport
from tests.commands.conftest import settled
from tests.server.http import Http

PAGE = Path(__file__).parents[2] / "docs" / "commands.md"


def test_an_app_without_a_url_takes_the_environments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Defect D6."""
    monkeypatch.delenv("SETTLED_URL", raising=False)
    assert isinstance(App().transport, MemoryTransport)
    monkeypatch.setenv("SETTLED_URL", "carrier://pigeon")
    with pytest.raises(ConfigurationError, match="no transport for 'carrier://pigeon'"):
        App()
    assert isinstance(App("memory://").transport, MemoryTransport)
    assert isinstance(App(transport=MemoryTransport()).transport, MemoryTransport)


def options(name: str) -> list[click.Option]:
    commands = typer.main.get_command(command_line).commands  # type: ignore[attr-defined]
    return [one for one in commands[name].params if one.param_type_name == "option" and one.name != "help"]


@pytest.mark.parametrize("command", ["run", "serve"])
def test_every_option_has_a_variable_of_its_name_and_a_row_in_the_docs(command: str) -> None:
    """Defect D6."""
    text = PAGE.read_text()
    assert options(command)
    for option in options(command):
        given = option.opts[0]
        wanted = "SETTLED_" + given.removeprefix("--").replace("-", "_").upper()
        names = [option.envvar] if isinstance(option.envvar, str) else list(option.envvar or ())
        assert wanted in names, given
        rows = [line for line in text.splitlines() if line.startswith(f"| `{given}`")]
        assert rows, f"{given} has no row in {PAGE.name}"
        assert f"`{wanted}`" in rows[0], rows[0]


def test_the_server_listens_where_the_variables_say(tmp_path: Path) -> None:
    """Defect Q17."""
    with tempfile.TemporaryDirectory(prefix="settled-", ignore_cleanup_errors=True) as home:
        Path(home).chmod(0o755)
        process = subprocess.Popen(
            [sys.executable, "-m", "settled", "serve"],
            env={**os.environ, "SETTLED_PORT": "0", "SETTLED_DATA": home, "SETTLED_WORKERS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert process.stdout is not None
        try:
            found = None
            while found is None:
                line = process.stdout.readline()
                assert line, "the server ended"
                found = re.search(r"listening on (http://127\.0\.0\.1:\d+)", line)
            assert Http(found[1])("GET", "/health").status == 200
            assert found[1] != "http://127.0.0.1:6632"
        finally:
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=60)


@pytest.mark.parametrize(
    ("dsn", "said"),
    [
        ("", "dsn: must be postgresql://user@host:port/database, got ''"),
        ("postgresql://ann:hush@host:port/shop", "dsn: the port must be 1..65535, got 'postgresql://host:port/shop'"),
        ("postgresql://ann:hush@host:0/shop", "dsn: the port must be 1..65535, got 'postgresql://host:0/shop'"),
        ("mysql://ann:hush@host/shop", "dsn: must be postgresql://user@host:port/database, got 'mysql://host/shop'"),
        ("postgresql://ann:hush@127.0.0.1:1/shop?sslmode=maybe", "dsn: `sslmode` parameter must be one of"),
        ("postgresql://ann:hush@127.0.0.1:1/shop", "the queue's database is unavailable: "),
    ],
)  # fmt: skip
@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_dsn_that_cannot_work_is_told_in_one_line_without_its_password(
    dsn: str, said: str, workers: str
) -> None:
    """Defect Q17."""
    done = settled("serve", "--port", "0", "--workers", workers, "--dsn", dsn)
    assert done.returncode == 1
    assert done.stderr.startswith(f"settled: {said}"), done.stderr
    assert "hush" not in done.stderr + done.stdout
    assert "Traceback" not in done.stderr


def test_the_password_of_a_dsn_is_not_in_the_process_list(database: str) -> None:
    """Defect Q17."""
    given = database.replace("//settled@", "//settled:hush@")
    process = subprocess.Popen(
        [sys.executable, "-m", "settled", "serve", "--port", "0", "--workers", "2", "--dsn", given],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    try:
        printed = []
        while not printed or "listening on" not in printed[-1]:
            printed.append(process.stdout.readline())
            assert printed[-1], printed
        family = [process.pid, *children(process.pid)]
        assert len(family) >= 3
        for pid in family:
            assert "hush" not in Path(f"/proc/{pid}/cmdline").read_text()
    finally:
        process.send_signal(signal.SIGTERM)
        rest, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert "hush" not in "".join(printed) + rest


def children(pid: int) -> list[int]:
    found = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(each) for each in found.split()]
