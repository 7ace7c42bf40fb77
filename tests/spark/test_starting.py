"""How Spark is started: with the settings it was given, on a cluster, and interrupted."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from typer.testing import CliRunner

from settled.queue.errors import Conflict
from settled.spark import command, packing
from settled.spark.command import app
from tests.spark.conftest import Shop
from tests.spark.test_crashes import cluster

BIN = Path(sys.executable).parent
JOB = """
import json, sys
from settled.spark import session
spark = session(**json.loads(sys.argv[1]))
names = ("spark.sql.shuffle.partitions", "spark.sql.session.timeZone", "spark.executor.extraJavaOptions")
print(json.dumps([spark.sparkContext.master, spark.sparkContext.appName, *map(spark.conf.get, names)]))
spark.stop()
"""


def started(tmp_path: Path, program: list[str], arguments: str = "{}", **env: str) -> str:
    (tmp_path / "job.py").write_text(JOB)
    done = subprocess.run(
        [*program, str(tmp_path / "job.py"), arguments],
        env={**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}", **env},
        capture_output=True, text=True, timeout=180, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().splitlines()[-1]


def test_a_session_has_the_master_and_the_settings_of_spark_submit(tmp_path: Path) -> None:
    """Defect S1."""
    submit = [str(BIN / "spark-submit"), "--master", "local[1,2]", "--name", "nightly"]
    for setting in ("spark.sql.shuffle.partitions=7", "spark.executor.extraJavaOptions=-Dshop=1"):
        submit += ["--conf", setting]
    found = started(tmp_path, submit)
    assert found.startswith('["local[1,2]", "nightly", "7", "UTC", "')
    assert found.endswith(' -Dshop=1"]')


def test_a_session_has_the_settings_of_its_defaults_file_unless_the_program_says_otherwise(
    tmp_path: Path,
) -> None:
    """Defect S1."""
    (tmp_path / "spark-defaults.conf").write_text("spark.master local[1]\nspark.sql.shuffle.partitions 9\n")
    arguments = '{"app": "shop", "conf": {"spark.sql.session.timeZone": "CET"}}'
    found = started(tmp_path, [sys.executable], arguments, SPARK_CONF_DIR=str(tmp_path))
    assert found.startswith('["local[1]", "shop", "9", "CET", "-Darrow')


def test_the_command_sends_the_handlers_own_modules_to_a_cluster(shop: Shop, tmp_path: Path) -> None:
    """Defect S2."""
    work = tmp_path / "work"
    (work / "till" / "data").mkdir(parents=True)
    (work / "lib").mkdir()
    (work / "till" / "__init__.py").touch()
    (work / "till" / "data" / "rate.txt").write_text("3")
    (work / "till" / "billing.py").write_text(
        "from importlib import resources\n"
        "import tariff, vat\n"
        "def charge(order: dict[str, int]) -> dict[str, float]:\n"
        "    rate = int(resources.files('till').joinpath('data/rate.txt').read_text())\n"
        "    return {'total': tariff.PRICE * vat.RATE * rate, 'order': order['id']}\n"
    )
    (work / "tariff.py").write_text("PRICE = 2\n")
    (work / "lib" / "vat.py").write_text("RATE = 5\n")
    queue = shop.queue()
    shop.push(queue, [{"id": i} for i in range(20)])
    with cluster(tmp_path) as (url, _):
        arguments = [
            "run", "till.billing:charge", "--master", url, "--py-files", "lib/vat.py", "--until-empty",
            "--url", shop.dsn, "--queue", queue, "--group", "g", "--to", queue + "-out",
        ]  # fmt: skip
        for name, value in (("executor.memory", "600m"), ("driver.host", "127.0.0.1")):
            arguments += ["--conf", f"spark.{name}={value}"]
        done = subprocess.run(
            [sys.executable, "-m", "settled", "pipeline", *arguments],
            cwd=work, capture_output=True, text=True, timeout=300, check=False,
        )  # fmt: skip
    assert (done.returncode, "acked=20" in done.stdout) == (0, True), done.stderr
    assert "sent to the executors: tariff, till\n" in done.stderr
    results = [one for lane in shop.pop_all(queue + "-out").values() for one in lane]
    assert sorted(one["order"] for one in results) == list(range(20))
    assert {one["total"] for one in results} == {30}


def test_only_modules_beside_the_handler_are_sent_and_not_what_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Defect S2."""
    assert packing.own_parts("settled") == packing.own_parts("msgspec") == packing.own_parts("json") == []
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "kiosk").mkdir()
    (tmp_path / "kiosk" / "large.bin").write_bytes(b"x" * 1000)
    for file, text in (("kiosk/__init__.py", "import papers"), ("papers.py", ""), ("unused.py", "")):
        (tmp_path / file).write_text(text)
    __import__("kiosk")
    parts = packing.own_parts("kiosk")
    assert parts == [tmp_path / "kiosk", tmp_path / "papers.py"]
    monkeypatch.setattr(packing, "LARGEST", 500)
    with pytest.raises(Conflict, match="more than 500 bytes; install them where executors run"):
        packing.pack(parts, tmp_path / "all.zip")


def test_wrong_settings_and_files_are_told_before_spark_starts(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").touch()
    base = ["run", "a:b", "--url", "postgresql://x", "--queue", "q", "--group", "g"]
    for wrong, text in (
        (["--conf", "shuffle=3"], "--conf: must be spark.NAME=VALUE, got 'shuffle=3'"),
        (["--conf", "spark.x"], "--conf: must be spark.NAME=VALUE, got 'spark.x'"),
        (["--py-files", str(tmp_path / "none.zip")], "--py-files: must be a file that is there"),
        (["--py-files", str(tmp_path / "notes.txt")], ".py, .zip, .egg, .whl, got"),
    ):
        result = CliRunner().invoke(app, [*base, *wrong])
        assert (result.exit_code, text in result.output) == (2, True), result.output


def test_each_run_logs_to_a_file_of_its_own_that_nobody_else_reads_and_that_is_no_link(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Defect I4."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    victim = tmp_path / "victim"
    victim.write_text("mine")
    (tmp_path / "settled-spark.log").symlink_to(victim)
    logs = [command._log(), command._log()]
    assert logs[0] != logs[1]
    for log in logs:
        assert (log.is_symlink(), stat.S_IMODE(log.stat().st_mode)) == (False, 0o600)
        log.write_text("an error")
    assert victim.read_text() == "mine"


INTERRUPTED = """
import os, signal, sys, threading
from settled.spark import startup
from settled.spark.command import app

start = startup.session

def session(*args, **options):
    spark = start(*args, **options)
    told = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
    told.start()
    while told.is_alive():
        spark.range(10).count()
    spark.range(10).count()
    return spark

startup.session = session
app(sys.argv[1:])
"""


def test_an_interrupt_before_the_query_starts_leaves_no_traceback(tmp_path: Path) -> None:
    """Defect S15."""
    (tmp_path / "clerk.py").write_text("def note(order: dict[str, int]) -> None: pass\n")
    (tmp_path / "program.py").write_text(INTERRUPTED)
    arguments = ["--url", "postgresql://nobody@127.0.0.1:1/none", "--queue", "q", "--group", "g"]
    done = subprocess.run(
        [sys.executable, "program.py", "run", "clerk:note", "--master", "local[1,4]", *arguments],
        cwd=tmp_path, capture_output=True, text=True, timeout=180, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout.startswith("batches=0 acked=0")) == (0, True), done.stderr
    [line] = done.stderr.splitlines()
    assert line.startswith("starting Spark, which logs to ")
