"""What the bridge does to a message: carry it whole, once where it can be, and never lose it."""

from __future__ import annotations

import asyncio
import random
import time
import uuid
from collections.abc import Callable
from typing import Any

import pytest
from nats.js.api import StreamConfig

from settled import ConfigurationError
from settled.bridge import Bridge, Totals
from settled.queue.engine import Engine
from settled.queue.types import AckItem, PopRequest
from settled.transports.base import Outgoing, Publication, Source
from settled.transports.lanes import QueueOptions
from settled.transports.memory import MemoryTransport
from settled.transports.nats import NatsTransport
from tests.nats.conftest import Desk, desk_on, until
from tests.nats.servers import Server


def put(transport: MemoryTransport, *bodies: bytes, **more: Any) -> None:
    for number, body in enumerate(bodies):
        transport.put(Outgoing(subject="orders", data=body, **{"id": f"m{number}", **more}))


def taken(transport: MemoryTransport, queue: str = "orders") -> list[Any]:
    return transport.immediate(Source(channel=queue)).take(100_000)


def carry(source: Any, target: Any, **options: Any) -> Totals:
    return asyncio.run(asyncio.wait_for(Bridge(source, target, **options).run(), 60))


class Moody(MemoryTransport):
    """Takes a message, or fails, as it is told."""

    def __init__(self, mood: Callable[[Outgoing], Exception | None]) -> None:
        super().__init__()
        self.mood = mood
        self.tried = 0

    def publish(self, message: Outgoing) -> Publication:
        async def later() -> Any:
            self.tried += 1
            await asyncio.sleep(random.random() * 0.003)
            if (error := self.mood(message)) is not None:
                raise error
            return self.put(message)

        return Publication.when_awaited(later())


def test_a_message_is_carried_whole() -> None:
    source, target = MemoryTransport(), MemoryTransport()
    headers = {"traceparent": "00-1-2-01", "tenant": "acme", "content-type": "application/cloudevents+json"}
    put(source, b"\x00 no event at all", headers=headers, lane="eu")
    assert str(carry(source, target, channel="orders", limit=1)) == (
        "read=1 written=1 duplicates=0 rejected=0"
    )
    (got,) = taken(target)
    assert (got.id, got.lane, got.data) == ("m0", "eu", b"\x00 no event at all")
    assert got.headers == headers
    assert source.depth("orders") == 0


def test_what_has_no_content_type_is_given_one_if_asked() -> None:
    source, target = MemoryTransport(), MemoryTransport()
    put(source, b"{}")
    put(source, b"a,b", id="csv", headers={"Content-Type": "text/csv"})
    carry(source, target, channel="orders", to="archive", content_type="application/json", limit=2)
    assert {m.id: dict(m.headers) for m in taken(target, "archive")} == {
        "m0": {"content-type": "application/json"},
        "csv": {"Content-Type": "text/csv"},
    }


def test_what_the_target_has_already_is_counted_and_acknowledged() -> None:
    source, target = MemoryTransport(), MemoryTransport()
    put(source, b"1", b"2", b"3")
    put(target, b"1", b"2")
    assert carry(source, target, channel="orders", idle_exit=0.2) == Totals(read=3, written=1, duplicates=2)
    assert source.depth("orders") == 0
    assert len(taken(target)) == 3


def test_a_limit_is_kept_to_the_message() -> None:
    source, target = MemoryTransport(), MemoryTransport()
    put(source, *[b"x"] * 50)
    totals = carry(source, target, channel="orders", buffer=8, limit=13)
    assert totals.read == totals.written == 13
    assert source.depth("orders") == 37


def test_lanes_stay_in_order_whatever_fails_on_the_way() -> None:
    chance = random.Random(4)
    source = MemoryTransport()
    target = Moody(lambda _: ConnectionError("lost") if chance.random() < 0.02 else None)
    for number in range(400):
        source.put(
            Outgoing(subject="orders", data=b"%d" % number, id=f"m{number}", lane=f"lane {number % 7}")
        )
    assert carry(source, target, channel="orders", buffer=50, limit=400).written == 400
    assert target.tried > 400
    lanes: dict[str, list[int]] = {}
    for message in taken(target):
        lanes.setdefault(message.lane, []).append(int(message.data))
    assert lanes == {f"lane {n}": list(range(n, 400, 7)) for n in range(7)}


def test_lanes_that_come_in_a_header_stay_in_order_too() -> None:
    source, target = MemoryTransport(), Moody(lambda _: None)
    for number in range(400):
        headers = {"settled-lane": f"lane {number % 7}"}
        source.put(Outgoing(subject="orders", data=b"%d" % number, id=f"m{number}", headers=headers))
    assert carry(source, target, channel="orders", buffer=50, limit=400).written == 400
    lanes: dict[str, list[int]] = {}
    for message in taken(target):
        lanes.setdefault(message.lane, []).append(int(message.data))
    assert lanes == {f"lane {n}": list(range(n, 400, 7)) for n in range(7)}


def test_a_channel_is_not_copied_onto_itself() -> None:
    both = MemoryTransport()
    with pytest.raises(ConfigurationError, match="'orders' of MemoryTransport onto itself"):
        Bridge(both, both, channel="orders")
    Bridge(both, both, channel="orders", to="archive")


def test_while_the_target_is_away_leases_are_kept_and_nothing_is_given_back() -> None:
    away = True
    source, target = MemoryTransport(), Moody(lambda _: OSError("nobody home") if away else None)
    # A lease that runs out would be a failure, and the first failure a dead letter.
    source.configure("orders", QueueOptions(lease=3, retry_limit=1))
    put(source, *[b"x"] * 30)

    async def main() -> Bridge:
        nonlocal away
        bridge = Bridge(source, target, channel="orders", buffer=10, limit=30)
        running = asyncio.create_task(bridge.run())
        await until(lambda: bridge.in_flight == 20 and not bridge.target_status.connected)
        assert bridge.target_status.detail == "OSError: nobody home"
        began, tried = time.monotonic(), target.tried
        await asyncio.sleep(4.0)
        # All were tried once when it went away; from then on it is one at a time.
        assert target.tried - tried < 60 * (time.monotonic() - began)
        assert bridge.totals == Totals(read=20)
        away = False
        await asyncio.wait_for(running, 60)
        assert bridge.target_status.connected
        return bridge

    assert asyncio.run(main()).totals == Totals(read=30, written=30)
    assert source.dead_letters("orders") == []
    assert len(taken(target)) == 30


def test_a_stop_gives_back_what_a_target_that_is_away_has_not_taken() -> None:
    source, target = MemoryTransport(), Moody(lambda _: OSError("nobody home"))
    put(source, b"0", b"1", b"2", lane="eu")

    async def main() -> Totals:
        bridge = Bridge(source, target, channel="orders", grace=0.1)
        stop = asyncio.Event()
        running = asyncio.create_task(bridge.run(stop))
        await until(lambda: target.tried > 1)
        stop.set()
        return await asyncio.wait_for(running, 30)

    assert asyncio.run(main()) == Totals(read=3, released=3)
    again = taken(source)
    assert [(m.data, m.attempt) for m in again] == [(b"0", 1), (b"1", 1), (b"2", 1)]


def test_all_that_is_refused_or_given_back_at_once_is_counted() -> None:
    class Slow(MemoryTransport):
        """A source that takes its time to settle."""

        def async_channel(self, source: Source) -> Any:
            channel = super().async_channel(source)
            for name in ("reject", "nack"):
                setattr(channel, name, slowly(getattr(channel, name)))
            return channel

    def slowly(settle: Callable[..., Any]) -> Callable[..., Any]:
        async def later(*arguments: Any) -> None:
            await asyncio.sleep(0.01)
            await settle(*arguments)

        return later

    class Picky(Moody):
        def refuses(self, error: Exception) -> bool:
            return isinstance(error, ValueError)

    async def main(target: Moody, most: int) -> Totals:
        source = Slow()
        put(source, *[b"x"] * 30)
        bridge, stop = Bridge(source, target, channel="orders", grace=0), asyncio.Event()
        running = asyncio.create_task(bridge.run(stop))
        await until(lambda: bridge.totals.rejected == most and bridge.totals.read == 30)
        stop.set()
        return await asyncio.wait_for(running, 30)

    refusing = Picky(lambda _: ValueError("never"))
    assert asyncio.run(main(refusing, 30)) == Totals(read=30, rejected=30)
    away = Moody(lambda _: OSError("nobody home"))
    assert asyncio.run(main(away, 0)) == Totals(read=30, released=30)


def on_desk(server: Server, test: Callable[[Desk], Any]) -> None:
    async def main() -> None:
        async with desk_on(server.url) as desk:
            await asyncio.wait_for(test(desk), 60)

    asyncio.run(main())


def test_what_the_target_will_never_take_is_a_dead_letter_of_the_source(nats_server: Server) -> None:
    source = MemoryTransport()
    put(source, b"small", b"x" * 500, b"small too")
    put(source, b"small", id="named", headers={"two words": "1"})
    put(source, b"small", id="broken", headers={"note": "line 1\nline 2"})
    put(source, b"small", id="nameless", headers={" ": "1"})

    async def test(desk: Desk) -> None:
        await desk.jetstream.update_stream(
            StreamConfig(name=desk.stream, subjects=[f"{desk.stream}.>"], max_msg_size=300)
        )
        bridge = Bridge(source, desk.url, channel="orders", to=desk.subject(), limit=6)
        assert await bridge.run() == Totals(read=6, written=2, rejected=4)
        assert await desk.kept() == 2

    on_desk(nats_server, test)
    dead = {letter.id: letter.error for letter in source.dead_letters("orders")}
    assert "does not take it" in dead["m1"]
    assert "message size exceeds maximum" in dead["m1"]
    assert "invalid header" in dead["named"]
    assert "line break" in dead["broken"]
    assert "without a name" in dead["nameless"]


def test_a_target_that_is_set_up_wrongly_ends_it_and_loses_nothing(nats_server: Server) -> None:
    source = MemoryTransport()
    put(source, b"1", b"2")

    async def test(desk: Desk) -> None:
        with pytest.raises(ConfigurationError, match=r"no stream takes subject 'nobody\.reads\.this'"):
            await Bridge(source, desk.url, channel="orders", to="nobody.reads.this").run()

    on_desk(nats_server, test)
    assert [m.attempt for m in taken(source)] == [1, 1]


def test_a_lane_survives_a_broker_without_lanes(nats_server: Server) -> None:
    source, end = MemoryTransport(), MemoryTransport()
    put(source, b"1", lane="eu", headers={"Nats-Expected-Stream": "another"})

    async def test(desk: Desk) -> None:
        await Bridge(source, desk.url, channel="orders", to=desk.subject("eu"), limit=1).run()
        back = Bridge(desk.url, end, channel=desk.subject(">"), to="orders", limit=1)
        assert await back.run() == Totals(read=1, written=1)

    on_desk(nats_server, test)
    (got,) = taken(end)
    assert (got.id, got.lane) == ("m0", "eu")
    assert set(got.headers) == {"settled-subject"}


def test_a_target_that_comes_back_gets_every_message(dsn: str) -> None:
    """From the queue to NATS, whose server is stopped and started again."""
    queue = f"orders-{uuid.uuid4().hex[:8]}"
    target = Server()

    async def main() -> None:
        target.start()
        async with desk_on(target.url) as desk:
            await desk.jetstream.add_stream(name="ORDERS", subjects=["orders.>"])
        transport = NatsTransport(target.url, timeout=0.5)
        bridge = Bridge(dsn, transport, channel=queue, to="orders.new", buffer=20, limit=100)
        running = asyncio.create_task(bridge.run())
        await until(lambda: bridge.source_status.connected and bridge.target_status.connected)
        target.stop()
        source = MemoryTransport()
        put(source, *[b"%d" % n for n in range(100)])
        await Bridge(source, dsn, channel="orders", to=queue, limit=100).run()
        await until(lambda: bridge.totals.read > 0 and "not acknowledged" in bridge.target_status.detail)
        assert bridge.totals.written == 0
        target.start()
        totals = await asyncio.wait_for(running, 60)
        assert totals.read == totals.written + totals.duplicates == 100
        async with desk_on(target.url) as desk:
            assert (await desk.jetstream.stream_info("ORDERS")).state.messages == 100

    try:
        asyncio.run(main())
    finally:
        target.remove()


def test_a_refused_message_does_not_hold_up_its_lane_nor_change_its_order(dsn: str) -> None:
    queue = f"orders-{uuid.uuid4().hex[:8]}"
    source = MemoryTransport()
    put(source, *[b"%d" % n for n in range(20)], lane="eu")
    put(source, b"no such id can be", id="x" * 10_000, lane="eu")
    put(source, b"no such text can be", id="raw", headers={"h": "\udcff"}, lane="eu")
    for n in range(20, 40):
        put(source, b"%d" % n, id=f"m{n}", lane="eu")

    async def main() -> list[int]:
        bridge = Bridge(source, dsn, channel="orders", to=queue, limit=42)
        assert await bridge.run() == Totals(read=42, written=40, rejected=2)
        async with await Engine.open(dsn) as engine:
            popped = await engine.pop(PopRequest(queue=queue, partition="eu", batch=100))
            return [int(message.payload) for message in popped.messages()]

    assert asyncio.run(asyncio.wait_for(main(), 60)) == list(range(40))
    dead = {letter.data: letter.error for letter in source.dead_letters("orders")}
    assert "transactionId: must be" in dead[b"no such id can be"]
    assert "surrogates not allowed" in dead[b"no such text can be"]


def test_a_full_queue_is_waited_for(dsn: str) -> None:
    queue = f"orders-{uuid.uuid4().hex[:8]}"
    source = MemoryTransport()
    put(source, *[b"%d" % n for n in range(60)])

    async def main() -> None:
        engine = await Engine.open(dsn)
        try:
            await engine.configure(queue, {"maxSize": 20})
            bridge = Bridge(source, dsn, channel="orders", to=queue, buffer=10, limit=60)
            running = asyncio.create_task(bridge.run())
            await until(lambda: "is full" in bridge.target_status.detail)
            seen: list[bytes] = []
            while len(seen) < 60:
                popped = await engine.pop(PopRequest(queue=queue, batch=10, partitions=10, wait=1))
                batch = list(popped.messages())
                seen += [m.payload for m in batch]
                if batch:
                    items = [AckItem(m.transaction_id, m.partition_id, lease_id=m.lease_id) for m in batch]
                    await engine.ack(items)
            assert await asyncio.wait_for(running, 60) == Totals(read=60, written=60)
            assert sorted(map(int, seen)) == list(range(60))
        finally:
            await engine.close()

    asyncio.run(asyncio.wait_for(main(), 90))
    assert source.dead_letters("orders") == []
