"""Implicit mode: take the payload. Returning acknowledges; an exception sends the message round again."""

import msgspec

from settled import App, current_message


class Order(msgspec.Struct):
    id: int
    amount: float


app = App("memory://")


@app.subscriber("orders")
def charge(order: Order) -> None:
    message = current_message()
    assert message is not None
    if order.id == 2 and message.attempt == 1:
        raise ConnectionError("the bank did not answer")
    print(f"charged order {order.id} on attempt {message.attempt}")
    if order.id == 2:
        app.stop()


if __name__ == "__main__":
    for number in (1, 2):
        app.publish("orders", Order(id=number, amount=9.5))
    print(app.run().counts)
