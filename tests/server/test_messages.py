"""Push, pop, ack, batch ack, leases and transactions over HTTP."""

from __future__ import annotations

import time
import uuid
from typing import Any

from tests.server.http import Http, ack_of


def test_a_pushed_message_comes_back_with_everything_it_was_given(http: Http, queue: str) -> None:
    trace = str(uuid.uuid4())
    item = {"queue": queue, "partition": "p1", "payload": {"a": [1, None, "é", 1.5]}, "transactionId": "tx-1",
            "traceId": trace, "headers": {"tenant": "t1"}}  # fmt: skip
    answer = http("POST", "/api/v1/push", {"items": [item]})
    assert answer.status == 201
    [pushed] = answer.body
    assert pushed["index"] == 0
    assert pushed["status"] == "queued"
    assert pushed["transaction_id"] == "tx-1"
    assert pushed["trace_id"] == trace
    assert pushed["queueName"] == queue
    popped = http.pop(queue)
    assert popped["success"] is True
    assert (popped["queue"], popped["partition"], popped["partitionsClaimed"]) == (queue, "p1", 1)
    [message] = popped["messages"]
    assert message["id"] == pushed["message_id"]
    assert message["partitionId"] == pushed["partition_id"] == popped["partitionId"]
    assert message["leaseId"] == popped["leaseId"] != ""
    assert message["data"] == {"a": [1, None, "é", 1.5]}
    assert message["headers"] == {"tenant": "t1"}
    assert message["traceId"] == trace
    assert message["consumerGroup"] == "__QUEUE_MODE__"
    assert message["createdAt"].endswith("Z")


def test_payloads_come_back_byte_for_byte(http: Http, queue: str) -> None:
    payloads = [
        b"null",
        b"0",
        b'""',
        b"[]",
        b"1e300",
        b"123456789012345678901234567890",
        b'{"a" : 1 , "a":2}',
    ]
    items = b",".join(b'{"queue":"%b","payload":%b}' % (queue.encode(), p) for p in payloads)
    assert http("POST", "/api/v1/push", raw=b'{"items":[%b]}' % items).status == 201
    path = f"{http.url}/api/v1/pop/queue/{queue}?batch=10&autoAck=true"
    text = http._pool.request("GET", path).data
    for payload in payloads:
        assert b'"data":' + payload + b"," in text


def test_a_message_without_a_payload_is_null_and_data_is_another_name_for_payload(
    http: Http, queue: str
) -> None:
    items = [{"queue": queue}, {"queue": queue, "data": {"x": 1}}]
    assert http("POST", "/api/v1/push", {"items": items}).status == 201
    assert [m["data"] for m in http.pop(queue, batch=2)["messages"]] == [None, {"x": 1}]


def test_an_empty_push_is_answered(http: Http) -> None:
    answer = http("POST", "/api/v1/push", {"items": []})
    assert (answer.status, answer.body) == (201, [])


def test_the_second_push_of_an_id_is_a_duplicate_of_the_first(http: Http, queue: str) -> None:
    [first] = http.push(queue, 1, transactionId="same")
    [second] = http.push(queue, 2, transactionId="same")
    assert (second["status"], second["message_id"]) == ("duplicate", first["message_id"])
    [elsewhere] = http.push(queue, 3, partition="other", transactionId="same")
    assert elsewhere["status"] == "queued"
    twice = http.push(queue, 4, 5, transactionId="again")
    assert [r["status"] for r in twice] == ["queued", "duplicate"]


def test_names_that_need_url_encoding_work(http: Http) -> None:
    queue, partition, group = f"a b/ü?{uuid.uuid4().hex}", "x/y %20+&", "g r/o&p"
    http.push(queue, "hello", partition=partition)
    popped = http.pop(queue, partition, consumerGroup=group)
    [message] = popped["messages"]
    assert (message["data"], message["consumerGroup"], message["partition"]) == ("hello", group, partition)
    assert http.ack(message).status == 200
    [again] = http.pop(queue)["messages"]
    assert again["data"] == "hello"


def test_a_lease_keeps_others_out_until_the_batch_is_settled(http: Http, queue: str) -> None:
    http.push(queue, *range(5))
    first = http.pop(queue, batch=3)["messages"]
    assert [m["data"] for m in first] == [0, 1, 2]
    assert http.pop(queue) == http.pop(queue) | {"success": False, "error": "no_available_partition"}
    assert http.pop(queue, "Default")["error"] == "lease_held"
    for message in first:
        answer = http.ack(message)
        assert answer.status == 200
        assert (answer.body["success"], answer.body["message"]) == (True, "acknowledged")
    assert answer.body["leaseReleased"] is True
    assert [m["data"] for m in http.pop(queue, batch=5)["messages"]] == [3, 4]


def test_a_pop_of_what_is_not_there_is_empty_not_an_error_status(http: Http, queue: str) -> None:
    assert http.pop(queue)["messages"] == []
    http.push(queue, 1)
    nothing = http.pop(queue, "nowhere")
    assert (nothing["success"], nothing["error"]) == (False, "partition_not_found")


def test_auto_ack_needs_no_ack(http: Http, queue: str) -> None:
    http.push(queue, 1, 2, 3)
    popped = http.pop(queue, batch=2, autoAck="true")
    assert popped["leaseId"] == ""
    assert [m["data"] for m in http.pop(queue, batch=5, autoAck="true")["messages"]] == [3]


def test_one_pop_takes_from_several_partitions(http: Http, queue: str) -> None:
    for i in range(4):
        http.push(queue, i, partition=f"p{i}")
    popped = http.pop(queue, batch=10, partitions=3)
    assert popped["partitionsClaimed"] == len(popped["messages"]) == 3
    assert len({m["leaseId"] for m in popped["messages"]}) == 1
    assert len(http.pop(queue, batch=10, partitions=3)["messages"]) == 1


def test_pop_by_namespace_and_task(http: Http) -> None:
    space = f"ns{uuid.uuid4().hex[:8]}"
    for task in ("a", "b"):
        queue = f"{space}.{task}"
        http("POST", "/api/v1/configure", {"queue": queue, "namespace": space, "task": task})
        http.push(queue, task)
    answer = http("GET", "/api/v1/pop", namespace=space, task="b", batch=5)
    assert [m["data"] for m in answer.body["messages"]] == ["b"]
    answer = http("GET", "/api/v1/pop", namespace=space, batch=5)
    assert [m["data"] for m in answer.body["messages"]] == ["a"]
    assert http("GET", "/api/v1/pop").status == 400


def test_groups_are_independent(http: Http, queue: str) -> None:
    http.push(queue, "m")
    for group in (None, "g1", "g2"):
        params = {"consumerGroup": group} if group else {}
        [message] = http.pop(queue, **params)["messages"]
        assert http.ack(message).body["success"] is True
        assert http.pop(queue, **params)["messages"] == []


def test_new_groups_start_at_all_new_or_a_time(http: Http, queue: str) -> None:
    http.push(queue, "old")
    assert http.pop(queue, consumerGroup="new", subscriptionMode="new")["messages"] == []
    assert http.pop(queue, consumerGroup="only", subscriptionMode="new-only")["messages"] == []
    assert http.pop(queue, consumerGroup="now", subscriptionFrom="now")["messages"] == []
    future = "2100-01-01T00:00:00Z"
    assert http.pop(queue, consumerGroup="future", subscriptionFrom=future)["messages"] == []
    http.push(queue, "fresh")
    for group, wanted in (("new", ["fresh"]), ("only", ["fresh"]), ("now", ["fresh"]), ("future", [])):
        assert [m["data"] for m in http.pop(queue, batch=9, consumerGroup=group)["messages"]] == wanted, group
    past = [
        m["data"]
        for m in http.pop(queue, batch=9, consumerGroup="p", subscriptionFrom="2020-01-01")["messages"]
    ]
    assert past == ["old", "fresh"]


def test_a_bad_start_is_400_not_all(http: Http, queue: str) -> None:
    http.push(queue, 1)
    bad: list[dict[str, Any]] = [{"subscriptionFrom": "yesterday"}, {"subscriptionMode": "latest-ish"}]
    for params in bad:
        answer = http("GET", f"/api/v1/pop/queue/{queue}", consumerGroup="g", **params)
        assert answer.status == 400
        assert answer.body["field"] in params


def test_settling_twice_or_with_a_foreign_lease_is_refused(http: Http, queue: str) -> None:
    http.push(queue, 1, 2)
    one, two = http.pop(queue, batch=2)["messages"]
    foreign = http.ack({**two, "leaseId": str(uuid.uuid4())})
    assert foreign.status == 409
    assert (foreign.body["success"], foreign.body["message"]) == (False, "invalid_lease")
    assert http.ack(one).status == 200
    missing = http.ack({**two, "transactionId": "never-pushed"})
    assert missing.status == 404
    assert missing.body["message"] == "not_found"
    assert missing.body["error"].startswith("Message not found")
    unknown = http.ack({**two, "partitionId": str(uuid.uuid4())})
    assert unknown.status in (404, 409)
    assert http.ack(two).status == 200


def test_an_ack_after_expiry_is_refused_and_the_message_comes_again(http: Http, queue: str) -> None:
    http.configure(queue, leaseTime=1)
    http.push(queue, 1)
    [late] = http.pop(queue)["messages"]
    [message] = http.pop(queue, wait="true", timeout=5000)["messages"]
    assert message["id"] == late["id"]
    assert http.ack(late).status == 409
    assert http.ack(message).status == 200


def test_a_failed_message_is_retried_then_dead_lettered(http: Http, queue: str) -> None:
    http.configure(queue, retryLimit=2, retryDelay=0)
    http.push(queue, {"n": 1}, transactionId="bad", headers={"h": "1"})
    said = []
    for attempt in range(3):
        [message] = http.pop(queue, wait="true", timeout=3000)["messages"]
        assert message["retryCount"] == attempt
        answer = http.ack(message, "failed", error=f"boom {attempt}")
        said.append(answer.body["message"])
        if answer.body["dlq"]:
            break
    assert said[-1] == "failed_dlq"
    assert set(said[:-1]) == {"failed_retry"}
    page = http("GET", "/api/v1/dlq", queue=queue).body
    assert (page["total"], page["limit"], page["offset"]) == (1, 100, 0)
    [letter] = page["messages"]
    assert letter["data"] == {"n": 1}
    assert letter["errorMessage"].startswith("boom")
    assert (letter["queueName"], letter["transactionId"], letter["headers"]) == (queue, "bad", {"h": "1"})
    assert letter["retryCount"] == len(said)
    assert letter["originalCreatedAt"] <= letter["movedToDlqAt"]


def test_status_dlq_goes_there_at_once_and_retry_gives_back(http: Http, queue: str) -> None:
    http.push(queue, 1, 2)
    [message] = http.pop(queue)["messages"]
    released = http.ack(message, "retry")
    assert (released.status, released.body["message"]) == (200, "released")
    [message] = http.pop(queue)["messages"]
    assert (message["data"], message["retryCount"]) == (1, 0)
    assert http.ack(message, "dlq", error="no").body["dlq"] is True
    assert http.pop(queue)["messages"][0]["data"] == 2


def test_a_batch_ack_is_all_or_nothing(http: Http, queue: str) -> None:
    http.push(queue, 1, 2, 3)
    messages = http.pop(queue, batch=3)["messages"]
    acks = [ack_of(m) for m in messages]
    wrong = [acks[0], {**acks[1], "transactionId": "nope"}, acks[2]]
    answer = http("POST", "/api/v1/ack/batch", {"acknowledgments": wrong})
    assert answer.status == 409
    assert answer.body["error"].startswith("acknowledgments[1]")
    assert [r["success"] for r in answer.body["results"]] == [False, False, False]
    assert answer.body["results"][1]["message"] == "not_found"
    answer = http("POST", "/api/v1/ack/batch", {"acknowledgments": acks})
    assert answer.status == 200
    assert [(r["index"], r["success"]) for r in answer.body] == [(0, True), (1, True), (2, True)]
    assert http.pop(queue)["messages"] == []


def test_a_batch_ack_item_by_item_on_request(http: Http, queue: str) -> None:
    http.push(queue, 1, 2)
    acks = [ack_of(m) for m in http.pop(queue, batch=2)["messages"]]
    body = {"acknowledgments": [acks[0], {**acks[1], "transactionId": "nope"}], "atomic": False}
    answer = http("POST", "/api/v1/ack/batch", body)
    assert answer.status == 200
    assert [r["success"] for r in answer.body] == [True, False]


def test_a_batch_acks_for_the_group_it_names(http: Http, queue: str) -> None:
    http.push(queue, 1, 2)
    acks = [ack_of(m) for m in http.pop(queue, batch=2, consumerGroup="g")["messages"]]
    for ack in acks:
        del ack["consumerGroup"]
    answer = http("POST", "/api/v1/ack/batch", {"acknowledgments": acks, "consumerGroup": "g"})
    assert answer.status == 200
    assert http.pop(queue, consumerGroup="g")["messages"] == []


def test_an_ack_without_a_lease_id_settles_what_the_group_holds(http: Http, queue: str) -> None:
    http.push(queue, 1)
    body = {"transactionId": "x", "partitionId": http.push(queue, 2, transactionId="x")[0]["partition_id"]}
    assert http("POST", "/api/v1/ack", body).status in (404, 409)
    messages = http.pop(queue, batch=2)["messages"]
    assert http("POST", "/api/v1/ack", body).status == 200
    assert http.ack(messages[0]).status == 200


def test_a_lease_is_extended(http: Http, queue: str) -> None:
    http.configure(queue, leaseTime=2)
    http.push(queue, 1)
    [message] = http.pop(queue)["messages"]
    for body in ({"seconds": 30}, {}, None):
        answer = http("POST", f"/api/v1/lease/{message['leaseId']}/extend", body)
        assert answer.status == 200
        assert answer.body["success"] is True
        assert answer.body["newExpiresAt"] == answer.body["expiresAt"]
    time.sleep(2.2)
    assert http.ack(message).status == 200
    gone = http("POST", f"/api/v1/lease/{message['leaseId']}/extend", {"seconds": 5})
    assert gone.status in (404, 409)
    assert gone.body["success"] is False
    assert http("POST", f"/api/v1/lease/{uuid.uuid4()}/extend", {}).status == 404
    for seconds in (0, -1, 1e9, "x"):
        assert http("POST", f"/api/v1/lease/{message['leaseId']}/extend", {"seconds": seconds}).status == 400


def test_a_transaction_moves_a_message_on(http: Http, queue: str) -> None:
    http.push(queue, "in")
    [message] = http.pop(queue)["messages"]
    operations: list[dict[str, Any]] = [
        {"type": "ack", **ack_of(message)},
        {
            "type": "push",
            "items": [{"queue": f"{queue}.a", "payload": 1}, {"queue": f"{queue}.b", "payload": 2}],
        },
    ]
    answer = http(
        "POST", "/api/v1/transaction", {"operations": operations, "requiredLeases": [message["leaseId"]]}
    )
    assert answer.status == 200, answer
    assert answer.body["success"] is True
    assert [(r["index"], r["type"], r["success"]) for r in answer.body["results"]] == [
        (0, "ack", True), (1, "push", True), (2, "push", True),
    ]  # fmt: skip
    assert [http.pop(f"{queue}.{x}")["messages"][0]["data"] for x in "ab"] == [1, 2]
    assert http.pop(queue)["messages"] == []


def test_a_transaction_with_a_bad_lease_or_a_duplicate_does_nothing(http: Http, queue: str) -> None:
    http.push(queue, "in")
    http.push(f"{queue}.out", "there", transactionId="taken")
    [message] = http.pop(queue)["messages"]
    push = {"type": "push", "items": [{"queue": f"{queue}.new", "payload": 1}]}
    stale = {"type": "ack", **ack_of(message), "leaseId": str(uuid.uuid4())}
    fine = {"type": "ack", **ack_of(message)}
    http.push(f"{queue}.other", 1)
    [other] = http.pop(f"{queue}.other")["messages"]
    answer = http(
        "POST",
        "/api/v1/transaction",
        {"operations": [push, {"type": "ack", **ack_of(other)}, push, stale]},
    )
    assert answer.status == 409
    assert answer.body["success"] is False
    assert answer.body["error"]
    assert answer.body["message"] == "invalid_lease"
    assert [(r["index"], r["type"], r["message"]) for r in answer.body["results"]] == [
        (0, "push", "not_applied"),
        (1, "ack", "not_applied"),
        (2, "push", "not_applied"),
        (3, "ack", "invalid_lease"),
    ]
    taken = {"type": "push", "items": [{"queue": f"{queue}.out", "payload": 2, "transactionId": "taken"}]}
    answer = http("POST", "/api/v1/transaction", {"operations": [push, fine, taken]})
    assert answer.status == 409
    assert http.pop(f"{queue}.new")["messages"] == []
    assert http.ack(message).status == 200


def test_a_delayed_push_comes_later(http: Http, queue: str) -> None:
    http("POST", "/api/v1/push", {"items": [{"queue": queue, "payload": 1, "delaySeconds": 2}]})
    assert http.pop(queue)["messages"] == []
    started = time.monotonic()
    assert [m["data"] for m in http.pop(queue, wait="true", timeout=8000)["messages"]] == [1]
    assert time.monotonic() - started < 8


def test_a_full_queue_is_429(http: Http, queue: str) -> None:
    http.configure(queue, maxSize=2)
    http.push(queue, 1, 2)
    answer = http("POST", "/api/v1/push", {"items": [{"queue": queue, "payload": 3}]})
    assert answer.status == 429
    assert "maxSize" in answer.body["error"]
    assert answer.headers["retry-after"] == "1"
