"""A consumer that is killed again and again, and the count of what it handled in the end."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

from settled import App, Reject

MESSAGES = 10_000
KINDS = ("async", "sync")


def handled(record: Path) -> Counter[int]:
    """How often each message was handled, by whatever consumer."""
    lines = record.read_bytes().split(b"\n")[:-1] if record.exists() else []
    return Counter(int(line) for line in lines)


def consume_with_crashes(
    url: str, queue: str, record: Path, *, messages: int = MESSAGES, crashes: int = 4, seconds: float = 300
) -> Counter[int]:
    """Run a consumer of `queue` in a process of its own, kill it at random times, then let it finish.

    The queue holds `messages` JSON numbers from 0 on. Every thousandth is rejected by the handler, which is
    a sync one in every other process.
    """
    chance = random.Random(7)
    deadline = time.monotonic() + seconds
    for crash in range(crashes + 1):
        last = crash == crashes
        enough = messages if last else (crash + chance.random()) * messages / (crashes + 1)
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.transports.crashing", url, queue, str(record), KINDS[crash % 2]]
        )
        try:
            while len(handled(record)) < enough and time.monotonic() < deadline:
                assert process.poll() is None, "the consumer ended by itself"
                time.sleep(0.05)
            if last:
                process.send_signal(signal.SIGTERM)
                assert process.wait(60) == 0
        finally:
            process.kill()
            process.wait()
    return handled(record)


def app(url: str, queue: str, record: Path, kind: str) -> App:
    found = App(url)
    output = os.open(record, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def handle(number: int) -> None:
        os.write(output, b"%d\n" % number)
        if number % 1000 == 0:
            raise Reject("a round number")

    async def handle_async(number: int) -> None:
        handle(number)

    subscriber = found.subscriber(queue, buffer=50, performers=2, channel_failure_delay=0.2)
    subscriber(handle if kind == "sync" else handle_async)
    return found


if __name__ == "__main__":
    _, url, queue, record, kind = sys.argv
    app(url, queue, Path(record), kind).run()
