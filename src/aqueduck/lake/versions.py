"""
The lake at its snapshots: which one is current, which tables it held, and what changed between two.

A version is the id of a lake snapshot.  For those who compare; what is current is read by
`progress` and `table_states`.
"""

from __future__ import annotations

import pyarrow as pa

from aqueduck.lake.catalog import METADATA, OWN_SCHEMA, LakeSession
from aqueduck.lake.digest import key_columns_sql
from aqueduck.lake.failures import lake_errors
from aqueduck.lake.sql import LAKE, ident, literal
from aqueduck.lake.table_states import TABLE, TableState
from aqueduck.schema import TableName, TableSchema
from aqueduck.typemap import lake_type

__all__ = ["changed_keys", "current_version", "tables_at"]

KEYS = pa.schema([("k", pa.uint64()), ("key", pa.list_(pa.string()))])


def current_version(session: LakeSession) -> int:
    [[version]] = session.execute(
        f"select max(snapshot_id) from {METADATA}.ducklake_snapshot", doing="reading the lake's version"
    )
    return int(version)


def tables_at(session: LakeSession, version: int) -> dict[str, dict[int, TableState]]:
    """Every table that the lake knew then, by group and source OID; nothing before the first `init`."""
    found = session.execute(
        "select 1 from duckdb_tables() where database_name = ? and schema_name = ? and table_name = 'tables'",
        (LAKE, OWN_SCHEMA),
    )
    rows = found and session.execute(
        "select group_name, source_oid, source_name, target_schema, target_table, ready, copy_position, error,"
        " columns"
        f" from {TABLE} at (version => {version}) order by group_name, source_name",
        doing="reading the tables' states",
    )
    groups: dict[str, dict[int, TableState]] = {}
    for group, oid, source, schema, table, ready, position, error, columns in rows:
        known = None if columns is None else TableSchema.from_json(columns)
        state = TableState(oid, source, TableName(schema, table), ready, position, error, known)
        groups.setdefault(group, {})[oid] = state
    return groups


def changed_keys(
    session: LakeSession, target: TableName, schema: TableSchema, *, after: int, upto: int, limit: int
) -> pa.Table:
    """Keys (k, key) of rows that were written or deleted by the versions in (after, upto]; at most `limit`."""
    if after == upto:
        return KEYS.empty_table()
    cells = [f"cast({ident(c.name)} as {lake_type(c)})" for c in schema.columns]
    changes = (
        f"ducklake_table_changes({literal(LAKE)}, {literal(target.schema)}, {literal(target.name)},"
        f" {after + 1}, {upto})"
    )
    query = f"select distinct k, key from (select {key_columns_sql(schema, cells)} from {changes}) c limit {limit}"
    with session.reading() as con, lake_errors("reading the lake's changes", table=target.qualified):
        return con.execute(query).to_arrow_table().cast(KEYS)
