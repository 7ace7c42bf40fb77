"""`settled router run` and `settled router simulate`, as an operator uses them."""

from __future__ import annotations

import asyncio
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import msgspec

import nats
from settled.router.command import WATCHED
from tests.nats.servers import Server, free_ports
from tests.router.test_faults import result_for


def settled(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "settled", "router", *arguments]


def test_run_serves_metrics_and_ends_on_a_signal(one: Server, tmp_path: Path) -> None:
    (port,) = free_ports(1)
    file = tmp_path / "router.toml"
    file.write_text(f'url = "{one.url}"\nnats_js_max_deliver = 4\ntenants = ["tenant-1"]\n')
    command = settled("run", "--config", str(file), "--metrics-port", str(port), "--log-json")
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            text = ""
            deadline = time.monotonic() + 30
            sent = False
            while 'router_results_total{job_type="text.generate"' not in text:
                assert process.poll() is None
                assert time.monotonic() < deadline, text
                try:
                    if not sent:
                        asyncio.run(_send(one.url))
                        sent = True
                    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=2) as answer:
                        text = answer.read().decode()
                except OSError:
                    pass
                except nats.errors.Error:
                    pass
                time.sleep(0.1)
        finally:
            process.send_signal(signal.SIGTERM)
            _, log = process.communicate(timeout=20)
        assert process.returncode == 0
    assert re.search(r'router_results_total\{.*status="success".*\} 1\.0', text)
    lines = [msgspec.json.decode(line) for line in log.splitlines() if line.startswith("{")]
    assert any(line["message"] == "result success" and line["assignment_id"] for line in lines)
    assert not any("gives a message up" in line["message"] for line in lines)


async def _send(url: str) -> None:
    client = await nats.connect(url)
    try:
        await client.jetstream().publish("caf.exec.result.v1", msgspec.json.encode(result_for()), timeout=1)
    finally:
        await client.close()


def test_a_wrong_setting_is_named(tmp_path: Path) -> None:
    file = tmp_path / "router.toml"
    for text, words in (
        ("nats_js_max_deliver = 0", "nats_js_max_deliver"),
        ("nats_js_max_deliverr = 3", "nats_js_max_deliverr"),
        ("nats_js_max_deliver = 2", "nats_js_backoff_seconds has 3 steps"),
        ("url = ", "Invalid value"),
    ):
        file.write_text(text)
        result = subprocess.run(
            settled("run", "--config", str(file)), capture_output=True, text=True, timeout=30, check=False
        )
        assert result.returncode == 2
        assert words in result.stderr


def test_a_wrong_option_is_an_error_in_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for option, value, words in (
            ("--log-level", "loud", "--log-level must be one of"),
            ("--metrics-port", str(port), f"metrics_port: cannot listen on port {port}"),
            ("--metrics-port", "99999", "metrics_port: cannot listen on port 99999"),
        ):
            result = subprocess.run(
                settled("run", option, value), capture_output=True, text=True, timeout=30, check=False
            )
            assert result.returncode == 2
            (line,) = result.stderr.splitlines()
            assert line.startswith(f"settled: {words}")


def test_a_server_that_is_not_there_is_an_error_in_one_line() -> None:
    (port,) = free_ports(1)
    result = subprocess.run(
        settled("run", "--url", f"nats://127.0.0.1:{port}"),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert result.returncode == 2
    assert f"cannot connect to 127.0.0.1:{port}" in result.stderr.splitlines()[-1]


def test_the_demonstration_shows_retries_rise_and_fall(one: Server) -> None:
    command = settled("simulate", "--url", one.url, "--seconds", "12", "--rate", "10", "--duplicate", "0.3")
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        columns = list(WATCHED)
        assert process.stdout.readline().split("(")[0].split() == " ".join(columns).split()
        rows = [_row(process.stdout.readline(), columns) for _ in range(2)]
        one.freeze()
        time.sleep(4)
        one.thaw()
        rest, _ = process.communicate(timeout=60)
        assert process.returncode == 0
    rows += [_row(line, columns) for line in rest.splitlines() if re.fullmatch(r"[\s\d]+", line)]
    retries = [row["retries"] for row in rows]
    assert retries[:2] == [0, 0]
    assert max(retries) > 0
    assert retries[-1] == 0
    assert sum(row["results"] for row in rows[-3:]) > 0
    assert sum(row["duplicates"] for row in rows) > 0
    assert "worker: duplicate" in rest


def _row(line: str, columns: list[str]) -> dict[str, int]:
    return dict(zip(columns, (int(word) for word in line.split()), strict=True))
