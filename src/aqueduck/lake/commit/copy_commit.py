"""
Commit a finished copy and then the table's parked changes, in one lake transaction.

A copy that was interrupted has files of several *sessions*, each read under its own snapshot.  Between
two sessions, rows whose key was touched in between are deleted and then replaced by the rows of the next
session, which read every row that was added or changed since, wherever it is stored now.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from aqueduck.lake.commit.commit import RunPlan, apply_run
from aqueduck.lake.commit.copy_commit_modes import SessionFiles, clear_for_copy, copied_keys
from aqueduck.lake.fold.projected import change_view
from aqueduck.lake.fold.segments import Scans, columns_of, read_batches
from aqueduck.lake.ledger.parking import forget_parked
from aqueduck.lake.ledger.table_states import TableState
from aqueduck.lake.session.catalog import LakeSession
from aqueduck.lake.session.failures import lake_errors
from aqueduck.lake.target.apply import add_files, delete_keys, empty_target, make_target
from aqueduck.lake.target.evolve import same_columns
from aqueduck.lake.target.inlined import inlining
from aqueduck.lake.target.mode_rows import own_rows
from aqueduck.lake.target.places import check_place, refuse_hidden_rows
from aqueduck.model.batches import plan_runs
from aqueduck.model.changes import SegmentRef
from aqueduck.model.columns.typemap import cast_sql
from aqueduck.model.errors import CopyDisturbedError, LakeBusyError
from aqueduck.model.schema import TableName, TableSchema
from aqueduck.model.visibility import Visibility

__all__ = ["commit_copy", "replay_parked"]


def commit_copy(
    session: LakeSession,
    group: str,
    ready: TableState,
    schema: TableSchema,
    sessions: Sequence[SessionFiles],
    parked: Sequence[SegmentRef],
    *,
    target_uuid: str | None = None,
    anew: bool = False,
) -> TableState:
    """
    Inside a transaction: fill the target; returns the state to write.

    An existing target must have `target_uuid`: see `check_place`; with `anew`, it is replaced by a new table.  If there
    are several sessions, or if the last one's visibility is not only a position, the lake must have (parked) every change
    that was committed before the last session's position.
    """
    visibility = sessions[-1].visibility
    for segment in parked:
        known = columns_of(segment)
        if not same_columns(schema, known) and _has_unseen(segment, visibility):
            raise CopyDisturbedError(
                "the table's columns changed while it was copied", table=schema.qualified
            )
    name = TableName(schema.schema, schema.name)
    there = check_place(session, ready.target, target_uuid, name, may_be_missing=True)
    if not ready.mode.plain:  # other rows stay
        refuse_hidden_rows(session, ready.target, name)
    filled = replace(ready, schema=schema, target_uuid=target_uuid if there else None)
    with inlining(session, filled.target, schema):
        make_target(session, filled.target, schema, filled.mode)
        if filled.mode.plain:
            if empty_target(session, filled.target, schema, anew=anew):
                filled = replace(filled, target_uuid=None)
        elif not clear_for_copy(session, group, filled, parked, sessions):
            return replay_parked(session, group, filled, parked, visibility=visibility)
        for before, now in zip([None, *sessions], sessions, strict=False):
            if before is not None:
                between = [s for s in parked if not before.visibility.shows_all(s)]
                _remove_touched(session, filled, schema, between, before.visibility, now.visibility)
                _remove_read(session, filled, schema, now.paths)
            add_files(session, filled.target, now.paths, filled.mode)
        return replay_parked(session, group, filled, parked, visibility=visibility)


def replay_parked(
    session: LakeSession,
    group: str,
    ready: TableState,
    parked: Sequence[SegmentRef],
    *,
    visibility: Visibility | None = None,
) -> TableState:
    """
    Inside a transaction: apply the parked changes that the copy does not show.

    `visibility` defines what the copy shows, by default everything before its position.  Returns the state to write, with
    the columns that the target has.
    """
    current = ready.schema
    shown = visibility or Visibility(ready.copy_position)
    left = [segment for segment in parked if not shown.shows_all(segment)]
    for run in plan_runs(left, keep_truncated=[ready.oid] if ready.mode.keeps else ()):
        plan = RunPlan(columns_of(run.segments[0]), run.segments)
        current = apply_run(
            session,
            ready.target,
            plan,
            current=current,
            skip_before=shown,
            group=group,
            mode=ready.mode,
        )
    if parked:
        forget_parked(session, group, ready.oid)
    return replace(ready, schema=current)


def _has_unseen(segment: SegmentRef, visibility: Visibility) -> bool:
    """Whether a segment has changes that a copy lacks."""
    if visibility.shows_all(segment):
        return False
    if segment.kind == "truncate" or visibility.xmax is None:
        return True
    return any(batch.num_rows for batch in read_batches([segment.path], ["_lsn"], visibility))


def _remove_touched(
    session: LakeSession,
    state: TableState,
    schema: TableSchema,
    segments: Sequence[SegmentRef],
    since: Visibility,
    before: Visibility,
) -> None:
    """Delete rows whose key is the old or new key of a change that was committed in between."""
    rows = [s for s in segments if s.kind == "rows"]
    if not rows:
        return
    if any(_keys_differ(columns_of(s), schema) for s in rows):
        # DDL makes a copy's journal void; this journal is from before the change was noticed.
        raise LakeBusyError("the table's key changed while it was copied", table=state.target.qualified)
    for version in dict.fromkeys(s.schema_json for s in rows):
        same = [s for s in rows if s.schema_json == version]
        view = change_view(session.con, columns_of(same[0]), same, all_keys=True)
        scans = Scans(session.con, same, since, before, view)
        try:
            _record_touched(session, state, schema, scans)
        finally:
            scans.close()
        delete_keys(session, state.target, schema, "aqueduck_touched", own_rows(state.mode))


def _record_touched(session: LakeSession, state: TableState, schema: TableSchema, scans: Scans) -> None:
    key, columns = schema.key_indexes, schema.columns
    images = []
    with lake_errors("committing a copy", table=state.target.qualified):
        for image in "no":
            scan = scans.scan([f"{image}{k}" for k in key])
            typed = (f"{cast_sql(columns[k], f'{image}{k}')} as k{i}" for i, k in enumerate(key))
            known = " and ".join(f"{image}{k} is not null" for k in key)
            images.append(f"select {', '.join(typed)} from {scan} where {known}")
        session.con.execute(f"create or replace temp table aqueduck_touched as {' union '.join(images)}")


def _keys_differ(one: TableSchema, other: TableSchema) -> bool:
    return [(i, one.columns[i]) for i in one.key_indexes] != [
        (i, other.columns[i]) for i in other.key_indexes
    ]


def _remove_read(session: LakeSession, state: TableState, schema: TableSchema, paths: Sequence[str]) -> None:
    """Delete rows that the next session read again, because its rows are newer or the same."""
    if not paths:
        return
    delete_keys(session, state.target, schema, copied_keys(schema, paths), own_rows(state.mode))
