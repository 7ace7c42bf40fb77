"""Segments and remembered ids: what goes in comes out, in every layout."""

from __future__ import annotations

import subprocess
import sys
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from settled.queue import dedup, segment
from settled.queue.columns import decode, id_texts
from settled.queue.names import new_lease, read_lease

_tx = st.one_of(st.just(b""), st.text(min_size=1, max_size=20).map(str.encode)).filter(
    lambda t: b"\0" not in t
)
_heads = st.sampled_from([b"", b'{"a":"b"}'])
_rows = st.one_of(  # of any bytes, and of JSON only, which is laid out in another way
    st.lists(st.tuples(_tx, each, _heads), min_size=1, max_size=40)
    for each in (st.binary(max_size=80), st.integers().map(lambda i: b'{"n":%d}' % i))
)


@given(_rows, st.integers(0, 2**60), st.booleans(), st.booleans())
def test_a_segment_gives_back_what_it_was_made_of(
    rows: list[tuple[bytes, bytes, bytes]], first: int, own_ids: bool, own_times: bool
) -> None:
    tx, payloads, headers = (list(column) for column in zip(*rows, strict=True))
    base = segment.new_base()
    ids = b"".join(segment.new_base() for _ in rows) if own_ids else None
    times = [1_700_000_000_000_000 + i for i in range(len(rows))] if own_times else None
    raw = segment.encode(base, tx, payloads, headers, ids, times)
    made = segment.Segment(first, 1_800_000_000_000_000, raw)
    assert (made.n, made.first_seq, made.end_seq) == (len(rows), first, first + len(rows))
    for i, (own, payload, header) in enumerate(rows):
        assert made.payload(i) == payload
        assert made.header(i) == header
        assert made.id(i) == made.ids()[i]
        assert made.tx(i) == made.txs()[i] == (own.decode() or made.id(i))
        assert made.created(i) == (times[i] if times else 1_800_000_000_000_000)
    assert len(set(made.ids())) == len(rows)
    columns = decode([(first, len(rows), 1_800_000_000_000_000, raw)])
    assert (columns.tx, columns.headers) == (tx if any(tx) else None, headers if any(headers) else None)
    assert [columns.payload[a:b] for a, b in pairwise(columns.offsets)] == payloads
    assert [bytes(text).decode() for text in id_texts(columns.ids)] == made.ids()
    assert columns.created.tolist() == [made.created(i) for i in range(len(rows))]


def test_ids_count_up_and_carry_their_time() -> None:
    base = segment.new_base()
    ids = segment.id_texts(base, 300)
    assert ids == sorted(ids)
    assert all(i[14] == "7" and i[19] in "89ab" and len(i) == 36 for i in ids)


@given(st.lists(st.lists(st.integers(0, 40), min_size=1, max_size=30), max_size=40), st.integers(0, 40))
def test_remembered_ids_are_found_wherever_they_are_kept(segments: list[list[int]], key: int) -> None:
    small, before = 10, dedup.FRESH_LIMIT
    dedup.FRESH_LIMIT = small
    try:
        remembered = dedup.Remembered()
        loaded = dedup.Remembered()
        expected: list[int] = []
        seq = 5
        stored = []
        for hashes in segments:
            remembered.add(seq, hashes)
            stored.append((seq, dedup.pack(hashes) or bytes(8 * len(hashes))))
            expected += [seq + i for i, h in enumerate(hashes) if h == key and key]
            seq += len(hashes)
        loaded.load(stored, seq)
        for found in (remembered, loaded):
            assert sorted(found.suspects([key]).get(key, [])) == expected
            assert sorted(found.suspects([key, *range(100, 120)]).get(key, [])) == expected
        assert loaded.known == seq
    finally:
        dedup.FRESH_LIMIT = before


@given(st.integers(1, 2**40 - 1), st.integers(1, 2**20 - 1), st.booleans())
def test_a_lease_id_names_its_lane_and_group(lane: int, group: int, wide: bool) -> None:
    assert read_lease(new_lease(lane, group, wide=wide)) == (lane, group, wide)
    assert new_lease(lane, group, wide=wide) != new_lease(lane, group, wide=wide)


FORK = """
import os
from settled.queue.segment import new_base
new_base()  # what is drawn from now on would be a child's too
ours, theirs = os.pipe()
if os.fork() == 0:
    os.write(theirs, new_base()[6:])
    os._exit(0)
print(os.read(ours, 10) != new_base()[6:])
"""


def test_a_forked_process_draws_other_ids_than_its_parent() -> None:
    done = subprocess.run([sys.executable, "-c", FORK], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "True"
