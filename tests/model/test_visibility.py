"""What a snapshot shows, by position and by the numbers of transactions."""

from __future__ import annotations

import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from aqueduck.model.changes import SegmentRef
from aqueduck.model.visibility import Visibility, visibility_of

NUMBERS = 1 << 32


def test_a_snapshot_shows_what_had_ended_when_it_was_taken() -> None:
    """Hazard 1: a snapshot excludes running and later transactions, and everything after the position that was read last."""
    visibility = Visibility.from_snapshot("100:110:100,104", 5000)
    assert [x for x in range(98, 113) if visibility.shows(4999, x)] == [
        98,
        99,
        101,
        102,
        103,
        105,
        106,
        107,
        108,
        109,
    ]
    assert not visibility.shows(5000, 99)


def test_numbers_of_transactions_start_again() -> None:
    """Four billion transactions later the numbers are small again, and still in order."""
    visibility = Visibility.from_snapshot(f"{NUMBERS - 2}:{NUMBERS + 3}:{NUMBERS + 1}", 5000)
    assert visibility.shows(1, NUMBERS - 1)
    assert visibility.shows(1, 2)
    assert not visibility.shows(1, 1)
    assert not visibility.shows(1, 3)
    assert not visibility.shows(1, 100)


def test_a_position_shows_all_earlier_commits() -> None:
    """A slot's snapshot shows exactly what was committed before its position, by any transaction."""
    assert visibility_of(7) == Visibility(7)
    assert visibility_of(7).shows(6, 123)
    assert not visibility_of(7).shows(7, 123)


@settings(deadline=None)
@given(
    st.integers(0, NUMBERS - 1), st.sets(st.integers(0, NUMBERS - 1), max_size=5),
    st.lists(st.tuples(st.integers(1, 20), st.integers(0, NUMBERS - 1)), min_size=1),
)  # fmt: skip
def test_changes_of_a_segment_are_judged_as_one_by_one(
    xmax: int, running: set[int], rows: list[tuple[int, int]]
) -> None:
    """The columns of a segment give what each of its changes gives."""
    visibility = Visibility(10, xmax, tuple(running))
    batch = pa.record_batch({"_lsn": [r[0] for r in rows], "_xid": [r[1] for r in rows]})
    assert visibility.mask(batch).to_pylist() == [visibility.shows(*row) for row in rows]


def test_a_segment_is_left_out_only_if_all_of_it_is_shown() -> None:
    """A segment may end exactly at the position; transaction numbers cannot decide about a whole segment."""
    segment = SegmentRef(
        1, 1, "rows", "s", 5, 50, 5, 0, 0, 0, 0, first_ord=1, last_lsn=100, last_ts=0, schema_json="{}"
    )
    assert Visibility(100).shows_all(segment)
    assert not Visibility(99).shows_all(segment)
    assert not Visibility(1000, 7, ()).shows_all(segment)


def test_a_truncate_is_left_out_by_its_own_commit() -> None:
    """Its segment may end far behind it."""
    truncate = SegmentRef(
        1, 1, "truncate", "", 0, 0, 0, 0, 0, 0, 0, first_ord=1, last_lsn=100, last_ts=0, schema_json="{}", commit_lsn=40, xid=5
    )  # fmt: skip
    assert Visibility(41).shows_all(truncate)
    assert not Visibility(40).shows_all(truncate)
    assert Visibility(41, 6, ()).shows_all(truncate)
    assert not Visibility(41, 6, (5,)).shows_all(truncate)
