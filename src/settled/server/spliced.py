"""The answers that are given most often, spliced together rather than encoded field by field."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from settled.queue.types import Acked, Appended

encode = msgspec.json.encode


def appended(result: Appended, transaction_ids: Sequence[str | None]) -> bytes:
    """The array that answers a push of plain messages."""
    tail = _place(result.partition_id, result.queue)
    if len(transaction_ids) == 1:
        given, twice = result.results[0]
        own = encode(transaction_ids[0] or given).decode()
        status = "duplicate" if twice else "queued"
        text = f'[{{"index":0,"transaction_id":{own},"status":"{status}","message_id":"{given}",{tail}]'
        return text.encode()
    ids = [own or given for own, (given, _) in zip(transaction_ids, result.results, strict=True)]
    rows = [
        f'{{"index":{i},"transaction_id":"{own}","status":"{"duplicate" if twice else "queued"}",'
        f'"message_id":"{given}",{tail}'
        for i, (own, (given, twice)) in enumerate(zip(_texts(ids), result.results, strict=True))
    ]
    return f"[{','.join(rows)}]".encode()


@lru_cache(maxsize=4096)
def _place(partition_id: str, queue: str) -> str:
    names = (encode(partition_id), encode(queue))
    return (b'"partition_id":%b,"trace_id":null,"queueName":%b}' % names).decode()


@lru_cache(maxsize=4096)
def _settled(queue: str, partition: str, lease_released: bool) -> str:
    return (
        b'"success":true,"message":"acknowledged","error":null,"queueName":%b,"partitionName":%b,'
        b'"leaseReleased":%b,"dlq":false,"retryCount":0}'
        % (encode(queue), encode(partition), encode(lease_released))
    ).decode()


def all_acked(transaction_ids: list[str], settled: Acked) -> list[str]:
    """The answers to acks of one partition that were all accepted, each as its JSON object."""
    tail = _settled(settled.queue, settled.partition, settled.lease_released)
    return [
        f'{{"index":{i},"transactionId":"{each}",{tail}' for i, each in enumerate(_texts(transaction_ids))
    ]


def _texts(values: list[str]) -> list[str]:
    """Strings as they stand between the quotes of JSON."""
    # No string of JSON has `","` inside: a quote in it has a backslash before it.
    return encode(values)[2:-2].decode().split('","')
