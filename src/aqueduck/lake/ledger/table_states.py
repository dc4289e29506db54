"""
The state of each table of a group in the lake: whether its copy is complete, and as of which position.

States are written in the same transactions as the data, so that a crash leaves no contradiction.  The states
that users see (`SyncState` of `model.lifecycle`) are derived from these in `sync.observe`.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from aqueduck.lake.ledger.progress import forget_position
from aqueduck.lake.session.catalog import OWN_SCHEMA, LakeSession
from aqueduck.lake.session.sql import LAKE, qualified
from aqueduck.model.columns.projection import Projection
from aqueduck.model.modes import UPSERT, TableMode
from aqueduck.model.schema import TableName, TableSchema

__all__ = [
    "TableState",
    "ensure_table_states",
    "forget_group",
    "forget_state",
    "forget_tables",
    "read_states",
    "write_state",
]

TABLE = qualified(LAKE, OWN_SCHEMA, "tables")


@dataclass(frozen=True, slots=True)
class TableState:
    """One table; if `ready`, its changes are applied, otherwise parked."""

    oid: int
    source: str
    target: TableName
    ready: bool
    copy_position: int
    """Changes committed before this position are part of the copy."""
    error: str | None = None
    schema: TableSchema | None = None
    """The source's columns that the target was made for."""
    mode: TableMode = UPSERT
    target_uuid: str | None = None
    """DuckLake's uuid of the target; None if the target does not exist yet or its uuid was not read."""

    @property
    def awaits_copy(self) -> bool:
        return not self.ready and self.error is None

    def skip_before(self, position: int) -> int:
        """Changes after `position` that were committed before this one are part of the table's copy; 0 if none are."""
        return self.copy_position if self.copy_position > position else 0

    @property
    def projection(self) -> Projection | None:
        """The projection for which the target was made; None if it has all rows and columns unchanged."""
        return None if self.schema is None else self.schema.streamed.projection


def ensure_table_states(session: LakeSession) -> None:
    session.execute(
        f"create table if not exists {TABLE} (group_name varchar, source_oid ubigint, source_name varchar,"
        " target_schema varchar, target_table varchar, ready boolean, copy_position ubigint, error varchar,"
        " columns varchar,"
        " updated_at timestamptz, mode varchar, target_uuid varchar)",
        doing="preparing the lake",
    )
    # A lake of an earlier version lacks these.
    for column in ("mode", "target_uuid"):
        session.execute(
            f"alter table {TABLE} add column if not exists {column} varchar", doing="preparing the lake"
        )


def read_states(session: LakeSession, group: str) -> dict[int, TableState]:
    rows, _ = session.query(
        f"select source_oid, source_name, target_schema, target_table, ready, copy_position, error, columns, mode, target_uuid"
        f" from {TABLE}"
        " where group_name = ?",
        [group],
    )
    return {
        oid: TableState(
            oid,
            source,
            TableName(schema, table),
            ready,
            position,
            error,
            None if columns is None else TableSchema.from_json(columns),
            TableMode.from_json(mode),
            uuid,
        )
        for oid, source, schema, table, ready, position, error, columns, mode, uuid in rows
    }


def write_state(session: LakeSession, group: str, states: Collection[TableState]) -> None:
    """Inside an open transaction."""
    if not states:
        return
    forget_state(session, group, *(state.oid for state in states))
    rows = [
        [
            group,
            state.oid,
            state.source,
            state.target.schema,
            state.target.name,
            state.ready,
            state.copy_position,
            state.error,
            None if state.schema is None else state.schema.to_json(),
            state.mode.to_json(),
            state.target_uuid,
        ]
        for state in states
    ]
    places = ", ".join(["(?, ?, ?, ?, ?, ?, ?, ?, ?, now(), ?, ?)"] * len(rows))
    session.execute(
        f"insert into {TABLE} values {places}",
        [cell for row in rows for cell in row],
        doing="writing the states of tables",
    )


def forget_group(session: LakeSession, group: str) -> None:
    """Delete all records of a group; its target tables stay."""
    with session.transaction():
        for book in _books(session):
            session.execute(f"delete from {book} where group_name = ?", [group])
        forget_position(session, group)


def forget_tables(session: LakeSession, group: str, *oids: int) -> None:
    """Inside an open transaction: delete all records of these tables."""
    for book in _books(session) if oids else ():
        session.execute(
            f"delete from {book} where group_name = ? and source_oid in (select unnest(?))",
            [group, list(oids)],
        )


def _books(session: LakeSession) -> list[str]:
    """The tables with our records: table states, parked changes, partition marks."""
    rows = session.execute(
        "select table_name from duckdb_tables() where database_name = ? and schema_name = ?"
        " and table_name in ('tables', 'parked', 'partitions')",
        [LAKE, OWN_SCHEMA],
    )
    return [qualified(LAKE, OWN_SCHEMA, name) for (name,) in rows]


def forget_state(session: LakeSession, group: str, *oids: int) -> None:
    session.execute(
        f"delete from {TABLE} where group_name = ? and source_oid in (select unnest(?))", [group, list(oids)]
    )
