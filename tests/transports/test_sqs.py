"""Amazon SQS, on moto: conformance of standard and FIFO queues, and what is special there."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from settled import App, ConfigurationError, DontAck, Message
from settled.settlement import Reject
from settled.transports.base import LeaseLost, Outgoing, Source
from settled.transports.sqs import Queue, SqsTransport
from tests.brokers.looped import LoopedBroker, name
from tests.brokers.processes import Server
from tests.brokers.sqs import CREDENTIALS, sqs_server
from tests.transports.blocking import block_on_the_first
from tests.transports.conformance import Conformance, Extends, Ordered, Releases
from tests.transports.crashing import MESSAGES, consume_with_crashes
from tests.transports.refusing import carry

LEASE = 2


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with sqs_server() as found:
        yield found


@pytest.fixture(autouse=True)
def credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable, value in CREDENTIALS.items():
        monkeypatch.setenv(variable, value)


@pytest.fixture
def url(server: Server) -> str:
    # moto looks for messages once a second, and goes on with a poll that nobody waits for any more.
    return f"sqs://127.0.0.1:{server.port}?region=eu-west-1&visibility={LEASE}&wait=1&create=true"


class SqsBroker(LoopedBroker):
    transport: SqsTransport

    def lease(self) -> float:
        return float(LEASE)

    def dead_letters(self) -> list[tuple[bytes, str]]:
        found = self.portal.run(self.transport.queue(self.queue))
        return self.read(Source(channel=found.dead_letters))

    def call(self, operation: str, **arguments: Any) -> Any:
        return self.portal.run(self.transport.call(operation, **arguments))

    def url(self, queue: str | None = None) -> str:
        return self.portal.run(self.transport.queue(queue or self.queue)).url


class FifoBroker(SqsBroker):
    lane = "one"


@pytest.fixture
def broker(url: str) -> Iterator[SqsBroker]:
    found = SqsBroker(SqsTransport(url), Source(channel=name()))
    yield found
    found.close()


@pytest.fixture
def fifo(url: str) -> Iterator[FifoBroker]:
    found = FifoBroker(SqsTransport(url), Source(channel=f"{name()}.fifo"))
    yield found
    found.close()


class TestStandard(Extends, Conformance):
    pass


class TestFifo:
    """What order can change; the rest is the same code as for a standard queue."""

    queue = Conformance.queue
    test_whole = Conformance.test_what_is_published_is_received_whole
    test_limit = Conformance.test_a_limit_is_a_limit
    test_nack = Releases.test_a_nacked_message_is_there_at_once
    test_requeue = Conformance.test_a_requeued_message_comes_after_its_delay_and_counts
    test_reject = Conformance.test_a_rejected_message_is_a_dead_letter_with_its_body_and_error
    test_lane = Ordered.test_a_lane_is_in_order_and_waits_for_its_first_message
    test_buffered = Ordered.test_what_was_buffered_behind_a_message_given_back_does_not_overtake_it
    test_other = Releases.test_a_message_given_back_goes_to_another_consumer
    test_async = Conformance.test_the_async_face_does_the_same

    @pytest.fixture
    def broker(self, fifo: FifoBroker) -> FifoBroker:
        return fifo


def test_ac_14_a_nack_sets_the_visibility_to_0_so_another_consumer_has_it_at_once(broker: SqsBroker) -> None:
    broker.call("set_queue_attributes", QueueUrl=broker.url(), Attributes={"VisibilityTimeout": "3600"})
    source = Source(channel=broker.queue, settings=Queue(visibility=3600))
    broker.source = source
    one, other = broker.channel(), broker.channel()
    broker.publish(Outgoing(subject=broker.queue, data=b"1"))
    (delivery,) = one.receive(1, 10)
    one.nack(delivery)
    (again,) = other.receive(1, 10)
    assert again.data == b"1"
    assert again.attempt == 2, "SQS counts every receive"
    other.ack(again)


def test_headers_beyond_ten_and_strange_ones_come_back(broker: SqsBroker) -> None:
    headers = {f"header-{n}": str(n) for n in range(20)}
    headers |= {"with space": "a", "empty": "", "AWS.x": "b", "content-type": "text/plain", "grün": "\x00ß"}
    broker.publish(Outgoing(subject=broker.queue, data=b"x", headers=headers, id="m-1"))
    (delivery,) = broker.channel().receive(1, 10)
    assert dict(delivery.headers) == headers
    assert delivery.id == "m-1"


def test_bodies_of_any_kind_come_back_whole(broker: SqsBroker) -> None:
    channel = broker.channel()
    for body in (b"", b"plain", "grün\n".encode(), b"\r\n", b"\x00", b"\xff\xfe", b"\xef\xbf\xbf"):
        broker.publish(Outgoing(subject=broker.queue, data=body))
        (delivery,) = channel.receive(1, 10)
        assert delivery.data == body
        channel.ack(delivery)


def test_a_message_of_another_producer_is_read_as_it_is(broker: SqsBroker) -> None:
    sent = broker.call(
        "send_message",
        QueueUrl=broker.url(),
        MessageBody="hello",
        MessageAttributes={
            "n": {"DataType": "Number", "StringValue": "7"},
            "b": {"DataType": "Binary", "BinaryValue": b"\x00"},
            "settled-encoding": {"DataType": "String", "StringValue": "base64"},
            "settled-headers": {"DataType": "String", "StringValue": "not JSON"},
        },
    )
    (delivery,) = broker.channel().receive(1, 10)
    assert (delivery.id, delivery.data) == (sent["MessageId"], b"hello")
    assert dict(delivery.headers) == {"n": "7", "b": "AA==", "settled-headers": "not JSON"}
    facts = delivery.metadata()
    assert facts.timestamp is not None
    assert abs(facts.timestamp.timestamp() - time.time()) < 60


def test_settling_after_the_visibility_timeout_is_refused(broker: SqsBroker) -> None:
    broker.publish(Outgoing(subject=broker.queue, data=b"1"))
    channel = broker.channel()
    (delivery,) = channel.receive(1, 10)
    time.sleep(LEASE + 0.2)
    for settle in (channel.ack, channel.nack, channel.extend):
        with pytest.raises(LeaseLost, match=delivery.id):
            settle(delivery)
    with pytest.raises(LeaseLost):
        channel.requeue(delivery, 1)
    with pytest.raises(LeaseLost):
        channel.reject(delivery, Reject())
    (again,) = channel.receive(1, 10)
    channel.ack(again)


def test_a_receipt_that_sqs_does_not_know_any_more_is_a_lost_lease(broker: SqsBroker) -> None:
    broker.publish(Outgoing(subject=broker.queue, data=b"1"))
    channel = broker.channel()
    (delivery,) = channel.receive(1, 10)
    broker.call("purge_queue", QueueUrl=broker.url())
    with pytest.raises(LeaseLost, match=delivery.id):
        channel.nack(delivery)


def test_acks_of_a_batch_go_together_after_a_moment(broker: SqsBroker) -> None:
    for number in range(4):
        broker.publish(Outgoing(subject=broker.queue, data=b"%d" % number))
    channel = broker.channel()
    deliveries = channel.receive(10, 10)
    assert len(deliveries) == 4
    channel.ack(deliveries[0])
    channel.ack(deliveries[1])
    deadline = time.monotonic() + 60
    left: set[bytes] = set()
    while len(left) < 2 and time.monotonic() < deadline:
        left |= {delivery.data for delivery in channel.receive(10, 5)}
    assert left == {b"2", b"3"}


def test_a_dead_letter_that_cannot_be_written_leaves_the_message(broker: SqsBroker) -> None:
    broker.publish(Outgoing(subject=broker.queue, data=b"1"))
    channel = broker.channel()
    (delivery,) = channel.receive(1, 10)
    dead = f"{broker.queue}-dead"
    broker.call("delete_queue", QueueUrl=broker.url(dead))
    with pytest.raises(Exception, match="queue does not exist"):
        channel.reject(delivery, Reject(error="no"))
    (again,) = channel.receive(1, 10)
    assert again.data == b"1"


def test_dead_letters_go_to_the_queue_of_the_redrive_policy_and_its_limit_is_known(broker: SqsBroker) -> None:
    queue, dead = name(), name()
    broker.call("create_queue", QueueName=dead)
    policy = {"deadLetterTargetArn": f"arn:aws:sqs:eu-west-1:123456789012:{dead}", "maxReceiveCount": 3}
    broker.call("create_queue", QueueName=queue, Attributes={"RedrivePolicy": json.dumps(policy)})
    broker.source = Source(channel=queue)
    broker.portal.run(broker.transport.prepare(broker.source))
    channel = broker.channel()
    assert channel.capabilities.max_attempts == 3
    broker.publish(Outgoing(subject=queue, data=b"1"))
    (delivery,) = channel.receive(1, 10)
    channel.reject(delivery, Reject(error="no"))
    assert broker.read(Source(channel=dead)) == [(b"1", "no")]


def test_an_app_that_blocks_is_told_of_the_redrive_policy(
    broker: SqsBroker, url: str, caplog: pytest.LogCaptureFixture
) -> None:
    queue, dead = name(), name()
    broker.call("create_queue", QueueName=dead)
    policy = {"deadLetterTargetArn": f"arn:aws:sqs:eu-west-1:123456789012:{dead}", "maxReceiveCount": 3}
    broker.call("create_queue", QueueName=queue, Attributes={"RedrivePolicy": json.dumps(policy)})
    app = App(url)
    attempts: list[int] = []

    @app.subscriber(queue, on_error="dont_ack", dont_ack_delay=0)
    def handle(message: Message[int]) -> None:
        attempts.append(message.attempt)
        if len(attempts) == 2:
            message.ack()
            app.stop()
            return
        raise DontAck("not now")

    app.publish(queue, 1)
    with caplog.at_level(logging.WARNING):
        app.run()
    assert attempts == [1, 2]
    assert "gives a message up after 3 deliveries" in caplog.text


def test_a_longer_delay_than_sqs_has_is_cut_with_a_warning(
    broker: SqsBroker, caplog: pytest.LogCaptureFixture
) -> None:
    broker.publish(Outgoing(subject=broker.queue, data=b"1"))
    channel = broker.channel()
    (delivery,) = channel.receive(1, 10)
    channel.requeue(delivery, 13 * 3600)
    assert "12 h at most" in caplog.text


def test_a_delayed_publish(broker: SqsBroker, fifo: FifoBroker) -> None:
    started = time.monotonic()
    broker.publish(Outgoing(subject=broker.queue, data=b"1", delay=2))
    (delivery,) = broker.channel().receive(1, 20)
    assert delivery.data == b"1"
    assert time.monotonic() - started >= 1.8
    for queue, delay in ((broker.queue, 1000.0), (fifo.queue, 1.0)):
        with pytest.raises(ConfigurationError, match="delay="):
            fifo.publish(Outgoing(subject=queue, data=b"1", delay=delay))


def test_the_id_keeps_duplicates_out_of_a_fifo_queue(fifo: FifoBroker) -> None:
    for _ in range(2):
        fifo.publish(Outgoing(subject=fifo.queue, data=b"1", id="m-1", lane="eu"))
    channel = fifo.channel()
    (delivery,) = channel.receive(10, 10)
    assert (delivery.id, delivery.lane, delivery.ordered) == ("m-1", "eu", True)
    channel.ack(delivery)
    assert not channel.receive(10, 0.2)


def test_a_missing_queue_says_how_to_make_it(server: Server) -> None:
    async def main() -> None:
        transport = SqsTransport(f"sqs://127.0.0.1:{server.port}?region=eu-west-1")
        await transport.open()
        try:
            with pytest.raises(ConfigurationError, match="aws sqs create-queue --queue-name nothing-here"):
                await transport.prepare(Source(channel="nothing-here"))
            with pytest.raises(ConfigurationError, match="no groups, got group='billing'"):
                await transport.prepare(Source(channel="x", group="billing"))
            with pytest.raises(ConfigurationError, match=r"must be a sqs\.Queue, got 7"):
                transport.async_channel(Source(channel="x", settings=7))
            assert transport.broker().connected
        finally:
            await transport.close()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("url", "error"),
    [
        ("sqs://eu-west-1?visiblity=3", "no option 'visiblity' in the URL; there are backoff, create"),
        ("sqs://eu-west-1?create=perhaps", "option create='perhaps': must be true or false"),
        ("sqs://eu-west-1?wait=21", r"wait must be 1\.\.20 s, got 21"),
        ("sqs://eu-west-1?visibility=0", r"visibility must be 1\.\.43200 s, got 0"),
        ("sqs://key:secret@eu-west-1", "credentials come from boto's own chain"),
    ],
)
def test_a_wrong_url_says_what_is_wrong(url: str, error: str) -> None:
    with pytest.raises(ConfigurationError, match=error):
        App(url)


def test_a_broker_that_is_away_is_an_error_until_it_is_back(server: Server, broker: SqsBroker) -> None:
    channel = broker.channel()
    server.stop()
    try:
        with pytest.raises(Exception, match=r"127\.0\.0\.1"):
            channel.receive(1, 60)
        assert not broker.transport.broker().connected
    finally:
        server.start()
    # moto forgets its queues; a real SQS does not.
    broker.call("create_queue", QueueName=broker.queue)
    broker.publish(Outgoing(subject=broker.queue, data=b"1"))
    (delivery,) = channel.receive(1, 20)
    channel.ack(delivery)
    assert broker.transport.broker().connected


def test_a_consumer_that_is_killed_again_and_again_loses_nothing(
    broker: SqsBroker, url: str, tmp_path: Path
) -> None:
    url_of_queue = broker.url()

    async def send(numbers: list[int]) -> None:
        entries = [{"Id": str(n), "MessageBody": str(n)} for n in numbers]
        await broker.transport.call("send_message_batch", QueueUrl=url_of_queue, Entries=entries)

    async def send_all() -> None:
        tens = [list(range(start, start + 10)) for start in range(0, MESSAGES, 10)]
        while tens:
            await asyncio.gather(*(send(tens.pop()) for _ in range(min(4, len(tens)))))

    broker.portal.run(send_all())
    seen = consume_with_crashes(url, broker.queue, tmp_path / "seen")
    assert set(seen) == set(range(MESSAGES))


def test_a_message_it_will_never_take_is_a_dead_letter_of_the_bridge_that_carries_it(
    broker: SqsBroker, url: str
) -> None:
    broker.call("set_queue_attributes", QueueUrl=broker.url(), Attributes={"MaximumMessageSize": "1024"})
    totals, errors = carry(url, broker.queue, b"1", b"x" * 2000, b"2")
    assert (totals.written, totals.rejected) == (2, 1)
    assert "InvalidParameterValue" in errors[0]
    channel, found = broker.channel(), set()
    while len(found) < 2:
        for delivery in channel.receive(10, 10):
            found.add(delivery.data)
            channel.ack(delivery)
    assert found == {b"1", b"2"}


def test_after_twelve_hours_a_message_can_be_given_back_but_not_kept(broker: SqsBroker) -> None:
    broker.publish(Outgoing(subject=broker.queue, data=b"1"))
    channel = broker.channel()
    (delivery,) = channel.receive(1, 10)
    delivery.received -= 12 * 3600  # type: ignore[attr-defined]
    with pytest.raises(LeaseLost, match="12 h at most"):
        channel.extend(delivery)
    channel.requeue(delivery, 5)
    (again,) = channel.receive(1, 10)
    channel.ack(again)


def test_what_is_behind_a_message_that_is_not_acked_is_handled_and_that_one_is_a_dead_letter_in_the_end(
    broker: SqsBroker, url: str
) -> None:
    queue, dead = name(), name()
    broker.call("create_queue", QueueName=dead)
    policy = {"deadLetterTargetArn": f"arn:aws:sqs:eu-west-1:123456789012:{dead}", "maxReceiveCount": 2}
    broker.call("create_queue", QueueName=queue, Attributes={"RedrivePolicy": json.dumps(policy)})
    assert block_on_the_first(App(url), queue) == {0: 2, 1: 1, 2: 1, 3: 1, 4: 1}
    ((body, error),) = broker.read(Source(channel=dead))
    assert body == b"0"
    assert "the bank is down" in error
