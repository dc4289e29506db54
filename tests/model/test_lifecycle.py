"""A table that failed is tried again when time can help."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aqueduck.model.errors import (
    AqueduckError,
    ConnectionLostError,
    LakeWriteError,
    Retry,
    SlotLimitError,
    StageFullError,
    TableMissingError,
    error_codes,
)
from aqueduck.model.lifecycle import (
    ErrorClass,
    Failure,
    Lifecycle,
    SyncState,
    classify,
    fail,
    retry_delay,
    retry_is_due,
)

NOW = datetime(2026, 1, 1, tzinfo=UTC)
SECOND = timedelta(seconds=1)
PENDING, SNAPSHOT, CATCHUP, STREAMING, ERRORED = SyncState
ERRORS = [cls("message") for cls in error_codes().values()]

states = st.sampled_from(list(SyncState))
errors = st.sampled_from(ERRORS)


def at(state: SyncState) -> Lifecycle:
    if state is ERRORED:
        return fail(Lifecycle(STREAMING, NOW), LakeWriteError("disk"), NOW)
    return Lifecycle(state, NOW)


@given(states, errors)
def test_every_table_can_fail_with_every_error(state: SyncState, error: AqueduckError) -> None:
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
    """P-S22: trying again without success lengthens the pause."""
    life, waits = Lifecycle(SNAPSHOT, NOW), []
    for _ in range(3):
        life = fail(life, ConnectionLostError("gone"), NOW)
        assert life.retry_at is not None
        waits.append((life.retry_at - NOW).total_seconds())
    assert waits == [30, 60, 120]
    assert life.failures == 3
    assert life.failure is not None


def test_a_retry_is_due_at_its_time_and_not_before() -> None:
    """P-S22: the service asks with its own clock."""
    life = fail(Lifecycle(STREAMING, NOW), LakeWriteError("disk"), NOW)
    assert not retry_is_due(life, NOW + 29 * SECOND)
    assert retry_is_due(life, NOW + 30 * SECOND)
    assert not retry_is_due(Lifecycle(STREAMING, NOW), NOW)


def test_errors_for_a_person_are_never_due() -> None:
    """An error that waiting cannot repair waits for a person."""
    life = fail(Lifecycle(STREAMING, NOW), TableMissingError("gone"), NOW)
    assert not retry_is_due(life, NOW + timedelta(days=365))


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: str(error.code))
def test_what_is_retried_is_transient_and_nothing_else(error: AqueduckError) -> None:
    """The class follows from the error's own retry policy."""
    assert (classify(error) is ErrorClass.TRANSIENT) is (error.retry is Retry.AUTO)


def test_room_that_is_missing_is_a_resource() -> None:
    """Full disks and slot limits are distinguished from wrong configuration."""
    assert {classify(cls("x")) for cls in (StageFullError, SlotLimitError)} == {ErrorClass.RESOURCE}
    assert classify(TableMissingError("x")) is ErrorClass.CONFIGURATION
