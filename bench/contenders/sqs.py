"""SQS: receive ten, delete each."""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncIterator
from typing import Any

from aiobotocore.session import get_session
from tests.brokers.sqs import CREDENTIALS, sqs_server

from bench.contenders import Meter, prepare
from settled.transports.base import Source


class Sqs:
    client = "aiobotocore"
    batch = 10
    most = 200

    def __init__(self, port: int) -> None:
        self._endpoint = f"http://127.0.0.1:{port}"
        self.url = f"sqs://127.0.0.1:{port}?region=eu-west-1&wait=1&create=true"

    async def make(self, queue: str) -> None:
        await prepare(self.url, Source(channel=queue))

    def subscription(self, queue: str) -> dict[str, Any]:
        return {}

    async def raw(self, queue: str, meter: Meter) -> None:
        session = get_session()
        async with session.create_client("sqs", "eu-west-1", endpoint_url=self._endpoint) as client:
            url = (await client.get_queue_url(QueueName=queue))["QueueUrl"]
            while meter.left:
                answer = await client.receive_message(
                    QueueUrl=url,
                    MaxNumberOfMessages=self.batch,
                    WaitTimeSeconds=1,
                    MessageAttributeNames=["All"],
                    MessageSystemAttributeNames=["All"],
                )
                for message in answer.get("Messages", ()):
                    meter(message["Body"].encode())
                    await client.delete_message(QueueUrl=url, ReceiptHandle=message["ReceiptHandle"])
            meter.end()


@contextlib.asynccontextmanager
async def start() -> AsyncIterator[Sqs]:
    os.environ.update(CREDENTIALS)
    with sqs_server() as server:
        yield Sqs(server.port)
