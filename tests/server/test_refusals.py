"""Bad requests are answered 4xx and name the field: no 500, no hang, and no harm to anybody else."""

from __future__ import annotations

import asyncio
import json
import threading
import uuid
from typing import Any

import pytest

from settled.queue.db import connect
from settled.server.testing import RunningServer
from tests.server.http import Answer, Http, ack_of

UUID = str(uuid.uuid4())

BAD_BODIES: list[tuple[str, bytes, str]] = [
    ("/api/v1/push", b"", "Empty request body"),
    ("/api/v1/push", b"{", "Invalid JSON"),
    ("/api/v1/push", b"nul", "Invalid JSON"),
    ("/api/v1/push", b'{"items":[{"queue":"q","payload":"\xff"}]}', "not UTF-8"),
    (
        "/api/v1/push",
        b'{"items":[{"queue":"q","payload":' + b"[" * 100_000 + b"]" * 100_000 + b"}]}",
        "nested",
    ),
    (
        "/api/v1/push",
        b'{"items":[{"queue":"q","payload":"\\ud800"}]}',
        "\\ud800 at byte 34 is half",
    ),
    ("/api/v1/push", b'{"items":[{"queue":"q","payload":"\\ud83d!!!!!!"}]}', "not valid UTF-8 text"),
    ("/api/v1/push", b'{"items":[{"queue":"q","payload":"\\\\ud800"', "Input data was truncated"),
    # Defect Q9: a number that no float holds.
    ("/api/v1/push", b'{"items":[{"queue":"q","payload":1e400}]}', "items[0].payload must be a number that"),
    ("/api/v1/push", b'{"items":[{"queue":"q","payload":{"a":[1,-1E+400]}}]}', "items[0].payload.a[1] must"),
    (
        "/api/v1/push",
        b'{"items":[{"queue":"q","data":%b}]}' % (b"9" * 5000),
        "items[0].data must be a number",
    ),
    ("/api/v1/push", b'{"items":[{"queue":"q","payload":NaN}]}', "Invalid JSON"),
    (
        "/api/v1/push",
        b'{"items":[{"queue":"q","contentType":"text/plain","payload":1e400}]}',
        "items[0].payload must be a number that a 64-bit float can hold, got 1e400",
    ),
    (
        "/api/v1/push",
        b'{"items":[%b,{"queue":"q","payload":1e400}]}' % b",".join([b'{"queue":"q","payload":1e30}'] * 200),
        "items[200].payload must be a number",
    ),
    (
        "/api/v1/transaction",
        b'{"operations":[{"type":"push","items":[{"queue":"q","contentType":"text/plain","payload":%b}]}]}'
        % (b"9" * 5000),
        "operations[0].items[0].payload must be a number",
    ),
    ("/api/v1/push", b"[]", "body must be an object, got array"),
    ("/api/v1/push", b"{}", "items is required"),
    ("/api/v1/push", b'{"items":{}}', "items must be an array, got object"),
    ("/api/v1/push", b'{"items":[{}]}', "items[0].queue is required"),
    ("/api/v1/push", b'{"items":[{"queue":7}]}', "items[0].queue must be a string, got int"),
    ("/api/v1/push", b'{"items":[{"queue":""}]}', "items[0].queue"),
    ("/api/v1/push", b'{"items":[{"queue":"a\\u0000b"}]}', "items[0].queue must not contain NUL"),
    ("/api/v1/push", b'{"items":[{"queue":"%b"}]}' % (b"x" * 256), "items[0].queue must have 1..255"),
    ("/api/v1/push", b'{"items":[{"queue":"q","partition":1}]}', "items[0].partition must be a string"),
    ("/api/v1/push", b'{"items":[{"queue":"q","partition":"\\u0000"}]}', "items[0].partition"),
    ("/api/v1/push", b'{"items":[{"queue":"q","transactionId":5}]}', "items[0].transactionId"),
    ("/api/v1/push", b'{"items":[{"queue":"q","transactionId":""}]}', "items[0].transactionId"),
    ("/api/v1/push", b'{"items":[{"queue":"q","traceId":"not-a-uuid"}]}', "items[0].traceId must be a uuid"),
    ("/api/v1/push", b'{"items":[{"queue":"q","delaySeconds":-1}]}', "items[0].delaySeconds"),
    ("/api/v1/push", b'{"items":[{"queue":"q","headers":{"a":1}}]}', "items[0].headers"),
    (
        "/api/v1/push",
        b'{"items":[' + b",".join([b'{"queue":"q"}'] * 10_001) + b"]}",
        "items must have at most 10000",
    ),
    ("/api/v1/ack", b'{"partitionId":"%b"}' % UUID.encode(), "transactionId is required"),
    ("/api/v1/ack", b'{"transactionId":"x"}', "partitionId is required to ensure message uniqueness"),
    ("/api/v1/ack", b'{"transactionId":"x","partitionId":"p"}', "partitionId must be the uuid"),
    (
        "/api/v1/ack",
        b'{"transactionId":"x","partitionId":"%b","status":"maybe"}' % UUID.encode(),
        "status must be one of completed, dlq, failed, retry, success, got 'maybe'",
    ),
    ("/api/v1/ack/batch", b"{}", "acknowledgments is required"),
    (
        "/api/v1/ack/batch",
        b'{"acknowledgments":[{"transactionId":"x"}]}',
        "acknowledgments[0].partitionId is required",
    ),
    ("/api/v1/transaction", b"{}", "operations is required"),
    ("/api/v1/transaction", b'{"operations":[]}', "operations array cannot be empty"),
    (
        "/api/v1/transaction",
        b'{"operations":[{"type":"dance"}]}',
        "type must be one of push, ack, got",
    ),
    (
        "/api/v1/transaction",
        b'{"operations":[{"type":"push","items":[{}]}]}',
        "operations[0].items[0].queue is required",
    ),
    ("/api/v1/configure", b"{}", "queue is required"),
    ("/api/v1/configure", b'{"queue":"q","options":{"leaseTime":0}}', "leaseTime"),
    ("/api/v1/configure", b'{"queue":"q","options":{"nonsense":1}}', "nonsense"),
    ("/api/v1/configure", b'{"queue":"q","namespace":"\\u0000"}', "namespace"),
    ("/api/v1/consumer-groups/g/queues/q/seek", b"{}", "toEnd"),
    (
        "/api/v1/consumer-groups/g/queues/q/seek",
        b'{"timestamp":"soon"}',
        "timestamp must be an ISO 8601 time",
    ),
    ("/api/v1/consumer-groups/g/subscription", b'{"subscriptionTimestamp":"x"}', "subscriptionTimestamp"),
    (
        "/api/v1/traces",
        b'{"transactionId":"x","partitionId":"%b","data":{"took":1e999}}' % UUID.encode(),
        "data.took must be a number",
    ),
    ("/api/v1/traces", b'{"transactionId":"x","partitionId":"p","data":{}}', "partitionId"),
    ("/api/v1/system/maintenance", b'{"enabled":"yes"}', "enabled must be true or false"),
    ("/streams/v1/queries", b'{"name":"n"}', "source_queue is required"),
    ("/streams/v1/cycle", b'{"query_id":"x","partition_id":"%b"}' % UUID.encode(), "query_id"),
    ("/streams/v1/state/get", b'{"query_id":"%b","partition_id":"x"}' % UUID.encode(), "partition_id"),
]


@pytest.mark.parametrize(("path", "body", "said"), BAD_BODIES, ids=range(len(BAD_BODIES)))
def test_a_bad_body_is_400_and_says_what_is_wrong(http: Http, path: str, body: bytes, said: str) -> None:
    answer = http("POST", path, raw=body)
    assert answer.status == 400, answer
    assert said in answer.body["error"]
    assert answer.headers["content-type"] == "application/json"


@pytest.mark.parametrize("bad", ["", "x" * 256, "a\x00b", "\x00", "é" * 256])
@pytest.mark.parametrize("beside", [[], ["good"]])
def test_a_bad_id_is_refused_though_the_partition_is_known_and_takes_nothing_along(
    http: Http, queue: str, bad: str, beside: list[str]
) -> None:
    def push(*ids: str) -> Answer:
        return http("POST", "/api/v1/push", {"items": [{"queue": queue, "transactionId": i} for i in ids]})

    assert push("first").status == 201
    refused = push(*beside, bad)
    assert (refused.status, refused.body["field"]) == (400, f"items[{len(beside)}].transactionId")
    popped = http("GET", f"/api/v1/pop/queue/{queue}", batch=10).body["messages"]
    assert [message["transactionId"] for message in popped] == ["first"]


def test_a_bad_option_is_named_as_a_field(http: Http, queue: str) -> None:
    answer = http("POST", "/api/v1/configure", {"queue": queue, "options": {"leaseTime": 0}})
    assert (answer.status, answer.body["field"]) == (400, "options.leaseTime")
    assert f"queue '{queue}'" in answer.body["error"]


BAD_QUERIES: list[tuple[str, dict[str, Any]]] = [
    ("/api/v1/pop/queue/q", {"batch": 0}),
    ("/api/v1/pop/queue/q", {"batch": -5}),
    ("/api/v1/pop/queue/q", {"batch": 10**9}),
    ("/api/v1/pop/queue/q", {"batch": "9" * 5000}),
    ("/api/v1/pop/queue/q", {"batch": "ten"}),
    ("/api/v1/pop/queue/q", {"partitions": 0}),
    ("/api/v1/pop/queue/q", {"timeout": -1}),
    ("/api/v1/pop/queue/q", {"timeout": 10**12}),
    ("/api/v1/pop/queue/q", {"wait": "maybe"}),
    ("/api/v1/pop/queue/q", {"autoAck": "si"}),
    ("/api/v1/pop/queue/q", {"consumerGroup": "g" * 256}),
    ("/api/v1/pop/queue/q", {"consumerGroup": "a\x00b"}),
    ("/api/v1/pop/queue/q%00", {}),
    ("/api/v1/pop/queue/%ff", {}),
    ("/api/v1/pop/queue/" + "q" * 300, {}),
    ("/api/v1/pop/queue/", {}),
    ("/api/v1/dlq", {"limit": 0}),
    ("/api/v1/dlq", {"offset": -1}),
    ("/api/v1/dlq", {"from": "x"}),
    ("/api/v1/messages", {"status": "odd"}),
    ("/api/v1/messages", {"limit": "1e3"}),
    ("/api/v1/messages/not-a-uuid/tx", {}),
    ("/api/v1/consumer-groups/lagging", {"minLagSeconds": "x"}),
]


@pytest.mark.parametrize(("path", "params"), BAD_QUERIES, ids=range(len(BAD_QUERIES)))
def test_a_bad_parameter_is_400(http: Http, path: str, params: dict[str, Any]) -> None:
    answer = http("GET", path, **params)
    assert answer.status == 400, answer
    assert isinstance(answer.body["error"], str)
    for name in params:
        assert name in answer.body["error"]


def test_what_is_not_there_is_404_in_json(http: Http, queue: str) -> None:
    for method, path in (
        ("GET", "/nowhere"),
        ("GET", f"/api/v1/resources/queues/{queue}"),
        ("GET", f"/api/v1/messages/{UUID}/tx"),
        ("DELETE", f"/api/v1/messages/{UUID}/tx"),
        ("POST", f"/api/v1/messages/{UUID}/tx/retry"),
        ("POST", f"/api/v1/dlq/{UUID}/retry"),
        ("DELETE", f"/api/v1/dlq/{UUID}"),
        ("GET", f"/api/v1/consumer-groups/{queue}"),
    ):
        answer = http(method, path)
        assert answer.status == 404, (method, path, answer)
        assert isinstance(answer.body["error"], str)


def test_the_wrong_method_is_405_and_names_the_right_ones(http: Http) -> None:
    answer = http("GET", "/api/v1/push")
    assert (answer.status, answer.headers["allow"]) == (405, "POST")
    assert http("DELETE", "/api/v1/pop/queue/q").status == 405
    counted = 'settled_http_requests_total{method="DELETE",route="/api/v1/pop/queue/{queue}",status="405"}'
    assert counted in http("GET", "/metrics").body


def test_head_works_but_takes_no_messages(http: Http, queue: str) -> None:
    http.push(queue, 1)
    assert http("HEAD", "/health").status == 200
    assert http("HEAD", f"/api/v1/pop/queue/{queue}").status == 405
    assert len(http.pop(queue)["messages"]) == 1


def test_options_and_cors(http: Http) -> None:
    answer = http("OPTIONS", "/api/v1/push")
    assert answer.status == 204
    assert answer.headers["access-control-allow-origin"] == "*"
    assert "POST" in answer.headers["access-control-allow-methods"]
    assert http("GET", "/health").headers["access-control-allow-origin"] == "*"
    assert http("GET", "/nowhere").headers["access-control-allow-origin"] == "*"


def test_an_empty_batch_ack_is_answered(http: Http) -> None:
    answer = http("POST", "/api/v1/ack/batch", {"acknowledgments": []}, patience=5)
    assert (answer.status, answer.body) == (200, [])


def test_one_callers_bad_input_never_touches_anothers_request(http: Http, queue: str) -> None:
    stop = threading.Event()
    rejected: list[int] = []

    def vandal() -> None:
        own = Http(http.url)
        while not stop.is_set():
            trace = own("POST", "/api/v1/push", {"items": [{"queue": queue, "traceId": "x"}]})
            ack = own("POST", "/api/v1/ack", {"transactionId": "t", "partitionId": "no-uuid"})
            foreign = own(
                "POST", "/api/v1/ack", {"transactionId": "t", "partitionId": UUID, "leaseId": "odd"}
            )
            rejected.extend((trace.status, ack.status, foreign.status))

    threads = [threading.Thread(target=vandal) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        for i in range(100):
            [pushed] = http.push(queue, i)
            assert pushed["status"] == "queued"
            [message] = http.pop(queue)["messages"]
            assert message["data"] == i
            assert http.ack(message).status == 200
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert rejected
    assert set(rejected) <= {400, 404, 409}


def test_a_failed_message_inside_a_batch_ack_comes_again(http: Http, queue: str) -> None:
    http.configure(queue, retryDelay=0)
    http.push(queue, *range(4))
    messages = http.pop(queue, batch=4)["messages"]
    acks = [ack_of(m, "failed" if m["data"] == 2 else "completed", error="no") for m in messages]
    answer = http("POST", "/api/v1/ack/batch", {"acknowledgments": acks})
    assert answer.status == 200
    assert [r["message"] for r in answer.body] == [
        "acknowledged",
        "acknowledged",
        "failed_retry",
        "acknowledged",
    ]
    again = http.pop(queue, batch=4, wait="true", timeout=3000)["messages"]
    assert [(m["data"], m["retryCount"]) for m in again] == [(2, 1)]


def test_acks_in_reverse_order_settle_each_message_once(http: Http, queue: str) -> None:
    http.push(queue, *range(5))
    for message in reversed(http.pop(queue, batch=5)["messages"]):
        assert http.ack(message).status == 200
    assert http.pop(queue)["messages"] == []


def test_acking_only_the_last_one_leaves_the_others(http: Http, queue: str) -> None:
    http.configure(queue, leaseTime=1)
    http.push(queue, *range(3))
    assert http.ack(http.pop(queue, batch=3)["messages"][2]).status == 200
    again = http.pop(queue, batch=3, wait="true", timeout=5000)["messages"]
    assert [m["data"] for m in again] == [0, 1]


def test_attempts_belong_to_a_message_not_to_its_partition(http: Http, queue: str) -> None:
    http.configure(queue, retryLimit=2, retryDelay=0)
    http.push(queue, "first", "second")
    for wanted in ("failed_retry", "failed_dlq"):
        [message] = http.pop(queue, wait="true", timeout=3000)["messages"]
        assert message["data"] == "first"
        assert http.ack(message, "failed").body["message"] == wanted
    [message] = http.pop(queue, wait="true", timeout=3000)["messages"]
    assert (message["data"], message["retryCount"]) == ("second", 0)
    assert http.ack(message, "failed").body["message"] == "failed_retry"


def test_retry_delay_is_honoured(http: Http, queue: str) -> None:
    http.configure(queue, retryDelay=700)
    http.push(queue, 1)
    [message] = http.pop(queue)["messages"]
    http.ack(message, "failed")
    assert http.pop(queue)["messages"] == []
    [again] = http.pop(queue, wait="true", timeout=5000)["messages"]
    assert again["retryCount"] == 1


def test_many_producers_on_one_partition_lose_nothing(http: Http, queue: str) -> None:
    def produce(producer: int) -> None:
        own = Http(http.url)
        for i in range(30):
            size = 40 if i % 5 == 0 else 1
            own.push(queue, *([producer, i, k] for k in range(size)))

    threads = [threading.Thread(target=produce, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    seen: list[tuple[int, ...]] = []
    while any(thread.is_alive() for thread in threads) or len(seen) < 8 * (24 + 6 * 40):
        popped = http.pop(queue, batch=100, autoAck="true", wait="true", timeout=1000)["messages"]
        if not popped and not any(thread.is_alive() for thread in threads):
            break
        seen.extend(tuple(m["data"]) for m in popped)
    assert len(seen) == len(set(seen)) == 8 * (24 + 6 * 40)
    for producer in range(8):
        mine = [entry for entry in seen if entry[0] == producer]
        assert mine == sorted(mine)


def test_the_dead_letters_page_for_real(http: Http, queue: str) -> None:
    http.push(queue, *range(5))
    for message in http.pop(queue, batch=5)["messages"]:
        http.ack(message, "dlq", error=f"e{message['data']}")
    pages = [http("GET", "/api/v1/dlq", queue=queue, limit=2, offset=o).body for o in (0, 2, 4, 6)]
    assert [len(p["messages"]) for p in pages] == [2, 2, 1, 0]
    assert {p["total"] for p in pages} == {5}
    assert len({m["id"] for p in pages for m in p["messages"]}) == 5
    assert http("GET", "/api/v1/dlq", queue=queue, consumerGroup="other").body["total"] == 0
    assert http("GET", "/api/v1/dlq", queue=queue, to="2001-01-01").body["total"] == 0
    assert http("GET", f"/api/v1/dlq?queue={queue}&from=2001-01-01").body["total"] == 5


def test_configuring_one_option_leaves_the_others_as_they_were(http: Http, queue: str) -> None:
    """Defect Q13."""
    first = http.configure(queue, leaseTime=7)["options"]
    assert (first["leaseTime"], first["retryLimit"]) == (7, 3)
    again = http.configure(queue, retryLimit=9)["options"]
    assert (again["leaseTime"], again["retryLimit"]) == (7, 9)
    nulled = http.configure(queue, leaseTime=None)["options"]
    assert (nulled["leaseTime"], nulled["retryLimit"]) == (300, 9)
    body = {"queue": queue, "options": {"leaseTime": 8}, "mode": "replace"}
    replaced = http("POST", "/api/v1/configure", body).body["options"]
    assert (replaced["leaseTime"], replaced["retryLimit"]) == (8, 3)
    refused = http("POST", "/api/v1/configure", {**body, "mode": "forget"})
    assert refused.status == 400
    assert "mode" in refused.body["error"]
    assert http.configure(queue)["options"]["leaseTime"] == 8


def test_configuring_keeps_namespace_and_task_that_are_not_said(http: Http, queue: str) -> None:
    """Defect Q13; the peer's client sends null for both unless they are set."""

    def configure(**fields: Any) -> tuple[str, str]:
        answer = http("POST", "/api/v1/configure", {"queue": queue, **fields}).body
        return answer["namespace"], answer["task"]

    assert configure(namespace="shop", task="mail") == ("shop", "mail")
    assert configure(options={"leaseTime": 9}) == ("shop", "mail")
    assert configure(namespace=None, task="print") == ("shop", "print")
    assert configure(namespace="") == ("", "print")
    assert configure(mode="replace") == ("", "")


@pytest.mark.parametrize("way", ["ack", "batch", "transaction"])
@pytest.mark.parametrize("error", ["no such \x00 customer", "x" * 100_000], ids=["nul", "long"])
def test_a_nack_is_taken_whatever_its_error_says(http: Http, queue: str, way: str, error: str) -> None:
    """Defect Q18."""
    http.configure(queue, retryLimit=1)
    http.push(queue, 1)
    [message] = http.pop(queue)["messages"]
    nack = ack_of(message, "failed", error=error)
    match way:
        case "ack":
            answer = http("POST", "/api/v1/ack", nack)
        case "batch":
            answer = http("POST", "/api/v1/ack/batch", {"acknowledgments": [nack]})
        case _:
            answer = http("POST", "/api/v1/transaction", {"operations": [{"type": "ack", **nack}]})
    assert answer.status == 200, answer
    [dead] = http("GET", "/api/v1/dlq", queue=queue).body["messages"]
    assert dead["errorMessage"] == error.replace("\x00", "")[:10_000]


def test_a_push_that_fails_for_one_partition_says_what_is_stored(
    server: RunningServer, http: Http, queue: str
) -> None:
    """Defect Q8."""
    dsn = next(line.split()[1] for line in server.output if line.startswith("database "))
    bad = http.push(queue, "first", partition="bad")[0]["partition_id"]

    async def execute(*statements: str) -> None:
        connection = await connect(dsn)
        try:
            for statement in statements:
                await connection.execute(statement)
        finally:
            await connection.close()

    asyncio.run(
        execute(
            "create or replace function refuse() returns trigger language plpgsql as "
            "$$ begin raise exception 'no more of this'; end $$",
            f"""do $$ begin execute format('create trigger refuse before insert on segment for each row
                when (new.lane_id = %s) execute function refuse()',
                (select id from lane where uid = '{bad}')); end $$""",
        )
    )
    try:
        items = [
            {"queue": queue, "partition": p, "payload": p, "transactionId": p} for p in ("x", "bad", "y")
        ]
        answer = http("POST", "/api/v1/push", {"items": items})
    finally:
        asyncio.run(execute("drop trigger refuse on segment"))
    assert answer.status == 503
    assert "2 of 3 items are stored" in answer.body["error"]
    assert [(r["transaction_id"], r["status"]) for r in answer.body["results"]] == [
        ("x", "queued"),
        ("bad", "failed"),
        ("y", "queued"),
    ]
    again = http("POST", "/api/v1/push", {"items": items}).body
    assert [r["status"] for r in again] == ["duplicate", "queued", "duplicate"]


def test_a_long_body_is_413(http: Http) -> None:
    body = json.dumps({"items": [{"queue": "q", "payload": "x" * (17 * 1024 * 1024)}]}).encode()
    answer = http("POST", "/api/v1/push", raw=body)
    assert answer.status == 413
    assert answer.body["limit"] == 16 * 1024 * 1024


def test_a_payload_that_is_no_base64_is_refused_whatever_its_characters(http: Http, queue: str) -> None:
    for text in ("a", "é", "\U0001f600"):
        item = {"queue": queue, "contentType": "text/plain", "encoding": "base64", "payload": text}
        answer = http("POST", "/api/v1/push", {"items": [item]})
        assert (answer.status, answer.body["field"]) == (400, "items[0].payload")
