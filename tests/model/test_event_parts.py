"""Planning the parts of a batch: nothing is left out, nothing is out of order."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from aqueduck.model.changes import SegmentRef
from aqueduck.model.event_parts import piece_stretches, plan_pieces, stretches


def segment(first: int, last: int, size: int, oid: int) -> SegmentRef:
    return SegmentRef(
        table_oid=oid, version=0, kind="rows", path=f"{oid}-{first}", rows=1, bytes=size, inserts=1, updates=0, deletes=0,
        key_changes=0, unchanged=0, first_ord=first, last_lsn=0, last_ts=0, schema_json="{}", last_ord=last,
    )  # fmt: skip


segments = st.lists(
    st.builds(
        lambda first, length, size, oid: segment(first, first + length, size, oid),
        st.integers(0, 200), st.integers(0, 20), st.integers(1, 100), st.integers(1, 3),
    ),
    max_size=30,
)  # fmt: skip


@given(segments)
def test_stretches_are_in_order_and_never_overlap(found: list[SegmentRef]) -> None:
    """P-E01: overlapping segments are merged into one stretch, so stretches can be written one after the other."""
    planned = stretches(found)
    assert sorted(s.path for stretch in planned for s in stretch) == sorted(s.path for s in found)
    for before, after in itertools.pairwise(planned):
        assert max(s.last_ord for s in before) < min(s.first_ord for s in after)


@given(segments, st.integers(1, 300))
def test_pieces_are_the_stretches_in_order(found: list[SegmentRef], piece_bytes: int) -> None:
    """A piece is larger than asked for only if it is a single stretch."""
    pieces = [piece_stretches(piece) for piece in plan_pieces(found, piece_bytes=piece_bytes)]
    assert [stretch for piece in pieces for stretch in piece] == stretches(found)
    for piece in pieces:
        assert len(piece) == 1 or sum(s.bytes for stretch in piece for s in stretch) <= piece_bytes
