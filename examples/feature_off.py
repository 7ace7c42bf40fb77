"""A feature switch that does not lose messages: while it is off, the pump blocks on the message."""

from settled import App, feature_switch

app = App("memory://")
asked = 0


def billing_is_on() -> bool:
    """Off at first; somebody turns it on while the message waits."""
    global asked
    asked += 1
    print(f"billing is {'on' if asked > 2 else 'off'}")
    return asked > 2


@app.subscriber("orders", dont_ack_delay=0.2)
@feature_switch(billing_is_on, dont_ack=True)
def bill(order: dict[str, int]) -> None:
    print(f"billed order {order['id']}")
    app.stop()


if __name__ == "__main__":
    app.publish("orders", {"id": 1})
    app.run()
