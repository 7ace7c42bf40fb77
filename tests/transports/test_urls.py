"""What is wrong with a URL is said before anything is opened, by name and value, and without a password."""

from __future__ import annotations

import asyncio
import logging
import socket
import traceback
from pathlib import Path
from urllib.parse import quote

import pytest

from settled import App, ConfigurationError
from settled.transports.urls import in_one_line


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("ampq://ann:s3cret@h?token=s3cret", "no transport for 'ampq://h'; use one of amqp://"),
        ("ampq://ann:s3@cret/s3cret@h", "no transport for 'ampq://h'; use one of amqp://"),
        ("amqp://[::1", "the URL 'amqp://[::1' cannot be read: Invalid IPv6 URL"),
        ("amqp:h", "no host in 'amqp:h'; write amqp://host"),
        ("mqtt://ann:s3cret@h:abc", "mqtt: the port must be a number up to 65535, got 'mqtt://h:abc'"),
        ("amqp://ann:s3cret/1@h", "amqp: the port must be a number up to 65535, got 'amqp://h'"),
        ("amqp://h:99999", "the port must be a number up to 65535, got 'amqp://h:99999'"),
        ("sqs://h:abc", "the port must be a number up to 65535, got 'sqs://h:abc'"),
        ("redis://h:abc", "the port must be a number up to 65535, got 'redis://h:abc'"),
        ("nats://one:4222,two:abc", "the port must be a number up to 65535, got 'nats://two:abc'"),
        ("kafka://one:9092,two:abc", "the port must be a number up to 65535, got 'kafka://two:abc'"),
        ("redis://h:6379/xx", "the database must be a number, got 'xx'"),
        ("redis://h?maxlen=inf", "maxlen must be a number from 0, got 'inf'"),
        ("redis://h?lease=inf", "lease must be a number from 0.1, got 'inf'"),
        ("redis://h?socket_timeout=abc", "option socket_timeout='abc': could not convert"),
        ("rediss://h?ssl_check_hostname=maybe", "option ssl_check_hostname='maybe': must be true or false"),
        ("rediss://h?ssl_ca_certs=/none", "option ssl_ca_certs='/none': No such file"),
        ("kafka://h?lease=inf", "lease must be a number of seconds from 0.1, got 'inf'"),
        ("mqtt://h?keepalive=70000", "keepalive must be a number of seconds from 5 to 65535, got '70000'"),
        ("mqtts://h?ca_certs=/none", "option ca_certs='/none': No such file"),
        ("mqtts://h?keyfile=/none", "option keyfile='/none': No such file"),
        ("amqps://h?cafile=/none", "option cafile='/none': No such file"),
        ("amqps://h?cafile={page}", "option cafile='{page}': no certificates in it"),
        ("amqps://h?no_verify_ssl=maybe", "option no_verify_ssl='maybe': must be true or false"),
        ("amqp://h?heartbeat=abc", "option heartbeat='abc': must be 0 to 65534 s"),
        ("amqp://h?auth=magic", "option auth='magic': must be plain or external"),
        ("nats://h?tls_ca=/none", "option tls_ca='/none': No such file"),
        ("nats://h?credentials=/none", "option credentials='/none': No such file"),
        ("http://h:abc", "the port must be a number up to 65535, got 'http://h:abc'"),
        ("http://h?bogus=1", "http: the URL has no options, got 'bogus'"),
        (
            "postgresql://ann:s3cret@one,h:abc/x",
            "port must be a number up to 65535, got 'postgresql://h:abc'",
        ),
        ("servicebus://name:s3cret@", "the URL 'servicebus://' has no namespace"),
        ("servicebus://name@h", "a key's name, 'name', and no key"),
        ("pubsub://p?ack_deadline=-5", "ack_deadline must be 1..600, got -5"),
        ("pubsub://p?max_attempts=-1", "max_attempts must be 0..100, got -1"),
    ],
)
def test_a_wrong_url_is_told_by_name_and_value_and_never_with_its_password(url: str, told: str) -> None:
    page = str(Path(__file__))
    with pytest.raises(ConfigurationError) as error:
        App(url.format(page=page))
    assert told.format(page=page) in str(error.value)
    assert "s3cret" not in str(error.value)


def closed_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


SECRET = "s3/cr@t"
WITH_SECRETS = [
    "nats://ann:{secret}@127.0.0.1:{port}",
    "nats://{secret}@127.0.0.1:{port}",
    "redis://ann:{secret}@127.0.0.1:{port}/0",
    "redis://127.0.0.1:{port}/0?password={secret}",
    "rediss://ann:{secret}@127.0.0.1:{port}/0",
    "amqp://ann:{secret}@127.0.0.1:{port}/",
    "amqps://ann:{secret}@127.0.0.1:{port}/",
    "mqtt://ann:{secret}@127.0.0.1:{port}?client_id=x",
    "mqtts://ann:{secret}@127.0.0.1:{port}?client_id=x",
    "kafka://ann:{secret}@127.0.0.1:{port}",
    "postgresql://ann:{secret}@127.0.0.1:{port}/db",
    "postgresql://127.0.0.1:{port}/db?user=ann&password={secret}",
    "http://ann:{secret}@127.0.0.1:{port}",
    "servicebus://ann:{secret}@127.0.0.1:{port}?emulator=true",
]


@pytest.mark.parametrize("url", WITH_SECRETS)
def test_no_error_log_or_status_of_a_broker_that_is_away_has_the_password(
    url: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Defect Q17, for brokers: also what an error was caused by, and what clients log themselves."""
    caplog.set_level(logging.DEBUG)
    quoted = quote(SECRET, safe="")
    app = App(url.format(secret=quoted, port=closed_port()))

    @app.subscriber("orders", group="billing")
    async def handle(order: dict[str, int]) -> None: ...

    async def main() -> None:
        """Until it fails, or says that the broker is away."""
        running = asyncio.create_task(app.serve())
        async with asyncio.timeout(60):
            while not running.done():
                shown.append(repr(app.status()))
                broker = app.status().broker
                if broker is not None and not broker.connected and "refused" in broker.detail.lower():
                    app.stop()
                await asyncio.sleep(0.05)
            await running

    shown: list[str] = []
    try:
        asyncio.run(main())
    except Exception as error:
        shown += traceback.format_exception(error)
    shown += [repr(app.status()), repr(app.transport), caplog.text]
    told = "\n".join(shown)
    assert "127.0.0.1" in told
    for secret in (SECRET, quoted, "cr@t"):
        assert secret not in told


def test_an_error_that_repeats_a_url_is_shown_without_its_password() -> None:
    error = OSError("cannot reach amqp://ann:s3@cret@h:5672/shop")
    assert in_one_line(error) == "OSError: cannot reach amqp://h:5672/shop"
