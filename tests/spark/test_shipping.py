"""Handlers and types that were defined in `__main__` arrive whole in another process."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from settled import App, Backoff, codec
from settled.spark.attempts import Attempts, Job, Rows
from settled.spark.frames import policy_of
from settled.spark.shipping import loads
from tests.spark import shipped


def attempted(text: str, payloads: list[Any]) -> tuple[list[Any], list[str | None]]:
    data = [json.dumps(payload).encode() for payload in payloads]
    ends = [sum(len(d) for d in data[:i]) for i in range(len(data) + 1)]
    done = Attempts(loads(text)).run(
        Rows(lanes=1, blob=b"".join(data), offsets=ends, seqs=list(range(len(data))))
    )
    results = [None if r is None else json.loads(r) for r in done.results]
    return results, [error for _, _, error in done.failed.values()]


def test_a_subscribers_backoff_is_how_long_a_failed_row_stays_away() -> None:
    def fail(order: dict[str, int]) -> None:
        raise OSError("the bank is away")

    for backoff, delay in ((Backoff(initial=3, maximum=9, jitter=0), 6.0), (None, None)):
        policy = policy_of(App("memory://").subscriber("orders", backoff=backoff)(fail), {})
        attempts = Attempts(Job(fail, policy, {}, "orders", "g", in_order=False))
        done = attempts.run(Rows(lanes=1, blob=b"{}", offsets=[0, 2], seqs=[0], attempts=[2]))
        assert done.failed == {0: ("retry", delay, "OSError: the bank is away")}


def test_types_of_main_arrive_as_they_were() -> None:
    sent = subprocess.run(
        [sys.executable, shipped.__file__], capture_output=True, text=True, timeout=120, check=False
    )
    assert sent.returncode == 0, sent.stderr
    jobs: dict[str, str] = json.loads(sent.stdout)
    assert attempted(jobs["kw"], [{"id": 1}, {"note": "x"}])[0] == [[1, None], None]
    assert attempted(jobs["node"], [{"id": 1, "children": [{"id": 2}]}]) == ([[3, True]], [])
    found, errors = attempted(
        jobs["child"],
        [
            {"theId": 1, "needed": "x"},
            {"theId": -1, "needed": "x"},
            {"theId": 1, "needed": "x", "ofMine": 8},
            {"theId": 1},
        ],
    )
    assert found == [["hello 1!", 7, True, "Child", "X"], None, None, None]
    for told, error in zip(("negative", "too many", "missing required field `needed`"), errors, strict=True):
        assert told in (error or "")
    rich = {"id": 1, "color": "blue", "size": 1, "node": {"id": 1}, "by_color": {"red": 1}}
    rich["address"] = {"city": "Rome", "next": {"city": "Bonn"}}
    found, errors = attempted(jobs["rich"], [rich, {"id": 1, "color": "green"}])
    assert found == [[True, True, True, "Bonn", {"red": 1}], None]
    assert "Invalid enum value 'green'" in (errors[0] or "")
    assert attempted(jobs["box"], [{"content": 1}, {"content": "x"}])[0] == [1, None]
    assert attempted(jobs["boxes"], [{"content": [{"id": 4}]}]) == ([4], [])
    assert attempted(jobs["tagged"], [{"type": "b", "id": 1}, {"type": "a", "id": 1}])[0] == [True, False]
    assert attempted(jobs["plain"], [{"city": "Rome", "next": {"city": "Bonn"}}]) == ([["Rome", True]], [])
    payload = codec.decoder(loads(jobs["payload"]))
    assert payload(b'{"color": "red"}', {}).color.value == "red"
