"""Everything at once on the queue engine, and nothing may be lost: `python -m bench.soak [seconds]`.

Three engines on one Postgres, producers and consumers of every kind, small segments merged while they are
read. It prints what was done, and fails if a message was lost, settled twice or out of order, or a deadlock
was seen.
"""

from __future__ import annotations

import asyncio
import random
import sys
import time
from collections import Counter

import uvloop

from bench.queue_engine import start
from settled.queue import compact
from settled.queue.engine import Engine
from settled.queue.types import AckItem, AckOp, PoppedMessage, PopRequest, PushItem, PushOp

ENGINES, LANES = 3, 6
QUEUES = {"order": "in_order", "park": "parked", "auto": "in_order", "step": "in_order"}


class Soak:
    """What was sent and settled, and who still works."""

    def __init__(self, engines: list[Engine], seconds: float) -> None:
        self.engines = engines
        self.end = time.monotonic() + seconds
        self.sent: dict[str, set[str]] = {queue: set() for queue in (*QUEUES, "out")}
        self.done: dict[str, Counter[str]] = {queue: Counter() for queue in (*QUEUES, "out")}
        self.counts: Counter[str] = Counter()
        self.last: dict[str, int] = {}
        self.seen: set[tuple[str, int]] = set()
        self.disordered = 0

    @property
    def producing(self) -> bool:
        """Whether producers go on."""
        return time.monotonic() < self.end

    def complete(self, queue: str) -> bool:
        """Whether all that was sent to a queue is settled."""
        return not self.producing and len(self.done[queue]) >= len(self.sent[queue])

    def check_order(self, messages: list[PoppedMessage]) -> None:
        """What comes for the first time must be behind all that came before."""
        for m in messages:
            if (m.partition, m.seq) not in self.seen:
                self.seen.add((m.partition, m.seq))
                self.disordered += m.seq < self.last.get(m.partition, -1)
                self.last[m.partition] = m.seq

    async def produce(self, number: int) -> None:
        """Batches of mixed sizes, now and then the same again."""
        rng, i = random.Random(number), 0
        while self.producing:
            queue = rng.choice(list(QUEUES))
            names = [f"{number}-{i + k}" for k in range(rng.choice((1, 1, 1, 5, 60)))]
            i += len(names)
            items = [PushItem(queue, b'"x"', f"p{rng.randrange(LANES)}", name) for name in names]
            self.sent[queue].update(names)
            for _ in range(2 if rng.random() < 0.05 else 1):
                results = await rng.choice(self.engines).push(items)
                self.counts.update(f"push {r.status}" for r in results)
            await asyncio.sleep(0)

    async def consume(self, queue: str, number: int) -> None:
        """Leases, settled in every way, through any engine."""
        rng = random.Random(number)
        while not self.complete(queue):
            partitions = rng.choice((1, 1, 3))
            request = PopRequest(queue, batch=rng.choice((1, 10, 100)), partitions=partitions, wait=0.2)
            popped = await rng.choice(self.engines).pop(request)
            messages = list(popped.messages())
            if queue == "order":
                self.check_order(messages)
            statuses = [rng.choices(("completed", "failed", "retry"), (30, 1, 1))[0] for _ in messages]
            acks = [
                AckItem(m.transaction_id, m.partition_id, status, m.lease_id)
                for m, status in zip(messages, statuses, strict=True)
            ]
            rng.shuffle(acks)
            while acks:
                part = [acks.pop() for _ in range(min(len(acks), rng.choice((1, 20, 100))))]
                for ack, result in zip(part, await rng.choice(self.engines).ack(part), strict=True):
                    assert result.success, result
                    self.counts[f"ack {result.message}"] += 1
                    if ack.status == "completed":
                        self.done[queue][ack.transaction_id] += 1

    async def take(self, queue: str, number: int) -> None:
        """Settled on delivery."""
        rng = random.Random(number)
        while not self.complete(queue):
            request = PopRequest(queue, batch=rng.choice((1, 30, 300)), auto_ack=True, wait=0.2)
            for m in (await rng.choice(self.engines).pop(request)).messages():
                self.done[queue][m.transaction_id] += 1
                self.counts["auto-ack"] += 1

    async def forward(self, number: int) -> None:
        """From one queue to the next, in transactions."""
        rng = random.Random(number)
        while not self.complete("step"):
            popped = await rng.choice(self.engines).pop(PopRequest("step", batch=20, wait=0.2))
            messages = list(popped.messages())
            if not messages:
                continue
            names = [m.transaction_id for m in messages]
            operations: list[AckOp | PushOp] = [
                PushOp([PushItem("out", m.payload, m.partition, m.transaction_id) for m in messages])
            ]
            operations += [
                AckOp(AckItem(m.transaction_id, m.partition_id, lease_id=m.lease_id)) for m in messages
            ]
            self.sent["out"].update(names)
            result = await rng.choice(self.engines).transaction(operations)
            assert result.success, result.error
            self.done["step"].update(names)
            self.counts["transactions"] += 1

    async def maintain(self) -> None:
        """The janitor without a rest, and who looks on."""
        while self.producing:
            done = await random.choice(self.engines).tidy()
            self.counts["segments merged"] += done.get("compacted", 0)
            await self.engines[0].groups()
            await asyncio.sleep(0.05)


async def main(seconds: float) -> int:
    """Run, then compare."""
    compact.AGE, compact.IDLE = 0.5, 0.5
    server = start()
    try:
        engines = [await Engine.open(server.dsn, worker=f"w{i}") for i in range(ENGINES)]
        for queue, retry in QUEUES.items():
            await engines[0].configure(queue, {"retry": retry, "retryDelay": 5, "retryLimit": 100_000})
        soak = Soak(engines, seconds)
        began = time.monotonic()
        await asyncio.wait_for(
            asyncio.gather(
                *(soak.produce(i) for i in range(8)),
                *(soak.consume("order", 100 + i) for i in range(4)),
                *(soak.consume("park", 200 + i) for i in range(4)),
                *(soak.take("auto", 300 + i) for i in range(4)),
                *(soak.forward(400 + i) for i in range(3)),
                soak.maintain(),
            ),
            seconds * 4 + 60,
        )
        took = time.monotonic() - began
        await soak.take("out", 500)
        fetchval = engines[0]._core.pool.fetchval
        deadlocks = await fetchval("select sum(deadlocks) from pg_stat_database")
        segments = await fetchval("select count(*) from segment")
        for engine in engines:
            await engine.close()
        lost = sum(len(sent - set(soak.done[queue])) for queue, sent in soak.sent.items())
        twice = sum(count > 1 for done in soak.done.values() for count in done.values())
        sent = sum(len(each) for each in soak.sent.values())
        print(
            f"{sent:,} messages in {took:.1f} s, {segments:,} segments: lost {lost}, twice {twice}, "
            f"out of order {soak.disordered}, deadlocks {deadlocks}"
        )
        for name, count in sorted(soak.counts.items()):
            print(f"  {name:28s} {count:12,}")
        return 1 if lost or twice or soak.disordered or deadlocks else 0
    finally:
        server.stop()


if __name__ == "__main__":
    sys.exit(uvloop.run(main(float(sys.argv[1]) if len(sys.argv) > 1 else 60.0)))
