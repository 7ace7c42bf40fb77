"""What a pop hands out: slices of log segments, readable as messages or as ready-made JSON."""

from collections.abc import Iterator
from datetime import UTC, datetime
from functools import lru_cache
from typing import Literal

import msgspec

from settled.queue.segment import JSON, Row, Segment

_encode = msgspec.json.encode

Empty = Literal[
    "no_available_partition", "lease_held", "partition_not_found", "window_buffer", "timeout", "paused"
]


class PoppedMessage(msgspec.Struct, frozen=True):
    """One delivered message; `attempts` counts its failures before this delivery."""

    id: str
    transaction_id: str
    payload: bytes
    content_type: str
    headers: dict[str, str]
    created_at: datetime
    queue: str
    partition: str
    partition_id: str
    group: str
    seq: int
    lease_id: str | None
    attempts: int = 0
    trace_id: str | None = None
    producer: str | None = None


class Piece(msgspec.Struct, frozen=True, gc=False):
    """A run of messages of one segment: the offsets in it that are handed out."""

    segment: Segment
    offsets: range | list[int]


class PoppedLane(msgspec.Struct):
    """What one partition contributed to a pop."""

    queue: str
    partition: str
    partition_id: str
    pieces: list[Piece]
    attempts: dict[int, int] = {}

    def __len__(self) -> int:
        return sum(len(piece.offsets) for piece in self.pieces)


class Popped(msgspec.Struct):
    """The answer to a pop: its lease and the messages, or why there are none."""

    group: str
    lease_id: str | None = None
    expires_at: datetime | None = None
    lanes: list[PoppedLane] = []
    empty: Empty | None = None

    def __len__(self) -> int:
        return sum(len(lane) for lane in self.lanes)

    def messages(self) -> Iterator[PoppedMessage]:
        """Each message as an object, in partition order."""
        for lane in self.lanes:
            for piece in lane.pieces:
                segment = piece.segment
                ids, txs, first = segment.ids(), segment.txs(), segment.first_seq
                at = datetime.fromtimestamp(segment.created_us / 1e6, UTC)
                for offset in piece.offsets:
                    seq = first + offset
                    message = PoppedMessage(
                        ids[offset],
                        txs[offset],
                        segment.payload(offset),
                        JSON,
                        {},
                        at,
                        lane.queue,
                        lane.partition,
                        lane.partition_id,
                        self.group,
                        seq,
                        self.lease_id,
                        lane.attempts.get(seq, 0) if lane.attempts else 0,
                    )
                    yield message if segment.plain else _enriched(message, segment.row(offset))

    def json_messages(self) -> bytes:
        """All messages as the inside of a JSON array, payloads spliced in as they were pushed.

        Each is `{"id","messageId","transactionId","traceId","data","producerSub","createdAt",("headers"),
        ("contentType"),"retryCount","queue","partition","partitionId","leaseId","consumerGroup"}`; a payload
        that is not JSON comes as a string (base64, with `"encoding":"base64"`, if it is not text).
        """
        whose = b',"leaseId":%b%b}' % (_encode(self.lease_id or ""), reader(self.group))
        parts: list[bytes] = []
        for lane in self.lanes:
            tail = place(lane.queue, lane.partition, lane.partition_id) + whose
            fresh = b',"retryCount":0' + tail
            for piece in lane.pieces:
                segment, offsets = piece.segment, piece.offsets
                if isinstance(offsets, range) and not lane.attempts:
                    parts.append(segment.json(offsets.start, offsets.stop, fresh))
                    continue
                for offset in offsets:
                    count = lane.attempts.get(segment.first_seq + offset, 0)
                    parts.append(segment.json(offset, offset + 1, b',"retryCount":%d%b' % (count, tail)))
        return b",".join(parts)


@lru_cache(maxsize=4096)
def place(queue: str, partition: str, partition_id: str) -> bytes:
    """Where a message lies, as fields of a JSON object."""
    names = (_encode(queue), _encode(partition), _encode(partition_id))
    return b',"queue":%b,"partition":%b,"partitionId":%b' % names


@lru_cache(maxsize=4096)
def reader(group: str) -> bytes:
    """Whose message it is, as a field of a JSON object."""
    return b',"consumerGroup":%b' % _encode(group)


def _enriched(message: PoppedMessage, row: Row) -> PoppedMessage:
    """A message with what only some messages have."""
    return msgspec.structs.replace(
        message,
        content_type=row.content_type,
        headers=row.headers,
        created_at=datetime.fromtimestamp(row.created_us / 1e6, UTC),
        trace_id=row.trace_id,
        producer=row.producer,
    )
