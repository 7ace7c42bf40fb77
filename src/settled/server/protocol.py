"""One HTTP/1.1 connection on asyncio: requests are parsed and handled one at a time, bytes go out."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import sys
import time
from collections import deque
from email.utils import formatdate
from typing import TYPE_CHECKING, NamedTuple

import httptools

from .exchange import Answer, HttpError, Request, reason

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from .router import Reply

    Handler = Callable[[Request], Awaitable[Answer]]
    # Takes a request that needs no coroutine and replies later, once; False: it is one for the Handler.
    # A reply of None says that the Handler is needed after all.
    Soon = Callable[[Request, Reply], bool]
    # What goes back for a reply.
    Close = Callable[[Request, Answer | Exception], Answer]

log = logging.getLogger("settled.server")

HEADER_LIMIT = 64 * 1024
PIPELINE_LIMIT = 16
LINGER = 2.0
KNOWN_LIMIT = 512
KNOWN_SIZE = 1024
TELL_AGAIN = 30.0
RESERVED = 64
LARGE = 256 * 1024


def room() -> int:
    """How many connections the limit of open files allows, which is raised as far as it goes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            soft = hard
    if soft == resource.RLIM_INFINITY:
        return sys.maxsize
    return max(soft - RESERVED, soft // 2)


class Head(NamedTuple):
    """What the bytes before a body mean: a request line, and how much body follows."""

    method: str
    path: bytes
    query: bytes
    length: int
    html: bool = False


class Shared:
    """What the connections of one server have in common."""

    def __init__(
        self, handler: Handler, body_limit: int, soon: Soon | None = None, close: Close | None = None
    ) -> None:
        self.handler = handler
        self.soon = soon
        self.close = close or answer_of
        self.body_limit = body_limit
        self.connections: set[Connection] = set()
        # So many may be open at once; the process needs file descriptors for its own work, too.
        self.room = room()
        self._refused_at = 0.0
        # Clients repeat themselves: a head that was parsed once is recognised by its bytes.
        self.known: dict[bytes, Head] = {}
        self.stopping = False
        # Bytes of answers that their clients have not read yet.
        self.unsent = 0
        self.date = b""
        self._heads: dict[tuple[int, bytes], bytes] = {}
        self.tick()

    def remember(self, raw: bytes, head: Head) -> None:
        """Recognise this head when it comes again."""
        if len(self.known) >= KNOWN_LIMIT:
            self.known.clear()
        self.known[raw] = head

    def tick(self) -> None:
        """Refresh the Date header; called once a second."""
        self.date = formatdate(usegmt=True).encode()
        self._heads.clear()

    def refuse(self, transport: asyncio.Transport) -> None:
        """Turn away a connection for which there is no file descriptor to spare."""
        why = f"{len(self.connections)} connections are open; the limit of open files allows no more"
        answer = HttpError(503, why).answer()
        head = self.head(503, answer.content_type)
        transport.write(
            b"%b%d\r\nretry-after: 1\r\nconnection: close\r\n\r\n%b" % (head, len(answer.body), answer.body)
        )
        transport.close()
        now = time.monotonic()
        if now - self._refused_at > TELL_AGAIN or not self._refused_at:
            self._refused_at = now
            log.warning("%s; refusing new ones: raise `ulimit -n`", why)

    def head(self, status: int, content_type: bytes) -> bytes:
        """The status line and the headers that every such answer shares."""
        key = (status, content_type)
        head = self._heads.get(key)
        if head is None:
            head = self._heads[key] = (
                b"HTTP/1.1 %d %s\r\ndate: %s\r\ncontent-type: %s\r\n"
                b"access-control-allow-origin: *\r\ncontent-length: "
                % (status, reason(status).encode(), self.date, content_type)
            )
        return head


class Connection(asyncio.Protocol):
    """Parses requests, hands them to the handler in order, writes each answer."""

    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        self._loop = asyncio.get_running_loop()
        self._parser = httptools.HttpRequestParser(self)
        self._transport: asyncio.Transport | None = None
        self._waiting: deque[tuple[Request, bool]] = deque()
        self._request: Request | None = None
        self._keep_alive = True
        self._task: asyncio.Task[None] | None = None
        self._resume: asyncio.Future[None] | None = None
        self._closing = False
        self._unsent = 0
        self._unread_since = 0.0
        self._read: list[Request] = []  # those of the bytes just fed after which the connection stays open
        # Whether a request is being handled or its answer waits for the client to read.
        self.busy = False
        self.served = False
        # Since when the client owes us bytes of a request it began (0: it owes nothing).
        self.started = 0.0
        self.idle_since = self._loop.time()
        self._reset()

    def _reset(self) -> None:
        self._url = b""
        self._body: bytes | bytearray = b""
        self._in_head = False
        self._head_size = 0
        self._refused: HttpError | None = None
        self._expects = False
        self._html = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Remember the transport; asyncio calls this once."""
        if len(self._shared.connections) >= self._shared.room:
            self._shared.refuse(transport)  # type: ignore[arg-type]
            self._closing = True
            return
        self._transport = transport  # type: ignore[assignment]
        self._shared.connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the client, and end its long poll if it was in one."""
        self._shared.connections.discard(self)
        self._transport = None
        self._waiting.clear()
        if self._request is not None:
            self._request.gone = True
            if self._request.cancellable and self._task is not None:
                self._task.cancel()
        self.resume_writing()

    def pause_writing(self) -> None:
        """The client reads slower than we write: hold the next answer."""
        self._resume = self._loop.create_future()
        self._unread_since = self._loop.time()
        self._count_unsent()

    def _count_unsent(self) -> None:
        size = (
            0 if self._transport is None or self._resume is None else self._transport.get_write_buffer_size()
        )
        self._shared.unsent += size - self._unsent
        self._unsent = size

    def unread(self, now: float) -> float:
        """For how many seconds the client has read nothing of an answer that waits for it."""
        if self._resume is None:
            return 0.0
        before = self._unsent
        self._count_unsent()
        if self._unsent < before:
            self._unread_since = now
        return now - self._unread_since

    def resume_writing(self) -> None:
        """The client caught up."""
        waiting, self._resume = self._resume, None
        self._count_unsent()
        if waiting is not None and not waiting.done():
            waiting.set_result(None)

    def data_received(self, data: bytes) -> None:
        """Take a request whose head is known, or feed the parser; what it cannot read is answered 400."""
        if self._closing:
            return
        if self.started:
            self._feed(data)
            return
        raw, end, body = data.partition(b"\r\n\r\n")
        head = self._shared.known.get(raw) if end else None
        if head is not None and len(body) == head.length:
            request = Request(head.method, head.path, head.query, body)
            request.html = head.html
            if self.busy:
                self._accept(request, True)
            else:
                self._start(request, not self._shared.stopping)
            return
        self._read.clear()
        self._feed(data)
        if len(self._read) == 1 and not self.started and len(raw) <= KNOWN_SIZE:
            request = self._read[0]
            # One whole request, and its body as it came, not in chunks.
            if request.body == body:
                head = Head(request.method, request.path, request.query, len(body), request.html)
                self._shared.remember(raw, head)

    def _feed(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
            if self._in_head:
                self._head_size += len(data)
                if self._head_size > HEADER_LIMIT:
                    self._end(HttpError(431, f"request line and headers: at most {HEADER_LIMIT} bytes"))
        except httptools.HttpParserUpgrade:
            self._closing = True
        except httptools.HttpParserError as error:
            cause = error.__context__
            if isinstance(cause, HttpError):
                self._end(cause)
            else:
                self._end(HttpError(400, f"malformed HTTP request: {error}"))

    def on_message_begin(self) -> None:
        """The client began a request."""
        self.started = self._loop.time()

    def on_url(self, url: bytes) -> None:
        """Part of the request target."""
        self._in_head = True
        self._url += url

    def on_header(self, name: bytes, value: bytes | None) -> None:
        """Only the headers matter that change how the body is read, and whether a page is wanted."""
        if len(name) == 14 and name.lower() == b"content-length":
            if int(value or 0) > self._shared.body_limit:
                self._refused = self._too_large()
        elif len(name) == 6:
            name = name.lower()
            if name == b"expect":
                self._expects = (value or b"").lower() == b"100-continue"
            elif name == b"accept":
                self._html = b"text/html" in (value or b"").lower()

    def on_headers_complete(self) -> None:
        """A body that is too large is refused before it is read."""
        self._in_head = False
        if self._refused is not None:
            raise self._refused
        if self._expects and self._transport is not None:
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, chunk: bytes) -> None:
        """Part of the body; a chunked one may only now prove too large."""
        if not self._body:
            self._body = chunk
        else:
            if isinstance(self._body, bytes):
                self._body = bytearray(self._body)
            self._body += chunk
        if len(self._body) > self._shared.body_limit:
            raise self._too_large()

    def _too_large(self) -> HttpError:
        limit = self._shared.body_limit
        return HttpError(413, f"body must be at most {limit} bytes", limit=limit)

    def on_message_complete(self) -> None:
        """A whole request is here."""
        path, _, query = self._url.partition(b"?")
        if path[:1] != b"/":
            path = _origin_form(path)
        request = Request(self._parser.get_method().decode("latin-1"), path, query, bytes(self._body))
        request.html = self._html
        keep_alive = self._parser.should_keep_alive()
        if keep_alive and not self._expects:
            self._read.append(request)
        self._reset()
        self.started = 0.0
        self._accept(request, keep_alive)

    def _accept(self, request: Request, keep_alive: bool) -> None:
        """Handle a request now, or after those before it."""
        keep_alive = keep_alive and not self._shared.stopping
        if not self.busy:
            self._start(request, keep_alive)
            return
        self._waiting.append((request, keep_alive))
        if len(self._waiting) >= PIPELINE_LIMIT and self._transport is not None:
            self._transport.pause_reading()

    @property
    def silent(self) -> bool:
        """Whether nothing was asked that is not answered."""
        return not self.busy and not self.started

    def _start(self, request: Request, keep_alive: bool) -> None:
        self.busy = self.served = True
        self._request = request
        self._keep_alive = keep_alive
        soon = self._shared.soon
        if soon is None or not soon(request, self._reply):
            self._task = self._loop.create_task(self._handle(request))

    def _reply(self, outcome: Answer | Exception | None) -> None:
        """The outcome of a request that had no task, or None if it needs one."""
        request = self._request
        if request is None:  # the client has gone
            self.busy = False
        elif outcome is not None:
            self._finish(self._shared.close(request, outcome))
        elif self._transport is None:
            self._finish(None)
        else:
            self._task = self._loop.create_task(self._handle(request))

    async def _handle(self, request: Request) -> None:
        answer: Answer | None
        try:
            answer = await self._shared.handler(request)
        except HttpError as error:
            answer = error.answer()
        except asyncio.CancelledError:
            answer = None
        except Exception:
            log.exception("%s %r failed", request.method, request.path)
            answer = HttpError(500, "internal error; the server's log has the details").answer()
        self._task = None
        self._finish(answer)

    def _finish(self, answer: Answer | None) -> None:
        request, self._request = self._request, None
        if answer is None or request is None or self._transport is None:
            self.busy = False
            return
        self._write(answer, request.method == "HEAD", self._keep_alive)
        if self._resume is None:
            self._next()
        else:
            self._resume.add_done_callback(self._next)

    def _next(self, _: object = None) -> None:
        """The answer is out: turn to the request that waits, if there is one."""
        self.busy = False
        if not self._keep_alive or self._shared.stopping:
            self.close()
        elif self._waiting:
            following, keep_alive = self._waiting.popleft()
            if not self._waiting and self._transport is not None:
                self._transport.resume_reading()
            self._start(following, keep_alive)
        else:
            self.idle_since = self._loop.time()
            if self._closing:
                self.close()

    def _write(self, answer: Answer, head_only: bool, keep_alive: bool) -> None:
        transport = self._transport
        if transport is None:
            return
        body, extra = answer.body, answer.extra
        head = self._shared.head(answer.status, answer.content_type)
        if not keep_alive or self._shared.stopping:
            extra += b"connection: close\r\n"
        length = len(body)
        if head_only:
            body = b""
        elif answer.status == 204:
            body, length = b"", 0
        if length < LARGE:
            transport.write(b"%b%d\r\n%b\r\n%b" % (head, length, extra, body))
        else:  # is not copied once more
            transport.write(b"%b%d\r\n%b\r\n" % (head, length, extra))
            transport.write(body)
            if self._resume is not None:
                self._count_unsent()

    def _end(self, error: HttpError) -> None:
        """Answer an error that leaves the stream unreadable, after what is in flight, and hang up."""
        self._closing = True
        self.started = 0.0
        if self._transport is None:
            return
        if self.busy:
            self._transport.pause_reading()
            return
        self._write(error.answer(), False, False)
        # A client that is still sending would lose the answer to a reset: let it finish, unread.
        self._transport.write_eof()
        self._loop.call_later(LINGER, self.close)

    def close(self) -> None:
        """Hang up once what was written has gone out."""
        if self._transport is not None:
            self._transport.close()

    def drop(self) -> None:
        """Hang up on a client that does not read."""
        if self._transport is not None:
            self._transport.abort()

    def overdue(self, now: float, request_timeout: float, idle_timeout: float) -> bool:
        """Whether the client is too slow to finish a request, or has been silent for too long."""
        if self.started:
            return now - self.started > request_timeout
        return not self.busy and now - self.idle_since > idle_timeout


def answer_of(_: Request, outcome: Answer | Exception) -> Answer:
    """A reply as it is; one that went wrong is our fault."""
    return outcome if isinstance(outcome, Answer) else HttpError(500, str(outcome)).answer()


def _origin_form(target: bytes) -> bytes:
    """`http://host/path` as proxies send it, and `*` of OPTIONS, reduced to a path."""
    scheme, found, rest = target.partition(b"://")
    if not found or not scheme:
        return b"/"
    slash = rest.find(b"/")
    return rest[slash:] if slash >= 0 else b"/"
