"""The server at first sight: its front page, what is not there, whether it lives and whether it is ready."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import asyncpg
import pytest
import urllib3

from settled._version import __version__
from settled.queue.embedded import EmbeddedPostgres
from settled.server.testing import RunningServer, running_server
from tests.server.http import Http

if TYPE_CHECKING:
    from collections.abc import Iterator

FULL = """
create function full_disk() returns trigger language plpgsql as
    $$ begin raise exception 'No space left on device' using errcode = 'disk_full'; end $$;
create trigger full_disk before insert on settled.segment execute function full_disk();
create function full_table() returns event_trigger language plpgsql as
    $$ begin raise exception 'No space left on device' using errcode = 'disk_full'; end $$;
create event trigger full_table on ddl_command_end when tag in ('CREATE TABLE AS')
    execute function full_table()
"""
FREE = """
drop event trigger full_table;
drop trigger full_disk on settled.segment;
drop function full_disk(); drop function full_table()
"""


def execute(dsn: str, statements: str) -> None:
    async def main() -> None:
        connection = await asyncpg.connect(dsn)
        try:
            await connection.execute(statements)
        finally:
            await connection.close()

    asyncio.run(main())


@pytest.fixture(scope="module")
def own() -> Iterator[RunningServer]:
    with running_server() as server:
        yield server


def test_a_browser_gets_a_page_and_curl_gets_json(http: Http) -> None:
    """Defect D4."""
    browser = {"accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
    page = urllib3.request("GET", f"{http.url}/", headers=browser)
    assert (page.status, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
    for link in ("/health", "/metrics", "/openapi.json"):
        assert f'href="{link}"' in page.data.decode()
    assert __version__ in page.data.decode()
    for _ in range(2):  # the same head twice, which is known then
        said = http("GET", "/")
        assert (said.status, said.body["version"]) == (200, __version__)
        assert said.body["see"]["routes"] == "/openapi.json"
        assert urllib3.request("GET", f"{http.url}/", headers=browser).data == page.data


def test_a_route_that_is_not_there_says_where_to_look(http: Http) -> None:
    """Defect D4."""
    answer = http("GET", "/nothing/here")
    assert (answer.status, answer.body["error"]) == (404, "no such route: GET /nothing/here")
    assert answer.body["see"] == {
        "routes": "/openapi.json",
        "health": "/health",
        "metrics": "/metrics",
        "about": "/",
    }


def test_a_full_disk_is_not_ready_and_not_healthy_and_alive(own: RunningServer) -> None:
    """Defect Q15: /health was 200 while every push was 503."""
    http = Http(own.url)

    def statuses() -> tuple[int, int, int]:
        paths = ("/livez", "/readyz", "/health")
        return tuple(http("GET", path).status for path in paths)  # type: ignore[return-value]

    assert statuses() == (200, 200, 200)
    assert own.data is not None
    with EmbeddedPostgres.start(own.data) as postgres:
        execute(postgres.dsn, FULL)
        assert http("POST", "/api/v1/push", {"items": [{"queue": "q"}]}).status == 503
        # Within 5 s, as the docs say: something stored before counts as proof for so long.
        answer = http("GET", "/readyz")
        for _ in range(100):
            if answer.status == 503:
                break
            asyncio.run(asyncio.sleep(0.1))
            answer = http("GET", "/readyz")
        assert (answer.status, answer.body["status"]) == (503, "unready")
        assert "No space left on device" in answer.body["error"]
        health = http("GET", "/health")
        assert (health.status, health.body["status"], health.body["database"]) == (
            503,
            "unhealthy",
            "connected",
        )
        assert statuses() == (200, 503, 503)
        execute(postgres.dsn, FREE)
        assert statuses() == (200, 200, 200)
        assert http("POST", "/api/v1/push", {"items": [{"queue": "q"}]}).status == 201


def test_a_refusal_repeats_little_of_what_was_sent(http: Http, queue: str) -> None:
    """Defect Q16: a 400 had all 24 MB of it."""
    long = "x" * 200_000
    sent = [
        ("POST", "/api/v1/configure", {"queue": queue, "options": {long: 1}}),
        ("POST", "/api/v1/configure", {"queue": queue, "options": {"retry": long}}),
        ("POST", "/api/v1/ack", {"transactionId": "x", "partitionId": long}),
        ("POST", "/api/v1/ack", {"transactionId": "x", "partitionId": queue, "status": long}),
        ("POST", "/api/v1/push", {"items": [{"queue": queue, "headers": {long: "1"}}]}),
        ("POST", "/api/v1/push", {"items": [{"queue": queue, "contentType": long, "payload": 1}]}),
        ("POST", "/api/v1/push", {"items": [{"queue": queue, "contentType": "x" * 250, "payload": 1}]}),
        ("POST", "/api/v1/transaction", {"operations": [{"type": long}]}),
        ("GET", f"/api/v1/{long[:50_000]}", None),
        ("GET", f"/api/v1/pop/queue/{queue}?subscriptionMode={long[:50_000]}", None),
        ("GET", f"/api/v1/pop/queue/{queue}?batch={long[:50_000]}", None),
    ]
    for method, path, body in sent:
        answer = http(method, path, body)
        assert answer.status in (400, 404), answer
        for name, value in answer.body.items():
            assert str(value).count("x") <= 220, (path[:40], name)


def test_partitions_come_some_at_a_time(http: Http, queue: str) -> None:
    """Defect Q16."""
    names = [f"p{i:02}" for i in range(25)]
    items = [{"queue": queue, "partition": name, "payload": 1} for name in names]
    assert http("POST", "/api/v1/push", {"items": items}).status == 201
    paths = (
        f"/api/v1/resources/queues/{queue}",
        f"/api/v1/status/queues/{queue}",
        "/api/v1/resources/partitions",
    )
    for path in paths:
        where = {} if queue in path else {"queue": queue}
        seen = []
        for offset in range(0, 30, 10):
            page = http("GET", path, limit=10, offset=offset, **where).body
            assert (page["partitionsTotal"], page["limit"], page["offset"]) == (25, 10, offset)
            seen += [row["name"] for row in page["partitions"]]
        assert seen == names
        assert len(http("GET", path, **where).body["partitions"]) == 25
    depth = http("GET", f"/api/v1/resources/queues/{queue}/depth", limit=3, offset=23).body
    assert (depth["pending"], depth["partitionsTotal"]) == (25, 25)
    assert [row["partition"] for row in depth["partitions"]] == names[23:]


def test_partitions_of_all_queues_come_some_at_a_time(own: RunningServer) -> None:
    """Defect Q16."""
    http = Http(own.url)
    for name in ("one", "two", "three"):
        items = [{"queue": f"page-{name}", "partition": f"p{i}", "payload": 1} for i in range(3)]
        assert http("POST", "/api/v1/push", {"items": items}).status == 201
    every = http("GET", "/api/v1/resources/partitions").body
    assert every["partitionsTotal"] == len(every["partitions"])
    seen = []
    for offset in range(0, every["partitionsTotal"], 2):
        seen += http("GET", "/api/v1/resources/partitions", limit=2, offset=offset).body["partitions"]
    assert seen == every["partitions"]


def test_the_consumers_without_a_group_are_forgotten_for_one_queue_at_a_time(http: Http, queue: str) -> None:
    """Defect Q16: it forgot the position of every queue's consumers without a group."""
    http.push(queue, 1, 2)
    assert len(http.pop(queue, batch=2, autoAck="true")["messages"]) == 2
    refused = http("DELETE", "/api/v1/consumer-groups/__QUEUE_MODE__")
    assert (refused.status, refused.body["field"]) == (400, "group")
    assert "name one queue" in refused.body["error"]
    assert http.pop(queue)["messages"] == []
    assert http("DELETE", f"/api/v1/consumer-groups/__QUEUE_MODE__/queues/{queue}").status == 200
    assert len(http.pop(queue, batch=2, autoAck="true")["messages"]) == 2
