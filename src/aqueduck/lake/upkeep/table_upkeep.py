"""
Upkeep of one table's files: flush inlined rows, merge small files, rewrite files with many deleted rows.

The caller must exclude other writers of the table.  DuckLake 1.5.5 needs that (ADR 32): if one transaction merges
files while another one deletes rows of them by inlining, both commit and the deleted rows reappear.  Inlined rows are
flushed first, because time travel shows rows twice if deletions are flushed after their file was rewritten.
`model.upkeep` decides which steps to do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from aqueduck.lake.session.sql import literal
from aqueduck.lake.upkeep.statistics import read_statistics, widen_statistics
from aqueduck.model.schema import TableName
from aqueduck.model.upkeep import Merge, TableFile, UpkeepStep

__all__ = ["Lake", "do_step", "flush", "read_files", "table_id"]


class Lake(Protocol):
    """An attached lake: `catalog.LakeSession` or `pool.PooledLake`."""

    @property
    def alias(self) -> str: ...

    @property
    def metadata(self) -> str: ...

    def execute(
        self, statement: str, parameters: Sequence[Any] = (), *, doing: str = ...
    ) -> list[tuple[Any, ...]]: ...


def table_id(lake: Lake, table: TableName) -> int | None:
    """DuckLake's id of a table; None if the table does not exist."""
    rows = lake.execute(
        f"select t.table_id from {lake.metadata}.ducklake_table t join {lake.metadata}.ducklake_schema s using (schema_id)"
        " where lower(s.schema_name) = lower(?) and lower(t.table_name) = lower(?)"
        " and t.end_snapshot is null and s.end_snapshot is null",
        (table.schema, table.name),
        doing="looking for a table",
    )
    return int(rows[0][0]) if rows else None


def read_files(lake: Lake, number: int) -> list[TableFile]:
    """The current data files of a table."""
    rows = lake.execute(
        "select f.file_size_bytes, f.record_count, coalesce(d.delete_count, 0)"
        f" from {lake.metadata}.ducklake_data_file f left join {lake.metadata}.ducklake_delete_file d"
        " on d.data_file_id = f.data_file_id and d.end_snapshot is null"
        f" where f.table_id = {number} and f.end_snapshot is null",
        doing="reading the lake's files",
    )
    return [TableFile(int(size), int(count), int(removed)) for size, count, removed in rows]


def flush(lake: Lake, table: TableName) -> int:
    """Flush a table's inlined rows to files; returns how many rows."""
    rows = lake.execute(
        f"call ducklake_flush_inlined_data({literal(lake.alias)}, schema_name => {literal(table.schema)},"
        f" table_name => {literal(table.name)})",
        doing="flushing inlined rows",
    )
    return sum(int(row[-1] or 0) for row in rows)


def do_step(lake: Lake, table: TableName, number: int, step: UpkeepStep) -> int:
    """
    Merge or rewrite files, right after a flush; returns how many files were read.

    After a rewrite the session must be reopened, because it has cached statistics that are too narrow.
    """
    place = f"{literal(lake.alias)}, {literal(table.name)}, schema => {literal(table.schema)}"
    if isinstance(step, Merge):
        rows = lake.execute(
            f"call ducklake_merge_adjacent_files({place}, min_file_size => {step.at_least}, max_file_size => {step.below})",
            doing="merging small files",
        )
    else:
        before = read_statistics(lake, number)
        rows = lake.execute(
            f"call ducklake_rewrite_data_files({place}, delete_threshold => {max(step.share - 1e-9, 0.0)!r})",
            doing="rewriting files",
        )
        widen_statistics(lake, number, before, rewritten=True)
    return sum(int(row[2]) for row in rows)
