"""A table moves along its states only, and is tried again when time can help."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aqueduck.errors import (
    AqueduckError,
    ConnectionLostError,
    IllegalMoveError,
    LakeWriteError,
    Retry,
    SlotLimitError,
    StageFullError,
    TableMissingError,
    error_codes,
)
from aqueduck.lifecycle import (
    MOVES,
    ErrorClass,
    Failure,
    Lifecycle,
    TableState,
    classify,
    fail,
    may_move,
    move,
    resume,
    retry_delay,
    retry_is_due,
)

NOW = datetime(2026, 1, 1, tzinfo=UTC)
SECOND = timedelta(seconds=1)
PENDING, SNAPSHOT, CATCHUP, STREAMING, ERRORED = TableState
ERRORS = [cls("message") for cls in error_codes().values()]

states = st.sampled_from(list(TableState))
errors = st.sampled_from(ERRORS)


def at(state: TableState) -> Lifecycle:
    if state is ERRORED:
        return fail(Lifecycle(STREAMING, NOW), LakeWriteError("disk"), NOW)
    return Lifecycle(state, NOW)


def test_a_table_with_a_copy_goes_through_every_state() -> None:
    """P-S03: PENDING, SNAPSHOT, CATCHUP, STREAMING, each with the time of its move."""
    life = Lifecycle(PENDING, NOW)
    for number, state in enumerate((SNAPSHOT, CATCHUP, STREAMING), start=1):
        life = move(life, state, NOW + number * SECOND)
        assert life == Lifecycle(state, NOW + number * SECOND)


def test_a_table_without_a_copy_streams_at_once() -> None:
    """P-S03: with `copy: false` there is nothing to catch up with."""
    assert move(Lifecycle(PENDING, NOW), STREAMING, NOW).state is STREAMING


@pytest.mark.parametrize("state", [SNAPSHOT, CATCHUP, STREAMING, ERRORED])
def test_a_new_copy_can_be_asked_for_in_every_state(state: TableState) -> None:
    """P-S22: a resync starts over, whatever the table is doing."""
    assert move(at(state), PENDING, NOW).state is PENDING


@given(states, states)
def test_moves_that_are_not_in_the_table_are_refused(old: TableState, new: TableState) -> None:
    """P-S03: an illegal move raises and names both states."""
    if new is not ERRORED and may_move(old, new):
        assert move(at(old), new, NOW + SECOND).since == NOW + SECOND
        return
    with pytest.raises(IllegalMoveError, match=rf"from {old} to {new}"):
        move(at(old), new, NOW)


@pytest.mark.parametrize("state", list(TableState))
def test_no_state_follows_itself_unless_it_fails_again(state: TableState) -> None:
    """A move is a change; only failures repeat."""
    assert may_move(state, state) is (state is ERRORED)


def test_every_state_can_be_left_and_reached() -> None:
    """P-S03: no table can get stuck: from each state there is a way to STREAMING."""
    for start in TableState:
        reached = {start}
        while more := {new for old in reached for new in MOVES[old]} - reached:
            reached |= more
        assert reached == set(TableState)


@given(states, errors)
def test_every_table_can_fail_with_every_error(state: TableState, error: AqueduckError) -> None:
    """P-S03: the error is kept as text with its code, and counted."""
    before = at(state)
    after = fail(before, error, NOW + SECOND)
    assert after.state is ERRORED
    assert after.failure == Failure(error.code, classify(error), str(error))
    assert after.failures == before.failures + 1
    assert (after.retry_at is None) is (error.retry is Retry.OPERATOR)


def test_the_time_of_a_state_is_when_it_began() -> None:
    """P-S03: failing again does not hide how long the table has been errored."""
    life = fail(Lifecycle(STREAMING, NOW), LakeWriteError("disk"), NOW + SECOND)
    assert fail(life, LakeWriteError("disk"), NOW + 60 * SECOND).since == NOW + SECOND


def test_pauses_double_up_to_half_an_hour() -> None:
    """P-S22: 30 s, 1 min, 2 min and so on, never more than 30 min."""
    seconds = [retry_delay(n).total_seconds() for n in range(8)]
    assert seconds == [30, 60, 120, 240, 480, 960, 1800, 1800]
    assert retry_delay(10**6) == timedelta(minutes=30)


def test_failures_in_a_row_wait_longer_each_time() -> None:
    """P-S22: trying again without success lengthens the pause; streaming resets it."""
    life, waits = Lifecycle(SNAPSHOT, NOW), []
    for _ in range(3):
        life = fail(life, ConnectionLostError("gone"), NOW)
        assert life.retry_at is not None
        waits.append((life.retry_at - NOW).total_seconds())
        life = move(resume(life, NOW, copied=False), SNAPSHOT, NOW)
    assert waits == [30, 60, 120]
    assert (life.failures, life.retry_at) == (3, None)
    assert life.failure is not None
    life = move(move(life, CATCHUP, NOW), STREAMING, NOW)
    assert (life.failures, life.failure) == (0, None)


def test_a_retry_is_due_at_its_time_and_not_before() -> None:
    """P-S22: the service asks with its own clock."""
    life = fail(Lifecycle(STREAMING, NOW), LakeWriteError("disk"), NOW)
    assert not retry_is_due(life, NOW + 29 * SECOND)
    assert retry_is_due(life, NOW + 30 * SECOND)
    assert not retry_is_due(Lifecycle(STREAMING, NOW), NOW)


def test_errors_for_a_person_are_never_due() -> None:
    """What waiting cannot repair waits for somebody."""
    life = fail(Lifecycle(STREAMING, NOW), TableMissingError("gone"), NOW)
    assert not retry_is_due(life, NOW + timedelta(days=365))


@pytest.mark.parametrize(("copied", "state"), [(True, CATCHUP), (False, PENDING)])
def test_a_table_is_resumed_where_it_can_go_on(copied: bool, state: TableState) -> None:
    """A copied table replays what was parked, another one goes on with its copy."""
    assert resume(at(ERRORED), NOW, copied=copied).state is state


def test_only_an_errored_table_is_resumed() -> None:
    """P-S03: there is nothing to try again otherwise."""
    with pytest.raises(IllegalMoveError):
        resume(Lifecycle(STREAMING, NOW), NOW, copied=True)


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: str(error.code))
def test_what_is_retried_is_transient_and_nothing_else(error: AqueduckError) -> None:
    """The class follows from the error's own retry policy."""
    assert (classify(error) is ErrorClass.TRANSIENT) is (error.retry is Retry.AUTO)


def test_room_that_is_missing_is_a_resource() -> None:
    """Full disks and slot limits are told apart from what is configured wrong."""
    assert {classify(cls("x")) for cls in (StageFullError, SlotLimitError)} == {ErrorClass.RESOURCE}
    assert classify(TableMissingError("x")) is ErrorClass.CONFIGURATION
