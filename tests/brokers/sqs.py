"""moto's SQS, in a process of its own."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.brokers.processes import Server, serving

CREDENTIALS = {"AWS_ACCESS_KEY_ID": "settled", "AWS_SECRET_ACCESS_KEY": "settled"}


def _command(port: int, directory: Path) -> list[str]:
    return [sys.executable, "-m", "tests.brokers.sqs_server", str(port)]


@contextmanager
def sqs_server() -> Iterator[Server]:
    with serving(Server(_command)) as server:
        yield server
