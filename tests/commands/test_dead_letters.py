"""`settled dlq` and `settled queues`, by the server and in the database."""

from __future__ import annotations

import asyncio
import json

import pytest

from settled import App
from settled.server.testing import RunningServer
from tests.commands.conftest import settled
from tests.nats.servers import server as nats_server
from tests.server.http import Http


@pytest.fixture(params=["http", "postgresql"])
def url(request: pytest.FixtureRequest, server: RunningServer, database: str) -> str:
    return server.url if request.param == "http" else database


def kill(http: Http, queue: str, *payloads: object, error: str = "the bank is away") -> None:
    """Make dead letters."""
    http.push(queue, *payloads)
    for message in http.pop(queue, batch=1000, consumerGroup="billing")["messages"]:
        http.ack(message, "dlq", error=error)


def waiting(http: Http, queue: str) -> list[object]:
    popped = http.pop(queue, batch=1000, consumerGroup="billing", autoAck="true")["messages"]
    return sorted(message["data"] for message in popped)


def test_dead_letters_are_listed_by_filter(url: str, http: Http, queue: str) -> None:
    """Defect D7."""
    kill(http, queue, 1, 2)
    kill(http, queue, 3, error="no\ncard")
    listed = settled("dlq", "list", url, "--queue", queue)
    assert listed.returncode == 0, listed.stderr
    assert len(listed.stdout.splitlines()) == 3
    assert f"{queue}/Default  billing" in listed.stdout
    assert listed.stdout.splitlines()[0].endswith("no card")
    assert listed.stderr == "3 of 3 dead letters\n"
    away = settled("dlq", "list", url, "--queue", queue, "--error", "BANK", "--json")
    rows = [json.loads(line) for line in away.stdout.splitlines()]
    assert sorted(row["payload"] for row in rows) == [1, 2]
    shown = settled("dlq", "show", rows[0]["id"], SETTLED_URL=url)
    letter = json.loads(shown.stdout)
    assert (letter["queue"], letter["error"], letter["group"]) == (queue, "the bank is away", "billing")


def test_dead_letters_are_sent_again_in_bulk(url: str, http: Http, queue: str) -> None:
    """Defect D7."""
    kill(http, queue, *range(1, 701))
    kill(http, queue, 999, error="no card")
    only = ["--queue", queue, "--error", "bank"]
    looked = settled("dlq", "retry", url, *only, "--dry-run")
    assert (looked.returncode, looked.stdout) == (0, "would retry=700\n")
    assert waiting(http, queue) == []
    done = settled("dlq", "retry", url, *only)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "retried=700 refused=0\n"
    assert done.stderr == "retry: 500 of 700\n"
    assert waiting(http, queue) == list(range(1, 701))
    assert settled("dlq", "list", url, "--queue", queue).stdout.count("no card") == 1


def test_dead_letters_are_dropped_only_after_a_yes(url: str, http: Http, queue: str) -> None:
    kill(http, queue, 1, 2)
    asked = settled("dlq", "purge", url, "--queue", queue)
    assert asked.returncode == 2
    assert asked.stderr == "settled: 2 dead letters would be dropped for good; add --yes\n"
    (one, _) = [
        json.loads(line)
        for line in settled("dlq", "list", url, "--queue", queue, "--json").stdout.splitlines()
    ]
    dropped = settled("dlq", "purge", url, "--id", one["id"], "--yes", "--json")
    assert json.loads(dropped.stdout) == {"matched": 1, "purged": 1, "refused": [], "dryRun": False}
    assert settled("dlq", "purge", url, "--queue", queue, "--yes").stdout == "purged=1 refused=0\n"
    assert settled("dlq", "list", url, "--queue", queue).stderr == "0 of 0 dead letters\n"


def test_what_is_refused_is_named_and_exits_1(url: str, http: Http, queue: str) -> None:
    kill(http, queue, 1, 2)
    assert http("DELETE", f"/api/v1/queues/{queue}/clear").status == 200
    http("POST", "/api/v1/configure", {"queue": queue, "options": {"maxSize": 1}})
    done = settled("dlq", "retry", url, "--queue", queue)
    assert (done.returncode, done.stdout) == (1, "retried=1 refused=1\n")
    assert "stays: queue" in done.stderr
    assert "is full" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["retry", "URL"], "retry: name --queue, --group, --error, --since or another filter, or --all"),
        (["purge", "URL", "--yes"], "purge: name --queue"),
        (["list", "URL", "--since", "yesterday"], "--since must be a time like 2026-01-31T12:00Z, got"),
        (["show", "URL", "nonsense"], "nonsense"),
        (["show", "URL", "00000000-0000-0000-0000-000000000000"], "dead letter not found"),
        (["list", "memory://"], "memory:// lives in one process"),
        (["list", "redis://h"], "this command works on the queue, http://… or postgresql://…, not on redis://"),
        (["list"], "no URL: write it first (URL), or set SETTLED_URL"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_told_in_one_line_and_exits_2(url: str, arguments: list[str], said: str) -> None:
    done = settled("dlq", *(url if word == "URL" else word for word in arguments), SETTLED_URL="")
    assert done.returncode == 2
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1, done.stderr


@pytest.mark.parametrize("away", ["http://ann:hush@127.0.0.1:1", "postgresql://ann:hush@127.0.0.1:1/shop"])
def test_a_queue_that_is_away_is_told_without_its_password_and_exits_1(away: str) -> None:
    done = settled("queues", away)
    assert done.returncode == 1
    assert "hush" not in done.stderr
    assert len(done.stderr.splitlines()) == 1, done.stderr


def test_queues_are_listed_with_their_counts_and_lag(url: str, http: Http, queue: str) -> None:
    kill(http, queue, 1, 2)
    http.push(queue, 3, 4, 5)
    listed = settled("queues", url, "--queue", queue)
    assert listed.returncode == 0, listed.stderr
    head, row = listed.stdout.splitlines()
    assert head.split() == [
        "queue",
        "partitions",
        "waiting",
        "in",
        "hand",
        "done",
        "dead",
        "group",
        "lag",
        "behind",
    ]
    assert row.split()[:8] == [queue, "1", "3", "0", "2", "2", "billing", "3"]
    (parsed,) = [
        json.loads(line) for line in settled("queues", url, "--queue", queue, "--json").stdout.splitlines()
    ]
    assert (parsed["pending"], parsed["dead"]) == (3, 2)
    assert [(group["name"], group["lag"]) for group in parsed["groups"]] == [("billing", 3)]


def test_the_bridge_sends_dead_letters_of_a_broker_again_as_the_error_says() -> None:
    """The command that `settled dlq` names for NATS."""

    async def reject(address: str) -> None:
        app = App(f"{address}?create=true")

        @app.subscriber("orders", group="billing", requeue_count=1)
        async def charge(order: dict[str, int]) -> None:
            raise ValueError("no card")

        stop = asyncio.Event()
        running = asyncio.create_task(app.serve(stop))
        async with asyncio.timeout(30):
            while app.status().counts.rejected < 1:
                if app.status().running and not app.status().counts.received:
                    await app.publish("orders", {"id": 1}, id="one")
                await asyncio.sleep(0.05)
        stop.set()
        await running

    with nats_server() as one:
        asyncio.run(reject(one.url))
        refused = settled("dlq", "retry", one.url, "--all")
        assert (
            "`settled bridge URL URL --from settled.dead.ORDERS.billing.> --to orders.new`" in refused.stderr
        )
        back = settled(
            "bridge",
            one.url,
            one.url,
            "--from",
            "settled.dead.orders.billing.>",
            "--to",
            "orders",
            "--idle-exit",
            "2",
        )
        assert back.returncode == 0, back.stderr
        assert back.stdout.startswith("read=1 written=")
