"""
Watch the source for columns that change without a row: the stream announces new columns only with a row.

`ColumnWatch.look` compares the columns that the catalog would send with the columns of the lake's tables. It
applies a difference once the lake has everything up to a position that was read after the catalog (ADR 57).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import psycopg
import structlog

from aqueduck.lake.commit.commit import RunPlan, apply_run, set_lineage, transact
from aqueduck.lake.fold.projected import refuse_unclear
from aqueduck.lake.ledger.table_states import TableState, write_state
from aqueduck.lake.target.evolve import same_columns, widen, wider_columns
from aqueduck.lake.target.places import check_place
from aqueduck.model.columns.projection import only_needed, other_rules
from aqueduck.model.errors import (
    CatalogUnreachableError,
    ConfigError,
    DataPathError,
    LakeBusyError,
    LakeError,
    PublicationError,
    ResyncNeededError,
    TableMissingError,
)
from aqueduck.model.schema import TableName, TableSchema
from aqueduck.postgres.catalog.tables import describe_oid
from aqueduck.postgres.copy.table_copy import read_column_marks
from aqueduck.postgres.publications.narrowed import publication_marks
from aqueduck.postgres.publications.published import refuse_narrowed
from aqueduck.postgres.session.connection import connect
from aqueduck.postgres.session.server import flushed_position, have_ended, next_transaction
from aqueduck.sync.groups.group import GroupRunner
from aqueduck.sync.groups.group_commits import with_way_out

__all__ = ["ColumnWatch"]

log = structlog.get_logger()

DESCRIBED_MAX = 100
"""Tables that one look describes: after a start, none has been described yet."""

Marks = dict[int, int]


@dataclass(frozen=True, slots=True)
class _Due:
    """New columns of a table, and the position that the lake must reach before it gets them."""

    state: TableState
    columns: TableSchema | ResyncNeededError
    marks: Marks
    open_before: str | None
    """Transactions before this one may still have rows with the old columns if they are open."""
    position: int | None = None


class ColumnWatch:
    """Checks the columns of groups' tables periodically."""

    def __init__(self) -> None:
        self._seen: dict[tuple[str, int], Marks] = {}
        """The catalog's marks of columns that the lake has, by group and table."""
        self._due: dict[tuple[str, int], _Due] = {}

    def look(self, runner: GroupRunner) -> None:
        """Check once; raises if source or lake cannot be read."""
        group = runner.group.name
        self._find(runner, {oid: s for oid, s in runner.states.items() if s.ready and s.schema})
        for key, due in [(key, due) for key, due in self._due.items() if key[0] == group]:
            if not runner.book.is_current(due.state):  # the stream was faster
                del self._due[key]
            elif due.position is not None and runner.has_everything_before(due.position):
                del self._due[key]
                if _follow(runner, due):
                    self._seen[key] = due.marks
        waiting = {oid: due for (name, oid), due in self._due.items() if name == group}
        runner.book.record_columns_waiting({oid: _names(due) for oid, due in waiting.items()})

    def _find(self, runner: GroupRunner, states: dict[int, TableState]) -> None:
        group, found = runner.group.name, {}
        with connect(runner.config.source.dsn) as conn:
            now = _marks(conn, runner, states)
            others = [oid for oid in now if self._seen.get((group, oid)) != now[oid]]
            waiting = {oid for oid in others if self._waits(group, states[oid], now[oid])}
            for oid in [oid for oid in others if oid not in waiting][:DESCRIBED_MAX]:
                columns = _new_columns(conn, states[oid])
                if columns is None:
                    self._seen[group, oid] = now[oid]
                else:
                    found[oid] = columns
            # Changing a table waits for its writers; changing a publication does not.
            horizon = next_transaction(conn) if found and runner.group.users_publication else None
            for oid, columns in found.items():
                self._due[group, oid] = _Due(states[oid], columns, now[oid], horizon)
            settled = [
                key
                for key, due in self._due.items()
                if key[0] == group and due.position is None
                and (due.open_before is None or have_ended(conn, due.open_before))
            ]  # fmt: skip
        if settled:
            position = flushed_position(runner.config.source.dsn)
            for key in settled:
                self._due[key] = replace(self._due[key], position=position)

    def _waits(self, group: str, state: TableState, marks: Marks) -> bool:
        due = self._due.get((group, state.oid))
        return due is not None and due.state is state and due.marks == marks


def _marks(
    conn: psycopg.Connection[Any], runner: GroupRunner, states: dict[int, TableState]
) -> dict[int, Marks]:
    """Marks that change with the sent columns of each table."""
    group, marks = runner.group, read_column_marks(conn, list(states))
    if not group.users_publication:
        return marks
    refuse_narrowed(conn, group.publication, group.plugin)
    theirs = publication_marks(conn, group.publication, list(states))
    return {oid: {**theirs.get(oid, {}), **columns} for oid, columns in marks.items()}


def _new_columns(conn: psycopg.Connection[Any], state: TableState) -> TableSchema | ResyncNeededError | None:
    """Columns that the next row would add to the lake; an error if the table's options no longer match."""
    old = state.schema
    assert old is not None
    try:
        now = describe_oid(conn, state.oid, need_key=False, projection=state.projection)
    except (TableMissingError, PublicationError):
        return None  # the source watch reports it
    except ConfigError as exc:
        return ResyncNeededError(exc.message, table=exc.table)
    version = only_needed(now.following(old.streamed)).in_lake
    if not version.columns or (same_columns(old, version) and not other_rules(old, version)):
        return None
    return version


def _names(due: _Due) -> tuple[str, ...]:
    """Columns whose current source form is not in the lake."""
    if due.state.schema is None or not isinstance(due.columns, TableSchema):
        return ()
    sides = [{(c.name, c.type_oid, c.typmod) for c in s.columns} for s in (due.state.schema, due.columns)]
    return tuple(sorted({name for name, *_ in sides[0] ^ sides[1]}))


def _follow(runner: GroupRunner, due: _Due) -> bool:
    """Whether the lake has the columns; if not, handle the table as its next row would."""
    state, group = due.state, runner.group
    with runner.between_commits() as free:
        if not free or not runner.book.is_current(state):
            return False
        try:
            _change(runner, state, due.columns)
        except (LakeBusyError, CatalogUnreachableError, DataPathError):
            raise  # not caused by the table
        except LakeError as exc:
            error = exc
        else:
            return True
        if not isinstance(error, ResyncNeededError) or group.on_type_change != "resync":
            runner.fail_table(state.oid, with_way_out(runner.book, state.oid, error))
            return False
    log.warning("table is re-copied", group=group.name, table=state.source, error=str(error))
    runner.resync(state.oid)
    return False


def _change(runner: GroupRunner, state: TableState, columns: TableSchema | ResyncNeededError) -> None:
    lake, old = runner.lake, state.schema
    assert old is not None
    if isinstance(columns, ResyncNeededError):
        raise columns
    refuse_unclear(columns, old)
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

    runner.book.written([transact(lake, change)])
    runner.versions.forget(state.oid)
    log.info("columns changed", group=runner.group.name, table=state.source)
