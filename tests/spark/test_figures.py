"""A report's page and the figures behind it, without Spark."""

from __future__ import annotations

import html
from pathlib import Path
from typing import Any

import pytest

from settled.queue.errors import NotFound
from settled.spark.jobs.export import EPOCH, export, query
from settled.spark.jobs.page import render
from settled.spark.jobs.run import _settled
from settled.spark.options import Options
from settled.spark.postgres import Reader
from settled.spark.source import new_holder
from tests.spark.conftest import Shop

AT = "2026-01-01T00:00:00+00:00"


def figures(**more: Any) -> dict[str, Any]:
    names = ("throughput", "latency", "in_hand", "redeliveries", "retries_to_success", "alerts", "lag")
    empty: dict[str, Any] = {name: [] for name in names}
    return {
        **empty, "made_at": AT, "queue": None, "from": AT, "to": AT, "bucket_seconds": 1.0, "lag_at": AT,
        "totals": {"acked": 0, "retried": 0, "released": 0, "dead": 0},
        "dead_letters": {"errors": [], "total": 0}, **more,
    }  # fmt: skip


def test_a_text_that_looks_like_a_mark_of_the_page_is_shown_as_it_is() -> None:
    again = [{"reason": "mail to ops@LAG@example.org <b>failed", "count": 3, "source": "q/g"}]
    page = render(figures(redeliveries=again))
    assert "mail to ops@LAG@example.org &lt;b&gt;failed" in page
    assert page.count("No group has read yet.") == 1


def test_what_is_not_known_is_not_shown_as_nothing() -> None:
    rule = {
        "name": "Redeliveries", "fired": [], "pending_since": None, "worst_rate": 0.0, "threshold": 20,
        "minutes": 10, "text": "", "known": False,
    }  # fmt: skip
    page = render(
        figures(
            streams=True,
            totals={"acked": None, "retried": None, "released": None, "dead": 23},
            only_dead_letters=[{"queue": "CAF_RESULTS", "consumer_group": "router-results"}],
            alerts=[rule],
        )
    )
    assert "Of router-results of CAF_RESULTS that are no pipeline only dead letters are known" in page
    assert page.count("not known here") == 4  # all tiles but the dead letters
    assert ">23</b><span>dead letters" in page
    assert '<i class="not-known">not known</i>' in page
    assert '<i class="quiet">' not in page
    assert "<title>Settled: All streams</title>" in page


def test_the_page_balances_its_books_and_tells_how_to_go_on() -> None:
    """Defect D5."""
    rule = {
        "name": "HighRetryRate", "fired": [], "pending_since": None, "worst_rate": 12.0, "threshold": 10,
        "minutes": 5, "text": "many", "minutes_over": 2,
    }  # fmt: skip
    error = {
        "error": "bank # is away", "queue": "my orders", "consumer_group": "g", "count": 3, "attempts": 2,
        "last": AT, "example": "bank 7 is away", "ids": ["letter-1", "letter-9"],
    }  # fmt: skip
    books = {
        "queue": "my orders", "consumer_group": "g", "pushed": 1100, "acked": 1000, "dead": 3, "waiting": 90,
        "failing": 7, "removed": 0, "lost": 0,
    }  # fmt: skip
    times = {"t": 0.0, "p50": 0.1, "p90": 0.5, "p99": 2.0}
    done = {"t": 0.0, "acked": 1000, "retried": 7, "released": 0, "dead": 3}
    page = render(
        figures(
            alerts=[rule], dead_letters={"errors": [error], "total": 3},
            books=[books, {**books, "lost": None}], throughput=[done], latency=[times],
            rate={"average": 501.5, "peak": 900.0, "seconds": 2.0},
            in_hand=[times],
        )
    )  # fmt: skip
    assert '<td class="n" data-name="lost">0</td>' in page
    assert '<td class="n" data-name="lost">?</td>' in page
    assert "<b>502</b><span>messages a second</span>" in page
    assert "<code>letter-1</code>, <code>letter-9</code>" in page
    assert "<code>settled dlq show letter-9</code>" in page
    command = "settled pipeline redrive --queue 'my orders' --group g --error 'bank .* is away' --dry-run"
    assert f"<code>{html.escape(command)}</code>" in page
    assert "never; over the limit for 2 min at most" in page
    # Each drawing has words, and each colour a meaning.
    assert page.count("<svg") == page.count("<desc>") == page.count("aria-label=") == 3
    assert "Half took at most 0.1 s, 99 in 100 at most 2 s, at 00:00:00." in page
    for text in ("failed, and came again", "half took no longer than this", "99 in 100 took no longer"):
        assert f"</i>{text}</span>" in page
    # On a narrow screen a row is a card: each cell brings the name of its column.
    assert page.count("<td") == page.count(' data-name="')
    assert "td::before { content: attr(data-name)" in page


def test_times_from_push_to_settlement_are_at_most_two_percent_too_long(shop: Shop) -> None:
    queue = shop.queue()
    for i in range(5):
        shop.push(queue, [{"id": i}], lanes=1)
    assert shop.pop_all(queue, "g") == {"p0": [{"id": i} for i in range(5)]}
    truth = """select extract(epoch from j.at - s.created_at)::double precision as s from journal j
                 cross join unnest(j.lanes) u (lane) join segment s on s.lane_id = u.lane
                 join lane l on l.id = u.lane join queue q on q.id = l.queue_id
                where q.name = %s and j.kind = 'auto_ack'"""
    real = shop.link.run(lambda c: c.execute(truth, (queue,)).fetchall())
    until = shop.link.run(lambda c: c.execute("select clock_timestamp() as at").fetchall())[0]["at"]
    rows = query(shop.link, "waits", since=EPOCH, until=until, queue=queue)
    shown = sorted(row["seconds"] for row in rows for _ in range(round(row["messages"])))
    assert len(shown) == len(real) == 5
    for seconds, row in zip(shown, sorted(real, key=lambda row: row["s"]), strict=True):
        assert 0.999 <= seconds / max(row["s"], 0.001) <= 1.021


def test_a_batch_that_an_earlier_run_left_open_is_counted_by_the_next(shop: Shop) -> None:
    queue = shop.queue()
    shop.push(queue, [{"id": i} for i in range(4)], lanes=1)
    given = {"url": shop.dsn, "queue": queue, "group": "g", "holder": new_holder(), "leaseSeconds": "1"}
    reader = Reader(Options.parse(given))
    try:
        reader.hold(streaming=False)
        assert reader.claim(10, None) == 1
        assert shop.link.rows("find_reader", queue=queue, group="g")[0]["newest"] == 1
        assert _settled(shop.link, queue, "g") == 0
    finally:
        reader.close()


def test_an_export_of_a_queue_that_is_not_there_is_refused_and_makes_no_folder(
    shop: Shop, tmp_path: Path
) -> None:
    with pytest.raises(NotFound, match="queue not found: nosuch"):
        export(None, shop.dsn, tmp_path / "files", queue="nosuch")  # type: ignore[arg-type]
    assert not (tmp_path / "files").exists()
