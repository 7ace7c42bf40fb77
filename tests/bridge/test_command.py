"""`settled bridge`, as a user runs it: in a process of its own, which may be killed."""

from __future__ import annotations

import asyncio
import logging
import random
import re
import signal
import subprocess
import sys
import threading
import urllib.request
import uuid
from collections import Counter
from collections.abc import Callable, Iterator

import pytest
from nats.js.api import ConsumerConfig
from typer.testing import CliRunner, Result

import nats
from settled.cli import app
from settled.queue.engine import Engine
from settled.queue.types import AckItem, PopRequest
from settled.transports.base import Outgoing
from settled.transports.nats import NatsTransport
from tests.nats.conftest import Desk, desk_on, until
from tests.nats.servers import Server

MESSAGES = 3000
KILLS = 3


class Running:
    """A bridge in a process of its own; what it says is read as it comes."""

    def __init__(self, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "settled", "bridge", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip())

    def end(self, number: signal.Signals | None = None, timeout: float = 60) -> int:
        if number is not None:
            self.process.send_signal(number)
        try:
            return self.process.wait(timeout)
        finally:
            self.process.kill()
            self.process.wait()
            self._reader.join()
            assert self.process.stdout is not None
            self.process.stdout.close()


@pytest.fixture
def queue() -> str:
    return f"orders-{uuid.uuid4().hex[:8]}"


@pytest.fixture
def command() -> Iterator[Callable[..., Result]]:
    """The command in this process, for what ends by itself."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield lambda *arguments: CliRunner().invoke(app, ["bridge", *arguments])
    root.handlers[:], root.level = handlers, level


async def stored(dsn: str, queue: str) -> Counter[str]:
    """How often each id is in the queue."""
    engine = await Engine.open(dsn)
    found: Counter[str] = Counter()
    try:
        request = PopRequest(queue=queue, group=uuid.uuid4().hex, batch=1000, partitions=100)
        while batch := list((await engine.pop(request)).messages()):
            found.update(m.transaction_id for m in batch)
            items = [AckItem(m.transaction_id, m.partition_id, lease_id=m.lease_id) for m in batch]
            await engine.ack(items, request.group)
    finally:
        await engine.close()
    return found


async def fill(desk: Desk, count: int, first: int = 0) -> None:
    for start in range(first, first + count, 500):
        numbers = range(start, min(start + 500, first + count))
        await asyncio.gather(*(desk.put(b'{"id": %d}' % n, Nats_Msg_Id=f"order-{n}") for n in numbers))


def test_a_bridge_killed_at_random_times_loses_nothing_and_writes_nothing_twice(
    nats_server: Server, dsn: str, queue: str
) -> None:
    chance = random.Random(11)

    async def main() -> None:
        async with desk_on(nats_server.url) as desk:
            config = ConsumerConfig(name="bridge", durable_name="bridge", ack_wait=2)
            await desk.jetstream.add_consumer(desk.stream, config)
            command = (desk.url, dsn, "--from", desk.subject(), "--to", queue, "--group", "bridge")

            async def acked() -> int:
                floor = (await desk.info("bridge")).ack_floor
                return 0 if floor is None else floor.stream_seq

            part = MESSAGES // (KILLS + 1)
            for kill in range(KILLS):
                await fill(desk, part, kill * part)
                enough = (kill + chance.random() / 2) * part
                running = Running(*command, "--buffer", "20")

                async def far_enough(
                    process: subprocess.Popen[str] = running.process, enough: float = enough
                ) -> bool:
                    assert process.poll() is None, "the bridge ended by itself"
                    return await acked() > enough

                try:
                    await until(far_enough, 60)
                finally:
                    running.end(signal.SIGKILL)
            await fill(desk, MESSAGES - KILLS * part, KILLS * part)
            last = Running(*command)
            try:
                await until(lambda: desk.settled("bridge"), 60)
            finally:
                code = last.end(signal.SIGTERM)
            assert code == 0, last.lines
            found = re.fullmatch(r"read=(\d+) written=(\d+) duplicates=(\d+) rejected=0", last.lines[-1])
            assert found, last.lines
            read, written, duplicates = map(int, found.groups())
            assert read == written + duplicates > 0
            assert await stored(dsn, queue) == Counter(f"order-{n}" for n in range(MESSAGES))

    asyncio.run(asyncio.wait_for(main(), 180))


def filled(server: Server, count: int) -> Desk:
    """A stream with so many messages."""

    async def fill_it() -> Desk:
        async with desk_on(server.url) as desk:
            await fill(desk, count)
            return desk

    return asyncio.run(fill_it())


def test_it_ends_by_itself_and_a_second_run_finds_only_duplicates(
    nats_server: Server, dsn: str, queue: str, command: Callable[..., Result]
) -> None:
    desk = filled(nats_server, 20)
    arguments = (desk.url, dsn, "--from", desk.subject(), "--to", queue, "--create")
    first = command(*arguments, "--group", "one", "--limit", "20")
    assert (first.exit_code, first.output) == (0, "read=20 written=20 duplicates=0 rejected=0\n")
    second = command(*arguments, "--group", "two", "--idle-exit", "1")
    assert (second.exit_code, second.output) == (0, "read=20 written=0 duplicates=20 rejected=0\n")
    assert asyncio.run(stored(dsn, queue)).total() == 20


def test_without_a_group_it_goes_on_where_it_was_too(
    nats_server: Server, dsn: str, queue: str, command: Callable[..., Result]
) -> None:
    desk = filled(nats_server, 5)
    arguments = (desk.url, dsn, "--from", desk.subject())
    for to, limit in ((queue, 3), (queue, 2), (f"{queue}-too", 5)):
        carried = command(*arguments, "--to", to, "--limit", str(limit))
        assert carried.output == f"read={limit} written={limit} duplicates=0 rejected=0\n"


def test_with_create_a_bridge_makes_the_streams_it_reads_and_writes_and_the_consumer(
    nats_server: Server, command: Callable[..., Result]
) -> None:
    one, other = (f"made.{uuid.uuid4().hex[:8]}.new" for _ in range(2))
    url = nats_server.url
    arguments = (url, url, "--from", one, "--to", other, "--group", "bridge")
    refused = command(*arguments, "--idle-exit", "0.1")
    assert (refused.exit_code, "no stream takes this subject" in refused.output) == (2, True)
    empty = command(*arguments, "--create", "--idle-exit", "0.1")
    assert (empty.exit_code, empty.output) == (0, "read=0 written=0 duplicates=0 rejected=0\n")

    async def publish() -> None:
        transport = NatsTransport(url)
        await transport.open()
        await transport.publish(Outgoing(subject=one, data=b"1", id="m-1"))
        await transport.close()

    asyncio.run(publish())
    carried = command(*arguments, "--create", "--limit", "1")
    assert (carried.exit_code, carried.output) == (0, "read=1 written=1 duplicates=0 rejected=0\n")

    async def look() -> None:
        client = await nats.connect(url)
        for subject in (one, other):
            info = await client.jetstream().stream_info(subject.replace(".", "-"))
            assert (info.config.subjects, info.state.messages) == ([subject], 1)
        await client.close()

    asyncio.run(look())


def test_a_signal_ends_it_in_order_and_metrics_are_served_until_then(
    nats_server: Server, dsn: str, queue: str
) -> None:
    async def main() -> None:
        async with desk_on(nats_server.url) as desk:
            await fill(desk, 5)
            running = Running(desk.url, dsn, "--from", desk.subject(), "--to", queue, "--metrics-port", "0")
            try:
                await until(lambda: bool(running.lines), 60)
                address = running.lines[0].removeprefix("metrics on ")

                def metrics() -> str:
                    with urllib.request.urlopen(address, timeout=30) as answer:
                        return str(answer.read().decode())

                async def all_written() -> bool:
                    return "settled_bridge_written_total 5.0" in await asyncio.to_thread(metrics)

                await until(all_written, 60)
                assert "settled_bridge_target_up 1.0" in await asyncio.to_thread(metrics)
            finally:
                code = running.end(signal.SIGINT)
            assert (code, running.lines[1:]) == (0, ["read=5 written=5 duplicates=0 rejected=0"])

    asyncio.run(asyncio.wait_for(main(), 120))


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["ftp://x", "{dsn}", "--from", "a"], "no transport for 'ftp://x'; use one of amqp://"),
        (["ampq://u:secret@x", "{dsn}", "--from", "a"], "no transport for 'ampq://x'; use one of amqp://"),
        (["mqtt://u:secret@h:abc", "{dsn}", "--from", "a"], "mqtt: the port must be a number up to 65535"),
        (["{nats}", "amqp://[::1", "--from", "a", "--create"], "the URL 'amqp://[::1' cannot be read"),
        (["{nats}?colour=red", "{dsn}", "--from", "a"], "the URL has no option colour"),
        (["nats://127.0.0.1:1", "{dsn}", "--from", "a"], "bridge: cannot open nats://127.0.0.1:1"),
        (["{nats}", "http://u:secret@127.0.0.1:1/", "--from", "a"], "cannot open http://127.0.0.1:1/: Unrea"),
        (["{nats}", "{dsn}", "--from", "no.such.subject", "--group", "g"], "no stream takes this subject"),
        (["{nats}", "{dsn}", "--from", ""], "channel must be a name, got ''"),
        (["memory://", "{dsn}", "--from", "a"], "memory:// lives in one process"),
        (["{nats}", "{nats}/?create=true", "--from", "a"], "it would copy 'a' of nats://127.0.0.1"),
        (["{nats}", "{nats}", "--from", "a.*", "--to", "a.b"], "it would copy 'a.*' of nats://127.0.0.1"),
        (
            ["{dsn}", "{dsn}", "--from", "a", "--to", "a"],
            "onto itself without end; name another",
        ),
        (["mqtt://127.0.0.1:1", "{dsn}", "--from", "a"], "mqtt: 127.0.0.1:1: Connection refused"),
        (["sqs://127.0.0.1:1?region=eu", "{dsn}", "--from", "a"], "cannot read 'a' of sqs://127.0.0.1:1: "),
        (
            ["servicebus://k:secret@127.0.0.1:1?emulator=1", "{dsn}", "--from", "a"],
            "cannot read 'a' of s",
        ),
    ],
)
def test_what_is_wrong_is_said_in_one_line(
    nats_server: Server, dsn: str, command: Callable[..., Result], arguments: list[str], text: str
) -> None:
    result = command(*(word.format(nats=nats_server.url, dsn=dsn) for word in arguments))
    assert result.exit_code == 2
    assert result.output.count("\n") == 1, result.output
    assert text in result.output
    assert "secret" not in result.output
