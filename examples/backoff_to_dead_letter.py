"""Retry with backoff, and after three attempts the dead letter; another subscriber reads those."""

from settled import App, Backoff, Message, defer_on_error

app = App("memory://")


@app.subscriber("orders", requeue_count=3, dead_letter="orders.dead")
@defer_on_error(Backoff(initial=0.1, jitter=0))
def charge(order: dict[str, int]) -> None:
    print(f"trying order {order['id']}")
    raise TimeoutError("the bank did not answer")


@app.subscriber("orders.dead")
def tell_somebody(message: Message[dict[str, int]]) -> None:
    headers = message.headers
    print(f"dead: order {message.payload['id']}: {headers['settled-error']}")
    message.ack()
    app.stop()


if __name__ == "__main__":
    app.publish("orders", {"id": 1})
    app.run()
