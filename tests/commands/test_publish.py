"""`settled publish`, as a user types it."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys

import pytest

import nats
from settled.server.testing import RunningServer
from tests.commands.conftest import settled
from tests.nats.servers import Server
from tests.server.http import Http


def test_a_message_is_published_and_its_id_printed(server: RunningServer, http: Http, queue: str) -> None:
    """Defect D1."""
    done = settled("publish", server.url, queue, '{"id": 1}')
    assert done.returncode == 0, done.stderr
    (message,) = http.pop(queue)["messages"]
    assert message["data"] == {"id": 1}
    assert done.stdout == f"published {queue} id={message['transactionId']} lane={message['partition']}\n"


def test_id_lane_and_headers_reach_the_message_and_a_second_publish_is_a_duplicate(
    server: RunningServer, http: Http, queue: str
) -> None:
    more = ["--id", "order-1", "--lane", "ann", "--header", "tenant=blue", "--header", "note=a=b"]
    first = settled("publish", server.url, queue, "1", *more)
    assert (first.returncode, first.stdout) == (0, f"published {queue} id=order-1 lane=ann\n")
    again = settled("publish", server.url, queue, "1", *more, "--json")
    assert again.returncode == 0
    assert json.loads(again.stdout)["duplicate"] is True
    (message,) = http.pop(queue)["messages"]
    assert (message["transactionId"], message["partition"]) == ("order-1", "ann")
    assert message["headers"] == {"tenant": "blue", "note": "a=b"}


@pytest.mark.parametrize(
    ("more", "content_type", "body"),
    [
        (["--text"], "text/plain", "hello {"),
        (["--content-type", "application/xml"], "application/xml", "<a/>"),
    ],
)
def test_a_message_may_be_something_else_than_json(
    server: RunningServer, http: Http, queue: str, more: list[str], content_type: str, body: str
) -> None:
    assert settled("publish", server.url, queue, body, *more).returncode == 0
    (message,) = http.pop(queue)["messages"]
    assert message["contentType"] == content_type


def test_a_delayed_message_is_not_there_yet(server: RunningServer, http: Http, queue: str) -> None:
    assert settled("publish", server.url, queue, "1", "--delay", "3600").returncode == 0
    assert http.pop(queue)["messages"] == []


def test_each_line_of_standard_input_is_a_message(database: str, http: Http, queue: str) -> None:
    lines = "".join(f'{{"id": {n}}}\n' for n in range(1200)) + "\n" + '{"id": 1200}'
    done = settled("publish", queue, "-", "--lane", "one", stdin=lines, SETTLED_URL=database)
    assert done.returncode == 0, done.stderr
    assert done.stderr == "settled: published=1201 duplicates=0\n"
    assert len(done.stdout.splitlines()) == 1201
    popped = http.pop(queue, batch=2000)["messages"]
    assert [message["data"]["id"] for message in popped] == list(range(1201))


def test_a_line_is_published_before_the_next_one_comes(server: RunningServer, queue: str) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "settled", "publish", server.url, queue, "-"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    for number in range(3):
        process.stdin.write(f"{number}\n")
        process.stdin.flush()
        assert process.stdout.readline().startswith(f"published {queue} ")
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 130
    assert errors == "settled: published=3 duplicates=0\n"


def test_a_bad_line_ends_it_and_the_lines_before_it_are_published(
    server: RunningServer, http: Http, queue: str
) -> None:
    done = settled("publish", server.url, queue, "-", stdin="1\n2\n{broken\n4\n")
    assert done.returncode == 2
    counts, why = done.stderr.splitlines()
    assert counts == "settled: published=2 duplicates=0"
    assert why.startswith("settled: line 3 is not JSON (")
    popped = http.pop(queue, batch=9, partitions=9)["messages"]
    assert sorted(message["data"] for message in popped) == [1, 2]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["http://127.0.0.1:1", "orders", "{no"], "the message is not JSON"),
        (["http://h", "orders", "1", "--header", "tenant"], "--header must be NAME=VALUE, got 'tenant'"),
        (["http://127.0.0.1:1", "orders", "-", "--id", "a"], "--id names one message, and - reads many"),
        (["http://127.0.0.1:1", "", "1"], "CHANNEL must be a name, got ''"),
        (["http://127.0.0.1:1", "orders", "1", "2"], "expected [URL] CHANNEL JSON, got 4 arguments"),
        (["orders", "1"], "no URL: write it first ([URL] CHANNEL JSON), or set SETTLED_URL"),
        (["memory://", "orders", "1"], "memory:// lives in one process, and this command is another one"),
        (["carrier://pigeon", "orders", "1"], "no transport for 'carrier://pigeon'"),
        (["http://h", "orders", "1", "--text", "--content-type", "a/b"], "--text is --content-type"),
    ],
)  # fmt: skip
def test_a_wrong_command_is_told_in_one_line_and_exits_2(arguments: list[str], said: str) -> None:
    done = settled("publish", *arguments, SETTLED_URL="")
    assert done.returncode == 2
    assert done.stderr.startswith(f"settled: {said}") or said in done.stderr
    assert len(done.stderr.splitlines()) == 1, done.stderr


def test_a_broker_that_is_away_is_told_without_its_password_and_exits_1() -> None:
    done = settled("publish", "postgresql://ann:hush@127.0.0.1:1/shop", "orders", "1")
    assert done.returncode == 1
    assert done.stderr.startswith("settled: cannot connect to postgresql://127.0.0.1:1/shop: ")
    assert "hush" not in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_it_publishes_to_a_broker_and_makes_the_stream_when_asked_to() -> None:
    nats_server = Server().start()
    try:
        refused = settled("publish", nats_server.url, "orders.new", '{"id": 1}')
        assert refused.returncode in (1, 2)
        assert len(refused.stderr.splitlines()) == 1
        done = settled("publish", nats_server.url, "orders.new", '{"id": 1}', "--create")
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith("published orders.new id=")

        async def stored() -> bytes:
            client = await nats.connect(nats_server.url)
            try:
                stream = client.jetstream()
                name = await stream.find_stream_name_by_subject("orders.new")
                message = await stream.get_last_msg(name, "orders.new")
                return message.data or b""
            finally:
                await client.close()

        assert asyncio.run(stored()) == b'{"id": 1}'
    finally:
        nats_server.stop()
