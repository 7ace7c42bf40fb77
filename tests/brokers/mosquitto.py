"""A private mosquitto on a free loopback port, which keeps its sessions when it restarts."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import trustme

from tests.brokers.debs import environment, required
from tests.brokers.ports import free_ports, wait_for, wait_until_free


class Mosquitto:
    """A server that can be stopped, killed and started again on the same ports and data."""

    def __init__(self, root: Path) -> None:
        self.directory = here = Path(tempfile.mkdtemp(prefix="settled-mosquitto-"))
        # It gives up root's rights and goes on as somebody who must be able to write there.
        here.chmod(0o777)
        self.port, self.tls_port = free_ports(2)
        self._binary = root / "usr" / "sbin" / "mosquitto"
        self._environment = environment(root)
        ca = trustme.CA()
        certificate = ca.issue_cert("localhost", "127.0.0.1")
        ca.cert_pem.write_to_path(here / "ca.pem")
        certificate.cert_chain_pems[0].write_to_path(here / "cert.pem")
        certificate.private_key_pem.write_to_path(here / "key.pem")
        for name in ("ca.pem", "cert.pem", "key.pem"):
            (here / name).chmod(0o644)
        (here / "acl").write_text("topic readwrite #\ntopic deny forbidden/#\n")
        (here / "acl").chmod(0o644)
        (here / "mosquitto.conf").write_text(
            "per_listener_settings false\n"
            "allow_anonymous true\n"
            f"acl_file {here}/acl\n"
            f"listener {self.port} 127.0.0.1\n"
            f"listener {self.tls_port} 127.0.0.1\n"
            f"certfile {here}/cert.pem\n"
            f"keyfile {here}/key.pem\n"
            "persistence true\n"
            f"persistence_location {here}/\n"
            "max_packet_size 4000000\n"
            "max_queued_messages 0\n"
            "max_inflight_messages 0\n"
        )
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"mqtt://127.0.0.1:{self.port}"

    @property
    def tls_url(self) -> str:
        return f"mqtts://localhost:{self.tls_port}?ca_certs={self.directory / 'ca.pem'}"

    def start(self) -> Mosquitto:
        with (self.directory / "log").open("ab") as log:
            self._process = process = subprocess.Popen(
                [self._binary, "-c", self.directory / "mosquitto.conf"],
                env=self._environment,
                stdout=log,
                stderr=log,
            )
        if not all(wait_for(port, lambda: process.poll() is None) for port in (self.port, self.tls_port)):
            raise RuntimeError(f"mosquitto did not come up: {self.log()}")
        return self

    def log(self) -> str:
        return (self.directory / "log").read_text(errors="replace")[-3000:]

    def stop(self, *, kill: bool = False) -> None:
        process, self._process = self._process, None
        if process is not None and process.poll() is None:
            process.kill() if kill else process.terminate()
            process.wait(30)
        wait_until_free(self.port)

    def remove(self) -> None:
        self.stop(kill=True)
        shutil.rmtree(self.directory, ignore_errors=True)


@contextlib.contextmanager
def mosquitto() -> Iterator[Mosquitto]:
    server = Mosquitto(required("mosquitto", "usr/sbin/mosquitto"))
    try:
        yield server.start()
    finally:
        server.remove()
