"""
The observed state of a running group: the registry's observed columns, computed from the runner's knowledge.

Values follow the changes of each table, never the server's position: writing them moves that position, and an
idle system must not write.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace

from aqueduck.model.errors import AqueduckError, TableDisabledError
from aqueduck.model.lifecycle import SyncState, classify
from aqueduck.overview.verification import NEVER, in_words
from aqueduck.postgres.registry.registry import GroupObservation, TableObservation, TableRow
from aqueduck.service.probe import STILL_SECONDS
from aqueduck.sync.control import Wanted
from aqueduck.sync.groups.group import GroupRunner

__all__ = [
    "errored_group",
    "errored_tables",
    "group_error",
    "observe_group",
    "observe_table",
    "observe_tables",
    "raise_errored_table",
    "stream_error",
    "table_error",
    "table_state",
    "waiting_tables",
]


def table_state(runner: GroupRunner, oid: int) -> SyncState:
    """The state of a table, in the words that users see."""
    state = runner.states[oid]
    if oid in runner.book.disabled or _is_disabled(state.error):
        return SyncState.PENDING
    if state.error is not None or oid in runner.copier.schedule.failures:
        return SyncState.ERRORED
    if not state.ready:
        copying = runner.copier.progress.of(oid)
        return SyncState.PENDING if copying is None or copying.ended_at else SyncState.SNAPSHOT
    if stream_error(runner, oid) is not None:
        return SyncState.ERRORED
    reached = max(runner.status.position, runner.status.seen)
    waits = state.copy_position > reached or runner.status.state == "retrying"
    waits = waits or runner.status.held or not runner.status.reading
    waits = waits or runner.proof.is_old()
    # The lake does not take what waits for it: a commit that hangs, or one very large batch.
    waits = waits or time.monotonic() - runner.status.moved_at >= STILL_SECONDS
    return SyncState.CATCHUP if waits else SyncState.STREAMING


def stream_error(runner: GroupRunner, oid: int) -> AqueduckError | None:
    """Why a ready table receives no changes, although the table itself is in order."""
    if oid in runner.book.unsent:
        return runner.book.unsent[oid]
    if runner.proof.error is not None:
        return runner.proof.error
    if runner.status.state == "retrying" and runner.failures > 1 and runner.status.last_error is not None:
        return AqueduckError.from_text(runner.status.last_error) or AqueduckError(runner.status.last_error)
    return None


def observe_tables(runner: GroupRunner, wanted: Wanted) -> dict[int, TableObservation]:
    """
    All tables of the group in the registry, by row id: the one source for SQL, the API, the page and the
    metrics.

    A table whose configuration cannot be applied is errored, even if it continues with its previous one.
    """
    found = {}
    for oid, table in runner.tables.items():
        row = wanted.rows.get(table.source)
        if row is not None and oid in runner.states:  # it may be in a handover
            found[row.id] = observe_table(runner, wanted.id, oid, row)
    for name, error in runner.book.refused.items():
        row = wanted.rows.get(name)
        if row is not None:
            found[row.id] = _with_error(row.observed, error)
    return found | {seen.id: seen for seen in wanted.refused}


def table_error(runner: GroupRunner, oid: int) -> str | None:
    """The error of a table that is missing in the registry."""
    stray = runner.book.strays.get(runner.tables[oid].source)
    if stray is not None:
        return str(stray)
    life = runner.copier.schedule.failures.get(oid)
    if life is not None and life.failure is not None:
        return life.failure.message
    if table_state(runner, oid) is not SyncState.ERRORED:
        return None
    return runner.states[oid].error or str(stream_error(runner, oid))


def raise_errored_table(runner: GroupRunner) -> None:
    """For a run that ends: raise the error of a table that could not be added, or that is shown as errored."""
    for error in runner.book.refused.values():
        raise error
    for oid in runner.tables:
        if table_state(runner, oid) is SyncState.ERRORED and (text := table_error(runner, oid)):
            raise AqueduckError.from_text(text) or AqueduckError(text)


def observe_group(runner: GroupRunner, id: int) -> GroupObservation:  # noqa: A002 - the registry's name
    status = runner.status
    error = None if status.last_error is None else AqueduckError.from_text(status.last_error)
    failing = status.state == "retrying"
    if (shown := group_error(runner)) is not None and not failing:
        failing, error = True, shown
    return GroupObservation(
        id=id,
        confirmed_flush_lsn=status.position,
        last_sync_at=status.last_commit_at,
        paused=status.paused,
        staged_bytes=status.staged_bytes,
        restarts=status.restarts,
        error_code=error.code if failing and error else None,
        error_message=str(error) if failing and error else None,
    )


def group_error(runner: GroupRunner) -> AqueduckError | None:
    """What is wrong with a group whose query runs."""
    return runner.proof.error or runner.unfollowed


def errored_group(id: int, error: AqueduckError) -> GroupObservation:  # noqa: A002 - the registry's name
    """A group that is errored."""
    return GroupObservation(id=id, error_code=error.code, error_message=str(error))


def waiting_tables(wanted: Wanted, refused: Mapping[str, AqueduckError]) -> list[TableObservation]:
    """The tables of a group that is not started yet, or is disabled: no query replicates them."""
    live = {name: row for name, row in wanted.rows.items() if not row.removed}
    found = {row.id: _waiting(row.observed) for row in live.values()}
    found |= {live[n].id: _with_error(live[n].observed, error) for n, error in refused.items() if n in live}
    return list((found | {seen.id: seen for seen in wanted.refused}).values())


def _waiting(seen: TableObservation) -> TableObservation:
    return seen if seen.state is SyncState.ERRORED else replace(seen, state=SyncState.PENDING)


def errored_tables(wanted: Wanted, error: AqueduckError) -> list[TableObservation]:
    """The tables of an errored group: all of them have stopped."""
    live = (row for row in wanted.rows.values() if not row.removed and row.enabled)
    return [_with_error(row.observed, error) for row in live]


def observe_table(runner: GroupRunner, group_id: int | None, oid: int, row: TableRow) -> TableObservation:
    """A table as the registry and the page show it."""
    before = row.observed
    state = runner.states[oid]
    counts = runner.book.counts_of(oid)
    position, at = counts.applied or (before.applied_lsn, before.last_sync_at)
    queued, queued_bytes = runner.status.queued.get(oid, (0, 0))
    parked = runner.book.parked.get(oid)
    done = runner.book.requests_done(oid)
    seen = replace(
        before,
        state=table_state(runner, oid),
        source_oid=oid,
        active_group_id=group_id,
        resync_done=max(before.resync_done, done.resync),
        retry_done=max(before.retry_done, done.retry),
        snapshot_lsn=state.copy_position or before.snapshot_lsn,
        applied_lsn=position,
        last_sync_at=at,
        rows_synced=runner.book.rows_synced(oid, before.rows_synced),
        queued_changes=queued,
        queued_bytes=queued_bytes,
        lag_bytes=runner.status.lag_bytes if queued else 0,
        lag_seconds=round(runner.status.lag_seconds, 1) if queued else 0.0,
        parked_rows=parked.rows if parked else 0,
        parked_bytes=parked.bytes if parked else 0,
        parked_since=parked.since if parked else None,
        error_code=None,
        error_class=None,
        error_message=None,
        retry_at=None,
        consecutive_failures=0,
    )
    seen = _with_waiting(_with_verdict(_with_copy(seen, runner, oid), runner, oid), runner, oid)
    return _with_failure(seen, runner, oid)


def _with_copy(seen: TableObservation, runner: GroupRunner, oid: int) -> TableObservation:
    copying = runner.copier.progress.of(oid)
    if copying is None:
        return seen
    return replace(
        seen,
        copy_rows=copying.rows(),
        copy_bytes=copying.bytes(),
        copy_bytes_total=copying.bytes_total,
        copy_started_at=copying.began_at,
        copy_finished_at=copying.ended_at,
    )


def _with_verdict(seen: TableObservation, runner: GroupRunner, oid: int) -> TableObservation:
    verified = runner.verified(runner.tables[oid].source)
    if verified == NEVER:
        return seen
    return replace(
        seen,
        verdict=verified.verdict,
        verified_at=verified.at,
        identical_at=verified.identical_at,
        differences=verified.differences,
        verify_note=in_words(verified),
    )


def _with_waiting(seen: TableObservation, runner: GroupRunner, oid: int) -> TableObservation:
    waiting = runner.book.columns_waiting.get(oid, ())
    verified = runner.verified(runner.tables[oid].source)
    said = "" if verified == NEVER else in_words(verified) or ""
    note = f"columns that wait for the changes before them: {', '.join(waiting)}" if waiting else ""
    return replace(seen, verify_note="; ".join(filter(None, (said, note))) or None)


def _with_failure(seen: TableObservation, runner: GroupRunner, oid: int) -> TableObservation:
    life = runner.copier.schedule.failures.get(oid)
    if life is not None and seen.state is SyncState.ERRORED:
        return seen.after(life)
    if seen.state is not SyncState.ERRORED:
        return seen
    error = runner.states[oid].error
    if error is not None:
        return _with_error(seen, AqueduckError.from_text(error) or AqueduckError(error))
    failure = stream_error(runner, oid)
    return seen if failure is None else _with_error(seen, failure)


def _with_error(seen: TableObservation, error: AqueduckError) -> TableObservation:
    return replace(
        seen,
        state=SyncState.ERRORED,
        error_code=error.code,
        error_class=classify(error),
        error_message=str(error),
        consecutive_failures=max(1, seen.consecutive_failures),
    )


def _is_disabled(error: str | None) -> bool:
    return error is not None and isinstance(AqueduckError.from_text(error), TableDisabledError)
