"""
Watch the source for columns that change while no row does: the stream tells of new columns only with a row.

`ColumnWatch.look` compares the catalog with what the lake's tables were made for.  What it finds is applied once the lake
has everything up to a position that was read after the catalog (ADR 57).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import psycopg
import structlog

from aqueduck.lake.commit.commit import RunPlan, apply_run, set_lineage, transact
from aqueduck.lake.ledger.table_states import TableState, write_state
from aqueduck.lake.target.evolve import same_columns, widen, wider_columns
from aqueduck.lake.target.places import check_place
from aqueduck.model.columns.column_numbers import UNCLEAR
from aqueduck.model.errors import (
    AqueduckError,
    LakeBusyError,
    LakeError,
    ResyncNeededError,
    Retry,
    TableMissingError,
)
from aqueduck.model.schema import TableName, TableSchema
from aqueduck.postgres.catalog.tables import describe_oid, dropped_columns
from aqueduck.postgres.copy.table_copy import read_column_marks
from aqueduck.postgres.publications.narrowed import as_published
from aqueduck.postgres.session.connection import connect
from aqueduck.postgres.session.server import flushed_position
from aqueduck.sync.group import GroupRunner

__all__ = ["ColumnWatch"]

log = structlog.get_logger()

DESCRIBED_MAX = 100
"""Tables that one look describes: after a start all of them are new to us."""

Marks = dict[int, int]


@dataclass(frozen=True, slots=True)
class _Due:
    """Columns that a table has by now, and how far the lake has to be before it gets them."""

    state: TableState
    columns: TableSchema
    marks: Marks
    position: int


class ColumnWatch:
    """Looks at the columns of groups' tables, now and then."""

    def __init__(self) -> None:
        self._seen: dict[tuple[str, int], Marks] = {}
        """What the catalog said of columns that the lake has, by group and table."""
        self._due: dict[tuple[str, int], _Due] = {}
        self._told: dict[tuple[str, int], tuple[TableState, Marks]] = {}
        """What was compared for those that wait for their next row."""

    def look(self, runner: GroupRunner) -> None:
        """Once; raises when source or lake cannot be asked."""
        self._tell_waiting(runner)
        # With options, or a publication of the user's, the catalog does not say what is sent.
        if runner.group.users_publication:
            return
        self._find(runner, {oid: s for oid, s in dict(runner.states).items() if _may_change(s)})
        for key, due in list(self._due.items()):
            if key[0] != runner.group.name:
                continue
            if runner.states.get(key[1]) is not due.state:  # the stream was faster
                del self._due[key]
            elif runner.has_everything_before(due.position):
                del self._due[key]
                _follow(runner, due)
                self._seen[key] = due.marks

    def _find(self, runner: GroupRunner, states: dict[int, TableState]) -> None:
        group, found = runner.group.name, {}
        with connect(runner.config.source.dsn) as conn:
            now = read_column_marks(conn, list(states))
            others = [oid for oid in now if self._seen.get((group, oid)) != now[oid]]
            waiting = {oid for oid in others if self._waits(group, states[oid], now[oid])}
            for oid in [oid for oid in others if oid not in waiting][:DESCRIBED_MAX]:
                columns = _new_columns(conn, states[oid])
                if columns is None:
                    self._seen[group, oid] = now[oid]
                else:
                    found[oid] = columns
        if not found:
            return
        position = flushed_position(runner.config.source.dsn)
        for oid, columns in found.items():
            self._due[group, oid] = _Due(states[oid], columns, now[oid], position)

    def _tell_waiting(self, runner: GroupRunner) -> None:
        """Which columns of tables that we do not follow here come with the table's next row."""
        states = {oid: s for oid, s in dict(runner.states).items() if _only_shown(runner, s)}
        for oid in [oid for oid in runner.columns_waiting if oid not in states]:
            del runner.columns_waiting[oid]
        if not states:
            return
        with connect(runner.config.source.dsn) as conn:
            now = read_column_marks(conn, list(states))
            news = [o for o in now if self._told.get((runner.group.name, o)) != (states[o], now[o])]
            for oid in news[:DESCRIBED_MAX]:
                runner.columns_waiting[oid] = _waiting_columns(conn, runner, states[oid])
                self._told[runner.group.name, oid] = states[oid], now[oid]

    def _waits(self, group: str, state: TableState, marks: Marks) -> bool:
        due = self._due.get((group, state.oid))
        return due is not None and due.state is state and due.marks == marks


def _may_change(state: TableState) -> bool:
    return state.ready and state.schema is not None and state.projection is None


def _only_shown(runner: GroupRunner, state: TableState) -> bool:
    own = runner.group.users_publication or state.projection is not None
    return own and state.ready and state.schema is not None


def _waiting_columns(
    conn: psycopg.Connection[Any], runner: GroupRunner, state: TableState
) -> tuple[str, ...]:
    """Columns that are not in the lake as the source has them by now, of those that are sent."""
    assert state.schema is not None
    try:
        now = describe_oid(conn, state.oid, need_key=False, projection=state.projection)
        if runner.group.users_publication and state.projection is None:
            now = as_published(conn, now, runner.group.publication)
    except AqueduckError as exc:
        if exc.retry is Retry.AUTO:
            raise
        return ()  # the table's next row, or a check, names it
    # By name: without a row it is not clear which number an option's column has.
    columns = [{(c.name, c.type_oid, c.typmod) for c in side.columns} for side in (state.schema, now.in_lake)]
    return tuple(sorted({name for name, *_ in columns[0] ^ columns[1]}))


def _new_columns(conn: psycopg.Connection[Any], state: TableState) -> TableSchema | None:
    """The columns that the lake lacks; None if it has them, or if only the next row can tell which they are."""
    assert state.schema is not None
    try:
        now = describe_oid(conn, state.oid, need_key=False)
    except TableMissingError:
        return None
    version = now.numbered(state.schema.streamed, now, dropped_columns(conn, state.oid)).in_lake
    if not version.columns or any(c.number == UNCLEAR for c in version.columns):
        return None
    return None if same_columns(state.schema, version) else version


def _follow(runner: GroupRunner, due: _Due) -> None:
    state, group = due.state, runner.group
    try:
        with runner.commit_lock:
            if runner.states.get(state.oid) is state:
                _change(runner, state, due.columns)
    except LakeBusyError:
        raise
    except LakeError as exc:
        # As with the next row, which would not fit either; other errors are named by that row.
        if isinstance(exc, ResyncNeededError) and group.on_type_change == "resync":
            log.warning("table is copied again", group=group.name, table=state.source, error=str(exc))
            runner.resync(state.oid)
            return
        log.warning("columns not changed", group=group.name, table=state.source, error=str(exc))


def _change(runner: GroupRunner, state: TableState, columns: TableSchema) -> None:
    lake, old = runner.lake, state.schema
    assert old is not None
    check_place(lake, state.target, state.target_uuid, TableName(old.schema, old.name))
    wider, [columns] = wider_columns(old, [columns])
    if wider != old:
        transact(lake, functools.partial(widen, lake, state.target, old, wider))

    def change() -> TableState:
        run = RunPlan(columns, ())
        apply_run(lake, state.target, run, current=wider, group=runner.group.name, mode=state.mode)
        changed = replace(state, schema=columns)
        write_state(lake, runner.group.name, [changed])
        set_lineage(lake, f"columns of {state.source}", {"group": runner.group.name})
        return changed

    runner.states[state.oid] = transact(lake, change)
    runner.versions.forget(state.oid)
    log.info("columns changed", group=runner.group.name, table=state.source)
