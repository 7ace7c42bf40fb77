"""Explicit mode: take the message and settle it yourself. Nothing is settled for you."""

import msgspec

from settled import App, Message


class Order(msgspec.Struct):
    id: int
    amount: float


app = App("memory://")


@app.subscriber("orders")
async def charge(message: Message[Order]) -> None:
    order = message.payload
    if order.amount < 0:
        await message.term("negative amount")
    elif message.metadata.redelivery_count == 0:
        await message.nak(delay=0.1)
    else:
        await message.ack()
    print(f"order {order.id}, attempt {message.attempt}: settled={message.settled}")
    if order.id == 2 and message.attempt == 2:
        app.stop()


if __name__ == "__main__":
    app.publish("orders", Order(id=1, amount=-1))
    app.publish("orders", Order(id=2, amount=9.5))
    app.run()
