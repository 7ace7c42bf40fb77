"""Queues, groups, dead letters, single messages, traces, switches and figures over HTTP."""

from __future__ import annotations

import time
import uuid
from urllib.parse import quote

import pytest

from settled.server.testing import RunningServer
from tests.server.http import Http, ack_of
from tests.server.test_schema import Checked


@pytest.fixture(scope="module")
def http(server: RunningServer) -> Http:
    """Each answer is held against the API document."""
    return Checked(server.url)


def test_configure_answers_all_options(http: Http, queue: str) -> None:
    body = {
        "queue": queue,
        "namespace": "shop",
        "task": "bill",
        "options": {"leaseTime": 60, "retry": "parked"},
    }
    answer = http("POST", "/api/v1/configure", body)
    assert answer.status == 200
    assert (answer.body["configured"], answer.body["namespace"], answer.body["task"]) == (
        True,
        "shop",
        "bill",
    )
    options = answer.body["options"]
    assert (options["leaseTime"], options["retry"], options["retryLimit"]) == (60, "parked", 3)
    uuid.UUID(answer.body["queueId"])
    uuid.UUID(answer.body["partitionId"])


def test_queues_are_listed_shown_cleared_and_deleted(http: Http, queue: str) -> None:
    http.push(queue, 1, 2, 3)
    http.push(queue, 4, partition="other")
    [message] = http.pop(queue, "Default")["messages"]
    listed = {q["name"]: q for q in http("GET", "/api/v1/resources/queues").body["queues"]}
    assert listed[queue]["partitions"] == 2
    assert listed[queue]["messages"]["total"] == 4
    shown = http("GET", f"/api/v1/resources/queues/{queue}").body
    lanes = {lane["name"]: lane["stats"] for lane in shown["partitions"]}
    assert (lanes["Default"]["total"], lanes["Default"]["processing"], lanes["other"]["pending"]) == (3, 1, 1)
    assert shown["totals"]["total"] == 4
    assert shown["options"]["leaseTime"] == 300
    depth = http("GET", f"/api/v1/resources/queues/{queue}/depth").body
    assert depth["pending"] == sum(p["pending"] for p in depth["partitions"])
    assert len(http("GET", "/api/v1/resources/partitions", queue=queue).body["partitions"]) == 2
    assert http.ack(message).status == 200
    assert http("DELETE", f"/api/v1/queues/{queue}/clear").status == 200
    assert http.pop(queue)["messages"] == []
    deleted = http("DELETE", f"/api/v1/resources/queues/{queue}").body
    assert (deleted["deleted"], deleted["existed"]) == (True, True)
    assert http("DELETE", f"/api/v1/resources/queues/{queue}").body["existed"] is False
    assert http("GET", f"/api/v1/resources/queues/{queue}").status == 404


def test_namespaces_tasks_and_overview(http: Http) -> None:
    space = f"n{uuid.uuid4().hex[:8]}"
    http.push(f"{space}.work", 1)
    spaces = {n["namespace"]: n for n in http("GET", "/api/v1/resources/namespaces").body["namespaces"]}
    assert (spaces[space]["queues"], spaces[space]["messages"]["total"]) == (1, 1)
    assert "work" in {t["task"] for t in http("GET", "/api/v1/resources/tasks").body["tasks"]}
    overview = http("GET", "/api/v1/resources/overview").body
    assert overview["queues"] >= 1
    assert overview["messages"]["total"] >= 1


def test_groups_show_their_lag_and_can_be_moved_and_forgotten(http: Http, queue: str) -> None:
    group = f"g {uuid.uuid4().hex[:8]}"
    at = f"/api/v1/consumer-groups/{quote(group)}"
    http.push(queue, *range(4))
    [message] = http.pop(queue, consumerGroup=group)["messages"]
    rows = [g for g in http("GET", "/api/v1/consumer-groups").body["groups"] if g["name"] == group]
    assert [(r["topics"], r["totalLag"], r["members"]) for r in rows] == [([queue], 4, 1)]
    assert rows[0]["state"] == "Stable"
    assert rows[0]["maxTimeLag"] >= 0
    assert http.ack(message).status == 200
    detail = http("GET", at).body[queue]["partitions"]
    assert [(p["partition"], p["offsetLag"], p["leaseActive"]) for p in detail] == [("Default", 3, False)]
    lagging = http("GET", "/api/v1/consumer-groups/lagging", minLagSeconds=0).body
    assert [r["offset_lag"] for r in lagging if r["consumer_group"] == group] == [3]

    moved = http("POST", f"{at}/queues/{queue}/seek", {"toEnd": True})
    assert (moved.status, moved.body["partitionsUpdated"]) == (200, 1)
    assert http.pop(queue, consumerGroup=group)["messages"] == []
    http("POST", f"{at}/queues/{queue}/seek", {"toBeginning": True})
    assert len(http.pop(queue, consumerGroup=group, batch=9, autoAck="true")["messages"]) == 4
    http("POST", f"{at}/queues/{queue}/seek", {"timestamp": "2020-01-01T00:00:00Z"})
    assert len(http.pop(queue, consumerGroup=group, batch=9, autoAck="true")["messages"]) == 4
    one = http("POST", f"{at}/queues/{queue}/partitions/Default/seek")
    assert (one.status, one.body["updated"]) == (200, True)

    stamp = http("POST", f"{at}/subscription", {"subscriptionTimestamp": "2020-01-01T00:00:00Z"})
    assert stamp.status == 200
    gone = http("DELETE", f"{at}/queues/{queue}", deleteMetadata="true").body
    assert (gone["success"], gone["deletedPartitions"], gone["queueName"]) == (True, 1, queue)
    assert len(http.pop(queue, consumerGroup=group, batch=9)["messages"]) == 4
    assert http("DELETE", at).body["deletedPartitions"] == 1


def test_a_dead_letter_is_put_back_or_dropped(http: Http, queue: str) -> None:
    http.push(queue, "one", "two", "three")
    messages = http.pop(queue, batch=3)["messages"]
    for message in messages:
        http.ack(message, "dlq", error="bad")
    letters = {m["data"]: m for m in http("GET", "/api/v1/dlq", queue=queue).body["messages"]}
    day = letters["one"]["failedAt"][:10]
    span = {"from": day, "to": letters["three"]["failedAt"][:10]}
    assert http("GET", "/api/v1/dlq", queue=queue, **span).body["total"] == 3  # to the end of the day
    assert http("GET", "/api/v1/dlq", queue=queue, to=f"{day}T00:00:00Z").body["total"] == 0
    back = http("POST", f"/api/v1/dlq/{letters['one']['id']}/retry")
    assert (back.status, back.body["success"], back.body["queueName"]) == (200, True, queue)
    [again] = http.pop(queue)["messages"]
    assert again["data"] == "one"
    assert http.ack(again).status == 200
    assert http("DELETE", f"/api/v1/dlq/{letters['two']['id']}").status == 200
    three = messages[2]
    retried = http("POST", f"/api/v1/messages/{three['partitionId']}/{three['transactionId']}/retry")
    assert (retried.status, retried.body["requeued"]) == (200, 1)
    assert [m["data"] for m in http.pop(queue)["messages"]] == ["three"]
    assert http("GET", "/api/v1/dlq", queue=queue).body["total"] == 0


def test_single_messages_are_found_listed_buried_and_deleted(http: Http, queue: str) -> None:
    http.configure(queue, priority=7)
    pushed = http.push(queue, {"n": 1}, {"n": 2}, {"n": 3})
    listed = http("GET", "/api/v1/messages", queue=queue).body
    assert {m["queuePriority"] for m in listed["messages"]} == {7}
    assert {m["status"] for m in listed["messages"]} == {"pending"}
    assert len(listed["messages"]) == 3
    assert len(http("GET", "/api/v1/messages", queue=queue, limit=1, offset=1).body["messages"]) == 1
    address = [f"/api/v1/messages/{p['partition_id']}/{p['transaction_id']}" for p in pushed]
    [first] = http.pop(queue)["messages"]
    one = http("GET", address[0]).body
    assert (one["payload"], one["status"], one["queue"]) == ({"n": 1}, "processing", queue)
    assert one["consumerGroups"][0]["name"] == "__QUEUE_MODE__"
    assert (one["queuePriority"], one["queueConfig"]["priority"], one["queueConfig"]["leaseTime"]) == (
        7,
        7,
        300,
    )
    assert http.ack(first).status == 200
    assert http("GET", address[0]).body["status"] == "completed"
    assert http("DELETE", address[1]).status == 200
    assert http("GET", address[1]).status == 404
    assert http("POST", f"{address[2]}/dlq").status == 200
    assert http("GET", "/api/v1/dlq", queue=queue).body["messages"][0]["data"] == {"n": 3}
    assert http.pop(queue)["messages"] == []


def test_the_journal_tells_how_a_message_was_settled(http: Http, queue: str) -> None:
    http.configure(queue, retryDelay=0)
    http.push(queue, 1, transactionId="life")
    [message] = http.pop(queue)["messages"]
    http.ack(message, "failed", error="first try")
    [message] = http.pop(queue, wait="true", timeout=3000)["messages"]
    http.ack(message)
    deadline = time.monotonic() + 10
    while True:
        answer = http("GET", "/api/v1/journal", partitionId=message["partitionId"], transactionId="life")
        kinds = {e["kind"] for e in answer.body["entries"]}
        if {"failed", "settled"} <= kinds:
            break
        assert time.monotonic() < deadline, answer
    assert "first try" in {e["error"] for e in answer.body["entries"]}


def test_traces_are_left_and_found(http: Http, queue: str) -> None:
    [pushed] = http.push(queue, 1)
    address = {"transactionId": pushed["transaction_id"], "partitionId": pushed["partition_id"]}
    name = f"order {uuid.uuid4().hex[:8]}"
    note = {**address, "data": {"step": "paid"}, "traceNames": [name, "all"], "eventType": "info"}
    answer = http("POST", "/api/v1/traces", note)
    assert (answer.status, answer.body["success"]) == (201, True)
    [trace] = http("GET", f"/api/v1/traces/{pushed['partition_id']}/{pushed['transaction_id']}").body[
        "traces"
    ]
    assert (trace["data"], trace["event_type"], trace["trace_names"]) == (
        {"step": "paid"},
        "info",
        [name, "all"],
    )
    found = http("GET", f"/api/v1/traces/by-name/{quote(name)}").body
    assert (found["total"], found["traces"][0]["queue_name"]) == (1, queue)
    assert found["traces"][0]["message_payload"] == 1
    assert name in {
        n["trace_name"] for n in http("GET", "/api/v1/traces/names", limit=1000).body["trace_names"]
    }
    missing = http("POST", "/api/v1/traces", {**note, "transactionId": "never"})
    assert missing.status == 404


def test_stream_queries_keep_state_push_and_ack_in_one_transaction(http: Http, queue: str) -> None:
    http.push(queue, 1, 2, 3)
    register = {"name": f"s-{queue}", "source_queue": queue, "config_hash": "h1"}
    first = http("POST", "/streams/v1/queries", register).body
    assert (first["success"], first["fresh"]) == (True, True)
    assert http("POST", "/streams/v1/queries", register).body["fresh"] is False
    clash = http("POST", "/streams/v1/queries", {**register, "config_hash": "h2"})
    assert clash.status == 409
    assert isinstance(clash.body["error"], str)
    popped = http.pop(queue, batch=3, consumerGroup="s")
    ops = [{"type": "upsert", "key": "sum", "value": {"n": 6}}, {"type": "upsert", "key": "b", "value": 1}]
    last = popped["messages"][2]["transactionId"]
    cycle = {
        "query_id": first["query_id"],
        "partition_id": popped["partitionId"],
        "consumer_group": "s",
        "state_ops": ops,
        "push_items": [{"queue": f"{queue}.out", "payload": {"sum": 6}}],
        "ack": {"transactionId": last, "leaseId": popped["leaseId"], "count": 3},
    }
    stale = {
        **cycle,
        "ack": {"transactionId": popped["messages"][2]["transactionId"], "leaseId": str(uuid.uuid4())},
    }
    assert http("POST", "/streams/v1/cycle", stale).status == 409
    done = http("POST", "/streams/v1/cycle", cycle)
    assert done.status == 200, done
    assert (done.body["state_ops_applied"], done.body["ack_result"]["success"]) == (2, True)
    assert done.body["push_results"][0]["status"] == "queued"
    place = {"query_id": first["query_id"], "partition_id": popped["partitionId"]}
    rows = http("POST", "/streams/v1/state/get", place).body["rows"]
    assert [(r["key"], r["value"]) for r in rows] == [("b", 1), ("sum", {"n": 6})]
    some = http("POST", "/streams/v1/state/get", {**place, "key_prefix": "su"}).body["rows"]
    assert [r["key"] for r in some] == ["sum"]
    assert http.pop(f"{queue}.out")["messages"][0]["data"] == {"sum": 6}
    assert http.pop(queue, consumerGroup="s")["messages"] == []
    reset = http("POST", "/streams/v1/queries", {**register, "config_hash": "h2", "reset": True}).body
    assert (reset["success"], reset["reset"]) == (True, True)


def test_health_metrics_and_the_dashboards_figures(http: Http, queue: str) -> None:
    http.push(queue, 1)
    health = http("GET", "/health")
    assert (health.status, health.body["status"], health.body["database"]) == (200, "healthy", "connected")
    deadline = time.monotonic() + 10
    while True:
        text = http("GET", "/metrics/prometheus").body
        if f'settled_queue_total{{queue="{queue}"}} 1\n' in text:
            break
        assert time.monotonic() < deadline, text
    assert 'settled_http_requests_total{method="POST",route="/api/v1/push",status="201"}' in text
    assert http("GET", "/metrics").body.startswith("# HELP")
    assert "# TYPE settled_engine_pushed_messages_total counter\n" in text
    assert "# TYPE settled_engine_waiting_pops gauge\n" in text
    assert "A figure of the engine." not in text
    status = "/api/v1/status"
    for path in (
        status,
        f"{status}/queues",
        f"{status}/queues/{queue}",
        f"{status}/queues/{queue}/messages",
        f"{status}/analytics",
        f"{status}/buffers",
        "/api/v1/analytics/system-metrics",
        "/api/v1/analytics/worker-metrics",
    ):
        assert http("GET", path).status == 200, path
    assert http("POST", "/api/v1/stats/refresh").body["success"] is True


def test_the_api_document_lists_every_route(http: Http) -> None:
    document = http("GET", "/openapi.json").body
    assert document["openapi"].startswith("3.")
    assert {"/api/v1/push", "/api/v1/ack", "/streams/v1/cycle", "/health"} <= set(document["paths"])
    assert "items" in document["components"]["schemas"]["PushBody"]["required"]


def test_an_ack_names_what_it_did(http: Http, queue: str) -> None:
    http.push(queue, 1)
    [message] = http.pop(queue)["messages"]
    body = http("POST", "/api/v1/ack", ack_of(message)).body
    assert body == {
        "index": 0, "transactionId": message["transactionId"], "success": True, "message": "acknowledged",
        "error": None, "queueName": queue, "partitionName": "Default", "leaseReleased": True, "dlq": False,
        "retryCount": 0, "noop": False,
    }  # fmt: skip


def test_dead_letters_in_bulk_need_a_filter_and_name_what_is_wrong(http: Http, queue: str) -> None:
    """Defect D7."""
    for body, field in (
        ({}, "body"),
        ({"queue": "a", "limit": 0}, "limit"),
        ({"queue": "a", "limit": 1001}, "limit"),
        ({"ids": ["x"]}, "ids"),
        ({"from": "soon"}, "from"),
        ({"to": "soon"}, "to"),
        ({"queue": "a", "after": "x"}, "after"),
        ({"error": "\x00"}, "error"),
    ):
        for what in ("retry", "purge"):
            answer = http("POST", f"/api/v1/dlq/{what}", body)
            assert (answer.status, answer.body.get("field")) == (400, field), (body, answer)


def test_dead_letters_are_put_back_in_bulk_over_http(http: Http, queue: str) -> None:
    """Defect D7."""
    http.push(queue, 1, 2, 3)
    for message in http.pop(queue, batch=9)["messages"]:
        http.ack(message, "dlq", error="the bank is away")
    chosen = {"queue": queue, "error": "BANK", "limit": 2}
    first = http("POST", "/api/v1/dlq/retry", chosen).body
    assert (first["matched"], first["done"], first["refused"], first["dryRun"]) == (3, 2, [], False)
    second = http("POST", "/api/v1/dlq/retry", {**chosen, "after": first["next"]}).body
    assert (second["matched"], second["done"], second["next"]) == (None, 1, None)
    assert sorted(message["data"] for message in http.pop(queue, batch=9)["messages"]) == [1, 2, 3]
