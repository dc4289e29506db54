"""
Land a table: its copy, then what was parked meanwhile, inside one lake transaction.

A copy that was interrupted has files of several *sessions*, each read under a snapshot of its own.  To
get from one snapshot to the next, rows whose key was touched in between are removed, and what the next
session read takes their place: it read every row that has come or changed since, wherever it lies now.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from aqueduck.batches import plan_runs
from aqueduck.changes import SegmentRef
from aqueduck.errors import CopyDisturbedError, LakeBusyError
from aqueduck.lake.apply import add_files, delete_keys, empty_target
from aqueduck.lake.catalog import LakeSession
from aqueduck.lake.commit import RunPlan, apply_run
from aqueduck.lake.evolve import same_columns
from aqueduck.lake.failures import lake_errors
from aqueduck.lake.parking import forget_parked, parked_segments
from aqueduck.lake.segments import Scans, read_batches
from aqueduck.lake.sql import ident, string_list
from aqueduck.lake.table_states import TableState, write_state
from aqueduck.moments import Moment
from aqueduck.schema import TableSchema
from aqueduck.typemap import cast_sql

__all__ = ["SessionFiles", "land_copy", "replay_parked"]


@dataclass(frozen=True, slots=True)
class SessionFiles:
    """What was read under one snapshot, and what the snapshot shows."""

    moment: Moment
    paths: tuple[str, ...]


def land_copy(
    session: LakeSession,
    group: str,
    ready: TableState,
    schema: TableSchema,
    sessions: Sequence[SessionFiles],
) -> tuple[TableState, list[SegmentRef]]:
    """
    Inside a transaction: fill the target and mark the table as ready.

    The lake must have (parked) every change that was committed before the last session's position,
    if there are several, or if that moment is more than a position.  Returns the state, and
    what was parked, for `remove_parked_files` after the transaction.
    """
    parked = parked_segments(session, group, ready.oid)
    moment = sessions[-1].moment
    for segment in parked:
        known = TableSchema.from_json(segment.schema_json)
        if not same_columns(known, schema) and _has_unseen(segment, moment):
            raise CopyDisturbedError(
                "the table's columns changed while it was copied", table=schema.qualified
            )
    ready = replace(ready, schema=schema)
    empty_target(session, ready.target, schema)
    for before, now in zip([None, *sessions], sessions, strict=False):
        if before is not None:
            between = [s for s in parked if not _is_shown(s, before.moment)]
            _remove_touched(session, ready, schema, between, before.moment, now.moment)
            _remove_read(session, ready, schema, now.paths)
        add_files(session, ready.target, now.paths)
    return replay_parked(session, group, ready, parked, moment=moment), parked


def replay_parked(
    session: LakeSession,
    group: str,
    ready: TableState,
    parked: Sequence[SegmentRef],
    version: Callable[[SegmentRef], TableSchema] = lambda s: TableSchema.from_json(s.schema_json),
    *,
    moment: Moment | None = None,
) -> TableState:
    """
    Inside a transaction: apply what was parked after the copy, and mark the table as ready.

    `moment` is what the copy shows, by default everything before its position.  `version` tells the columns of a
    segment.  Returns the state with the columns that the target has then.
    """
    current = ready.schema
    shown = moment or Moment(ready.copy_position)
    for run in plan_runs(segment for segment in parked if not _is_shown(segment, shown)):
        plan = RunPlan(version(run.segments[0]), run.truncate_first, run.segments)
        current = apply_run(session, ready.target, plan, current=current, skip_before=shown, group=group)
    forget_parked(session, group, ready.oid)
    ready = replace(ready, schema=current)
    write_state(session, group, [ready])
    return ready


def _is_shown(segment: SegmentRef, moment: Moment) -> bool:
    """Whether a copy surely has all of a segment's changes."""
    if segment.kind == "truncate" and segment.commit_lsn:
        return moment.shows(segment.commit_lsn, segment.xid)
    return moment.xmax is None and segment.last_lsn < moment.position


def _has_unseen(segment: SegmentRef, moment: Moment) -> bool:
    """Whether a segment has changes that a copy does not have."""
    if _is_shown(segment, moment):
        return False
    if segment.kind == "truncate" or moment.xmax is None:
        return True
    return any(batch.num_rows for batch in read_batches([segment.path], ["_lsn"], moment))


def _remove_touched(
    session: LakeSession,
    state: TableState,
    schema: TableSchema,
    segments: Sequence[SegmentRef],
    since: Moment,
    before: Moment,
) -> None:
    """Rows whose key, old or new, appears in a change that was committed in between."""
    rows = [s for s in segments if s.kind == "rows"]
    if not rows:
        return
    if any(_keys_differ(TableSchema.from_json(s.schema_json), schema) for s in rows):
        # A journal is void after DDL; this one was made before the change was seen.
        raise LakeBusyError("the table's key changed while it was copied", table=state.target.qualified)
    scans = Scans(session.con, rows, since, before)
    key = schema.key_indexes
    columns = schema.columns
    images = []
    try:
        with lake_errors("landing a copy", table=state.target.qualified):
            for image in "no":
                scan = scans.scan([f"{image}{k}" for k in key])
                typed = (f"{cast_sql(columns[k], f'{image}{k}')} as k{i}" for i, k in enumerate(key))
                known = " and ".join(f"{image}{k} is not null" for k in key)
                images.append(f"select {', '.join(typed)} from {scan} where {known}")
            session.con.execute(f"create or replace temp table aqueduck_touched as {' union '.join(images)}")
    finally:
        scans.close()
    delete_keys(session, state.target, schema, "aqueduck_touched")


def _keys_differ(one: TableSchema, other: TableSchema) -> bool:
    return [(i, one.columns[i]) for i in one.key_indexes] != [
        (i, other.columns[i]) for i in other.key_indexes
    ]


def _remove_read(session: LakeSession, state: TableState, schema: TableSchema, paths: Sequence[str]) -> None:
    """Rows that the next session read again: what it has is newer, or the same."""
    if not paths:
        return
    keys = ", ".join(f"{ident(schema.columns[k].name)} as k{i}" for i, k in enumerate(schema.key_indexes))
    delete_keys(session, state.target, schema, f"(select {keys} from read_parquet({string_list(paths)}))")
