"""moto's SQS for queues of ten thousand: the same rules, without a walk through the queue for every step.

Run as `python -m tests.brokers.sqs_server PORT`.
"""

from __future__ import annotations

import functools
import sys
import time
import uuid
from collections.abc import Iterator
from typing import Any

from moto.moto_server.werkzeug_app import MotoRequestHandler, create_backend_app
from moto.sqs import models
from werkzeug.serving import run_simple


class Visible:
    """The messages of a queue that may be received, looked for one after the other."""

    def __init__(self, messages: list[models.Message]) -> None:
        self._messages = messages

    def __iter__(self) -> Iterator[models.Message]:
        # A copy: another request may delete meanwhile.
        return (message for message in list(self._messages) if message.visible and not message.delayed)

    def __bool__(self) -> bool:
        return any(True for _ in self)


class Queue(models.Queue):
    """A queue that finds what is in flight, which is little, before all the rest."""

    # moto keeps its models by the module they are in.
    __module__ = models.__name__

    # moto counts them for every message that is sent.
    approximate_number_of_messages = property(lambda self: len(self._messages) - len(self.pending_messages))  # type: ignore[assignment]
    approximate_number_of_messages_not_visible = property(lambda self: len(self.pending_messages))  # type: ignore[assignment]
    approximate_number_of_messages_delayed = property(lambda self: 0)  # type: ignore[assignment]

    @property
    def messages(self) -> Any:
        return Visible(self._messages)

    def delete_message(self, receipt_handle: str) -> None:
        for message in list(self.pending_messages):
            if message.had_receipt_handle(receipt_handle):
                self.pending_messages.discard(message)
                self._messages.remove(message)
                self.deleted_messages.update(message.all_receipt_handles)  # type: ignore[arg-type]
                return
        super().delete_message(receipt_handle)


class KeepAlive(MotoRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_request(self, *arguments: Any) -> None:
        """A line a request would fill the log."""


def hurry() -> None:
    """Replace what moto works out anew for every message."""
    models.Queue = Queue  # type: ignore[misc]
    models.unix_time_millis = lambda: time.time() * 1000
    models.camelcase_to_underscores = functools.cache(models.camelcase_to_underscores)
    models.generate_receipt_handle = lambda: uuid.uuid4().hex


if __name__ == "__main__":
    hurry()
    app = create_backend_app("sqs")
    run_simple("127.0.0.1", int(sys.argv[1]), app, threaded=True, request_handler=KeepAlive)
