"""A private RabbitMQ: own data, own name, own epmd, on free loopback ports, without plugins."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import trustme

from tests.brokers.debs import environment, required
from tests.brokers.ports import free_ports, wait_for, wait_until_free


class RabbitServer:
    """A server that can be stopped, killed and started again on the same ports and data."""

    def __init__(self, root: Path) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="settled-rabbitmq-"))
        self.port, self.tls_port, self._dist_port, self._epmd_port = free_ports(4)
        self.ca = trustme.CA()
        # What the machine has installed already was not fetched.
        self._erlang = next(p for p in (root / "usr/lib/erlang", Path("/usr/lib/erlang")) if p.exists())
        self._runtime = next(self._erlang.glob("erts-*")) / "bin"
        (self._script,) = root.glob("usr/lib/rabbitmq/lib/rabbitmq_server-*/sbin/rabbitmq-server")
        self._environment = self._configure(environment(root))
        self._process: subprocess.Popen[bytes] | None = None
        self._epmd: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"amqp://127.0.0.1:{self.port}"

    @property
    def tls_url(self) -> str:
        return f"amqps://localhost:{self.tls_port}?cafile={self.directory / 'ca.pem'}"

    def _configure(self, base: dict[str, str]) -> dict[str, str]:
        here = self.directory
        certificate = self.ca.issue_cert("localhost", "127.0.0.1")
        self.ca.cert_pem.write_to_path(here / "ca.pem")
        certificate.cert_chain_pems[0].write_to_path(here / "cert.pem")
        certificate.private_key_pem.write_to_path(here / "key.pem")
        (here / "rabbitmq.conf").write_text(
            f"listeners.tcp.local = 127.0.0.1:{self.port}\n"
            f"listeners.ssl.local = 127.0.0.1:{self.tls_port}\n"
            f"ssl_options.cacertfile = {here}/ca.pem\n"
            f"ssl_options.certfile = {here}/cert.pem\n"
            f"ssl_options.keyfile = {here}/key.pem\n"
            "ssl_options.verify = verify_none\n"
            # Small disks and small machines must not make it stop taking messages.
            "disk_free_limit.absolute = 10MB\n"
            "max_message_size = 4000000\n"
            "log.console.level = warning\n"
        )
        (here / "plugins").write_text("[].\n")
        # The packaged `erl` only knows the place that it would have been installed to.
        erl = here / "bin" / "erl"
        erl.parent.mkdir()
        erl.write_text(
            f"#!/bin/sh\nexport ROOTDIR={self._erlang} BINDIR={self._runtime} EMU=beam PROGNAME=erl\n"
            f'exec {self._runtime}/erlexec "$@"\n'
        )
        erl.chmod(0o755)
        return {
            **{name: value for name, value in base.items() if not name.startswith(("RABBITMQ_", "ERL_"))},
            "HOME": str(here),
            "PATH": f"{erl.parent}:{base.get('PATH', '/usr/bin:/bin')}",
            "ERL_EPMD_PORT": str(self._epmd_port),
            "ERL_EPMD_ADDRESS": "127.0.0.1",
            "RABBITMQ_NODENAME": f"settled{self.port}@localhost",
            "RABBITMQ_DIST_PORT": str(self._dist_port),
            "RABBITMQ_CONFIG_FILE": str(here / "rabbitmq.conf"),
            "RABBITMQ_CONF_ENV_FILE": str(here / "none.conf"),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(here / "plugins"),
            "RABBITMQ_MNESIA_BASE": str(here / "data"),
            "RABBITMQ_LOG_BASE": str(here / "logs"),
            "RABBITMQ_LOGS": "-",
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "-kernel inet_dist_use_interface {127,0,0,1}",
        }

    def start(self) -> RabbitServer:
        with (self.directory / "log").open("ab") as log:
            if self._epmd is None:
                epmd = [str(self._runtime / "epmd"), "-port", str(self._epmd_port), "-address", "127.0.0.1"]
                self._epmd = subprocess.Popen(epmd, env=self._environment, stdout=log, stderr=log)
                if not wait_for(
                    self._epmd_port, lambda: self._epmd is not None and self._epmd.poll() is None
                ):
                    raise RuntimeError(f"epmd did not come up: {self.log()}")
            # A session of its own, so that the shell and the machine it starts can be ended together.
            self._process = process = subprocess.Popen(
                [self._script],
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        if not all(wait_for(port, lambda: process.poll() is None) for port in (self.port, self.tls_port)):
            raise RuntimeError(f"RabbitMQ did not come up: {self.log()}")
        return self

    def log(self) -> str:
        return (self.directory / "log").read_text(errors="replace")[-3000:]

    def stop(self, *, kill: bool = False) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        if not kill and process.poll() is None:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(30)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(15)
        # The shell is gone first, the machine that it started a moment later.
        for port in (self.port, self.tls_port, self._dist_port):
            wait_until_free(port)

    def remove(self) -> None:
        self.stop(kill=True)
        if self._epmd is not None:
            self._epmd.kill()
            self._epmd.wait(15)
        shutil.rmtree(self.directory, ignore_errors=True)


@contextlib.contextmanager
def rabbitmq() -> Iterator[RabbitServer]:
    # Another release of Debian has another RabbitMQ: trixie 4.0, sid the newest.
    suite = os.environ.get("SETTLED_RABBITMQ_FROM")
    server = RabbitServer(required("rabbitmq-server", "usr/lib/rabbitmq/bin/rabbitmq-script-wrapper", suite))
    try:
        yield server.start()
    finally:
        server.remove()
