"""
Compare source and lake, table by table: counts, then content.

The source is read through DuckDB's own PostgreSQL extension, on a connection that shares nothing
with the capture, as text; the lake is read as it is.  Both sides get the same order-independent
hash per row, summed.  Meant for a source that is quiet, such as after the demo's load: rows that
change between the two reads differ.
"""

from __future__ import annotations

import contextlib
from dataclasses import asdict, dataclass
from typing import Any

from aqueduck.config import SyncConfig, TableConfig
from aqueduck.lake.catalog import LakeSession, open_lake
from aqueduck.lake.engine import load_extension, new_connection
from aqueduck.lake.sql import ident, lake_table, literal
from aqueduck.postgres.connection import connect
from aqueduck.postgres.quoting import identifier, table_identifier
from aqueduck.postgres.tables import describe_table
from aqueduck.schema import TableSchema
from aqueduck.typemap import cast_sql

__all__ = ["TableComparison", "verify_tables"]


@dataclass(frozen=True, slots=True)
class TableComparison:
    """One table's verdict."""

    table: str
    target: str
    source_rows: int
    lake_rows: int
    same: bool

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def verify_tables(config: SyncConfig, *, session: LakeSession | None = None) -> list[TableComparison]:
    """Compare all tables; `session` is for callers whose own process holds the catalog."""
    with contextlib.ExitStack() as stack:
        lake = session or stack.enter_context(contextlib.closing(open_lake(config.lake, read_only=True)))
        conn = stack.enter_context(connect(config.source.dsn))
        source = stack.enter_context(contextlib.closing(new_connection()))
        load_extension(source, "postgres_scanner")
        source.execute(f"attach {literal(config.source.dsn)} as source (type postgres, read_only)")
        return [
            _compare(lake, source, describe_table(conn, table.source), table)
            for group in config.groups
            for table in group.tables
        ]


def _compare(lake: LakeSession, source: Any, schema: TableSchema, table: TableConfig) -> TableComparison:
    target = table.target_table
    theirs = source.execute(source_digest_sql(schema)).fetchone()
    ours = lake.query(lake_digest_sql(schema, lake_table(target)))[0][0]
    return TableComparison(
        schema.qualified, target.qualified, int(theirs[0]), int(ours[0]), tuple(theirs) == tuple(ours)
    )


def source_digest_sql(schema: TableSchema) -> str:
    """Count and content hash of the source's rows, typed as the lake types them."""
    texts = ", ".join(f"{_as_text(c.name)} as c{i}" for i, c in enumerate(schema.columns))
    remote = f"select {texts} from {table_identifier(schema)}"
    typed = ", ".join(f"{cast_sql(c, f'c{i}')} as v{i}" for i, c in enumerate(schema.columns))
    values = ", ".join(f"v{i}" for i in range(len(schema.columns)))
    return f"select count(*), sum(hash({values})::hugeint) from (select {typed} from postgres_query('source', {literal(remote)}))"


def lake_digest_sql(schema: TableSchema, target: str) -> str:
    values = ", ".join(ident(c.name) for c in schema.columns)
    return f"select count(*), sum(hash({values})::hugeint) from {target}"


def _as_text(name: str) -> str:
    # format() uses the type's output function, as pgoutput does; a cast to text would strip char(n) padding.
    return f"case when {identifier(name)} is not null then format('%s', {identifier(name)}) end"
