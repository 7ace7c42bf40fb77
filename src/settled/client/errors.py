"""What a client call can raise, each with what the server said."""

from __future__ import annotations


class ClientError(Exception):
    """Base of everything the client raises."""


class Closed(ClientError):
    """The client was closed; what is to be sent needs a new one."""

    def __init__(self) -> None:
        super().__init__("this client is closed: make a new one, or close it later")


class Unreachable(ClientError):
    """No answer from the server after all retries."""


class CircuitOpen(ClientError):
    """Too many failures in a row: the server is left alone until `retry_after` seconds have passed."""

    def __init__(self, retry_after: float) -> None:
        super().__init__(f"circuit breaker is open; next attempt in {retry_after:.1f} s")
        self.retry_after = retry_after


class Refused(ClientError):
    """The server answered 4xx or 5xx; `status` and `body` say why."""

    def __init__(self, status: int, error: str, body: object = None) -> None:
        super().__init__(f"{error} (HTTP {status})")
        self.status = status
        self.error = error
        self.body = body
        self.after_loss = False
        """An earlier attempt of this call had no answer, and may have been applied."""


class Unsettled(Refused):
    """An ack, nack or transaction was not applied: `invalid_lease` or `not_found` is in `message`.

    Only of an `Uncertain` one this is not known.
    """

    def __init__(self, status: int, error: str, message: str, body: object = None) -> None:
        super().__init__(status, error, body)
        self.message = message

    def __str__(self) -> str:
        return f"{self.message}: {self.args[0]}"


class Uncertain(Unsettled):
    """The answer to the first attempt was lost, and a further one was refused: it may have been applied.

    What there is to do is what to do with any message that may come twice: look whether it took effect.
    """

    def __init__(self, status: int, error: str, message: str, body: object = None) -> None:
        text = f"the answer was lost, so it may have been applied; the next attempt was refused: {error}"
        super().__init__(status, text, message, body)


class InvalidPayload(ClientError):
    """A message's payload is not of the type the queue was opened with."""
