"""Redriving without Spark: what is encrypted, what is full, and what has been redriven before."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

from settled.queue.errors import BadRequest, Conflict, NotFound
from settled.queue.types import AckItem, PopRequest
from settled.spark.command import app
from settled.spark.jobs.redrive import Choice, redrive
from tests.spark.conftest import Shop

SECRET = "hush" * 8


def die(shop: Shop, queue: str) -> None:
    """All that waits in a queue becomes dead letters."""
    popped = shop.wait(shop.engine.pop(PopRequest(queue, group="g", batch=1000, partitions=10)))
    acks = [
        AckItem(m.transaction_id, m.partition_id, "dlq", m.lease_id, "no card") for m in popped.messages()
    ]
    assert all(r.success for r in shop.wait(shop.engine.ack(acks, "g")))


def full_of(shop: Shop, values: list[Any], **options: Any) -> str:
    """A queue of which all messages are dead letters."""
    queue = shop.queue(**options)
    shop.push(queue, values)
    die(shop, queue)
    return queue


def test_what_is_redriven_into_an_encrypted_queue_is_encrypted(shop: Shop, key: None) -> None:
    target = shop.queue(encryptionEnabled=True)
    source = full_of(shop, [{"id": 1, "secret": SECRET}])
    assert redrive(shop.dsn, Choice(queue=source), to=target) == 1
    assert SECRET.encode() not in shop.stored(target)
    assert shop.pop_all(target) == {"p0": [{"id": 1, "secret": SECRET}]}


def test_dead_letters_of_an_encrypted_queue_are_redriven_readable_and_never_in_clear(
    shop: Shop, key: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = full_of(shop, [{"id": 1, "secret": SECRET}], encryptionEnabled=True)
    with pytest.raises(Conflict, match=r"are encrypted, but queue '.*' is not"):
        redrive(shop.dsn, Choice(queue=source), to=shop.queue())
    with monkeypatch.context() as patch:
        patch.delenv("SETTLED_ENCRYPTION_KEY")
        with pytest.raises(Conflict, match="not in SETTLED_ENCRYPTION_KEY"):
            redrive(shop.dsn, Choice(queue=source))
    assert redrive(shop.dsn, Choice(queue=source)) == 1
    assert SECRET.encode() not in shop.stored(source)
    assert shop.pop_all(source, "other")["p0"][-1] == {"id": 1, "secret": SECRET}
    die(shop, source)  # its headers are encrypted too, and say that it was redriven
    assert redrive(shop.dsn, Choice(queue=source), dry_run=True) == 0


def test_a_message_is_redriven_again_only_if_asked(shop: Shop, caplog: pytest.LogCaptureFixture) -> None:
    queue = full_of(shop, [{"id": i} for i in range(10)])
    sent: list[int] = []

    def rejected(count: int) -> None:
        """A consumer rejects each of them again, while the redrive runs."""
        die(shop, queue)
        sent.append(count)
        assert count <= 10

    assert redrive(shop.dsn, Choice(queue=queue), rate=5, on_progress=rejected) == 10
    assert len(shop.dead(queue)) == 20
    assert redrive(shop.dsn, Choice(queue=queue)) == 0
    assert "10 dead letters were left out: their messages were redriven before" in caplog.text
    assert redrive(shop.dsn, Choice(queue=queue), again=True, rate=5, on_progress=rejected) == 10
    assert sent == [5, 10, 5, 10]


def test_a_full_queue_takes_no_more_dead_letters_than_it_has_room_for(shop: Shop) -> None:
    target = shop.queue(maxSize=3)
    shop.push(target, [{"id": "first"}])
    source = full_of(shop, [{"id": i} for i in range(5)])
    with pytest.raises(
        Conflict, match=f"queue '{target}' is full: 3 pending, maxSize 3; .*; 2 dead letters were redriven"
    ):
        redrive(shop.dsn, Choice(queue=source), to=target)
    assert redrive(shop.dsn, Choice(queue=source), dry_run=True) == 3
    got = shop.pop_all(target)
    assert redrive(shop.dsn, Choice(queue=source), to=target) == 3
    got = [*got.values(), *shop.pop_all(target).values()]
    assert sorted(str(m["id"]) for some in got for m in some) == ["0", "1", "2", "3", "4", "first"]


def test_a_queue_that_is_not_there_is_named(shop: Shop) -> None:
    with pytest.raises(NotFound, match="queue not found: nosuch"):
        redrive(shop.dsn, Choice(queue="nosuch"))
    result = CliRunner().invoke(app, ["redrive", "--url", shop.dsn, "--queue", "nosuch"])
    assert (result.exit_code, result.output) == (1, "settled: queue not found: nosuch\n")
    with pytest.raises(NotFound, match="group not found: nosuch"):
        redrive(shop.dsn, Choice(group="nosuch"), dry_run=True)
    with pytest.raises(BadRequest, match=r"error: must be a pattern: .* not balanced, got '\('"):
        redrive(shop.dsn, Choice(error="("), dry_run=True)


def test_letters_of_a_group_that_was_deleted_are_redriven(shop: Shop) -> None:
    queue = full_of(shop, [{"id": 1}])
    shop.link.run(
        lambda c: c.execute("update dead_letter set consumer_group = 'gone' where queue = %s", (queue,))
    )
    assert redrive(shop.dsn, Choice(queue=queue, group="gone"), dry_run=True) == 1


def test_dead_letters_keep_their_headers_when_they_are_redriven(shop: Shop) -> None:
    queue = shop.queue()
    shop.push(queue, [{"id": 1}], headers={"tenant": "acme"})
    die(shop, queue)
    [letter] = shop.dead(queue)
    assert redrive(shop.dsn, Choice(queue=queue)) == 1
    popped = shop.wait(shop.engine.pop(PopRequest(queue, group="g", auto_ack=True)))
    [message] = popped.messages()
    assert dict(message.headers) == {"tenant": "acme", "redriven-from": letter.id}
    assert msgspec.json.decode(message.payload) == {"id": 1}
