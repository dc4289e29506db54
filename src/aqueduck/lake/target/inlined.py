"""
Rows that DuckLake stores in the catalog instead of a file (inlined rows), including deleted ones.

`inlining` sets how many rows a statement may inline.  Every thousand inlined rows add about a millisecond to
each delete, so beyond a limit they are flushed to a file.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

from aqueduck.lake.session.catalog import METADATA, LakeSession
from aqueduck.lake.session.sql import LAKE, ident, literal
from aqueduck.model.errors import LakeError
from aqueduck.model.schema import TableName, TableSchema

__all__ = ["RESERVED", "count_inlined", "flush_where_due", "inlining", "reserved_names"]

ROWS_MAX = 25_000
PARTITIONED_ROWS_MAX = 100_000
"""More, because each flush writes a file for every partition that has rows."""
RESERVED = {"row_id", "begin_snapshot", "end_snapshot"}


@contextlib.contextmanager
def inlining(session: LakeSession, target: TableName, *schemas: TableSchema | None) -> Iterator[None]:
    """
    Apply this target's limit for inlined rows inside the block; `schemas` are its columns before and after the block.

    The limit is 0 if a column's name clashes with those of DuckLake in the catalog's tables of inlined rows.
    """
    reserved = any(reserved_names(session, schema) for schema in schemas if schema is not None)
    with session.alone():
        before = session.inline_rows
        session.inline(0 if reserved else session.limits.get(target, session.config.inline_rows))
        try:
            yield
        finally:
            # A failed transaction accepts no more statements; the next one starts with the lake's limit.
            with contextlib.suppress(LakeError):
                session.inline(before)


def reserved_names(session: LakeSession, schema: TableSchema) -> set[str]:
    """The names of columns that clash with those of DuckLake in the catalog's tables of inlined rows."""
    reserved = RESERVED | ({"rowid"} if session.kind == "sqlite" else set())
    return {c.name.lower() for c in schema.columns} & reserved


def flush_where_due(session: LakeSession, targets: Iterable[TableName]) -> None:
    """Flush inlined rows beyond the limit, after a commit; a failed flush is retried after the next commit."""
    for target in targets:
        place = session.memory.places.get(target.folded)
        limit = PARTITIONED_ROWS_MAX if place is not None and place.layout.partition else ROWS_MAX
        if session.memory.inlined_rows.get(target, 0) <= limit:
            continue
        with contextlib.suppress(LakeError):
            session.execute(
                f"call ducklake_flush_inlined_data({literal(LAKE)}, schema_name => {literal(target.schema)},"
                f" table_name => {literal(target.name)})",
                doing="flushing inlined rows",
                table=target.qualified,
            )
            session.memory.inlined_rows[target] = 0


def count_inlined(session: LakeSession, targets: Iterable[TableName]) -> None:
    """Read from the catalog how many rows it holds; needed once, before a session's first commit."""
    for target in targets:
        tables = session.execute(
            f"select i.table_name from {METADATA}.ducklake_inlined_data_tables i"
            f" join {METADATA}.ducklake_table t using (table_id) join {METADATA}.ducklake_schema s using (schema_id)"
            " where t.end_snapshot is null and s.end_snapshot is null and s.schema_name = ? and t.table_name = ?",
            (target.schema, target.name),
            doing="reading the lake's layout",
        )
        counts = [
            session.execute(f"select count(*) from {METADATA}.{ident(name)}")[0][0] for [name] in tables
        ]
        session.memory.inlined_rows[target] = int(sum(counts))
