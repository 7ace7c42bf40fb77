"""Processes that are killed with messages in hand."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import textwrap
from collections import Counter
from pathlib import Path

import msgspec
from nats.js.api import ConsumerConfig, RetentionPolicy

from settled import App
from settled.transports.nats import Durable
from tests.nats.conftest import DEAD, desk_on, running, until
from tests.nats.servers import Server, server

MESSAGES = 400

# Every handled message leaves a line, in a file that survives the process.
PROGRAM = """
    import asyncio, os, sys
    from settled import App, Reject
    from settled.transports.nats import Durable

    url, stream, path = sys.argv[1:]
    app = App(url)
    lines = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    source = Durable(stream=stream, consumer="worker")

    @app.subscriber(stream + ".new", source=source, buffer=20, performers=2)
    async def handle(order: dict) -> None:
        await asyncio.sleep(0.005)
        if order["id"] % 20 == 0:
            raise Reject("poison")
        if order["id"] % 20 == 1:
            raise ValueError("never works")
        os.write(lines, b"%d\\n" % order["id"])

    app.run()
"""


def test_killed_processes_lose_nothing_and_write_no_letter_twice(tmp_path: Path) -> None:
    program, seen = tmp_path / "worker.py", tmp_path / "seen"
    program.write_text(textwrap.dedent(PROGRAM))

    async def main(one: Server) -> None:
        async with desk_on(one.url, retention=RetentionPolicy.WORK_QUEUE) as desk:
            config = ConsumerConfig(durable_name="worker", max_deliver=12, backoff=[0.5])
            await desk.jetstream.add_consumer(desk.stream, config)
            for number in range(MESSAGES):
                await desk.put(b'{"id": %d}' % number)
            command = [sys.executable, str(program), one.url, desk.stream, str(seen)]

            def lines() -> Counter[int]:
                text = seen.read_text() if seen.exists() else ""
                return Counter(int(line) for line in text.splitlines())

            for wanted in (40, 110, 180):
                with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
                    try:
                        await until(lambda wanted=wanted: len(lines()) >= wanted, 30)  # type: ignore[misc]
                    finally:
                        process.kill()
            with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
                try:

                    async def empty() -> bool:
                        return await desk.kept() == 0

                    await until(empty, 60)
                finally:
                    process.terminate()
            good = {number for number in range(MESSAGES) if number % 20 > 1}
            assert set(lines()) == good
            dead = Counter(
                msgspec.json.decode(letter.data)["id"] for letter in await desk.letters(stream=DEAD)
            )
            assert dead == Counter(set(range(MESSAGES)) - good)

    with server() as one:
        asyncio.run(asyncio.wait_for(main(one), 150))


def test_an_app_can_be_run_again_after_it_was_stopped(nats_server: Server) -> None:
    async def main() -> None:
        async with desk_on(nats_server.url) as desk:
            app, got = App(desk.url), []

            @app.subscriber(
                desk.subject(), source=Durable(stream=desk.stream, consumer="worker", create=True)
            )
            async def handle(order: dict[str, int]) -> None:
                got.append(order["id"])

            for number in range(3):
                await desk.put(b'{"id": %d}' % number)
                async with running(app):
                    await until(lambda number=number: got == list(range(number + 1)))  # type: ignore[misc]

    asyncio.run(main())
