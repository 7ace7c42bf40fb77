"""The application: the route table, and what every request has in common."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from settled.queue.errors import (
    BadRequest,
    Conflict,
    Fenced,
    NotFound,
    PartlyStored,
    QueueError,
    QueueFull,
    Unavailable,
)

from . import answers
from .buffered import Buffered
from .exchange import Answer, HttpError, Request
from .messages import Messages
from .metrics import Board, Counters
from .openapi import document
from .router import Router
from .routes import routes
from .system import System

if TYPE_CHECKING:
    from collections.abc import Callable

    from settled.queue.engine import Engine

    from .router import Reply
    from .spool import Spool

log = logging.getLogger("settled.server")

_CORS = (
    b"access-control-allow-methods: GET, POST, PUT, DELETE, OPTIONS\r\n"
    b"access-control-allow-headers: content-type, authorization\r\naccess-control-max-age: 86400\r\n"
)


class App:
    """Answers requests with an engine; call `stop()` before the listener is stopped."""

    def __init__(
        self,
        engine: Engine,
        board: Board,
        spool: Spool,
        connections: Callable[[], int],
        room: Callable[[], bool],
    ) -> None:
        self.counters = Counters()
        self._messages = Messages(engine, room)
        self._push = Buffered(self._messages.push, spool)
        self.system = System(engine, self.counters, board, spool, connections)
        self._router = Router(routes(engine, self._messages, self._push, self.system, self.openapi))
        self._document = document(self._router.routes)

    def stop(self) -> None:
        """End the pops that wait."""
        self._messages.stop()

    async def __call__(self, request: Request) -> Answer:
        """Answer one request; only a bug of ours raises."""
        if request.method == "OPTIONS":
            return Answer(204, b"", extra=_CORS)
        try:
            answer = await self._router.find(request).endpoint(request)
        except Exception as error:
            return self.close(request, error)
        return self.close(request, answer)

    def soon(self, request: Request, reply: Reply) -> bool:
        """Answer a hot route without a coroutine where that is possible; None asks for the coroutine."""
        try:
            shortcut = self._router.find(request).shortcut
            return shortcut is not None and shortcut(request, reply)
        except (HttpError, QueueError):  # the endpoint will find the same, and say so
            return False

    def close(self, request: Request, outcome: Answer | Exception) -> Answer:
        """What goes back for an outcome; it is counted here, so call this once a request."""
        answer = failure(request, outcome) if isinstance(outcome, Exception) else outcome
        self.counters.add(request, answer.status)
        return answer

    async def openapi(self, request: Request) -> Answer:
        """GET /openapi.json."""
        return Answer(200, self._document)


def failure(request: Request, error: Exception) -> Answer:
    """What went wrong, as HTTP."""
    match error:
        case HttpError():
            return error.answer()
        case QueueError():
            return refusal(error)
        case _:
            log.error("%s %r failed", request.method, request.path, exc_info=error)
            return HttpError(500, "internal error; the server's log has the details").answer()


def refusal(error: QueueError) -> Answer:
    """The engine's refusals as HTTP."""
    match error:
        case BadRequest():
            return HttpError(400, str(error), field=error.field.rpartition(": ")[2]).answer()
        case NotFound():
            return HttpError(404, str(error), success=False, message="not_found").answer()
        case Conflict() | Fenced():
            return HttpError(409, str(error), success=False).answer()
        case QueueFull():
            return HttpError(429, str(error), code="queue_full", extra=b"retry-after: 1\r\n").answer()
        case PartlyStored():
            results = answers.partly_pushed(error.results)
            return HttpError(503, str(error), extra=b"retry-after: 1\r\n", results=results).answer()
        case Unavailable():
            wait = max(1, round(error.retry_after))
            return HttpError(503, str(error), extra=b"retry-after: %d\r\n" % wait).answer()
        case _:
            log.error("unexpected refusal: %r", error)
            return HttpError(500, str(error)).answer()
