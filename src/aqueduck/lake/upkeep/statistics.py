"""
Keep the statistics of a table's columns wide enough for all lake snapshots.

`ducklake_rewrite_data_files` recomputes statistics from the current rows, but DuckLake uses the same statistics for
every lake snapshot.  A query of an older one then misses rows, and a query with a sort returns wrong values (ADR 32).
After a rewrite, the statistics are therefore widened to cover what they covered before.  If a process may have died
in between, they are widened to cover the files of all lake snapshots.

The transaction that first fills a table may leave the statistics of a column unknown although it has values: this
happens if the column is all NULL in the first file.  The next insert then narrows them to its own values.
`settle_statistics` removes unknown statistics for good (ADR 66).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from aqueduck.lake.session.sql import literal
from aqueduck.model.schema import TableName

if TYPE_CHECKING:
    from aqueduck.lake.upkeep.table_upkeep import Lake

__all__ = [
    "ColumnStatistics",
    "read_statistics",
    "settle_statistics",
    "statistics_of_files",
    "widen_statistics",
]

_TYPES = {
    "boolean": "boolean", "int8": "tinyint", "int16": "smallint", "int32": "integer", "int64": "bigint",
    "int128": "hugeint", "uint8": "utinyint", "uint16": "usmallint", "uint32": "uinteger", "uint64": "ubigint",
    "uint128": "uhugeint", "float32": "float", "float64": "double", "varchar": "varchar", "json": "varchar",
    "date": "date", "time": "time", "timetz": "timetz", "timestamp": "timestamp", "timestamp_us": "timestamp",
    "timestamp_ms": "timestamp_ms", "timestamp_ns": "timestamp_ns", "timestamp_s": "timestamp_s",
    "timestamptz": "timestamptz", "uuid": "uuid", "interval": "interval",
}  # fmt: skip
_DECIMAL = re.compile(r"decimal\(\d+,\s*\d+\)")


@dataclass(frozen=True, slots=True)
class ColumnStatistics:
    """The statistics of a column's values, as text like in the catalog."""

    column: int
    contains_null: bool | None
    contains_nan: bool | None
    lowest: str | None
    highest: str | None


def settle_statistics(lake: Lake, tables: Iterable[TableName], settled: set[TableName]) -> None:
    """
    Remove unknown statistics of these tables, which an insert would narrow; outside a transaction, before and after a commit.

    A column without statistics never gets any again; its files keep theirs.  `settled` has the tables with rows that
    were checked, whose statistics stay right; checked tables are added to it.
    """
    new = [table for table in dict.fromkeys(tables) if table not in settled]
    if not new:
        return
    known = {table.folded: table for table in new}
    found = _filled(lake, known)
    unknown = ", ".join(str(number) for number, some in found.values() if some)
    if unknown:
        lake.execute(
            f"delete from {lake.metadata}.ducklake_table_column_stats"
            f" where table_id in ({unknown}) and (min_value is null or max_value is null)",
            doing="removing statistics",
        )
    settled.update(known[name] for name in found)


def _filled(lake: Lake, tables: Collection[TableName]) -> dict[TableName, tuple[int, bool]]:
    """For tables that have or had rows: DuckLake's table id, and whether some statistics are unknown."""
    names = ", ".join(f"({literal(t.schema)}, {literal(t.name)})" for t in tables)
    rows = lake.execute(
        "select lower(s.schema_name), lower(t.table_name), t.table_id, exists (select 1 from"
        f" {lake.metadata}.ducklake_table_column_stats c where c.table_id = t.table_id"
        " and (c.min_value is null or c.max_value is null))"
        f" from {lake.metadata}.ducklake_table t join {lake.metadata}.ducklake_schema s using (schema_id)"
        f" where (lower(s.schema_name), lower(t.table_name)) in ({names})"
        " and t.end_snapshot is null and s.end_snapshot is null"
        f" and t.table_id in (select table_id from {lake.metadata}.ducklake_table_stats)",
        doing="reading statistics",
    )
    return {TableName(schema, name): (int(number), bool(some)) for schema, name, number, some in rows}


def read_statistics(lake: Lake, table: int) -> list[ColumnStatistics]:
    """The statistics of the table as a whole."""
    rows = lake.execute(
        "select column_id, contains_null, contains_nan, min_value, max_value"
        f" from {lake.metadata}.ducklake_table_column_stats where table_id = {table}",
        doing="reading statistics",
    )
    return [ColumnStatistics(int(c), _bool(null), _bool(nan), low, high) for c, null, nan, low, high in rows]


def statistics_of_files(lake: Lake, table: int) -> list[ColumnStatistics]:
    """The statistics of each file of any lake snapshot."""
    rows = lake.execute(
        "select distinct column_id, null_count > 0, contains_nan, min_value, max_value"
        f" from {lake.metadata}.ducklake_file_column_stats where table_id = {table}",
        doing="reading statistics",
    )
    return [ColumnStatistics(int(c), _bool(null), _bool(nan), low, high) for c, null, nan, low, high in rows]


def widen_statistics(
    lake: Lake, table: int, to_cover: Sequence[ColumnStatistics], *, rewritten: bool = False
) -> bool:
    """
    Widen the table's statistics to cover `to_cover`; returns whether anything changed.

    `rewritten` says that `to_cover` covers all rows of the table.  A column whose statistics are unknown because no row
    is left then gets those of `to_cover`, which the next insert would otherwise narrow to its own values.  Without
    `rewritten`, unknown statistics stay unknown.
    """
    if not to_cover:
        return False
    types = {
        int(column): kind
        for column, kind in lake.execute(
            f"select column_id, column_type from {lake.metadata}.ducklake_column"
            f" where table_id = {table} and end_snapshot is null",
            doing="reading statistics",
        )
    }
    now = read_statistics(lake, table)
    by_column: dict[int, list[ColumnStatistics]] = {}
    for statistics in to_cover:
        by_column.setdefault(statistics.column, []).append(statistics)
    changed = False
    for current in now:
        known = by_column.get(current.column, [])
        if not known or (current.lowest is None and not rewritten):
            continue
        # Values that cannot be compared get the statistics from before a rewrite, or else stay unchanged.
        several = [*known, current] if rewritten else [current, *known]
        wide = _covering(lake, types.get(current.column), several)
        if wide != current:
            _write(lake, table, wide)
            changed = True
    return changed


def _covering(lake: Lake, kind: str | None, several: Sequence[ColumnStatistics]) -> ColumnStatistics:
    """Statistics that cover all of `several`; if values cannot be compared, those of the first."""
    first = several[0]
    lows = {s.lowest for s in several if s.lowest is not None}
    highs = {s.highest for s in several if s.highest is not None}
    return ColumnStatistics(
        first.column,
        _any(s.contains_null for s in several),
        _any(s.contains_nan for s in several),
        _extreme(lake, kind, lows, "min", first.lowest),
        _extreme(lake, kind, highs, "max", first.highest),
    )


def _extreme(lake: Lake, kind: str | None, values: set[str], which: str, otherwise: str | None) -> str | None:
    """The least or greatest of some texts, compared as values of their type."""
    if len(values) < 2:
        return next(iter(values), None)
    cast = _TYPES.get(kind or "", kind if _DECIMAL.fullmatch(kind or "") else None)
    if cast is None:
        return otherwise
    listed = ", ".join(f"({literal(value)})" for value in sorted(values))
    [[found]] = lake.execute(
        f"select arg_{which}(v, cast(v as {cast})) from (values {listed}) as t (v)",
        doing="comparing statistics",
    )
    return str(found)


def _write(lake: Lake, table: int, s: ColumnStatistics) -> None:
    lake.execute(
        f"update {lake.metadata}.ducklake_table_column_stats set contains_null = ?, contains_nan = ?,"
        f" min_value = ?, max_value = ? where table_id = {table} and column_id = {s.column}",
        (s.contains_null, s.contains_nan, s.lowest, s.highest),
        doing="keeping statistics wide",
    )


def _bool(value: object) -> bool | None:
    """Convert a boolean, because a catalog in SQLite stores numbers."""
    return None if value is None else bool(value)


def _any(values: Iterable[bool | None]) -> bool | None:
    known = [value for value in values if value is not None]
    return any(known) if known else None
