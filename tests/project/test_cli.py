"""The command line, as a user runs it: in a process of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import settled

APP = """
from settled import App

app = App()
not_an_app = 3

@app.subscriber("orders", buffer=10)
def handle(order: int) -> None:
    import time
    print("handling", order, flush=True)
    time.sleep(0.3)

for number in range(20):
    app.publish("orders", number)
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "shop.py").write_text(APP)
    (tmp_path / "broken.py").write_text("\n\nraise RuntimeError('no\\n database')\n")
    (tmp_path / "needs.py").write_text("import there_is_no_such_thing\n")
    (tmp_path / "torn.py").write_text("\nprint(\n")
    (tmp_path / "empty.py").write_text("from settled import App\napp = App()\n")
    (tmp_path / "wrong.py").write_text(
        "from settled import App\napp = App()\n@app.subscriber('orders')\ndef handle(order): ...\n"
    )
    limited = APP.replace("buffer=10", "unacceptable_limit=1").replace(
        "print", "raise ValueError('boom'); print"
    )
    (tmp_path / "limited.py").write_text(limited)
    return tmp_path


def run(project: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "settled", *arguments],
        cwd=project,
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "COLUMNS": "80"},
        check=False,
    )


@pytest.fixture
def start(project: Path) -> Iterator[object]:
    processes: list[subprocess.Popen[str]] = []

    def go(*arguments: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-m", "settled", *arguments],
            cwd=project,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        processes.append(process)
        return process

    yield go
    for process in processes:
        if process.poll() is None:
            process.kill()
            process.wait()
        for stream in (process.stdout, process.stderr):
            if stream is not None:
                stream.close()


def read_until(process: subprocess.Popen[str], text: str) -> str:
    assert process.stdout is not None
    for line in process.stdout:
        if text in line:
            return line
    raise AssertionError(f"{text!r} did not come; {process.stderr.read() if process.stderr else ''}")


def test_version(project: Path) -> None:
    assert run(project, "--version").stdout == f"settled {settled.__version__}\n"


@pytest.mark.parametrize(
    ("target", "text"),
    [
        ("shop", "'shop' does not name an app; write module:app"),
        ("nowhere:app", "no module 'nowhere' in"),
        ("shop.py:app", "'shop.py' is no module's name; write shop:app"),
        ("../shop:app", "'../shop' is no module's name; write shop:app"),
        ("torn:app", "torn cannot be imported: SyntaxError: '(' was never closed (torn.py:2)"),
        ("shop.nowhere:app", "no module 'shop.nowhere'"),
        ("shop:ap", "shop has no 'ap'; did you mean shop:app?"),
        ("shop:not_an_app", "shop:not_an_app is a int, not a settled.App"),
        ("broken:app", "broken cannot be imported: RuntimeError: no database (broken.py:3)"),
        ("needs:app", "needs needs 'there_is_no_such_thing', which is not installed"),
        ("empty:app", "app: it has no subscriber; decorate a function with @app.subscriber"),
        ("wrong:app", "parameter 'order' has no annotation"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(project: Path, target: str, text: str) -> None:
    result = run(project, "run", target)
    assert result.returncode == 2
    assert text in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1, result.stderr


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("http://127.0.0.1:1", "cannot connect: Unreachable: "),
        ("postgresql://u:hush@127.0.0.1:1/d", "cannot connect: Unavailable: the queue's database is unavail"),
    ],
)
def test_a_broker_that_is_away_at_the_start_is_told_without_a_traceback(
    project: Path, url: str, text: str
) -> None:
    (project / "away.py").write_text(APP.replace("App()", f"App({url!r})").partition("for number")[0])
    result = run(project, "run", "away:app")
    assert result.returncode == 2
    _, told = result.stderr.strip().splitlines()  # the first one names the subscription
    assert told.startswith(f"settled: {text}")
    assert "hush" not in told


def test_a_bad_option_is_refused(project: Path) -> None:
    assert run(project, "run", "shop:app", "--performers", "0").returncode == 2
    assert "--log-level must be" in run(project, "run", "shop:app", "--log-level", "loud").stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_drains_settles_what_is_in_hand_and_exits_0(start, number: signal.Signals) -> None:  # type: ignore[no-untyped-def]
    process = start("run", "shop:app")
    read_until(process, "handling 0")
    process.send_signal(number)
    _, errors = process.communicate(timeout=20)
    assert process.returncode == 0, errors
    assert "acked=1 requeued=0 released=9" in errors
    assert "stopped (told to stop)" in errors


def test_performers_override_the_apps(start) -> None:  # type: ignore[no-untyped-def]
    process = start("run", "shop:app", "--performers", "2", "--log-json")
    read_until(process, "handling")
    process.terminate()
    _, errors = process.communicate(timeout=20)
    assert "orders:handle x 2" in errors


def test_an_app_whose_pumps_all_stopped_exits_1_and_says_why(project: Path) -> None:
    result = run(project, "run", "limited:app")
    assert result.returncode == 1
    assert "limit exceeded (1 unacceptable messages; the last one: ValueError: boom)" in result.stderr


NAMES = """
from settled import App

app = App()

@app.subscriber("ship", group="ship")
def ship(order: int) -> None: ...

@app.subscriber("orders[eu]")
def handle(order: int) -> None: ...

@app.subscriber("plant[/1]/t")
def read(order: int) -> None:
    print("reading", flush=True)

app.publish("plant[/1]/t", 1)
"""


def test_names_are_printed_as_they_are_not_read_as_markup_or_emoji(start, project: Path) -> None:  # type: ignore[no-untyped-def]
    """Defect D2."""
    (project / "names.py").write_text(NAMES)
    process = start("run", "names:app")
    read_until(process, "reading")
    process.terminate()
    _, errors = process.communicate(timeout=20)
    assert process.returncode == 0, errors
    for name in ("ship/ship:ship", "orders[eu]:handle", "plant[/1]/t:read"):
        assert f"settled: {name} x 1\n" in errors
        assert f"settled: {name}: stopped" in errors


def json_lines(text: str) -> list[dict[str, object]]:
    return [json.loads(line) for line in text.splitlines()]


WARNS = NAMES.replace(
    "    print(",
    """    import threading, warnings
    warnings.warn("this is old")
    thread = threading.Thread(target=lambda: 1 / 0)
    thread.start()
    thread.join()
    print(""",
)


def test_with_log_json_standard_error_holds_only_json(start, project: Path) -> None:  # type: ignore[no-untyped-def]
    """Defect D3: the banner, warnings, uncaught errors and the summary, too."""
    (project / "warns.py").write_text(WARNS)
    process = start("run", "warns:app", "--log-json")
    read_until(process, "reading")
    process.terminate()
    _, errors = process.communicate(timeout=20)
    lines = json_lines(errors)
    told = [str(line["message"]) for line in lines]
    assert "plant[/1]/t:read x 1" in told
    assert any("this is old" in text for text in told)
    assert any(text.startswith("ZeroDivisionError") for text in told)
    assert lines[-1]["subscription"] == "plant[/1]/t:read"
    assert lines[-1]["acked"] == 1


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        ("run shop:ap", 2, "did you mean shop:app?"),
        ("run", 2, "MODULE:APP"),
        ("run shop:app --performers 0", 2, "--performers"),
        ("run shop:app --log-level loud", 2, "--log-level must be"),
        ("serve --port 99999", 2, "--port"),
        ("serve --host 256.0.0.1", 1, "256.0.0.1"),
        ("bridge nats://127.0.0.1:1 memory:// --from orders", 2, "memory:// lives in one process"),
        ("router run --config nowhere.toml", 2, "nowhere.toml"),
        ("router run --url nats://127.0.0.1:1", 2, "cannot connect to 127.0.0.1:1"),
    ],
)
def test_with_log_json_an_error_is_json_too(project: Path, arguments: str, code: int, text: str) -> None:
    """Defect D3."""
    result = run(project, *arguments.split(), "--log-json")
    assert result.returncode == code
    last = json_lines(result.stderr)[-1]
    assert text in str(last["message"])
    assert last["level"] == "error"


@pytest.mark.parametrize("module", ["msgspec", "typer"])
def test_ctrl_c_while_the_command_is_imported_prints_no_traceback(project: Path, module: str) -> None:
    """Defect D3: the first 0.3 s of a command are imports."""
    (project / f"{module}.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n")
    result = run(project, "run", "shop:app")
    assert (result.returncode, result.stderr) == (130, "")


@pytest.mark.parametrize("url", ["nats://u:hush@127.0.0.1:1", "redis://:hush@127.0.0.1:1"])
def test_an_app_run_by_a_script_tells_a_broker_that_is_away_in_one_short_error(
    project: Path, url: str
) -> None:
    """Defect D3: 42 to 113 lines of tracebacks."""
    script = APP.replace("App()", f"App({url!r})").partition("for number")[0] + "\napp.run()\n"
    (project / "script.py").write_text(script)
    result = subprocess.run(
        [sys.executable, "script.py"], cwd=project, capture_output=True, text=True, timeout=60, check=False
    )
    lines = result.stderr.splitlines()
    assert result.returncode == 1
    assert lines[-1].startswith("ConnectionError: ")
    assert "127.0.0.1:1" in lines[-1]
    assert len(lines) <= 8, result.stderr
    assert "hush" not in result.stderr


@pytest.mark.parametrize("by", ["option", "variable"])
def test_reload_starts_anew_when_a_file_changes(  # type: ignore[no-untyped-def]
    start, project: Path, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    if by == "variable":
        monkeypatch.setenv("SETTLED_RELOAD", "1")
    process = start("run", "shop:app", *(["--reload"] if by == "option" else []))
    read_until(process, "handling")
    time.sleep(0.5)
    (project / "shop.py").write_text(APP.replace('"handling"', '"now handling"'))
    read_until(process, "now handling")
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=20)
    assert process.returncode == 0


ONLY_THE_COMMAND_LINE = """
import sys

others = "asyncpg", "nats", "prometheus_client", "psycopg", "pyarrow", "pyspark", "watchfiles", "zstandard"
sys.modules.update(dict.fromkeys(others))  # as if they were not installed
from settled.__main__ import main
main()
"""


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ("serve", "serve needs zstandard; run: pip install 'settled[server]'"),
        (
            "pipeline redrive --url postgresql://h/d",
            "pipeline needs zstandard; run: pip install 'settled[spark]'",
        ),
        ("run shop:app --reload", "run needs watchfiles; run: pip install 'settled[cli]'"),
    ],
)
def test_a_command_whose_extra_is_not_installed_names_it_in_one_line(
    project: Path, arguments: str, text: str
) -> None:
    result = subprocess.run(
        [sys.executable, "-c", ONLY_THE_COMMAND_LINE, *arguments.split()],
        cwd=project,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (result.returncode, result.stderr) == (1, f"settled: {text}\n")


def test_the_bare_install_says_how_to_get_the_command_line(project: Path) -> None:
    hidden = "import sys; sys.modules['typer'] = None; sys.argv = ['settled', 'run', 'x:y']; "
    result = subprocess.run(
        [sys.executable, "-c", hidden + "from settled.__main__ import main; main()"],
        cwd=project,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert result.returncode == 1
    assert result.stderr.strip().endswith("pip install 'settled[cli]'")
