"""What the command line says and does before, or without, a Spark session."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from settled.spark import command, startup
from settled.spark.command import app, told_by

DSN = "postgresql://nobody@127.0.0.1:1/none"
pytestmark = pytest.mark.usefixtures("signals")
ZEROS = "batches=0 acked=0 retried=0 dead=0 released=0 pushed=0 waiting=0 failing=0 removed=0\n"


def told(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, list(arguments))
    return result.exit_code, result.output


@pytest.fixture(autouse=True)
def no_spark(monkeypatch: pytest.MonkeyPatch) -> None:
    def started(*_: object) -> None:
        raise AssertionError("Spark was started")

    monkeypatch.setattr(command, "_session", started)


def test_what_is_wrong_is_told_before_spark_starts(tmp_path: Path) -> None:
    page = str(tmp_path / "report.html")
    for arguments, text in (
        (["export", str(tmp_path), "--url", DSN, "--format", "csv"], "must be parquet or delta, got 'csv'"),
        (["export", str(tmp_path), "--url", "nats://x"], "url: must be the queue's database"),
        (["report", page, "--url", "http://a:hush@x"], "or a NATS server, nats://…, got 'http://x'"),
        (["report", str(tmp_path / "a.json"), "--url", DSN], "must not end in .json"),
        (["report", str(tmp_path / "no" / "a.html"), "--url", DSN], "must be in a folder that is there"),
        (["report", page, "--url", DSN, "--hours", "0"], "hours: must be above 0"),
        (["report", page, "--url", DSN, "--hours", "nan"], "hours: must be above 0"),
        (["redrive", "--url", DSN, "--rate", "inf"], "rate: must be messages a second"),
        (["redrive", "--url", DSN, "--to", ""], "to: must be text of 1..255 characters"),
        (["redrive", "--url", DSN, "--to", "x" * 300], "to: must be text of 1..255 characters"),
        (["run", "a:b", "--url", "http://x", "--queue", "q", "--group", "g"], "url: must be the queue's"),
    ):  # fmt: skip
        code, output = told(*arguments)
        assert (code, text in output, output.count("\n")) == (1, True, 1), output
    assert list(tmp_path.iterdir()) == []


def test_a_handler_that_spark_cannot_run_is_told_before_it_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = (
        "async def later(order: dict) -> None: ...",
        "def bare(order): ...",
        "def good(order: dict): ...",
    )
    source = "\n".join(lines)
    (tmp_path / "odd_shop.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    for name, text in (
        ("later", "Spark runs plain functions; write def, not async def"),
        ("bare", "parameter 'order' has no annotation"),
        ("good", "to: is the queue that is read: a message would go round for ever, got 'q'"),
    ):
        options = ["--url", DSN, "--queue", "q", "--group", "g", "--to", "q"]
        code, output = told("run", f"odd_shop:{name}", *options)
        assert (code, text in output, output.count("\n")) == (1, True, 1), output


@pytest.mark.parametrize("future", ["", "from __future__ import annotations\n"])
def test_results_of_a_handler_that_returns_none_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, future: str
) -> None:
    """Defect I3: 0 messages were pushed, and nobody said so."""
    name = "returning_later" if future else "returning"
    (tmp_path / f"{name}.py").write_text(f"{future}def charge(order: dict) -> None: ...\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    where = ["--url", DSN, "--queue", "orders", "--group", "g"]
    code, output = told("run", f"{name}:charge", *where, "--to", "invoices")
    assert code == 1
    assert "to: charge() is declared to return None, so nothing would go there" in output
    assert output.count("\n") == 1


def test_a_handlers_module_that_fails_is_told_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_shop.py").write_text("raise ValueError('no card reader')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    code, output = told("run", "broken_shop:charge", "--url", DSN, "--queue", "q", "--group", "g")
    assert (code, output) == (
        2,
        "settled: broken_shop:charge cannot be loaded: ValueError: no card reader\n",
    )


def test_times_are_converted_to_utc() -> None:
    def utc(text: str) -> str:
        at = command._moment("--since", text)
        assert at is not None
        return at.isoformat()

    assert utc("2026-11-18T04:30:00+05:00") == "2026-11-17T23:30:00+00:00"
    assert utc("2026-11-18T04:30:00Z") == "2026-11-18T04:30:00+00:00"
    assert utc("2026-11-18 04:30") == "2026-11-18T04:30:00+00:00"
    assert utc("2026-11-18") == "2026-11-18T00:00:00+00:00"
    for text in ("yesterday", "9999-12-31T23:59-05:00", "0001-01-01T00:00+05:00"):
        code, output = told("redrive", "--url", DSN, "--since", text)
        assert (code, "--since: must be a time like" in output) == (2, True)


def test_a_checkpoint_with_a_scheme_is_sparks_and_a_name_is_one_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for uri in ("file:///data/x", "file:/data/x", "hdfs://host/x", "s3a://bucket/x"):
        assert command._place(uri, "q", "g") == uri
    assert command._place("here", "q", "g") == str(tmp_path / "here")
    assert command._place(None, "order-events", "g 1") == str(tmp_path / "checkpoints" / "order-events-g 1")
    assert command._place(None, "a/b", "../c%") == str(tmp_path / "checkpoints" / "a%2Fb-..%2Fc%25")


def test_the_line_that_says_it_is_found_in_what_spark_says() -> None:
    query = "[STREAM_FAILED] Query [id = 1] terminated with exception: [PYTHON_EXCEPTION] An exception was "
    start = 'thrown from the Python worker: Traceback (most recent call last):\n  File "a.py", line 1, in f\n'
    first = f"{query}{start}    g()\nOSError: disk is full\n"
    again = "\nDuring handling of the above exception, another exception occurred:\n\n"
    second = (
        'Traceback (most recent call last):\n  File "b.py", line 2, in g\nshop.Broken: no till\nat home\n'
    )
    java = (
        "An error occurred while calling o153.start.\n: java.io.IOException: mkdir of x failed\n\tat a.b.C\n"
    )
    for text, line in (
        (first, "OSError: disk is full"),
        (first + again + second, "shop.Broken: no till"),
        (first + "settled.queue.errors.Conflict: read by another\n" + again + second, "read by another"),
        (java, "java.io.IOException: mkdir of x failed"),
        ("one line", "one line"),
        ("", ""),
    ):
        assert told_by(text) == line


def test_a_signal_while_the_jvm_is_launched_is_heard_when_it_is_up() -> None:
    heard: list[str] = []
    usual = signal.signal(signal.SIGTERM, lambda *_: heard.append("told"))
    try:
        with startup._signals_later():
            os.kill(os.getpid(), signal.SIGTERM)
            heard.append("up")
        assert heard == ["up", "told"]
    finally:
        signal.signal(signal.SIGTERM, usual)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with pytest.raises(KeyboardInterrupt), startup._signals_later():
        os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    other = threading.Thread(target=lambda: startup._signals_later().__enter__())
    other.start()
    other.join()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_run_that_is_told_to_stop_while_spark_starts_ends_with_its_summary_and_leaves_no_jvm(
    tmp_path: Path, number: signal.Signals
) -> None:
    (tmp_path / "clerk.py").write_text("def note(order: dict[str, int]) -> None: pass\n")
    arguments = ["run", "clerk:note", "--master", "local[1,4]", "--url", DSN, "--queue", "q", "--group", "g"]
    said = tmp_path / "said"
    with said.open("w") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "settled", "pipeline", *arguments],
            cwd=tmp_path, stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True,
        )  # fmt: skip
        try:
            until = time.monotonic() + 60
            while not (java := children(process.pid)):
                assert process.poll() is None, said.read_text()
                assert time.monotonic() < until, said.read_text()
                time.sleep(0.02)
            os.killpg(process.pid, number)
            out, _ = process.communicate(timeout=120)
        finally:
            process.kill()
            process.wait()
    assert (process.returncode, out, "Traceback" in said.read_text()) == (0, ZEROS, False), said.read_text()
    until = time.monotonic() + 30
    while any(Path(f"/proc/{pid}").exists() for pid in java):
        assert time.monotonic() < until, "the JVM is left"
        time.sleep(0.1)


def children(pid: int) -> list[int]:
    """The processes that any of its threads started."""
    found = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(one) for some in found for one in some.read_text().split()]
