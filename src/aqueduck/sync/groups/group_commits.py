"""
Commit the batches of a group: which tables are applied and which are parked, in one lake transaction.

A table that cannot be written is parked in the same batch, so that the others continue.  The transaction itself is
in `lake.commit.commit`; `group` hands the batches over, and counts them.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass, replace

import structlog

from aqueduck.lake.commit.commit import BatchPlan, TableFailed, commit_batch, transact
from aqueduck.lake.fold.fold_tasks import FoldedTasks, plan_batch, segments_to_park
from aqueduck.lake.fold.projected import refuse_unclear
from aqueduck.lake.ledger.parking import copy_to_parking, sealing
from aqueduck.lake.ledger.progress import Position
from aqueduck.lake.ledger.table_states import TableState
from aqueduck.lake.target.evolve import same_columns, widen, wider_columns
from aqueduck.lake.target.places import check_place, notice_changes
from aqueduck.model.changes import SegmentRef
from aqueduck.model.errors import (
    CatalogUnreachableError,
    DataPathError,
    LakeBusyError,
    LakeError,
    ResyncNeededError,
)
from aqueduck.model.schema import TableName
from aqueduck.overview import metrics
from aqueduck.sync.copying.copy_journal import forget_journal
from aqueduck.sync.copying.copy_schedule import CopySchedule
from aqueduck.sync.tables.column_versions import ColumnVersions
from aqueduck.sync.tables.table_book import TableBook

__all__ = ["GroupCommits", "with_way_out"]

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class GroupCommits:
    """Commits the batches of one group."""

    book: TableBook
    versions: ColumnVersions
    schedule: CopySchedule
    data_path: str
    run_id: str
    """Part of the names of parked files."""
    resync_on_type_change: bool
    """Whether a table is re-copied if its changes cannot be applied."""

    def commit(self, tasks: FoldedTasks, end: Position) -> None:
        """Commit the batch; a table that fails is parked in the same batch, and the others continue.  The caller holds the commit lock."""
        before = self.book.states
        try:
            self._commit_what_can_be(tasks, end)
        except BaseException:  # which table failed is unknown: none of them stays isolated
            self.schedule.succeeded(self.book.take_back(before))
            raise

    def _commit_what_can_be(self, tasks: FoldedTasks, end: Position) -> None:
        changed: list[TableState] = []
        while True:
            refs = [self._numbered(segment) for segment in segments_to_park(tasks, self.book.states)]
            parked = copy_to_parking(
                self.data_path, self.book.group, self.run_id, refs, seal=sealing(self.book.lake)
            )
            plan = plan_batch(
                tasks,
                self.book.states,
                end,
                before=self.book.status.position,
                parked=parked,
                version=self.versions.of,
            )
            self.book.begin_parking(parked)
            try:
                plan, evolved = self._evolved(plan)
                plan = replace(plan, changed=(*changed, *evolved))
                commit_batch(self.book.lake, plan)
                self.book.written(evolved)
            except TableFailed as failed:
                changed.append(self._isolate(failed))
            else:
                break
        self.book.park(parked)

    def _numbered(self, segment: SegmentRef) -> SegmentRef:
        """Park the segments with the column numbers that the catalog has now: later they may no longer be known."""
        return replace(segment, schema_json=self.versions.of(segment).streamed.to_json())

    def _isolate(self, failed: TableFailed) -> TableState:
        """The state of a table that is no longer applied: it waits for a new copy, or until the cause of its error is removed."""
        state, error = self.book.states[failed.oid], failed.error
        again = isinstance(error, ResyncNeededError) and self.resync_on_type_change
        error = error if again else with_way_out(self.book, failed.oid, error)
        what = "table is re-copied" if again else "table failed"
        log.warning(what, group=self.book.group, table=state.source, error=str(error))
        isolated = self.book.isolate(failed.oid, None if again else error)
        if again:
            forget_journal(self.book.directory, failed.oid)
        else:
            self.schedule.failed(failed.oid, error)
        metrics.count_error(error.code, flow="sync", group=self.book.group)
        return isolated

    def _evolved(self, plan: BatchPlan) -> tuple[BatchPlan, list[TableState]]:
        """
        The plan after columns were widened, which happens first and in its own transaction; and the states of tables whose
        columns change.

        These states are written with the batch: until then, changes may have the columns of before.
        """
        tables, evolved = [], []
        for table in plan.tables:
            state, versions = self.book.states[table.oid], [run.schema for run in table.runs]
            old = state.schema
            if old is not None and any(not same_columns(old, version) for version in versions):
                try:
                    for before, after in itertools.pairwise([old, *versions]):
                        refuse_unclear(after, before)
                    notice_changes(self.book.lake)
                    check_place(
                        self.book.lake, state.target, state.target_uuid, TableName(old.schema, old.name)
                    )
                    wider, versions = wider_columns(old, versions)
                    if wider != old:
                        transact(
                            self.book.lake, functools.partial(widen, self.book.lake, state.target, old, wider)
                        )
                except (LakeBusyError, CatalogUnreachableError, DataPathError):
                    raise  # the table is not the cause
                except LakeError as exc:
                    raise TableFailed(table.oid, exc) from exc
                evolved.append(replace(state, schema=versions[-1]))
                old = wider
                log.info("columns changed", group=self.book.group, table=state.source)
            runs = tuple(replace(run, schema=v) for run, v in zip(table.runs, versions, strict=True))
            tables.append(replace(table, schema=old, runs=runs))
        return replace(plan, tables=tuple(tables)), evolved


def with_way_out(book: TableBook, oid: int, error: LakeError) -> LakeError:
    """The error for users; if a copy would help and none is made automatically, the hint says how to request one."""
    if not isinstance(error, ResyncNeededError):
        return error
    schema = book.tables[oid].schema
    hint = f"aqueduck tables resync -c FILE {TableName(schema.schema, schema.name)}"
    return ResyncNeededError(error.message, hint=hint, table=error.table)
