"""
Past lake snapshots, for comparisons: the latest id, the tables of a snapshot, and the keys changed between two.

A version is the id of a lake snapshot.  The current state is read by `progress` and `table_states`.
"""

from __future__ import annotations

import pyarrow as pa

from aqueduck.lake.compare.digest import key_columns_sql
from aqueduck.lake.ledger.table_states import TABLE, TableState
from aqueduck.lake.session.catalog import METADATA, OWN_SCHEMA, LakeSession
from aqueduck.lake.session.failures import lake_errors
from aqueduck.lake.session.sql import LAKE, ident, lake_table, literal
from aqueduck.lake.target.mode_rows import own_rows
from aqueduck.model.columns.typemap import lake_type
from aqueduck.model.modes import UPSERT, TableMode
from aqueduck.model.schema import TableName, TableSchema

__all__ = ["changed_keys", "current_version", "tables_at", "unsent_columns"]

KEYS = pa.schema([("k", pa.uint64()), ("key", pa.list_(pa.string()))])


def current_version(session: LakeSession) -> int:
    [[version]] = session.execute(
        f"select max(snapshot_id) from {METADATA}.ducklake_snapshot", doing="reading the lake's version"
    )
    return int(version)


def tables_at(session: LakeSession, version: int) -> dict[str, dict[int, TableState]]:
    """The states of all tables at a version, by group and source OID; empty before the first `init`."""
    found = session.execute(
        "select 1 from duckdb_tables() where database_name = ? and schema_name = ? and table_name = 'tables'",
        (LAKE, OWN_SCHEMA),
    )
    groups: dict[str, dict[int, TableState]] = {}
    if not found:
        return groups
    rows, names = session.query(f"from {TABLE} at (version => {version}) order by group_name, source_name")
    for values in rows:
        row = dict(zip(names, values, strict=True))
        groups.setdefault(row["group_name"], {})[row["source_oid"]] = TableState(
            row["source_oid"],
            row["source_name"],
            TableName(row["target_schema"], row["target_table"]),
            row["ready"],
            row["copy_position"],
            row["error"],
            None if row["columns"] is None else TableSchema.from_json(row["columns"]),
            mode=TableMode.from_json(row.get("mode")),  # a lake of an earlier version has neither
            target_uuid=row.get("target_uuid"),
        )
    return groups


def unsent_columns(session: LakeSession, target: TableName, version: int, mode: TableMode) -> tuple[str, ...]:
    """Columns of a log that lack values which PostgreSQL did not send."""
    names = session.execute(
        f"select distinct unnest(cast(_unchanged as varchar[])) from"
        f" (from {lake_table(target)} at (version => {int(version)})) as t where {own_rows(mode)} and _unchanged is not null order by 1",
        doing="reading the log",
        table=target.qualified,
    )
    return tuple(name for (name,) in names)


def changed_keys(
    session: LakeSession,
    target: TableName,
    schema: TableSchema,
    *,
    after: int,
    upto: int,
    limit: int,
    mode: TableMode = UPSERT,
) -> pa.Table:
    """Keys (k, key) of rows that were written or deleted in the versions (after, upto]; at most `limit`."""
    if after == upto:
        return KEYS.empty_table()
    cells = [f"cast({ident(c.name)} as {lake_type(c)})" for c in schema.columns]
    changes = (
        f"ducklake_table_changes({literal(LAKE)}, {literal(target.schema)}, {literal(target.name)},"
        f" {after + 1}, {upto})"
    )
    keys = f"select {key_columns_sql(schema, cells)} from {changes} as t where {own_rows(mode)}"
    query = f"select distinct k, key from ({keys}) c limit {limit}"
    with session.reading() as con, lake_errors("reading the lake's changes", table=target.qualified):
        return con.execute(query).to_arrow_table().cast(KEYS)
