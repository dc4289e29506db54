"""
Commit a batch: one lake transaction for all tables of a group and its position.

A batch that the lake already has is skipped.  If a commit fails, the position is read on a new connection
to see whether the commit took effect.  If one table cannot be written, also not on a new connection,
`TableFailed` names it, so that the batch can be planned again without it.
"""

from __future__ import annotations

import contextlib
import json
import random
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import structlog

from aqueduck import faults
from aqueduck.lake.direct.batch import commit_directly
from aqueduck.lake.fold.fold import folded
from aqueduck.lake.fold.fold_modes import fold_of, lacks_key
from aqueduck.lake.fold.projected import refuse_unclear
from aqueduck.lake.ledger.parking import record_parked
from aqueduck.lake.ledger.progress import Position, move_position, progress_table, read_position
from aqueduck.lake.ledger.table_states import TableState, write_state
from aqueduck.lake.session.catalog import LakeSession
from aqueduck.lake.session.sql import LAKE, ident, literal
from aqueduck.lake.target.apply import apply_files, apply_fold, check_target
from aqueduck.lake.target.evolve import evolve, plan_changes, same_columns
from aqueduck.lake.target.inlined import flush_where_due, inlining
from aqueduck.lake.target.kept_columns import keep_columns
from aqueduck.lake.target.layout_rows import discard_inserted
from aqueduck.lake.target.layouts import mend_partition_values
from aqueduck.lake.target.mode_rows import truncate_target
from aqueduck.lake.target.places import (
    check_place,
    file_bytes,
    know_places,
    notice_changes,
    refuse_hidden_rows,
)
from aqueduck.lake.upkeep.statistics import settle_statistics
from aqueduck.model.changes import SegmentRef
from aqueduck.model.errors import (
    CatalogUnreachableError,
    DataPathError,
    LakeBusyError,
    LakeError,
    LakeWriteError,
    SchemaChangeError,
)
from aqueduck.model.modes import UPSERT, TableMode
from aqueduck.model.retries import retried
from aqueduck.model.schema import TableName, TableSchema, lsn_text
from aqueduck.model.visibility import Visibility, visibility_of

__all__ = [
    "BatchPlan",
    "RunPlan",
    "TableFailed",
    "TablePlan",
    "apply_run",
    "commit_batch",
    "set_lineage",
    "transact",
]

log = structlog.get_logger()

TRIES = 5
PAUSE_SECONDS = 0.2
MANY_TABLES = 8
"""A batch with so many tables is applied in one thread, except for the large ones."""
SMALL_BYTES = 16 << 20

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RunPlan:
    """One run of a table: the segments to fold here, or the files that Spark tasks folded them into."""

    schema: TableSchema
    segments: tuple[SegmentRef, ...]
    data: tuple[str, ...] = ()
    deletes: tuple[str, ...] = ()
    patches: tuple[str, ...] = ()
    ends: tuple[str, ...] = ()

    def truncate(
        self, skip_before: int | Visibility, skip_from: int | Visibility | None
    ) -> SegmentRef | None:
        """The truncate that precedes the rows, unless `skip_before` or `skip_from` leaves it out."""
        first = self.segments[0] if self.segments else None
        if first is None or first.kind != "truncate":
            return None
        if visibility_of(skip_before).shows(first.commit_lsn, first.xid):
            return None
        return (
            first
            if skip_from is None or visibility_of(skip_from).shows(first.commit_lsn, first.xid)
            else None
        )


@dataclass(frozen=True, slots=True)
class TablePlan:
    oid: int
    target: TableName
    runs: tuple[RunPlan, ...]
    skip_before: int = 0
    """Changes committed before this position are part of the table's copy."""
    schema: TableSchema | None = None
    """The source columns that the target was made for; a run with other columns alters it."""
    mode: TableMode = UPSERT
    target_uuid: str | None = None


@dataclass(frozen=True, slots=True)
class BatchPlan:
    position: Position
    tables: tuple[TablePlan, ...]
    parked: tuple[SegmentRef, ...] = ()
    """Segments of tables that are not ready, already copied to the parking directory."""
    changed: tuple[TableState, ...] = ()
    """Table states to write together with the batch."""
    start: int | None = None
    """The position at which the batch begins; None accepts any position of the lake."""


class TableFailed(Exception):  # noqa: N818 - a finding about one table, not one of our error codes
    """The lake can be written, but one table cannot; `error` says why."""

    def __init__(self, oid: int, error: LakeError) -> None:
        super().__init__(str(error))
        self.oid = oid
        self.error = error


def commit_batch(session: LakeSession, plan: BatchPlan) -> bool:
    """Commit the batch; returns False if the lake already had it."""
    suspect: int | None = None

    def is_final(exc: Exception) -> bool:
        """Retry a failed table once on a new connection, because the connection may have been the cause."""
        nonlocal suspect
        if not isinstance(exc, TableFailed):
            return False
        before, suspect = suspect, exc.oid
        return exc.oid == before

    return retried(
        lambda: _try_batch(session, plan),
        _pauses(),
        time.sleep,
        on=(LakeBusyError, TableFailed),
        failed=is_final,
    )


def _try_batch(session: LakeSession, plan: BatchPlan) -> bool:
    stored = _stored(session, plan.position.group)
    if _reaches(stored, plan.position):
        return False
    targets = [table.target for table in plan.tables]
    inlined = dict(session.memory.inlined_rows)
    try:
        settle_statistics(session, targets, session.memory.settled)
        _commit(session, plan, _start(plan, stored))
    except (LakeError, TableFailed):
        session.reopen()
        session.memory.inlined_rows = inlined
        if _reaches(_stored(session, plan.position.group), plan.position):
            return True  # the commit took effect; only the reply was lost
        raise
    with contextlib.suppress(LakeError):  # the next batch repeats it before its commit
        settle_statistics(session, targets, session.memory.settled)
        mend_partition_values(session, session.memory.misfiled)
    discard_inserted(session)
    flush_where_due(session, [progress_table(plan.position.group), *targets])
    return True


def transact(
    session: LakeSession, work: Callable[[], T], *, happened: Callable[[T], bool] | None = None
) -> T:
    """
    Run `work` in one lake transaction, and retry it a few times after a conflict.

    `work` must have no effect outside the transaction.  Conflicts come from other services that write to the same lake.
    If the commit fails for another reason, `happened` is called on a new connection to see whether it took effect.
    """

    def wait(seconds: float) -> None:
        session.reopen()
        time.sleep(seconds)

    return retried(lambda: _transact(session, work, happened), _pauses(), wait, on=LakeBusyError)


def _transact(session: LakeSession, work: Callable[[], T], happened: Callable[[T], bool] | None) -> T:
    done: list[T] = []
    try:
        with session.transaction():
            notice_changes(session)
            done.append(work())
    except LakeBusyError:
        raise
    except LakeError:
        if not done or happened is None:
            raise
        session.reopen()
        if not happened(done[0]):
            raise
    return done[0]


def _pauses() -> Iterator[float]:
    """Growing delays, the first one zero, with jitter, so that two services do not retry in lockstep."""
    return (random.uniform(0, PAUSE_SECONDS * done) for done in range(TRIES - 1))


def _reaches(stored: int | None, position: Position) -> bool:
    return stored is not None and stored >= position.position


def _stored(session: LakeSession, group: str) -> int | None:
    """The group's position; read once per session, because `move_position` detects that it has changed."""
    if group not in session.memory.positions:
        found = read_position(session, group)
        if found is None:
            return None
        session.memory.positions[group] = found.position
    return session.memory.positions[group]


def _start(plan: BatchPlan, stored: int | None) -> int:
    """The position that the batch continues from; raises if it is not the lake's position."""
    if stored is None:
        raise LakeWriteError(
            f"the lake has no position of group {plan.position.group}", hint="run: aqueduck init"
        )
    if plan.start is not None and plan.start != stored:
        raise LakeBusyError("this batch does not begin at the group's position in the lake")
    return stored


def _commit(session: LakeSession, plan: BatchPlan, before: int) -> None:
    """Commit the batch in the catalog, or through the engine if it is more than a few rows of plain tables."""
    position = plan.position
    if not _in_catalog(session, plan, before):
        _transaction(session, plan, before)
    session.memory.positions[position.group] = position.position
    inlined, progress = session.memory.inlined_rows, progress_table(position.group)
    inlined[progress] = inlined.get(progress, 0) + 1


def _in_catalog(session: LakeSession, plan: BatchPlan, before: int) -> bool:
    """
    Commit the batch in the catalog, if that is possible.

    An error may concern one table: the engine's way finds out which.  If the commit took effect nonetheless, the group's
    position shows it to the engine's way.
    """
    position = plan.position
    message = f"{position.group} up to {lsn_text(position.position)}"
    try:
        return commit_directly(session, plan, before, message, _lineage(position, before))
    except (LakeBusyError, CatalogUnreachableError, DataPathError):
        raise  # not specific to a table
    except LakeError as exc:
        log.warning("batch could not be written directly", group=position.group, error=str(exc))
        session.reopen()
        return False


def _transaction(session: LakeSession, plan: BatchPlan, before: int) -> None:
    position = plan.position
    large = _large_targets(session, plan)
    with session.one_thread(apply=large is not None), session.transaction():
        if not move_position(session, position, start=before):
            raise LakeBusyError("the group's position in the lake moved while this batch was prepared")
        notice_changes(session)
        know_places(session, [table.target for table in plan.tables])
        for table in plan.tables:
            with session.one_thread(apply=large is not None and table.target not in large):
                _apply_table(session, table, position.group)
        record_parked(session, position.group, position.position, plan.parked)
        write_state(session, position.group, plan.changed)
        set_lineage(
            session, f"{position.group} up to {lsn_text(position.position)}", _lineage(position, before)
        )
        faults.point("lake.before_commit")
    faults.point("lake.after_commit")


def _large_targets(session: LakeSession, plan: BatchPlan) -> set[TableName] | None:
    """The targets whose work all threads should share; None if that is best for all of them."""
    if len(plan.tables) < MANY_TABLES:
        return None
    sizes = file_bytes(session, [table.target for table in plan.tables])
    busy = {t.target for t in plan.tables if sum(s.bytes for r in t.runs for s in r.segments) > SMALL_BYTES}
    return busy | {target for target, size in sizes.items() if size > SMALL_BYTES}


def _apply_table(session: LakeSession, table: TablePlan, group: str) -> None:
    try:
        current = table.schema
        source = None if current is None else TableName(current.schema, current.name)
        check_place(session, table.target, table.target_uuid, source)
        refuse_hidden_rows(session, table.target, source)
        for run in table.runs:
            current = apply_run(
                session,
                table.target,
                run,
                current=current,
                skip_before=table.skip_before,
                group=group,
                mode=table.mode,
            )
    except (LakeBusyError, CatalogUnreachableError, DataPathError):
        raise  # not specific to this table
    except LakeError as exc:
        raise TableFailed(table.oid, exc) from exc


def apply_run(
    session: LakeSession,
    target: TableName,
    run: RunPlan,
    *,
    current: TableSchema | None = None,
    skip_before: int | Visibility = 0,
    skip_from: int | Visibility | None = None,
    group: str | None = None,
    mode: TableMode = UPSERT,
) -> TableSchema:
    """
    Apply one run inside an open transaction and return its columns.

    Changes committed before `skip_before`, or from `skip_from` on, are left out.  The target has the columns of
    `current` before the call and those of the run afterwards.
    """
    with inlining(session, target, current, run.schema):
        refuse_unclear(run.schema, current)
        if lacks_key(mode, run.schema, run.segments):
            raise SchemaChangeError(
                "the source table no longer has a key, so its rows cannot be identified",
                hint="add a primary key, then: aqueduck tables resync -c FILE"
                f" {TableName(run.schema.schema, run.schema.name)}",
                table=run.schema.qualified,
            )
        check_target(session, target, current or run.schema, mode)
        if current is not None and not same_columns(current, run.schema):
            steps = plan_changes(current, run.schema)
            evolve(session, target, steps) if mode.plain else keep_columns(session, target, steps, mode)
        truncate = run.truncate(skip_before, skip_from)
        if truncate is not None:
            truncate_target(session, target, mode, truncate)
        if any(s.kind == "rows" for s in run.segments):
            how = fold_of(mode)
            with folded(
                session.con, run.segments, run.schema, skip_before=skip_before, skip_from=skip_from, how=how
            ) as fold:
                apply_fold(session, target, run.schema, fold, group=group, mode=mode)
        files = {"data": run.data, "deletes": run.deletes, "patches": run.patches, "ends": run.ends}
        apply_files(session, target, run.schema, **files, group=group, mode=mode)
    return run.schema


def _lineage(position: Position, before: int) -> dict[str, Any]:
    return {
        "group": position.group,
        "lsn_from": lsn_text(before),
        "lsn_to": lsn_text(position.position),
        "source_commit_time_us": position.commit_time_us,
    }


def set_lineage(session: LakeSession, message: str, extra: Mapping[str, Any]) -> None:
    """Record in the commit message what the lake snapshot contains, so that it can be found by source time."""
    session.execute(
        f"call {ident(LAKE)}.set_commit_message('aqueduck', {literal(message)},"
        f" extra_info => {literal(json.dumps(extra))})"
    )
