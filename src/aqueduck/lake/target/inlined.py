"""
Which rows the catalog itself holds: those that DuckLake inlined, dead ones included.

`inlining` says how many rows of a table may come there at a time.  Each thousand of them costs about a millisecond in
every delete, so beyond a limit they are moved to a file.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

from aqueduck.lake.session.catalog import METADATA, LakeSession
from aqueduck.lake.session.sql import LAKE, ident, literal
from aqueduck.model.errors import LakeError
from aqueduck.model.schema import TableName, TableSchema

__all__ = ["count_inlined", "flush_where_due", "inlining"]

ROWS_MAX = 25_000
_RESERVED = {"row_id", "begin_snapshot", "end_snapshot"}


@contextlib.contextmanager
def inlining(session: LakeSession, target: TableName, *schemas: TableSchema | None) -> Iterator[None]:
    """
    Inside, the limit of this target is in force; `schemas` are the columns that it has, and those that it gets.

    With some names of columns it is 0: inlined rows are in tables of the catalog, where DuckLake has columns of its own.
    """
    reserved = _RESERVED | ({"rowid"} if session.kind == "sqlite" else set())
    names = {c.name.lower() for schema in schemas if schema is not None for c in schema.columns}
    with session.alone():
        before = session.inline_rows
        session.inline(0 if names & reserved else session.limits.get(target, session.config.inline_rows))
        try:
            yield
        finally:
            # A transaction that failed takes no statement any more; the next one begins with the lake's limit.
            with contextlib.suppress(LakeError):
                session.inline(before)


def flush_where_due(session: LakeSession, targets: Iterable[TableName]) -> None:
    """After a commit; a flush that fails is tried after the next one."""
    for target in targets:
        if session.memory.inlined_rows.get(target, 0) <= ROWS_MAX:
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
    """Ask the catalog how many rows it holds; for the first commit of a session."""
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
