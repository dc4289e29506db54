"""
Make source and lake ready for a group: publication, slot, target tables, first position.

`prepare_group` is idempotent, refuses before it changes anything where it can, and takes back what it
created when a later step fails.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psycopg

from aqueduck.app.control import open_control
from aqueduck.config import GroupConfig, SyncConfig
from aqueduck.errors import LakeWriteError, SchemaChangeError, SlotConflictError, WalLevelError
from aqueduck.lake.apply import check_target, ensure_target
from aqueduck.lake.catalog import LakeSession, open_lake
from aqueduck.lake.parking import ensure_parking
from aqueduck.lake.progress import Position, read_position, write_position
from aqueduck.lake.table_states import TableState, ensure_table_states, read_states, write_state
from aqueduck.postgres.capture_settings import read_note
from aqueduck.postgres.connection import connect
from aqueduck.postgres.failures import SET_WAL_LEVEL, THEN_RESTART
from aqueduck.postgres.publications import drop_publication, ensure_publication
from aqueduck.postgres.server import ServerInfo, read_server
from aqueduck.postgres.slots import check_slot, create_slot, drop_slot, slot_info
from aqueduck.postgres.tables import describe_table
from aqueduck.schema import TableName, TableSchema, lsn_text

__all__ = ["PreparedGroup", "PreparedTable", "group_dir", "prepare", "prepare_group"]


@dataclass(frozen=True, slots=True)
class PreparedTable:
    schema: TableSchema
    target: TableName
    initial_copy: bool


@dataclass(frozen=True, slots=True)
class PreparedGroup:
    """What a query of the group needs to know."""

    group: GroupConfig
    tables: dict[int, PreparedTable]
    position: int
    system_identifier: str
    timeline: int


def group_dir(config: SyncConfig, group: GroupConfig) -> Path:
    """Where the group keeps its stage, checkpoint and notes."""
    return Path(config.state_dir) / group.name


def prepare(config: SyncConfig) -> Iterator[str]:
    """`aqueduck init`: prepare every group; yields a line for people about each."""
    with (
        contextlib.closing(open_lake(config.lake)) as lake,
        contextlib.closing(open_control(config)) as control,
    ):
        yield f"registry: {'none, the file alone is used' if control.conn is None else 'schema aqueduck'}"
        for wanted in control.wanted():
            if wanted.removed or not wanted.enabled:
                continue
            group = wanted.group
            ready = prepare_group(config, group, lake)
            yield (
                f"group {group.name}: slot {group.slot_name}, publication {group.publication},"
                f" {len(ready.tables)} tables, position {lsn_text(ready.position)}"
            )


def prepare_group(
    config: SyncConfig, group: GroupConfig, lake: LakeSession, *, trust_slot: bool = False
) -> PreparedGroup:
    directory = group_dir(config, group)
    directory.mkdir(parents=True, exist_ok=True)
    with connect(config.source.dsn) as conn:
        server = read_server(conn)
        if server.wal_level != "logical":
            raise WalLevelError(
                f"wal_level is {server.wal_level}, not logical", hint=SET_WAL_LEVEL + THEN_RESTART
            )
        tables = {}
        for table in group.tables:
            schema = describe_table(conn, table.source)
            tables[schema.oid] = PreparedTable(schema, table.target_table, table.initial_copy)
        stored = read_position(lake, group.name)
        _check_same_server(stored, server, group)
        confirmed = None if trust_slot else read_note(directory / "confirmed")
        position = None if stored is None else stored.position
        info = slot_info(conn, group.slot_name)
        if not (trust_slot and info is not None):
            check_slot(
                info, name=group.slot_name, database=server.database, position=position, confirmed=confirmed
            )
        with _undo_on_failure(conn, group):
            ensure_publication(conn, group.publication, [t.schema for t in tables.values()])
            start = create_slot(conn, group.slot_name)
            position = start if position is None else position
            _prepare_lake(lake, group, tables, position, server, first=stored is None)
    return PreparedGroup(group, tables, position, server.system_identifier, server.timeline)


def _prepare_lake(
    lake: LakeSession,
    group: GroupConfig,
    tables: dict[int, PreparedTable],
    position: int,
    server: ServerInfo,
    *,
    first: bool,
) -> None:
    """Targets and the first position, in one lake transaction."""
    ensure_table_states(lake)
    ensure_parking(lake)
    known = read_states(lake, group.name)
    broken = [_broken(lake, known[oid], table) for oid, table in tables.items() if oid in known]
    with lake.transaction():
        for oid, table in tables.items():
            if oid not in known:
                ensure_target(lake, table.target, table.schema)
                state = TableState(oid, table.schema.qualified, table.target, not table.initial_copy, 0)
                write_state(lake, group.name, [state])
        write_state(lake, group.name, [state for state in broken if state is not None])
        if first:
            write_position(
                lake, Position(group.name, position, None, server.system_identifier, server.timeline)
            )


def _broken(lake: LakeSession, state: TableState, table: PreparedTable) -> TableState | None:
    """The state of a table that streamed and whose columns, here or there, changed since: it waits for a new copy."""
    try:
        check_target(lake, table.target, table.schema)
    except (SchemaChangeError, LakeWriteError) as exc:
        return replace(state, ready=False, error=str(exc)) if state.ready else None
    return None


def _check_same_server(stored: Position | None, server: ServerInfo, group: GroupConfig) -> None:
    if stored is not None and stored.system_identifier != server.system_identifier:
        raise SlotConflictError(
            f"the lake's group {group.name} was filled from another PostgreSQL cluster",
            hint="point source.dsn to that cluster, or use another group name or another lake",
        )


@contextlib.contextmanager
def _undo_on_failure(conn: psycopg.Connection[Any], group: GroupConfig) -> Iterator[None]:
    """Whatever was not there before is not there after a failure."""
    had_slot = slot_info(conn, group.slot_name) is not None
    had_publication = _publication_exists(conn, group.publication)
    try:
        yield
    except BaseException:
        if not had_slot:
            drop_slot(conn, group.slot_name)
        if not had_publication:
            drop_publication(conn, group.publication)
        raise


def _publication_exists(conn: psycopg.Connection[Any], name: str) -> bool:
    return conn.execute("select from pg_publication where pubname = %s", (name,)).fetchone() is not None
