"""
What the service knows of the tables of one group: only `TableBook` has it, and only its methods change it.

A table is added (`add`), changes its state (`write`, `written`, `isolate`, `mark_ready`), and is removed (`forget`).  Code
that changes a table's state holds the commit lock.  Mappings are replaced, never changed: a reader keeps the version that
it has.  The state files from which the capture and the tasks learn of the tables are written here, too.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeVar

from aqueduck.lake.commit.commit import transact
from aqueduck.lake.fold.fold_tasks import skips_of
from aqueduck.lake.ledger.parking import parked_totals
from aqueduck.lake.ledger.table_states import TableState, read_states, write_state
from aqueduck.lake.session.catalog import LakeSession
from aqueduck.lake.session.directories import read_directories
from aqueduck.lake.target.places import know_places, notice_changes, task_layout
from aqueduck.model.batches import FoldTask
from aqueduck.model.changes import SegmentRef
from aqueduck.model.errors import AqueduckError, CopyDisturbedError, TableDisabledError
from aqueduck.model.layout import TableLayout
from aqueduck.model.schema import TableName
from aqueduck.state_files.files import write_skips, write_tables
from aqueduck.sync.copying.copy_journal import forget_journal
from aqueduck.sync.status import GroupStatus, Parked, RequestsDone, TableCounts
from aqueduck.sync.tables.prepare_tables import PreparedTable

__all__ = ["TableBook"]

_V = TypeVar("_V")


class TableBook:
    """The tables of one group, by OID; those without an OID by source name."""

    def __init__(
        self, status: GroupStatus, lake: LakeSession, commit_lock: threading.Lock, directory: Path
    ) -> None:
        self.group = status.group
        self.status = status
        """The group's status; only this class changes its counts of tables."""
        self.lake = lake
        self.commit_lock = commit_lock
        self.directory = directory
        self.tables: Mapping[int, PreparedTable] = {}
        """The tables that the group follows."""
        self.states: Mapping[int, TableState] = {}
        """Their states in the lake."""
        self.parked: Mapping[int, Parked] = {}
        """How much is parked of tables that are not ready."""
        self.refused: Mapping[str, AqueduckError] = {}
        """Tables that could not be added."""
        self.strays: Mapping[str, AqueduckError] = {}
        """Tables that are followed although the registry does not know them."""
        self.unsent: Mapping[int, AqueduckError] = {}
        """Tables that a user's publication does not send any more."""
        self.columns_waiting: Mapping[int, tuple[str, ...]] = {}
        """Columns that differ from the source's until the lake has the earlier changes, as `column_watch` found."""
        self.disabled: frozenset[int] = frozenset()
        """Tables whose changes stay parked until a person enables them."""
        self._may_have_parked: set[int] = set()
        """Tables whose changes may be parked, including those whose commit had an unknown result."""
        self._unsettled: set[int] = set()
        """Tables that were published while transactions may have been open, whose earlier changes are in no stream."""
        self._truncated: set[int] = set()
        self._left: set[int] = set()
        self._layouts: dict[int, TableLayout] = {}
        """The layouts that the tasks have."""
        self._requests_done: dict[int, RequestsDone] = {}
        self._rows_before: dict[int, int] = {}

    def begin(self, tables: Mapping[int, PreparedTable], refused: Mapping[str, AqueduckError]) -> None:
        """Begin with the tables of a prepared group, in their states in the lake."""
        known = read_states(self.lake, self.group)
        totals = parked_totals(self.lake, self.group)
        self.parked = {oid: Parked(*total) for oid, total in totals.items()}
        self._may_have_parked = set(totals)
        self.refused = dict(refused)
        self.tables = dict(tables)
        self.states = {oid: self._as_found(known[oid]) for oid in tables}
        self._unsettled = {oid for oid, state in self.states.items() if not state.ready}
        self.status.tables.update((oid, TableCounts()) for oid in tables)

    def _as_found(self, state: TableState) -> TableState:
        if not state.ready:
            return state
        # The service may have crashed after the commit of a copy, before its journal was removed.
        forget_journal(self.directory, state.oid)
        if state.oid not in self.parked:
            return state
        # Or before a state was written after which changes were parked.
        why = CopyDisturbedError("parked changes are still to be applied", table=state.source)
        return replace(state, ready=False, error=str(why))

    # -- tables that are added and removed

    def add(self, table: PreparedTable, state: TableState) -> None:
        """Follow one more table."""
        self._assert_locked()
        self.accept(table.source)
        self.tables = {**self.tables, state.oid: table}
        self.states = {**self.states, state.oid: state}
        self.status.tables.setdefault(state.oid, TableCounts())
        self._unsettled.add(state.oid)

    def forget(self, oids: Collection[int]) -> None:
        """Stop following these tables, and inform the capture and the tasks."""
        self._assert_locked()
        self.tables = _without(self.tables, oids)
        self.states = _without(self.states, oids)
        self.parked = _without(self.parked, oids)
        self.unsent = _without(self.unsent, oids)
        self.disabled -= set(oids)
        self._truncated.difference_update(oids)
        self._may_have_parked.difference_update(oids)
        self._left.update(oids)
        for oid in oids:
            self.status.tables.pop(oid, None)
        self.inform_capture()
        self.inform_tasks()

    def rename(self, oid: int, name: TableName) -> None:
        """The source table was renamed or moved to another schema; its target keeps its name."""
        self._assert_locked()
        table = self.tables[oid]
        schema = replace(table.schema, schema=name.schema, name=name.name)
        self.tables = {**self.tables, oid: replace(table, schema=schema)}
        self.inform_capture()

    def refuse(self, errors: Mapping[str, AqueduckError]) -> None:
        """Record tables that cannot be added, with their errors."""
        self.refused = {**self.refused, **errors}

    def accept(self, *sources: str) -> None:
        """Forget refused tables that are not wanted any more, or that could be added."""
        self.refused = {source: error for source, error in self.refused.items() if source not in sources}

    def record_strays(self, strays: Mapping[str, AqueduckError]) -> None:
        """Record all tables that are followed although the registry does not know them."""
        self.strays = dict(strays)

    # -- their states

    def is_current(self, state: TableState) -> bool:
        """Whether the table still has this state; otherwise work that was begun for it does not count."""
        return self.states.get(state.oid) is state

    def is_ready(self, oid: int) -> bool:
        """Whether the table is followed and its changes are applied."""
        return oid in self.states and self.states[oid].ready

    def written(self, states: Iterable[TableState]) -> None:
        """The lake has these states now."""
        self._assert_locked()
        self.states = {**self.states, **{state.oid: state for state in states}}

    def write(self, state: TableState) -> None:
        """Write a table's state outside of any batch, and inform the tasks."""
        self._assert_locked()
        transact(self.lake, lambda: write_state(self.lake, self.group, [state]))
        self.written([state])
        self.inform_tasks()

    def await_copy(self, oid: int) -> None:
        """Copy the table again; its changes are parked from the next batch on."""
        self.write(replace(self.states[oid], ready=False, copy_position=0, error=None))

    def fail(self, oid: int, error: AqueduckError) -> None:
        """The table cannot be written; its changes are parked from the next batch on."""
        self.write(replace(self.states[oid], ready=False, error=str(error)))

    def disable(self, oid: int) -> None:
        """Park the table's changes, even after a copy that is running now."""
        self._assert_locked()
        self.disabled |= {oid}
        if self.states[oid].ready:
            self.write(self.unless_disabled(self.states[oid]))

    def enable(self, oid: int) -> None:
        """The table is ready again, with its parked changes applied."""
        self._assert_locked()
        self.disabled -= {oid}

    def unless_disabled(self, state: TableState) -> TableState:
        """A ready state, unless the table is disabled."""
        if state.oid not in self.disabled:
            return state
        why = TableDisabledError(f"{state.source} is disabled")
        return replace(state, ready=False, error=str(why))

    def isolate(self, oid: int, error: AqueduckError | None) -> TableState:
        """
        Stop applying the table from the batch on that is being committed; that batch writes the returned state.

        Without an error, the table is re-copied.
        """
        self._assert_locked()
        state = self.states[oid]
        if error is None:
            isolated = replace(state, ready=False, copy_position=0, error=None)
        else:
            isolated = replace(state, ready=False, error=str(error))
        self.states = {**self.states, oid: isolated}
        return isolated

    def take_back(self, before: Mapping[int, TableState]) -> list[int]:
        """The batch failed: tables that it isolated get the states in `before` again; returns these tables."""
        self._assert_locked()
        isolated = {oid: s for oid, s in before.items() if s.ready and not self.states[oid].ready}
        self.states = {**self.states, **isolated}
        return list(isolated)

    def mark_ready(self, copied: Mapping[int, int]) -> None:
        """The lake has all changes of these tables, including the rows that their copies wrote."""
        self._assert_locked()
        now = datetime.now(UTC)
        self.parked = _without(self.parked, copied)
        self._may_have_parked.difference_update(copied)
        for oid, rows in copied.items():
            counts = self.status.tables.setdefault(oid, TableCounts())
            counts.copied += rows
            applied = counts.applied[0] if counts.applied else 0
            counts.applied = (max(self.states[oid].copy_position, applied), now)
        self.status.last_commit_at = now
        self.inform_capture()
        self.inform_tasks()

    # -- what is parked

    def may_have_parked(self, oid: int) -> bool:
        """False if certainly nothing of a table is parked."""
        return oid in self._may_have_parked

    def begin_parking(self, segments: Sequence[SegmentRef]) -> None:
        """A batch parks these segments if its commit succeeds."""
        self._may_have_parked.update(segment.table_oid for segment in segments)

    def park(self, segments: Sequence[SegmentRef]) -> None:
        """The lake has parked these segments."""
        self._assert_locked()
        parked = dict(self.parked)
        for segment in segments:
            before = parked.get(segment.table_oid, Parked(0, 0, datetime.now(UTC)))
            parked[segment.table_oid] = before.plus(segment.rows, segment.bytes)
        self.parked = parked

    # -- what is counted

    def count(self, tasks: Iterable[FoldTask], position: int) -> None:
        """The lake has a batch that ends at `position`."""
        self._assert_locked()
        for task in tasks:
            if task.bucket:
                continue  # fold tasks of one run name the same segments
            counts = self.status.tables[task.table_oid]
            if self.is_ready(task.table_oid):
                counts.applied = (position, datetime.now(UTC))
            if task.truncate is not None:
                counts.truncates += 1
                self._truncated.add(task.table_oid)
            for segment in task.segments:
                counts.add(segment)

    def counts_of(self, oid: int) -> TableCounts:
        return self.status.tables.get(oid, TableCounts())

    def rows_synced(self, oid: int, before: int) -> int:
        """Rows and changes of a table, including those from before the service started (`before`, from the registry)."""
        counts = self.counts_of(oid)
        return self._rows_before.setdefault(oid, before) + counts.changes + counts.copied

    def requests_done(self, oid: int) -> RequestsDone:
        """The last requests about a table that were started."""
        return self._requests_done.get(oid, RequestsDone())

    def record_resync(self, oid: int, request: int) -> None:
        """The copy that this request asks for was started."""
        self._requests_done.setdefault(oid, RequestsDone()).resync = request

    def record_retry(self, oid: int, request: int) -> None:
        self._requests_done.setdefault(oid, RequestsDone()).retry = request

    # -- findings of the source's catalog

    def take_truncated(self, oid: int) -> bool:
        """Whether a batch has truncated the table since the last call."""
        found = oid in self._truncated
        self._truncated.discard(oid)
        return found

    def take_left(self) -> set[int]:
        """Tables that left the group since the last call."""
        left = self._left.copy()
        self._left.difference_update(left)
        return left

    def record_unsent(self, oid: int, error: AqueduckError) -> None:
        """The publication does not send the table any more."""
        self._assert_locked()
        self.unsent = {**self.unsent, oid: error}

    def record_sent_again(self, oid: int) -> None:
        """The publication did not send the table for a while, and sends it again."""
        self._assert_locked()
        self.unsent = _without(self.unsent, [oid])
        self._unsettled.add(oid)

    def record_columns_waiting(self, waiting: Mapping[int, tuple[str, ...]]) -> None:
        """Record all columns that differ between the source and the lake."""
        self.columns_waiting = dict(waiting)

    def is_settled(self, oids: Collection[int]) -> bool:
        """Whether transactions that wrote to the tables before they were published have ended."""
        return self._unsettled.isdisjoint(oids)

    def mark_settled(self, oids: Collection[int]) -> None:
        self._unsettled.difference_update(oids)

    # -- state files for capture and tasks

    @property
    def scratch(self) -> Path:
        """The stage, where tasks also write what is only for the commit."""
        return self.directory / "stage"

    @property
    def unsealed(self) -> Path:
        """Parked changes of an encrypted lake, while they are replayed."""
        return self.directory / "unsealed"

    @property
    def skips_path(self) -> Path:
        return self.directory / "skips.json"

    @property
    def tables_path(self) -> Path:
        return self.directory / "tables.json"

    def inform_tasks(self) -> None:
        """Write which tables are not ready, and which have changes to skip because their copy has them."""
        write_skips(self.skips_path, skips_of(self.states.values(), self.status.position))

    def inform_capture(self) -> None:
        """Write the tables, and the directories of their files."""
        known = read_directories(self.lake)
        # None if the target is missing: its changes are parked, like those of a table that is not ready.
        places = [(table.schema, self._place(known.of(table.target))) for table in self.tables.values()]
        targets = [table.target for table in self.tables.values()]
        notice_changes(self.lake)
        know_places(self.lake, targets)
        self._layouts = {oid: task_layout(self.lake, t.target) for oid, t in self.tables.items()}
        modes = {oid: table.mode for oid, table in self.tables.items()}
        write_tables(self.tables_path, places, modes, self._layouts)

    def layout_of(self, oid: int) -> str | None:
        """The layout of a target, for people; None if it has none."""
        table = self.tables.get(oid)
        place = None if table is None else self.lake.memory.places.get(table.target.folded)
        return None if place is None or place.layout.is_plain else str(place.layout)

    def inform_of_layouts(self) -> None:
        """Write the tables again if the session knows other layouts than the tasks: people change them in the lake."""
        places = self.lake.memory.places
        for oid, table in self.tables.items():
            place = places.get(table.target.folded)
            if place is not None and task_layout(self.lake, table.target) != self._layouts.get(oid):
                self.inform_capture()
                break

    def _place(self, directory: str | None) -> str | None:
        """Where tasks write the rows of a table; only DuckLake writes the files of an encrypted lake."""
        return str(self.scratch) if directory is not None and self.lake.encrypted else directory

    def _assert_locked(self) -> None:
        assert self.commit_lock.locked(), "the caller holds the commit lock"


def _without(known: Mapping[int, _V], oids: Collection[int]) -> dict[int, _V]:
    return {oid: value for oid, value in known.items() if oid not in oids}
