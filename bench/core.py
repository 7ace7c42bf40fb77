"""What the pump costs a message on the in-memory transport, and what a message weighs.

    python bench/core.py [--messages 100000]

Prints the time a message for each driver and mode, the same for a bare loop over the channel (receive,
decode, call, ack), and the size of a `Message`.
"""

import argparse
import asyncio
import sys
import time
from collections.abc import Awaitable, Callable

import msgspec

from settled import App, Message
from settled.clock import SystemClock
from settled.pump import Proactor, Reactor
from settled.pump.settlers import AwaitableSettler
from settled.transports.base import Outgoing, Source
from settled.transports.lanes import MemoryDelivery
from settled.transports.memory import MemoryTransport


class Order(msgspec.Struct):
    id: int
    amount: float


DATA = msgspec.json.encode(Order(1, 9.5))


def filled(messages: int) -> MemoryTransport:
    transport = MemoryTransport()
    transport.subscribe("orders")
    for _ in range(messages):
        transport.put(Outgoing(subject="orders", data=DATA))
    return transport


def app_on(transport: MemoryTransport, explicit: bool, is_async: bool, buffer: int) -> App:
    app = App(transport=transport)
    if explicit and is_async:

        @app.subscriber("orders", buffer=buffer)
        async def explicit_async(message: Message[Order]) -> None:
            await message.ack()
    elif explicit:

        @app.subscriber("orders", buffer=buffer)
        def explicit_sync(message: Message[Order]) -> None:
            message.ack()
    elif is_async:

        @app.subscriber("orders", buffer=buffer)
        async def implicit_async(order: Order) -> None:
            pass
    else:

        @app.subscriber("orders", buffer=buffer)
        def implicit_sync(order: Order) -> None:
            pass

    return app


def pump(messages: int, explicit: bool, is_async: bool, buffer: int = 1) -> float:
    transport = filled(messages)
    (subscription,) = app_on(transport, explicit, is_async, buffer).subscriptions

    async def proactor() -> float:
        channel = transport.async_channel(subscription.source)
        driver = Proactor(subscription, channel, SystemClock(), until_idle=True)
        started = time.perf_counter()
        await driver.run()
        assert driver.counts.received == messages
        return time.perf_counter() - started

    def reactor() -> float:
        driver = Reactor(subscription, transport.channel(subscription.source), SystemClock(), until_idle=True)
        started = time.perf_counter()
        driver.run()
        assert driver.counts.received == messages
        return time.perf_counter() - started

    return asyncio.run(proactor()) if is_async else reactor()


def bare(messages: int) -> float:
    transport = filled(messages)
    channel = transport.immediate(Source(channel="orders"))
    decode = msgspec.json.Decoder(Order).decode
    started = time.perf_counter()
    while taken := channel.take(1):
        decode(taken[0].data)
        channel.ack(taken[0])
    return time.perf_counter() - started


def settle_overhead(messages: int) -> tuple[float, float]:
    """Seconds for `await message.ack()` and for the channel's own call, over the same deliveries."""

    class Nothing:
        async def ack(self, delivery: object) -> None:
            pass

    async def measure() -> tuple[float, float]:
        transport = filled(1)
        (delivery,) = transport.immediate(Source(channel="orders")).take(1)
        channel = Nothing()
        settler = AwaitableSettler(channel)  # type: ignore[arg-type]
        message: Message[Order] = Message(delivery, lambda data, headers: None, settler)

        async def timed(call: Callable[[], Awaitable[None]]) -> float:
            started = time.perf_counter()
            for _ in range(messages):
                delivery.settled = False
                await call()
            return time.perf_counter() - started

        return await timed(message.ack), await timed(lambda: channel.ack(delivery))

    return asyncio.run(measure())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--messages", type=int, default=100_000)
    messages = parser.parse_args().messages
    rows = [
        ("bare loop, buffer 1", bare(messages)),
        ("Proactor, implicit", pump(messages, explicit=False, is_async=True)),
        ("Proactor, implicit, buffer 100", pump(messages, explicit=False, is_async=True, buffer=100)),
        ("Proactor, explicit", pump(messages, explicit=True, is_async=True)),
        ("Reactor, implicit", pump(messages, explicit=False, is_async=False)),
        ("Reactor, implicit, buffer 100", pump(messages, explicit=False, is_async=False, buffer=100)),
    ]
    print(f"{messages} messages, a no-op handler, µs a message")
    for name, seconds in rows:
        print(f"  {name:32} {seconds / messages * 1e6:6.2f}")
    with_message, alone = settle_overhead(messages)
    print(f"  ack() over the channel's own call {(with_message - alone) / messages * 1e6:5.2f}")
    print(f"Message {sys.getsizeof(_message())} bytes, its delivery {_delivery_size()} bytes")


def _message() -> Message[None]:
    (delivery,) = filled(1).immediate(Source(channel="orders")).take(1)
    return Message(delivery, lambda data, headers: None, None)  # type: ignore[arg-type]


def _delivery_size() -> int:
    (delivery,) = filled(1).immediate(Source(channel="orders")).take(1)
    assert isinstance(delivery, MemoryDelivery)
    return sys.getsizeof(delivery)


if __name__ == "__main__":
    main()
