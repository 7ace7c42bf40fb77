"""The answers that are given most often, spliced together rather than encoded field by field."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from settled.queue.types import Acked, Appended

encode = msgspec.json.encode
_INDEXES = [*map(str, range(1000))]


def appended(result: Appended, transaction_ids: Sequence[str | None]) -> bytes:
    """The array that answers a push of plain messages."""
    tail = _place(result.partition_id, result.queue)
    if len(transaction_ids) == 1:
        one, twice = result.results[0]
        mine, state = encode(transaction_ids[0] or one).decode(), "duplicate" if twice else "queued"
        text = f'[{{"index":0,"transaction_id":{mine},"status":"{state}","message_id":"{one}",{tail}]'
        return text.encode()
    given = [each for each, _ in result.results]
    own = [each or known for each, known in zip(transaction_ids, given, strict=True)]
    states = ["duplicate" if twice else "queued" for _, twice in result.results]
    parts = ('{"index":', ',"transaction_id":"', '","status":"', '","message_id":"', f'",{tail}')
    return f"[{_rows(parts, _numbers(len(own)), _texts(own), states, given)}]".encode()


@lru_cache(maxsize=4096)
def _place(partition_id: str, queue: str) -> str:
    names = (encode(partition_id), encode(queue))
    return (b'"partition_id":%b,"trace_id":null,"queueName":%b}' % names).decode()


@lru_cache(maxsize=4096)
def _settled(queue: str, partition: str, lease_released: bool) -> str:
    return (
        b'"success":true,"message":"acknowledged","error":null,"queueName":%b,"partitionName":%b,'
        b'"leaseReleased":%b,"dlq":false,"retryCount":0,"noop":false}'
        % (encode(queue), encode(partition), encode(lease_released))
    ).decode()


def acked(transaction_id: str, settled: Acked) -> bytes:
    """The object that answers an ack that was accepted."""
    tail = _settled(settled.queue, settled.partition, settled.lease_released)
    return f'{{"index":0,"transactionId":{encode(transaction_id).decode()},{tail}'.encode()


def all_acked(transaction_ids: list[str], settled: Acked) -> bytes:
    """The array that answers acks of one partition that were all accepted."""
    tail = _settled(settled.queue, settled.partition, settled.lease_released)
    parts = ('{"index":', ',"transactionId":"', f'",{tail}')
    return f"[{_rows(parts, _numbers(len(transaction_ids)), _texts(transaction_ids))}]".encode()


def _rows(parts: Sequence[str], *columns: Sequence[str]) -> str:
    """JSON objects with commas between: the columns' values of each row between the parts."""
    first, *between, last = parts
    step = len(parts) + len(columns) - 1
    pieces = [f"{last},{first}"] * (step * len(columns[0]))
    pieces[0] = first
    for at, column in enumerate(columns):
        pieces[2 * at + 1 :: step] = column
    for at, part in enumerate(between):
        pieces[2 * at + 2 :: step] = [part] * len(columns[0])
    return "".join(pieces) + last


def _numbers(count: int) -> list[str]:
    return _INDEXES[:count] if count <= len(_INDEXES) else [*map(str, range(count))]


def _texts(values: list[str]) -> list[str]:
    """Strings as they stand between the quotes of JSON."""
    # No string of JSON has `","` inside: a quote in it has a backslash before it.
    return encode(values)[2:-2].decode().split('","')
