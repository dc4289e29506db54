"""What two looks at a slot tell of the server's history."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aqueduck.model.errors import SlotLostError
from aqueduck.postgres.session.history import KnownPast, move_mark
from aqueduck.state_files.files import SlotMark

positions = st.integers(0, 9)
marks = st.builds(SlotMark, st.integers(1, 2), positions, st.sampled_from(["", "a", "b"]))


@given(st.none() | marks, st.none() | marks, marks)
def test_a_mark_is_never_lowered(before: SlotMark | None, seen: SlotMark | None, now: SlotMark) -> None:
    """A slot behind its mark is refused; otherwise the mark is what two looks agree on, and no lower than it was."""
    known = KnownPast(9, slot=before)
    if before is not None and before.is_ahead_of(now):
        with pytest.raises(SlotLostError):
            move_mark(known, seen, now)
        return
    moved = move_mark(known, seen, now)
    if moved is None:
        assert before is None
        return
    assert before is None or not before.is_ahead_of(moved)
    assert moved == before or (
        seen is not None and moved.restart_lsn <= min(seen.restart_lsn, now.restart_lsn)
    )


def test_a_position_that_one_look_saw_is_no_mark() -> None:
    """A server may show a position a moment before it is on its disk, and crash: that is no restored backup."""
    known = KnownPast(9, slot=SlotMark(1, 5, "s"))
    assert move_mark(known, None, SlotMark(1, 8, "s")) == SlotMark(1, 5, "s")
    assert move_mark(known, SlotMark(1, 8, "s"), SlotMark(1, 6, "s")) == SlotMark(1, 6, "s")


def test_another_slot_has_marks_of_its_own() -> None:
    """A group with another `slot_name`, or a server on another timeline, is not taken for a restored server."""
    known = KnownPast(9, slot=SlotMark(1, 5, "before"))
    assert move_mark(known, SlotMark(1, 2, "now"), SlotMark(1, 3, "now")) == SlotMark(1, 2, "now")
    assert move_mark(known, SlotMark(2, 2, "before"), SlotMark(2, 3, "before")) == SlotMark(2, 2, "before")
