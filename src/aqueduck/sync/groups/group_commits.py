"""
Commit the batches of a group: which tables are applied and which are parked, one lake transaction, and the counters.

A table that cannot be written is parked in the same batch, so that the others continue.  The transaction itself is
in `lake.commit.commit`; `group` calls this module.
"""

from __future__ import annotations

import functools
import itertools
import time
from dataclasses import replace
from typing import TYPE_CHECKING

import structlog

from aqueduck.lake.commit.commit import BatchPlan, TableFailed, commit_batch, transact
from aqueduck.lake.fold.fold_tasks import FoldedTasks, plan_batch, remove_scratch, segments_to_park, settled
from aqueduck.lake.fold.projected import refuse_unclear
from aqueduck.lake.ledger.parking import copy_to_parking, sealing
from aqueduck.lake.ledger.progress import Position
from aqueduck.lake.ledger.table_states import TableState
from aqueduck.lake.target.evolve import same_columns, widen, wider_columns
from aqueduck.lake.target.places import check_place, notice_changes
from aqueduck.model.batches import LeftToDriver
from aqueduck.model.changes import SegmentRef
from aqueduck.model.errors import (
    CatalogUnreachableError,
    DataPathError,
    LakeBusyError,
    LakeError,
    ResyncNeededError,
)
from aqueduck.model.schema import TableName, lsn_text
from aqueduck.overview import metrics
from aqueduck.service.tracing import BatchTimes
from aqueduck.state_files.files import write_durable
from aqueduck.sync.copying.copy_journal import forget_journal

if TYPE_CHECKING:  # a group hands its batches over
    from aqueduck.sync.groups.group import GroupRunner

__all__ = ["commit_tasks", "with_way_out"]

log = structlog.get_logger()


def commit_tasks(runner: GroupRunner, tasks: FoldedTasks, position: int, time_us: int) -> None:
    """Commit all changes of a batch in one lake transaction, then report the position as durable."""
    paths = [s.path for task, _ in tasks for s in task.segments if s.path] if runner.on_commit else []
    end = Position(runner.group.name, position, time_us, runner.ready.system_identifier, runner.timeline)
    began, before = time.monotonic(), runner.status.position
    with runner.commit_lock:
        # The batch may still contain changes of a table that was removed.
        ours = [(task, outcome) for task, outcome in tasks if task.table_oid in runner.states]
        _commit_or_isolate(runner, ours, end)
        if runner.on_commit is not None:
            runner.on_commit(paths)
        write_durable(runner.directory / "durable", position)
        runner.book.count((task for task, _ in ours), position)
        runner.committed(position, time_us)
        runner.book.inform_tasks()
        runner.book.inform_of_layouts()
        outcomes = settled(ours, runner.states, before)
    seconds = time.monotonic() - began
    changes = sum(s.rows for task, _ in ours if not task.bucket for s in task.segments)
    metrics.observe_batch(
        runner.group.name,
        phase_seconds={"fold": runner.query.fold_seconds, "commit": seconds},
        commit_seconds=seconds,
        changes=changes,
        freshness_seconds=runner.status.freshness_seconds,
    )
    for _, outcome in outcomes:
        metrics.count_fold_task(runner.group.name, outcome if isinstance(outcome, LeftToDriver) else "files")
    if runner.on_traced is not None:
        runner.on_traced(
            BatchTimes(
                group=runner.group.name,
                ended=time.time(),
                fold_seconds=runner.query.fold_seconds,
                commit_seconds=seconds,
                source_commit=time_us / 1e6 if time_us else None,
                lsn_from=lsn_text(before),
                lsn_to=lsn_text(position),
                changes=changes,
                tables=len({task.table_oid for task, _ in ours}),
            )
        )
    remove_scratch(tasks, str(runner.book.scratch))


def _commit_or_isolate(runner: GroupRunner, tasks: FoldedTasks, end: Position) -> None:
    """Commit the batch; a table that fails is parked in the same batch, and the others continue."""
    before = runner.states
    try:
        _commit_what_can_be(runner, tasks, end)
    except BaseException:  # which table failed is unknown: none of them stays isolated
        runner.copier.schedule.succeeded(runner.book.take_back(before))
        raise


def _commit_what_can_be(runner: GroupRunner, tasks: FoldedTasks, end: Position) -> None:
    changed: list[TableState] = []
    while True:
        refs = [_numbered(runner, segment) for segment in segments_to_park(tasks, runner.states)]
        parked = copy_to_parking(
            runner.config.lake.data_path, runner.group.name, runner.run_id, refs, seal=sealing(runner.lake)
        )
        plan = plan_batch(
            tasks,
            runner.states,
            end,
            before=runner.status.position,
            parked=parked,
            version=runner.versions.of,
        )
        runner.book.begin_parking(parked)
        try:
            plan, evolved = _evolved(runner, plan)
            plan = replace(plan, changed=(*changed, *evolved))
            commit_batch(runner.lake, plan)
            runner.book.written(evolved)
        except TableFailed as failed:
            changed.append(_isolate(runner, failed))
        else:
            break
    runner.book.park(parked)


def _numbered(runner: GroupRunner, segment: SegmentRef) -> SegmentRef:
    """Park the segments with the column numbers that the catalog has now: later they may no longer be known."""
    return replace(segment, schema_json=runner.versions.of(segment).streamed.to_json())


def _isolate(runner: GroupRunner, failed: TableFailed) -> TableState:
    """The state of a table that is no longer applied: it waits for a new copy, or until the cause of its error is removed."""
    state, error = runner.states[failed.oid], failed.error
    again = isinstance(error, ResyncNeededError) and runner.group.on_type_change == "resync"
    error = error if again else with_way_out(runner, failed.oid, error)
    what = "table is re-copied" if again else "table failed"
    log.warning(what, group=runner.group.name, table=state.source, error=str(error))
    isolated = runner.book.isolate(failed.oid, None if again else error)
    if again:
        forget_journal(runner.directory, failed.oid)
    else:
        runner.copier.schedule.failed(failed.oid, error)
    metrics.count_error(error.code, flow="sync", group=runner.group.name)
    return isolated


def with_way_out(runner: GroupRunner, oid: int, error: LakeError) -> LakeError:
    """The error for users; if a copy would help and none is made automatically, the hint says how to request one."""
    if not isinstance(error, ResyncNeededError):
        return error
    schema = runner.tables[oid].schema
    hint = f"aqueduck tables resync -c FILE {TableName(schema.schema, schema.name)}"
    return ResyncNeededError(error.message, hint=hint, table=error.table)


def _evolved(runner: GroupRunner, plan: BatchPlan) -> tuple[BatchPlan, list[TableState]]:
    """
    The plan after columns were widened, which happens first and in its own transaction; and the states of tables whose
    columns change.

    These states are written with the batch: until then, changes may have the columns of before.
    """
    tables, evolved = [], []
    for table in plan.tables:
        state, versions = runner.states[table.oid], [run.schema for run in table.runs]
        old = state.schema
        if old is not None and any(not same_columns(old, version) for version in versions):
            try:
                for before, after in itertools.pairwise([old, *versions]):
                    refuse_unclear(after, before)
                notice_changes(runner.lake)
                check_place(runner.lake, state.target, state.target_uuid, TableName(old.schema, old.name))
                wider, versions = wider_columns(old, versions)
                if wider != old:
                    transact(runner.lake, functools.partial(widen, runner.lake, state.target, old, wider))
            except (LakeBusyError, CatalogUnreachableError, DataPathError):
                raise  # the table is not the cause
            except LakeError as exc:
                raise TableFailed(table.oid, exc) from exc
            evolved.append(replace(state, schema=versions[-1]))
            old = wider
            log.info("columns changed", group=runner.group.name, table=state.source)
        runs = tuple(replace(run, schema=v) for run, v in zip(table.runs, versions, strict=True))
        tables.append(replace(table, schema=old, runs=runs))
    return replace(plan, tables=tuple(tables)), evolved
