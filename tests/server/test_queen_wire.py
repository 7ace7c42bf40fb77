"""Words, fields and routes that Queen MQ's own clients and their suites rely on. Defect Q12."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import Any

import pytest
from queen import Queen

from settled.server.testing import RunningServer
from tests.server.http import Http, ack_of


@pytest.mark.parametrize(("mode", "seen"), [("from_beginning", [1]), ("all", [1]), ("new-only", [])])
def test_a_group_starts_where_the_words_of_the_peer_say(
    http: Http, queue: str, mode: str, seen: list[int]
) -> None:
    http.push(queue, 1)
    messages = http.pop(queue, consumerGroup="g", subscriptionMode=mode)["messages"]
    assert [message["data"] for message in messages] == seen


def test_an_unknown_subscription_mode_is_refused_with_the_known_words(http: Http, queue: str) -> None:
    answer = http("GET", f"/api/v1/pop/queue/{queue}", consumerGroup="g", subscriptionMode="oldest")
    assert answer.status == 400
    assert "from_beginning" in answer.body["error"]


@pytest.mark.parametrize("fields", [{}, {"headers": {"a": "b"}}, {"transactionId": "own"}])
def test_a_popped_message_has_its_id_under_both_names(http: Http, queue: str, fields: dict[str, Any]) -> None:
    [pushed] = http.push(queue, 1, **fields)
    [message] = http.pop(queue)["messages"]
    assert message["id"] == message["messageId"] == pushed["message_id"]


def test_a_batch_of_popped_messages_has_each_id_under_both_names(http: Http, queue: str) -> None:
    pushed = [each["message_id"] for each in http.push(queue, *range(5))]
    messages = http.pop(queue, batch=5)["messages"]
    assert [m["messageId"] for m in messages] == [m["id"] for m in messages] == pushed


def test_a_foreign_lease_fails_with_the_documented_text(http: Http, queue: str) -> None:
    http.push(queue, 1)
    [message] = http.pop(queue)["messages"]
    answer = http.ack({**message, "leaseId": str(uuid.uuid4())})
    assert answer.status == 409
    assert (answer.body["message"], answer.body["error"]) == ("invalid_lease", "Lease validation failed")
    assert answer.body["noop"] is False


def test_an_unknown_transaction_id_is_unresolvable(http: Http, queue: str) -> None:
    http.push(queue, 1)
    [message] = http.pop(queue)["messages"]
    for status in ("completed", "failed"):
        answer = http.ack({**message, "transactionId": "never-pushed"}, status)
        assert (answer.status, answer.body["message"]) == (404, "not_found")
        assert "unresolvable" in answer.body["error"]
    assert http.ack(message).body["noop"] is False


@pytest.mark.parametrize("own", [None, "own-id"])
def test_a_second_ack_after_the_last_one_is_not_found(http: Http, queue: str, own: str | None) -> None:
    http.push(queue, 1, transactionId=own)
    [message] = http.pop(queue)["messages"]
    assert http.ack(message).body["leaseReleased"] is True
    again = http.ack(message)
    assert again.status == 404
    assert (again.body["message"], again.body["noop"]) == ("not_found", True)
    assert "already settled" in again.body["error"]
    late = http.ack(message, "failed")
    assert (late.status, late.body["message"], late.body["noop"]) == (404, "not_found", False)
    assert "committed" in late.body["error"]


def test_a_second_batch_ack_after_the_last_one_is_not_found_item_by_item(http: Http, queue: str) -> None:
    http.push(queue, *range(3))
    acks = {"acknowledgments": [ack_of(m) for m in http.pop(queue, batch=3)["messages"]]}
    assert http("POST", "/api/v1/ack/batch", acks).status == 200
    again = http("POST", "/api/v1/ack/batch", acks)
    assert again.status == 409
    assert [(each["message"], each["noop"]) for each in again.body["results"]] == [("not_found", True)] * 3


def test_an_ack_under_a_lease_that_ran_out_is_not_taken_for_settled(http: Http, queue: str) -> None:
    http.configure(queue, leaseTime=1)
    http.push(queue, 1)
    [late] = http.pop(queue)["messages"]
    [message] = http.pop(queue, wait="true", timeout=5000)["messages"]
    assert http.ack(late).body["message"] == "invalid_lease"
    assert http.ack(message).status == 200
    assert http.ack(late).body["message"] == "not_found"


def test_a_renewal_counts_its_partitions(http: Http, queue: str) -> None:
    for partition in ("a", "b"):
        http.push(queue, 1, partition=partition)
    popped = http.pop(queue, batch=2, partitions=2)
    path = f"/api/v1/lease/{popped['leaseId']}/extend"
    assert http("POST", path).body["renewed"] == 2
    for message in popped["messages"]:
        http.ack(message)
    gone = http("POST", path)
    assert (gone.status, gone.body["renewed"], gone.body["newExpiresAt"]) == (404, 0, None)


def test_a_refused_transaction_says_that_it_was_rolled_back(http: Http, queue: str) -> None:
    http.push(queue, 1)
    [message] = http.pop(queue)["messages"]
    http.ack(message)
    push = {"type": "push", "items": [{"queue": f"{queue}.out", "payload": 1}]}
    refused = http("POST", "/api/v1/transaction", {"operations": [push, {"type": "ack", **ack_of(message)}]})
    assert refused.status == 409
    assert "rolled back" in refused.body["error"]
    assert http.pop(f"{queue}.out")["messages"] == []


@pytest.mark.parametrize("rider", ["kv", "timers"])
def test_a_transaction_with_parts_of_a_newer_api_is_refused_whole(http: Http, queue: str, rider: str) -> None:
    push = {"type": "push", "items": [{"queue": queue, "payload": 1}]}
    refused = http("POST", "/api/v1/transaction", {"operations": [push], rider: [{"op": "put"}]})
    assert (refused.status, refused.body["field"]) == (400, rider)
    assert "not supported" in refused.body["error"]
    assert http.pop(queue)["messages"] == []
    done = http("POST", "/api/v1/transaction", {"operations": [push], rider: None})
    assert done.status == 200


def test_a_stream_with_another_hash_says_config_hash_mismatch(http: Http, queue: str) -> None:
    body = {"name": queue, "source_queue": queue, "config_hash": "one"}
    assert http("POST", "/streams/v1/queries", body).status == 200
    refused = http("POST", "/streams/v1/queries", {**body, "config_hash": "two"})
    assert (refused.status, refused.body["success"]) == (409, False)
    assert "config_hash mismatch" in refused.body["error"]


@pytest.mark.parametrize("shape", ["{}", "dlq:{}"])
def test_a_dead_letter_is_replayed(http: Http, queue: str, shape: str) -> None:
    http.push(queue, "poison")
    [message] = http.pop(queue)["messages"]
    http.ack(message, "dlq")
    [letter] = http("GET", "/api/v1/dlq", queue=queue).body["messages"]
    path = f"/api/v1/dlq/{shape.format(letter['id'])}/replay"
    replayed = http("POST", path)
    assert (replayed.status, replayed.body["success"]) == (200, True)
    assert [m["data"] for m in http.pop(queue, wait="true", timeout=5000)["messages"]] == ["poison"]
    assert http("POST", path).status == 404


@pytest.mark.parametrize(
    "path",
    [
        "/api/v1/kv",
        "/api/v1/kv/ns/key",
        "/api/v1/timers",
        "/api/v1/locks",
        "/api/v1/fetch",
        "/api/v1/partitions/changed",
        "/api/v1/ephemeral/push",
    ],
)
def test_a_route_of_a_newer_peer_answers_that_it_is_not_served(http: Http, path: str) -> None:
    answer = http("POST", path, {})
    assert answer.status == 404
    assert "not part of Settled" in answer.body["error"]
    assert "not part of Settled" not in http("POST", "/api/v1/kvx", {}).body["error"]


def rest(http: Http, queue: str) -> list[Any]:
    popped = http.pop(queue, batch=10, wait="true", timeout=3000)
    return sorted(message["data"] for message in popped["messages"])


@pytest.mark.parametrize("ask", [{"releaseRest": "true"}, {"autopilot": "true"}])
@pytest.mark.parametrize("status", ["failed", "retry"])
def test_a_nack_gives_the_rest_of_its_partition_back_where_the_pop_asked(
    http: Http, queue: str, ask: dict[str, str], status: str
) -> None:
    http.configure(queue, retry="parked", retryDelay=60_000)
    http.push(queue, *range(4))
    first, second, third, _ = http.pop(queue, batch=4, **ask)["messages"]
    assert http.ack(first).body["leaseReleased"] is False
    assert http.ack(second, status).body["leaseReleased"] is True
    assert http.ack(third).body["message"] == "invalid_lease"
    assert rest(http, queue) == ([2, 3] if status == "failed" else [1, 2, 3])


def test_a_nack_leaves_the_other_partitions_of_a_pop_alone(http: Http, queue: str) -> None:
    http.configure(queue, retry="parked", retryDelay=60_000)
    for partition in ("a", "b"):
        http.push(queue, f"{partition}1", f"{partition}2", partition=partition)
    popped = http.pop(queue, batch=4, partitions=2, releaseRest="true")["messages"]
    by = {message["data"]: message for message in popped}
    http.ack(by["a1"], "failed")
    assert http.ack(by["b1"]).status == http.ack(by["b2"]).status == 200
    assert rest(http, queue) == ["a2"]


def test_a_nack_keeps_the_rest_leased_where_nobody_asked(http: Http, queue: str) -> None:
    http.configure(queue, retry="parked", retryDelay=60_000)
    http.push(queue, *range(3))
    first, second, third = http.pop(queue, batch=3)["messages"]
    http.ack(first, "failed")
    assert http.pop(queue, batch=3)["messages"] == []
    assert http.ack(second).status == http.ack(third).status == 200


@pytest.mark.parametrize("named", [True, False])
def test_an_ack_gives_the_rest_back_where_it_asks(http: Http, queue: str, named: bool) -> None:
    http.push(queue, *range(3))
    first, *_ = http.pop(queue, batch=3)["messages"]
    lease = {} if named else {"leaseId": None}
    assert http.ack({**first, **lease}, releaseRest=True).body["leaseReleased"] is True
    assert rest(http, queue) == [1, 2]


def test_a_queue_gives_the_rest_back_by_its_option(http: Http, queue: str) -> None:
    http.configure(queue, releaseRest=True, retry="parked", retryDelay=60_000)
    http.push(queue, *range(3))
    first, *_ = http.pop(queue, batch=3)["messages"]
    body = {"acknowledgments": [ack_of(first, "failed")]}
    assert http("POST", "/api/v1/ack/batch", body).status == 200
    assert rest(http, queue) == [1, 2]


def test_a_nack_in_a_transaction_gives_the_rest_back(http: Http, queue: str) -> None:
    http.configure(queue, retry="parked", retryDelay=60_000)
    http.push(queue, *range(3))
    first, *_ = http.pop(queue, batch=3, releaseRest="true")["messages"]
    operation = {"type": "ack", **ack_of(first, "failed")}
    assert http("POST", "/api/v1/transaction", {"operations": [operation]}).status == 200
    assert rest(http, queue) == [1, 2]


def test_a_consumer_of_the_peer_that_drops_its_batch_after_a_nack_goes_on_at_once(
    server: RunningServer, queue: str
) -> None:
    seen: list[int] = []

    async def handle(message: Any) -> None:
        seen.append(message["data"])
        if message["data"] == 1:
            raise ValueError("poison")

    async def consume() -> None:
        client = Queen(server.url, retry_attempts=1)
        try:
            await client.queue(queue).config({"retryLimit": 1, "leaseTime": 300}).create()
            await client.queue(queue).push([{"data": n} for n in range(5)])
            async with asyncio.timeout(30):
                await client.queue(queue).group("g").batch(5).each().limit(5).consume(handle)
        finally:
            await client.close()

    began = time.monotonic()
    asyncio.run(consume())
    assert seen == [0, 1, 2, 3, 4]
    assert time.monotonic() - began < 20


def test_the_example_for_who_comes_from_the_peer_runs(server: RunningServer) -> None:
    page = (Path(__file__).parents[2] / "docs" / "from-queen.md").read_text()
    [source] = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    source = source.replace("http://127.0.0.1:6632", server.url)
    done = subprocess.run(
        [sys.executable, "-c", source], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "handled 1" in done.stdout
