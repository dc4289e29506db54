"""
Commit a batch: one lake transaction for all tables of a group, and its position.

A batch that the lake already has is skipped.  When a commit fails, the position read on a new
connection says whether it happened after all.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from aqueduck import faults
from aqueduck.changes import SegmentRef
from aqueduck.errors import LakeBusyError, LakeError
from aqueduck.lake.apply import apply_files, apply_fold, truncate_target
from aqueduck.lake.catalog import LakeSession
from aqueduck.lake.fold import folded
from aqueduck.lake.progress import Position, read_position, write_position
from aqueduck.lake.sql import LAKE, ident, literal
from aqueduck.schema import TableName, TableSchema, lsn_text

__all__ = ["BatchPlan", "RunPlan", "TablePlan", "commit_batch"]

TRIES = 5


@dataclass(frozen=True, slots=True)
class RunPlan:
    """One run of a table: its segments, to be folded here, or the files that tasks made of it."""

    schema: TableSchema
    truncate_first: bool
    segments: tuple[SegmentRef, ...]
    data: tuple[str, ...] = ()
    deletes: tuple[str, ...] = ()
    patches: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class TablePlan:
    target: TableName
    runs: tuple[RunPlan, ...]


@dataclass(frozen=True, slots=True)
class BatchPlan:
    position: Position
    tables: tuple[TablePlan, ...]


def commit_batch(session: LakeSession, plan: BatchPlan) -> bool:
    """Whether anything had to be written."""
    for attempt in range(TRIES):
        stored = read_position(session, plan.position.group)
        if stored is not None and stored.position >= plan.position.position:
            return False
        try:
            _transaction(session, plan, 0 if stored is None else stored.position)
        except LakeError as exc:
            session.reopen()
            stored = read_position(session, plan.position.group)
            if stored is not None and stored.position >= plan.position.position:
                return True  # the commit happened, only its answer was lost
            if isinstance(exc, LakeBusyError) and attempt + 1 < TRIES:
                continue
            raise
        return True
    raise AssertionError("unreachable")


def _transaction(session: LakeSession, plan: BatchPlan, before: int) -> None:
    with session.transaction():
        for table in plan.tables:
            for run in table.runs:
                _apply_run(session, table.target, run)
        write_position(session, plan.position)
        _set_lineage(session, plan.position, before)
        faults.point("lake.before_commit")
    faults.point("lake.after_commit")


def _apply_run(session: LakeSession, target: TableName, run: RunPlan) -> None:
    if run.truncate_first:
        truncate_target(session, target)
    if any(s.kind == "rows" for s in run.segments):
        with folded(session.con, run.segments, run.schema) as fold:
            apply_fold(session, target, run.schema, fold)
    apply_files(session, target, run.schema, data=run.data, deletes=run.deletes, patches=run.patches)


def _set_lineage(session: LakeSession, position: Position, before: int) -> None:
    """What the lake snapshot holds, for people who look for one by source time."""
    extra = {
        "group": position.group,
        "lsn_from": lsn_text(before),
        "lsn_to": lsn_text(position.position),
        "source_commit_time_us": position.commit_time_us,
    }
    message = f"{position.group} up to {lsn_text(position.position)}"
    session.execute(
        f"call {ident(LAKE)}.set_commit_message('aqueduck', {literal(message)}, extra_info => {literal(json.dumps(extra))})"
    )
