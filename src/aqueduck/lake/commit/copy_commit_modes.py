"""
Prepare a target for a finished copy, by mode: delete, end or keep the rows that the target has of the source.

A first copy is added as files, in every mode.  A later copy of the same table must not lose rows: `append` logs a
`resync` event and keeps all rows, `history` ends only versions that the copy does not confirm, and `soft_delete` marks
rows that the copy lacks.  This runs in the transaction of `copy_commit`.  `prepare_copy` and `can_resume` run before the
copy is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from aqueduck.lake.commit.commit import RunPlan, apply_run
from aqueduck.lake.fold.fold_modes import TIME
from aqueduck.lake.fold.segments import columns_of
from aqueduck.lake.ledger.table_states import TableState
from aqueduck.lake.session.catalog import LakeSession
from aqueduck.lake.session.encryption import parquet_rows
from aqueduck.lake.session.sql import ident, lake_table
from aqueduck.lake.target.apply import check_target, delete_keys, insert_rows, make_target
from aqueduck.lake.target.inlined import inlining
from aqueduck.lake.target.kept_columns import fit_columns
from aqueduck.lake.target.mode_rows import current_rows, end_rows, has_rows, log_resync, own_rows
from aqueduck.model.batches import plan_runs
from aqueduck.model.changes import SegmentRef
from aqueduck.model.columns.projection import other_rules
from aqueduck.model.errors import CopyDisturbedError, SchemaChangeError
from aqueduck.model.schema import Column, TableSchema
from aqueduck.model.visibility import Visibility

__all__ = ["SessionFiles", "can_resume", "clear_for_copy", "copied_keys", "prepare_copy"]


@dataclass(frozen=True, slots=True)
class SessionFiles:
    """The files that were read under one snapshot, and which transactions the snapshot shows."""

    visibility: Visibility
    paths: tuple[str, ...]
    time_us: int = 0
    """The server's time right before the snapshot was taken; 0 if it is not needed."""

    @property
    def position(self) -> int:
        return self.visibility.position


def prepare_copy(session: LakeSession, state: TableState, schema: TableSchema) -> None:
    """Inside a transaction: create the target, or fit it to these columns."""
    make_target(session, state.target, schema, state.mode)
    if not state.mode.plain:
        with inlining(session, state.target, schema):
            fit_columns(session, state.target, schema, state.mode)


def can_resume(
    session: LakeSession, state: TableState, schema: TableSchema, *, missing: bool = False
) -> bool:
    """
    Whether chunks of an earlier session can be used; `missing` says that the target does not exist yet.

    Sessions are merged by key and replace the target's rows.  This is not possible if rows of an earlier copy must stay.
    """
    if state.mode.plain:
        return True
    if missing or not state.mode.keeps:
        return bool(schema.key)
    return bool(schema.key) and not has_rows(session, state.target, state.mode)


def clear_for_copy(
    session: LakeSession,
    group: str,
    state: TableState,
    parked: Sequence[SegmentRef],
    sessions: Sequence[SessionFiles],
) -> bool:
    """Delete, end or keep the target's rows of the source, by mode; returns whether to add the copy's files."""
    target, schema, mode = state.target, state.schema, state.mode
    assert schema is not None
    check_target(session, target, schema, mode)
    if not mode.keeps:
        session.execute(
            f"delete from {lake_table(target)} as t where {own_rows(mode)}", table=target.qualified
        )
        return True
    if not has_rows(session, target, mode):
        return True
    if len(sessions) > 1:
        raise CopyDisturbedError("the table has rows of an earlier copy", table=schema.qualified)
    copy = sessions[-1]
    if mode.name == "append":
        _write_parked(session, group, state, parked, copy.visibility)
        log_resync(session, target, mode, copy.position, copy.time_us)
    elif mode.name == "soft_delete":
        _end_missing(session, state, schema, copy, [schema.columns[k] for k in schema.key_indexes])
        delete_keys(session, target, schema, copied_keys(schema, copy.paths), own_rows(mode))
    else:
        _commit_versions(session, group, state, schema, copy)
        return False
    return True


def copied_keys(schema: TableSchema, paths: Sequence[str]) -> str:
    """A relation with the keys (k0, …) of a copy."""
    keys = ", ".join(f"{ident(schema.columns[k].name)} as k{i}" for i, k in enumerate(schema.key_indexes))
    return f"(select {keys} from {_rows(schema, paths)})"


def _rows(schema: TableSchema, paths: Sequence[str]) -> str:
    """A relation with the rows of a copy; without rows there is no file."""
    if paths:
        return parquet_rows(paths)
    nothing = ", ".join(f"null as {ident(c.name)}" for c in schema.columns)
    return f"(select {nothing} where false)"


def _write_parked(
    session: LakeSession, group: str, state: TableState, parked: Sequence[SegmentRef], copy: Visibility
) -> None:
    """
    Write parked changes from before the copy to the log, so that the log has no gap.

    Changes whose columns no longer fit the target are left out; only the copy shows their effect.
    """
    [[copied]] = session.execute(
        f"select coalesce(max(_commit_lsn), 0) from {lake_table(state.target)} as t"
        f" where {own_rows(state.mode)} and _op in ('copy', 'resync')"
    )
    for run in plan_runs(parked, keep_truncated=[state.oid]):
        plan = RunPlan(columns_of(run.segments[0]), run.segments)
        if state.schema is not None and other_rules(state.schema, plan.schema):
            continue  # staged under other options, which may have let more data through
        try:
            check_target(session, state.target, plan.schema, state.mode)
        except SchemaChangeError:
            continue
        apply_run(
            session,
            state.target,
            plan,
            skip_before=copied,
            skip_from=copy,
            group=group,
            mode=state.mode,
        )


def _end_missing(
    session: LakeSession,
    state: TableState,
    schema: TableSchema,
    copy: SessionFiles,
    columns: Sequence[Column],
) -> None:
    """End the target's rows, at the time of the copy, that equal no row of the copy in these columns."""
    cells = ", ".join(f"t.{ident(c.name)} as k{i}" for i, c in enumerate(columns))
    session.execute(
        f"create or replace temp table aqueduck_ends as select {cells}, {TIME.format(copy.time_us)} as ended_at"
        f" from {lake_table(state.target)} as t anti join {_rows(schema, copy.paths)} as c on {_same(columns, 'c')}"
        f" where {current_rows(state.mode)}",
        doing="committing a copy",
        table=schema.qualified,
    )
    same = " and ".join(f"t.{ident(c.name)} is not distinct from k.k{i}" for i, c in enumerate(columns))
    end_rows(session, state.target, same, state.mode, "aqueduck_ends")


def _same(columns: Sequence[Column], other: str) -> str:
    # For joins, because in a subquery a name of an outer column could resolve to a column of the inner table.
    return " and ".join(f"t.{ident(c.name)} is not distinct from {other}.{ident(c.name)}" for c in columns)


def _commit_versions(
    session: LakeSession, group: str, state: TableState, schema: TableSchema, copy: SessionFiles
) -> None:
    """
    Insert rows of the copy that equal no open version, and end open versions that equal no row of the copy.

    Rows are compared by all cells, because a key may have two open versions: this happens if a partition was emptied and
    filled again and the stream had only the second step.
    """
    session.execute(
        f"create or replace temp table aqueduck_copied as select c.* from {_rows(schema, copy.paths)} as c"
        f" anti join {lake_table(state.target)} as t on {current_rows(state.mode)} and {_same(schema.columns, 'c')}",
        doing="committing a copy",
        table=schema.qualified,
    )
    _end_missing(session, state, schema, copy, schema.columns)
    insert_rows(session, state.target, "aqueduck_copied", group=group, mode=state.mode)
