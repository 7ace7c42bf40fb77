"""Maintenance: pushes are kept in a file and pushed afterwards, pops are paused."""

from __future__ import annotations

import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from settled.queue import sealing
from settled.queue.types import PushItem
from settled.server.spool import Entry, kept, pack, unpack
from settled.server.testing import RunningServer, running_server
from tests.server.http import Http

if TYPE_CHECKING:
    from collections.abc import Iterator

SWITCH = "/api/v1/system/maintenance"


@contextmanager
def _maintenance(http: Http) -> Iterator[None]:
    assert http("POST", SWITCH, {"enabled": True}).body["maintenanceMode"] is True
    try:
        yield
    finally:
        assert http("POST", SWITCH, {"enabled": False}).body["maintenanceMode"] is False


def _take(http: Http, queue: str, count: int) -> list[Any]:
    """Wait for so many messages and answer what is in them."""
    found: list[Any] = []
    deadline = time.monotonic() + 60
    while len(found) < count and time.monotonic() < deadline:
        popped = http.pop(queue, batch=100, wait="true", timeout=1000, autoAck="true")
        found += [(m["data"], m["transactionId"], m.get("headers")) for m in popped["messages"]]
    return found


def _buffers(http: Http) -> tuple[int, int]:
    body = http("GET", "/api/v1/status/buffers").body
    return body["pending"], body["failed"]


def _until(http: Http, kept: int) -> None:
    deadline = time.monotonic() + 60
    while http("GET", SWITCH).body["bufferedMessages"] != kept and time.monotonic() < deadline:
        time.sleep(0.05)
    assert http("GET", SWITCH).body["bufferedMessages"] == kept


def test_pushes_are_kept_while_maintenance_is_on_and_delivered_afterwards(http: Http, queue: str) -> None:
    http.push(queue, "before", transactionId="before")
    with _maintenance(http):
        first = http.push(queue, 1, 2, headers={"tenant": "blue"})
        assert [(r["index"], r["status"], r["queueName"]) for r in first] == [
            (0, "buffered", queue),
            (1, "buffered", queue),
        ]
        for _ in range(2):
            assert http.push(queue, 3, transactionId="three")[0]["transaction_id"] == "three"
        http.push(queue, "known", transactionId="before")
        assert http("POST", "/api/v1/push", {"items": [{"queue": ""}]}).status == 400
        assert http("GET", SWITCH).body["bufferedMessages"] == 5
        assert [m["data"] for m in http.pop(queue, batch=10, autoAck="true")["messages"]] == ["before"]
    ids = [r["transaction_id"] for r in first]
    blue = {"tenant": "blue"}
    assert _take(http, queue, 3) == [(1, ids[0], blue), (2, ids[1], blue), (3, "three", None)]
    _until(http, 0)
    assert http.push(queue, 4)[0]["status"] == "queued"
    assert [data for data, *_ in _take(http, queue, 1)] == [4]


def test_a_full_queue_holds_up_nobody_elses_kept_pushes(http: Http, queue: str) -> None:
    full = f"{queue}.full"
    http.configure(full, maxSize=2)
    with _maintenance(http):
        http.push(full, 0, 1, 2)  # more than ever fit at once
        http.push(full, 3)
        for n in range(4):
            http.push(queue, n)
    assert [data for data, *_ in _take(http, queue, 4)] == [0, 1, 2, 3]
    _until(http, 2)
    assert [data for data, *_ in _take(http, full, 4)] == [0, 1, 2, 3]
    _until(http, 0)


def test_what_can_never_be_pushed_is_put_aside(server: RunningServer, http: Http, queue: str) -> None:
    now = time.time()
    records = [
        pack(Entry(now, [kept(PushItem(queue, b"1", transaction_id="one"))])),
        pack(Entry(now, [kept(PushItem(queue, b"0")), kept(PushItem("not\0possible", b"0"))])),
        pack(Entry(now, [kept(PushItem(queue, b"2", transaction_id="two"))])),
        pack(Entry(now, [kept(PushItem(queue, b"3"))]))[:-1],  # the server died while it wrote this
    ]
    refused = _buffers(http)[1]
    folder = Path(server.data or "") / "spool"
    folder.mkdir(exist_ok=True)
    draft = folder / "left.draft"
    draft.write_bytes(b"".join(records))
    draft.rename(folder / "left.pushes")
    assert [data for data, *_ in _take(http, queue, 3)] == [1, 0, 2]
    _until(http, 0)
    assert _buffers(http) == (0, refused + 1)
    assert http("GET", SWITCH).body["bufferHealthy"] is False
    assert (folder / "left.refused").stat().st_size > 0
    assert not (folder / "left.pushes").exists()


def _stored(data: str) -> Iterator[Entry]:
    for path in (Path(data) / "spool").glob("*.pushes"):
        yield from unpack(path.read_bytes())


def test_kept_pushes_wait_for_their_key_and_hold_up_nobody_else(
    server: RunningServer, http: Http, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(server.data or "") / "spool"
    folder.mkdir(exist_ok=True)
    plain = pack(Entry(time.time(), [kept(PushItem(queue, b"1"))]))
    monkeypatch.setenv(sealing.VARIABLE, "11" * 32)
    sealed = pack(Entry(time.time(), [kept(PushItem(queue, b"2"))]))
    for name, record in (("0-sealed", sealed), ("1-plain", plain)):
        draft = folder / f"{name}.draft"
        draft.write_bytes(record)
        draft.rename(folder / f"{name}.pushes")
    assert [data for data, *_ in _take(http, queue, 1)] == [1]
    assert (folder / "0-sealed.pushes").exists()
    (folder / "0-sealed.pushes").unlink()


def test_kept_pushes_outlive_the_server(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    data = str(tmp_path / "data")
    with running_server(data=data, workers=2) as server:
        http = Http(server.url)
        http("POST", SWITCH, {"enabled": True})
        deadline = time.monotonic() + 60
        while (
            len(statuses := {http.push("q", "x", transactionId=f"{n}")[0]["status"] for n in range(20)}) > 1
        ):
            assert time.monotonic() < deadline, statuses  # until both workers know
        assert statuses == {"buffered"}
    with running_server(data=data) as server:
        http = Http(server.url)
        assert http("GET", SWITCH).body["maintenanceMode"] is True
        _until(http, kept := len(list(_stored(data))))
        assert kept >= 20
        http("POST", SWITCH, {"enabled": False})
        assert {tx for _, tx, _ in _take(http, "q", 20)} == {f"{n}" for n in range(20)}
        _until(http, 0)
        assert list((Path(data) / "spool").glob("*")) == []


def test_pops_are_paused_and_go_on(http: Http, queue: str) -> None:
    http.push(queue, 1)
    try:
        switched = http("POST", f"{SWITCH}/pop", {"enabled": True}).body
        assert switched["popMaintenanceMode"] is True
        paused = http.pop(queue)
        assert (paused["messages"], paused["paused"]) == ([], True)
    finally:
        http("POST", f"{SWITCH}/pop", {"enabled": False})
    assert http.pop(queue)["messages"][0]["data"] == 1
