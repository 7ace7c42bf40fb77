"""The client's HTTP: one session, retries with backoff, a circuit breaker, errors in the server's words."""

from __future__ import annotations

import asyncio
import random
import time
from typing import TYPE_CHECKING, Any

import aiohttp
import msgspec
from yarl import URL

from .errors import Closed, Refused, Unreachable
from .resilience import Breaker, Resilience

if TYPE_CHECKING:
    from collections.abc import Mapping

_RETRIED = frozenset({429, 500, 502, 503, 504})
_LOST = (aiohttp.ClientError, asyncio.TimeoutError, ConnectionError)


class Wire:
    """Sends JSON and reads JSON.

    Calls are retried on connection loss, 429 and 5xx. Nothing is applied twice by that: pushes carry ids and
    settling is checked against the lease. But a call that was applied before its answer was lost may be
    refused when it is sent again; such a refusal is marked as `after_loss`.
    """

    def __init__(self, url: str, rules: Resilience, timeout: float, headers: Mapping[str, str]) -> None:
        self._url = url.rstrip("/")
        # As errors name it: without the user and the password.
        self._where = str(URL(self._url).with_user(None))
        self._rules = rules
        self._timeout = timeout
        self._headers = dict(headers)
        self._session: aiohttp.ClientSession | None = None
        self._closed = False
        self.breaker = Breaker(rules, time.monotonic)

    async def call(
        self,
        method: str,
        path: str,
        body: object = None,
        *,
        params: Mapping[str, str] | None = None,
        wait: float = 0,
        until_room: bool = True,
    ) -> bytes:
        """The body of a 2xx answer; Refused for 4xx and for a 5xx that lasts, Unreachable for no answer.

        `wait` is how long the server may hold the request on purpose; without `until_room`, a queue that is
        full (429) is told at once.
        """
        data = None if body is None else msgspec.json.encode(body)
        failure: Exception = Unreachable(self._where)
        lost = False
        for attempt in range(self._rules.retries + 1):
            if self._closed:
                raise Closed
            self.breaker.check()
            retry_after: float | None = None
            try:
                status, answer, retry_after = await self._send(method, path, data, params, wait)
            except _LOST as error:
                self.breaker.failed()
                # Without a connection nothing was sent.
                lost = lost or not isinstance(error, aiohttp.ClientConnectorError)
                failure = Unreachable(f"{method} {self._where}{path}: {error or type(error).__name__}")
            else:
                if status < 400:
                    self.breaker.succeeded()
                    return answer
                failure = refusal = _refusal(status, answer)
                refusal.after_loss = lost
                if status not in _RETRIED:
                    self.breaker.succeeded()
                    raise failure
                if status == 429:
                    self.breaker.succeeded()
                    if not until_room:
                        raise failure
                else:
                    self.breaker.failed()
                    lost = True
            if attempt < self._rules.retries:
                await asyncio.sleep(self._rules.delay(attempt, random.random(), retry_after))  # noqa: S311
        raise failure

    async def _send(
        self, method: str, path: str, data: bytes | None, params: Mapping[str, str] | None, wait: float
    ) -> tuple[int, bytes, float | None]:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                headers=self._headers, connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=60)
            )
        async with self._session.request(
            method,
            URL(self._url + path, encoded=True),
            data=data,
            params=params,
            headers={"content-type": "application/json"} if data is not None else None,
            timeout=aiohttp.ClientTimeout(total=self._timeout + wait),
        ) as response:
            return response.status, await response.read(), _seconds(response.headers.get("retry-after"))

    async def close(self) -> None:
        """Close the connections for good; calls raise Closed from now on."""
        self._closed = True
        if self._session is not None:
            session, self._session = self._session, None
            await session.close()


def _seconds(text: str | None) -> float | None:
    try:
        return None if text is None else float(text)
    except ValueError:
        return None


def _refusal(status: int, answer: bytes) -> Refused:
    body: Any = None
    try:
        body = msgspec.json.decode(answer)
    except msgspec.DecodeError:
        return Refused(status, answer[:200].decode("utf-8", "replace") or "no reason given")
    if isinstance(body, dict):
        return Refused(status, str(body.get("error") or body.get("message") or "no reason given"), body)
    return Refused(status, "no reason given", body)
