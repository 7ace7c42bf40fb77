"""Pub/Sub servers: a stand-in of our own, and Google's emulator where its jar is installed."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.brokers.processes import Server, serving


def _stand_in(port: int, directory: Path) -> list[str]:
    return [sys.executable, "-m", "tests.brokers.pubsub_server", str(port), str(directory / "data")]


@contextmanager
def pubsub_server() -> Iterator[Server]:
    with serving(Server(_stand_in)) as server:
        yield server


def emulator_jar() -> Path | None:
    """Google's emulator, which no package index carries: where SETTLED_PUBSUB_EMULATOR says, or gcloud's."""
    if named := os.environ.get("SETTLED_PUBSUB_EMULATOR"):
        return Path(named)
    gcloud = shutil.which("gcloud")
    if gcloud is None or shutil.which("java") is None:
        return None
    sdk = Path(gcloud).resolve().parents[1]
    return next(iter(sorted(sdk.glob("platform/pubsub-emulator/lib/cloud-pubsub-emulator-*-all.jar"))), None)


@contextmanager
def emulator(jar: Path) -> Iterator[Server]:
    def command(port: int, directory: Path) -> list[str]:
        return ["java", "-jar", str(jar), "--host=127.0.0.1", f"--port={port}"]

    with serving(Server(command)) as server:
        yield server
