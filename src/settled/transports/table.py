"""The table of what every broker can do, made from what the transports declare.

python -m settled.transports.table            prints it
python -m settled.transports.table PAGE.md    writes it into the page, between its marks
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

from settled.transports import KINDS, Kind
from settled.transports.base import Capabilities, NackMeans
from settled.transports.memory import MemoryTransport

BEGIN, END = "<!-- capabilities -->", "<!-- /capabilities -->"

_TITLES = {
    "queue": ("the queue, its engine in this process", "queue.md"),
    "client": ("the queue, through its server", "queue.md"),
    "nats": ("NATS JetStream", "nats.md"),
    "rabbitmq": ("RabbitMQ", "brokers/rabbitmq.md"),
    "mqtt": ("MQTT 5", "brokers/mqtt.md"),
    "kafka": ("Kafka", "brokers/kafka.md"),
    "redis": ("Redis", "brokers/redis.md"),
    "sqs": ("Amazon SQS", "brokers/sqs.md"),
    "servicebus": ("Azure Service Bus", "brokers/servicebus.md"),
    "pubsub": ("Google Pub/Sub", "brokers/pubsub.md"),
}
"""What a broker is called and where it is described, by the extra that installs its transport."""

_NACK = {
    NackMeans.RELEASE: "at once, to anyone",
    NackMeans.REWIND: "at once, to this consumer",
    NackMeans.LEASE: "when its lease is over",
    NackMeans.NONE: "cannot be",
}
_HEAD = (
    "broker",
    "URL",
    "`DontAck`: given back",
    "attempts counted by",
    "dead letter",
    "a delay is kept by",
    "lease extended",
    "lanes",
)


def rows(docs: Path) -> Iterator[tuple[str, ...]]:
    """A row a transport, and one more for each way it can also be set up."""
    yield _row("in memory", "`memory://`", MemoryTransport.capabilities)
    schemes: dict[Kind, list[str]] = {}
    for scheme, kind in KINDS.items():
        schemes.setdefault(kind, []).append(f"`{scheme}://`")
    for kind, names in schemes.items():
        title, page = _TITLES[kind.extra]
        linked = f"[{title}]({page})" if (docs / page).exists() else title
        transport = getattr(import_module(kind.module), kind.name)
        yield _row(linked, ", ".join(names), transport.capabilities)
        for variant, capabilities in getattr(transport, "variants", {}).items():
            yield _row(f"{title}: {variant}", "", capabilities)


def _row(title: str, urls: str, can: Capabilities) -> tuple[str, ...]:
    return (
        title,
        urls,
        _NACK[can.nack],
        can.attempts.value,
        can.reject.value,
        can.delay.value,
        "yes" if can.extends else "no",
        "yes" if can.lanes else "no",
    )


def table(docs: Path) -> str:
    """The table in Markdown; `docs` is the directory its links start from."""
    lines = [_HEAD, ("---",) * len(_HEAD), *rows(docs)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def renewed(page: Path) -> str:
    """The page's text with the table as it is now."""
    before, begin, rest = page.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"{page}: no {BEGIN} … {END} to write the table into")
    return f"{before}{BEGIN}\n{table(page.parent)}\n{END}{after}"


def main(*pages: str) -> None:
    """Print the table, or write it into the pages."""
    for page in map(Path, pages):
        page.write_text(renewed(page))
    if not pages:
        sys.stdout.write(table(Path("docs")) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
