"""Segments as columns are the same messages as segments as rows."""

from __future__ import annotations

import os

from hypothesis import given, settings
from hypothesis import strategies as st

from settled.queue import segment
from settled.queue.columns import decode, id_texts
from settled.queue.manifest import share

ids = st.binary(max_size=9).filter(lambda tx: b"\0" not in tx)
messages = st.lists(
    st.tuples(st.binary(max_size=40), ids, st.sampled_from([b"", b'{"a":"b"}'])),
    min_size=1,
    max_size=9,
)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(messages, st.booleans(), st.booleans()), min_size=1, max_size=5))
def test_columns_hold_what_the_segments_hold(
    parts: list[tuple[list[tuple[bytes, bytes, bytes]], bool, bool]],
) -> None:
    rows, wanted, at = [], [], 7
    for number, (content, own_ids, own_times) in enumerate(parts):
        n, created = len(content), 1_700_000_000_000_000 + number
        body = segment.encode(
            segment.new_base(),
            [t for _, t, _ in content],
            [p for p, _, _ in content],
            [h for _, _, h in content],
            os.urandom(16 * n) if own_ids else None,
            [created - 5 * i for i in range(n)] if own_times else None,
        )
        rows.append((at, n, created, body))
        whole = segment.Segment(at, created, body)
        for i in range(n):
            own = whole.own_tx()
            tx = own[i] if own is not None else b""
            wanted.append((at + i, whole.id(i), tx, whole.header(i), whole.payload(i), whole.created(i)))
        at += n
    columns = decode(rows)
    ids = [bytes(text).decode() for text in id_texts(columns.ids)]
    found = [
        (
            int(columns.seqs[i]),
            ids[i],
            columns.tx[i] if columns.tx is not None else b"",
            columns.headers[i] if columns.headers is not None else b"",
            columns.payload[columns.offsets[i] : columns.offsets[i + 1]],
            int(columns.created[i]),
        )
        for i in range(len(columns.seqs))
    ]
    assert found == wanted


@given(st.lists(st.integers(1, 100), max_size=30), st.integers(1, 500))
def test_lanes_share_a_batch_evenly(available: list[int], limit: int) -> None:
    taken = dict(share(list(enumerate(available)), limit))
    assert sum(taken.values()) == min(limit, sum(available))
    assert all(n <= available[lane] for lane, n in taken.items())
    full = [n for lane, n in taken.items() if n < available[lane]]
    assert not full or max(taken.values()) - min(full) <= 1
