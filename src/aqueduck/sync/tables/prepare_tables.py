"""
Prepare the tables of a group: describe each at the source, and give it a target and a state in the lake.

A table that cannot be prepared does not stop the others: it is listed in `refused`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import psycopg

from aqueduck.config.sync import GroupConfig, SyncConfig, TableConfig
from aqueduck.lake.commit.commit import transact
from aqueduck.lake.ledger.own_targets import adopt_target, refuse_foreign_target
from aqueduck.lake.ledger.partition_marks import forget_marks
from aqueduck.lake.ledger.table_states import TableState, read_states, write_state
from aqueduck.lake.session.catalog import LakeSession
from aqueduck.lake.session.directories import read_directories
from aqueduck.lake.target.apply import check_target, ensure_target, make_target, refuse_names
from aqueduck.lake.target.places import check_place, with_places
from aqueduck.lake.target.set_layouts import check_wanted
from aqueduck.model.columns.projection import Projection
from aqueduck.model.errors import (
    AqueduckError,
    ConnectionLostError,
    LakeError,
    LakeTableMissingError,
    PartitionedTargetError,
    SchemaChangeError,
    SourceUnreachableError,
    TableRecreatedError,
    TargetReplacedError,
)
from aqueduck.model.layout import AS_IT_IS, WantedLayout
from aqueduck.model.modes import UPSERT, TableMode
from aqueduck.model.schema import TableName, TableSchema
from aqueduck.postgres.catalog.row_security import refuse_row_security
from aqueduck.postgres.catalog.tables import describe_table
from aqueduck.postgres.publications.publications import (
    give_identity,
    refuse_foreign,
    refuse_without_columns,
    refuse_without_identity,
    refuse_without_key,
)
from aqueduck.sync.tables.table_options import with_projection

__all__ = [
    "PreparedTable",
    "check_prepared",
    "describe_tables",
    "is_for",
    "prepare_tables",
    "refuse_recreated",
    "state_if_broken",
    "want_layouts",
]


@dataclass(frozen=True, slots=True)
class PreparedTable:
    schema: TableSchema
    target: TableName
    initial_copy: bool
    mode: TableMode = UPSERT
    adopt: bool = False
    """Whether an existing lake table that Aqueduck did not create may become the target."""
    layout: WantedLayout = AS_IT_IS

    @property
    def source(self) -> str:
        """The source's name as the configuration and the registry write it."""
        return str(TableName(self.schema.schema, self.schema.name))


def describe_tables(
    conn: psycopg.Connection[Any],
    config: SyncConfig,
    group: GroupConfig,
    tables: Iterable[TableConfig],
    before: Mapping[int, Projection],
) -> tuple[dict[int, PreparedTable], dict[str, AqueduckError]]:
    """
    Tables that can be published and applied, by OID; and the errors of the others, by source name.

    `before` are the projections of the lake's tables.
    """
    found: dict[int, PreparedTable] = {}
    refused: dict[str, AqueduckError] = {}
    for table in tables:
        try:
            mode = table.table_mode
            schema = describe_table(
                conn, table.source, need_key=mode.needs_key, publication=group.users_publication
            )
            refuse_without_columns(schema)
            refuse_row_security(conn, schema)
            if not group.users_publication:
                refuse_foreign(conn, group.publication, schema, [t.source_table for t in group.tables])
            if mode.follows_keys:
                refuse_without_key(schema, mode.name)
            if not mode.needs_key:
                schema = give_identity(conn, schema)
            refuse_without_identity(schema)
            schema = with_projection(schema, table, config.mask_salt_env, before.get(schema.oid))
            check_wanted(table.layout, schema.in_lake, mode)
        except (ConnectionLostError, SourceUnreachableError):
            raise
        except AqueduckError as exc:
            refused[table.source] = exc
        else:
            found[schema.oid] = PreparedTable(
                schema, table.target_table, table.initial_copy, mode, table.adopt, table.layout
            )
    return found, refused


def prepare_tables(
    lake: LakeSession,
    group: str,
    tables: Mapping[int, PreparedTable],
    *,
    now: int,
    filled: Collection[TableName] = (),
) -> dict[int, AqueduckError]:
    """
    Create targets and states of tables that the lake does not know yet; returns the errors, by OID.

    The targets in `filled` belonged to source tables that were dropped: a copy replaces their contents and their columns.
    """
    want_layouts(lake, tables.values())

    def make(some: Mapping[int, PreparedTable]) -> None:
        transact(lake, lambda: _make_tables(lake, group, some, now, filled))

    try:
        make(tables)
        record_targets(lake, group)
    except LakeError:  # one by one, to find out which
        failed: dict[int, AqueduckError] = {}
        for oid, table in tables.items():
            try:
                make({oid: table})
            except LakeError as exc:
                failed[oid] = exc
        record_targets(lake, group)
        return failed
    return {}


def want_layouts(lake: LakeSession, tables: Iterable[PreparedTable]) -> None:
    """Have these targets get the layouts that the configuration wants."""
    for table in tables:
        lake.wanted.pop(table.target, None)
        if table.layout != AS_IT_IS:
            lake.wanted[table.target] = table.layout


def record_targets(lake: LakeSession, group: str) -> None:
    """The uuids of existing targets that are not recorded yet."""
    found = with_places(lake, read_states(lake, group).values())
    if found:
        transact(lake, lambda: write_state(lake, group, found))


def _make_tables(
    lake: LakeSession,
    group: str,
    tables: Mapping[int, PreparedTable],
    now: int,
    filled: Collection[TableName],
) -> None:
    states = []
    directories = read_directories(lake)
    for oid, table in tables.items():
        in_lake = table.schema.in_lake
        check_place(lake, table.target, None, may_be_missing=True)
        if table.adopt:
            adopt_target(lake, table.target)
        missing = directories.of(table.target) is None
        if missing and table.initial_copy and directories.planned(table.target, table.mode) is not None:
            refuse_names(table.target, in_lake, table.mode)  # it is created when its copy is committed
        else:
            make = make_target if table.target in filled and table.initial_copy else ensure_target
            make(lake, table.target, in_lake, table.mode)
        position = 0 if table.initial_copy else now
        ready = not table.initial_copy
        states.append(
            TableState(oid, table.schema.qualified, table.target, ready, position, None, in_lake, table.mode)
        )
    forget_marks(lake, group, *tables)
    write_state(lake, group, states)


def refuse_recreated(
    group: GroupConfig,
    tables: dict[int, PreparedTable],
    refused: dict[str, AqueduckError],
    known: Mapping[int, TableState],
    renew: Collection[str],
) -> None:
    """Remove tables from `tables` that took the name of a table that the lake knows, unless they are to be copied."""
    before = {(s.source, s.target): s for s in known.values()}
    for oid, table in list(tables.items()):
        old = before.get((table.schema.qualified, table.target))
        if old is None or old.oid == oid or group.on_recreate == "resync" or table.source in renew:
            continue
        del tables[oid]
        refused[table.source] = TableRecreatedError(
            "the table was dropped and created anew; the lake has the rows of the old one",
            hint=f"to replace them by those of the new one: aqueduck tables resync -c FILE {table.source}"
            " (or set on_recreate: resync)",
            table=table.schema.qualified,
        )


def check_prepared(
    lake: LakeSession, group: GroupConfig, table: PreparedTable, known: Mapping[int, TableState]
) -> None:
    """Raise the error that a start would raise about this table's target; `known` are the group's states in the lake."""
    tables, refused = {table.schema.oid: table}, dict[str, AqueduckError]()
    refuse_recreated(group, tables, refused, known, ())
    for error in refused.values():
        raise error
    state = known.get(table.schema.oid)
    name = TableName(table.schema.schema, table.schema.name)
    if state is not None and is_for(state, table):
        if state.ready:
            _check_known(lake, state, table)
        return
    filled = {s.target for oid, s in known.items() if oid != table.schema.oid}
    refuse_names(table.target, table.schema.in_lake, table.mode)
    if not table.adopt:
        refuse_foreign_target(lake, table.target)
    there = check_place(lake, table.target, None, name, may_be_missing=True)
    if there and not (table.target in filled and table.initial_copy):
        check_target(lake, table.target, table.schema.in_lake, table.mode)


def _check_known(lake: LakeSession, state: TableState, table: PreparedTable) -> None:
    check_place(lake, table.target, state.target_uuid, TableName(table.schema.schema, table.schema.name))
    check_target(lake, table.target, state.schema or table.schema.in_lake, table.mode)


def state_if_broken(lake: LakeSession, state: TableState, table: PreparedTable) -> TableState | None:
    """The state of a table that streamed and whose target was later changed or dropped by someone else."""
    try:
        _check_known(lake, state, table)
    except (LakeTableMissingError, PartitionedTargetError, SchemaChangeError, TargetReplacedError) as exc:
        return replace(state, ready=False, error=str(exc)) if state.ready else None
    return None


def is_for(state: TableState, table: PreparedTable) -> bool:
    """Whether the lake's state has the target and the mode that are configured now."""
    return (state.target, state.mode) == (table.target, table.mode)
