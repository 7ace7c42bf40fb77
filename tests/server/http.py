"""A plain HTTP caller for the tests: what went out and what came back, no retries."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, urlencode

import urllib3


@dataclass
class Answer:
    """A status and a JSON body."""

    status: int
    body: Any
    headers: dict[str, str]


class Http:
    """A blocking JSON caller without retries."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._pool = urllib3.PoolManager(retries=False, maxsize=16)

    def __call__(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        raw: bytes | None = None,
        patience: float = 20,
        **params: Any,
    ) -> Answer:
        data = raw if raw is not None else None if body is None else json.dumps(body).encode()
        query = "?" + urlencode(params) if params else ""
        answer = self._pool.request(method, self.url + path + query, body=data, timeout=patience)
        try:
            content = json.loads(answer.data) if answer.data else None
        except ValueError:
            content = answer.data.decode()
        return Answer(answer.status, content, {k.lower(): v for k, v in answer.headers.items()})

    def push(
        self, queue: str, *payloads: Any, partition: str = "Default", **fields: Any
    ) -> list[dict[str, Any]]:
        items = [{"queue": queue, "partition": partition, "payload": p, **fields} for p in payloads]
        answer = self("POST", "/api/v1/push", {"items": items})
        assert answer.status == 201, answer
        return answer.body  # type: ignore[no-any-return]

    def pop(self, queue: str, partition: str | None = None, **params: Any) -> dict[str, Any]:
        path = f"/api/v1/pop/queue/{quote(queue, safe='')}"
        if partition is not None:
            path += f"/partition/{quote(partition, safe='')}"
        answer = self("GET", path, **params)
        assert answer.status == 200, answer
        return answer.body  # type: ignore[no-any-return]

    def ack(self, message: dict[str, Any], status: str = "completed", **fields: Any) -> Answer:
        return self("POST", "/api/v1/ack", ack_of(message, status, **fields))

    def configure(self, queue: str, **options: Any) -> dict[str, Any]:
        answer = self("POST", "/api/v1/configure", {"queue": queue, "options": options})
        assert answer.status == 200, answer
        return answer.body  # type: ignore[no-any-return]


def ack_of(message: dict[str, Any], status: str = "completed", **fields: Any) -> dict[str, Any]:
    return {
        "transactionId": message["transactionId"],
        "partitionId": message["partitionId"],
        "leaseId": message["leaseId"],
        "consumerGroup": message["consumerGroup"],
        "status": status,
        **fields,
    }
