"""The client as notebooks use it, and messages kept as dicts. Defect Q19."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import pytest

from settled.client import Client, SyncClient, Unsettled
from settled.server.testing import RunningServer


def test_the_blocking_client_closes_in_a_running_event_loop(server: RunningServer, queue: str) -> None:
    async def cell() -> None:
        client = SyncClient(server.url)
        client.queue(queue).push(1)
        client.close()
        with SyncClient(server.url) as another:
            another.queue(queue).push(2)

    asyncio.run(cell())
    assert not [t for t in threading.enumerate() if t.name == "settled-client"]
    with SyncClient(server.url) as client:
        assert len(client.queue(queue).batch(5).pop()) == 2


def test_the_blocking_client_works_in_the_cells_of_a_notebook(server: RunningServer, queue: str) -> None:
    """As a notebook's kernel: cells are run one after the other by a loop that never stops."""
    names: dict[str, Any] = {"url": server.url, "name": queue}
    cells = [
        "from settled.client import SyncClient",
        "client = SyncClient(url)",
        "pushed = client.queue(name).push({'n': 1})",
        "[message] = client.queue(name).pop()",
        "settled = client.ack(message)",
        "client.close()",
    ]

    async def kernel() -> None:
        for cell in cells:
            exec(cell, names)
            await asyncio.sleep(0)

    asyncio.run(kernel())
    assert names["settled"].message == "acknowledged"


def test_what_still_runs_on_the_clients_thread_is_ended_with_it(server: RunningServer, queue: str) -> None:
    client = SyncClient(server.url)
    failed: list[BaseException] = []

    def waits() -> None:
        try:
            client.queue(queue).wait(20).pop()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=waits)
    thread.start()
    deadline = time.monotonic() + 10
    while not client._portal.is_open and time.monotonic() < deadline:
        time.sleep(0.001)
    client.close()
    thread.join(10)
    assert not thread.is_alive()
    assert len(failed) == 1


def kept(message: Any) -> dict[str, Any]:
    return {
        "transactionId": message.transaction_id,
        "partitionId": message.partition_id,
        "leaseId": message.lease_id,
        "consumerGroup": message.group,
    }


def test_a_message_kept_as_a_dict_is_settled(sync: SyncClient, queue: str) -> None:
    sync.queue(queue).create(retry="parked")
    sync.queue(queue).push_all(range(5))
    one, two, three, four, five = sync.queue(queue).group("workers").batch(5).pop()
    sync.extend(kept(one))
    assert sync.ack(kept(one)).message == "acknowledged"
    assert sync.nack(kept(two), "no").message == "failed_retry"
    assert sync.reject(kept(three), "never").message == "failed_dlq"
    assert sync.release(kept(four)).message == "released"
    sync.transaction().ack(kept(five)).queue(f"{queue}.out").push(1).commit()
    assert len(sync.queue(f"{queue}.out").pop()) == 1


def test_a_batch_of_dicts_says_the_status_of_each(sync: SyncClient, queue: str) -> None:
    sync.queue(queue).push_all(range(3))
    one, two, three = sync.queue(queue).batch(3).pop()
    acks = [kept(one), {**kept(two), "status": "dlq", "error": "bad"}, {**kept(three), "status": "failed"}]
    outcomes = [settled.message for settled in sync.ack_batch(acks)]
    assert outcomes == ["acknowledged", "failed_dlq", "failed_retry"]


def test_an_async_client_settles_a_dict(server: RunningServer, queue: str) -> None:
    async def main() -> None:
        async with Client(server.url) as client:
            await client.queue(queue).push(1)
            [message] = await client.queue(queue).pop()
            assert (await client.ack(kept(message))).success

    asyncio.run(main())


def test_a_dict_without_its_partition_is_refused_before_it_is_sent(sync: SyncClient) -> None:
    with pytest.raises(ValueError, match="partitionId is required to ensure message uniqueness"):
        sync.ack({"transactionId": "t"})
    with pytest.raises(ValueError, match="transactionId is required"):
        sync.ack({"partitionId": "p"})
    with pytest.raises(TypeError, match="a message or a dict"):
        sync.ack("t")  # type: ignore[arg-type]


def test_the_text_of_an_unsettled_ack_names_its_outcome(sync: SyncClient, queue: str) -> None:
    sync.queue(queue).push(1)
    [message] = sync.queue(queue).pop()
    foreign = {**kept(message), "leaseId": "0197c5f1-27e4-7b0f-8b57-7b9d1c3d9a52"}
    with pytest.raises(Unsettled) as refused:
        sync.ack(foreign)
    assert str(refused.value) == "invalid_lease: Lease validation failed (HTTP 409)"
    sync.ack(message)
    with pytest.raises(Unsettled, match="not_found") as refused:
        sync.ack(message)
    assert refused.value.message == "not_found"
