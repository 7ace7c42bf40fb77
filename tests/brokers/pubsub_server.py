"""A stand-in for Pub/Sub: its Publisher and Subscriber services as far as we use them, on SQLite.

Run as `python -m tests.brokers.pubsub_server PORT FILE`. It takes ack deadlines below the real one's 10 s.
"""

from __future__ import annotations

import asyncio
import signal
import sqlite3
import sys
import time
import uuid
from datetime import UTC, datetime
from typing import Any

import grpc
from google.protobuf.any_pb2 import Any as Packed
from google.protobuf.empty_pb2 import Empty
from google.pubsub_v1 import types as pubsub
from google.rpc.error_details_pb2 import ErrorInfo
from google.rpc.status_pb2 import Status
from grpc_status import rpc_status

SCHEMA = """
CREATE TABLE IF NOT EXISTS topic (name TEXT PRIMARY KEY);
CREATE TABLE IF NOT EXISTS subscription (name TEXT PRIMARY KEY, topic TEXT, config BLOB);
CREATE TABLE IF NOT EXISTS message (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, subscription TEXT, key TEXT, body BLOB,
    attempts INTEGER DEFAULT 0, expires REAL DEFAULT 0, ack_id TEXT
);
CREATE INDEX IF NOT EXISTS ready ON message (subscription, seq);
CREATE INDEX IF NOT EXISTS acked ON message (ack_id);
CREATE INDEX IF NOT EXISTS keyed ON message (subscription, key, seq);
"""
# What may be handed out: with order, nothing behind a message of its key that is out.
READY = """
SELECT seq, body, attempts FROM message AS m WHERE subscription = ? AND expires <= ? AND NOT (
    ? AND key != '' AND EXISTS (
        SELECT 1 FROM message AS b
        WHERE b.subscription = m.subscription AND b.key = m.key AND b.seq < m.seq AND b.expires > ?
    )
) ORDER BY seq LIMIT ?
"""


class Service:
    def __init__(self, path: str) -> None:
        # Killed with SIGKILL the system still writes what SQLite gave it.
        self._db = sqlite3.connect(path, isolation_level=None)
        self._db.execute("PRAGMA journal_mode=WAL")
        self._db.execute("PRAGMA synchronous=OFF")
        self._db.executescript(SCHEMA)

    async def create_topic(self, topic: pubsub.Topic, call: Any) -> pubsub.Topic:
        try:
            self._db.execute("INSERT INTO topic VALUES (?)", (topic.name,))
        except sqlite3.IntegrityError:
            await call.abort(grpc.StatusCode.ALREADY_EXISTS, topic.name)
        return topic

    async def delete_topic(self, request: pubsub.DeleteTopicRequest, call: Any) -> Empty:
        self._db.execute("DELETE FROM topic WHERE name = ?", (request.topic,))
        return Empty()

    async def _require(self, table: str, name: str, call: Any) -> Any:
        row = self._db.execute(f"SELECT * FROM {table} WHERE name = ?", (name,)).fetchone()
        if row is None:
            await call.abort(grpc.StatusCode.NOT_FOUND, f"{table} {name}")
        return row

    async def list_topic_subscriptions(
        self, request: Any, call: Any
    ) -> pubsub.ListTopicSubscriptionsResponse:
        await self._require("topic", request.topic, call)
        rows = self._db.execute("SELECT name FROM subscription WHERE topic = ?", (request.topic,))
        return pubsub.ListTopicSubscriptionsResponse(subscriptions=[name for (name,) in rows])

    async def create_subscription(self, wanted: pubsub.Subscription, call: Any) -> pubsub.Subscription:
        await self._require("topic", wanted.topic, call)
        wanted.ack_deadline_seconds = wanted.ack_deadline_seconds or 10
        try:
            row = (wanted.name, wanted.topic, pubsub.Subscription.serialize(wanted))
            self._db.execute("INSERT INTO subscription VALUES (?, ?, ?)", row)
        except sqlite3.IntegrityError:
            await call.abort(grpc.StatusCode.ALREADY_EXISTS, wanted.name)
        return wanted

    async def get_subscription(self, request: Any, call: Any) -> pubsub.Subscription:
        _, _, config = await self._require("subscription", request.subscription, call)
        return pubsub.Subscription.deserialize(config)

    async def publish(self, request: pubsub.PublishRequest, call: Any) -> pubsub.PublishResponse:
        await self._require("topic", request.topic, call)
        for message in request.messages:
            if not (message.data or message.attributes):
                await call.abort(grpc.StatusCode.INVALID_ARGUMENT, "a message needs data or an attribute")
            for name, value in message.attributes.items():
                if len(name.encode()) > 256 or len(value.encode()) > 1024:
                    await call.abort(grpc.StatusCode.INVALID_ARGUMENT, f"attribute {name} is too long")
        return pubsub.PublishResponse(message_ids=self._publish(request.topic, request.messages))

    def _publish(self, topic: str, messages: Any) -> list[str]:
        names = self._db.execute("SELECT name FROM subscription WHERE topic = ?", (topic,)).fetchall()
        ids, rows = [], []
        for message in messages:
            message.message_id, message.publish_time = uuid.uuid4().hex, datetime.now(UTC)
            ids.append(message.message_id)
            body = pubsub.PubsubMessage.serialize(message)
            rows += [(name, message.ordering_key, body) for (name,) in names]
        self._db.execute("BEGIN")
        self._db.executemany("INSERT INTO message (subscription, key, body) VALUES (?, ?, ?)", rows)
        self._db.execute("COMMIT")
        return ids

    async def pull(self, request: pubsub.PullRequest, call: Any) -> pubsub.PullResponse:
        _, _, config = await self._require("subscription", request.subscription, call)
        found = pubsub.Subscription.deserialize(config)
        while True:
            taken = self._take(found, request.max_messages)
            if taken:
                return pubsub.PullResponse(received_messages=taken)
            await asyncio.sleep(0.02)

    def _take(self, found: pubsub.Subscription, limit: int) -> list[pubsub.ReceivedMessage]:
        now = time.time()
        arguments = (found.name, now, found.enable_message_ordering, now, limit)
        policy, taken = found.dead_letter_policy, []
        self._db.execute("BEGIN")
        rows = self._db.execute(READY, arguments).fetchall()
        over = [row for row in rows if policy and row[2] >= policy.max_delivery_attempts]
        for seq, body, attempts in rows:
            if (seq, body, attempts) in over:
                continue
            ack_id = uuid.uuid4().hex
            self._db.execute(
                "UPDATE message SET attempts = attempts + 1, ack_id = ?, expires = ? WHERE seq = ?",
                (ack_id, now + found.ack_deadline_seconds, seq),
            )
            taken.append(
                pubsub.ReceivedMessage(
                    ack_id=ack_id,
                    message=pubsub.PubsubMessage.deserialize(body),
                    # Counted for a subscription with a dead-letter policy only.
                    delivery_attempt=attempts + 1 if policy else 0,
                )
            )
        self._db.executemany("DELETE FROM message WHERE seq = ?", [(seq,) for seq, _, _ in over])
        self._db.execute("COMMIT")
        for _, body, _ in over:
            self._publish(policy.dead_letter_topic, [pubsub.PubsubMessage.deserialize(body)])
        return taken

    async def _held(self, request: Any, call: Any) -> list[str]:
        """The ack ids that still count; with exactly-once delivery, the others are told of."""
        _, _, config = await self._require("subscription", request.subscription, call)
        now = time.time()
        marks = ", ".join("?" * len(request.ack_ids))
        rows = self._db.execute(
            f"SELECT ack_id, expires FROM message WHERE ack_id IN ({marks})", list(request.ack_ids)
        ).fetchall()
        if not pubsub.Subscription.deserialize(config).enable_exactly_once_delivery:
            return [ack_id for ack_id, _ in rows]
        return [ack_id for ack_id, expires in rows if expires > now]

    async def _answer(self, request: Any, held: list[str], call: Any) -> Empty:
        _, _, config = await self._require("subscription", request.subscription, call)
        late = set(request.ack_ids) - set(held)
        if late and pubsub.Subscription.deserialize(config).enable_exactly_once_delivery:
            facts = dict.fromkeys(late, "PERMANENT_FAILURE_INVALID_ACK_ID")
            packed = Packed()
            packed.Pack(ErrorInfo(reason="EXACTLY_ONCE_ACKID_FAILURE", metadata=facts))
            code = grpc.StatusCode.FAILED_PRECONDITION
            status = rpc_status.to_status(Status(code=code.value[0], message="ack ids", details=[packed]))
            await call.abort(status.code, status.details, status.trailing_metadata)
        return Empty()

    async def acknowledge(self, request: pubsub.AcknowledgeRequest, call: Any) -> Empty:
        held = await self._held(request, call)
        self._db.execute("BEGIN")
        self._db.executemany("DELETE FROM message WHERE ack_id = ?", [(ack_id,) for ack_id in held])
        self._db.execute("COMMIT")
        return await self._answer(request, held, call)

    async def modify_ack_deadline(self, request: pubsub.ModifyAckDeadlineRequest, call: Any) -> Empty:
        after = request.ack_deadline_seconds
        if not 0 <= after <= 600:
            await call.abort(grpc.StatusCode.INVALID_ARGUMENT, f"ack_deadline_seconds {after}")
        held = await self._held(request, call)
        for ack_id in held:
            if after:
                self._db.execute(
                    "UPDATE message SET expires = ? WHERE ack_id = ?", (time.time() + after, ack_id)
                )
            else:
                self._db.execute("UPDATE message SET expires = 0, ack_id = NULL WHERE ack_id = ?", (ack_id,))
        return await self._answer(request, held, call)


def _handler(method: Any, request: Any, response: Any) -> Any:
    return grpc.unary_unary_rpc_method_handler(
        method,
        request_deserializer=request.deserialize,
        response_serializer=Empty.SerializeToString if response is Empty else response.serialize,
    )


async def main(port: int, path: str) -> None:
    service = Service(path)
    publisher = {
        "CreateTopic": _handler(service.create_topic, pubsub.Topic, pubsub.Topic),
        "DeleteTopic": _handler(service.delete_topic, pubsub.DeleteTopicRequest, Empty),
        "Publish": _handler(service.publish, pubsub.PublishRequest, pubsub.PublishResponse),
        "ListTopicSubscriptions": _handler(
            service.list_topic_subscriptions,
            pubsub.ListTopicSubscriptionsRequest,
            pubsub.ListTopicSubscriptionsResponse,
        ),
    }
    subscriber = {
        "CreateSubscription": _handler(service.create_subscription, pubsub.Subscription, pubsub.Subscription),
        "GetSubscription": _handler(
            service.get_subscription, pubsub.GetSubscriptionRequest, pubsub.Subscription
        ),
        "Pull": _handler(service.pull, pubsub.PullRequest, pubsub.PullResponse),
        "Acknowledge": _handler(service.acknowledge, pubsub.AcknowledgeRequest, Empty),
        "ModifyAckDeadline": _handler(service.modify_ack_deadline, pubsub.ModifyAckDeadlineRequest, Empty),
    }
    server = grpc.aio.server()
    server.add_generic_rpc_handlers(
        (
            grpc.method_handlers_generic_handler("google.pubsub.v1.Publisher", publisher),
            grpc.method_handlers_generic_handler("google.pubsub.v1.Subscriber", subscriber),
        )
    )
    server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    await stop.wait()
    await server.stop(0.1)


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), sys.argv[2]))
