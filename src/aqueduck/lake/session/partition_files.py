"""
Write rows as files that fit a table's layout: one file per partition, sorted, in the directory of its partition.

A partition with few rows gets no file of its own: many small files would be slow to read and to merge.  Its rows go
into a file without a mark, together with rows whose partition values a path cannot express, and the driver has DuckLake
insert them.  The rows are sorted by partition first, so that memory holds one writer, however many partitions there are.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import duckdb

from aqueduck.lake.session.engine import load_extension
from aqueduck.lake.session.failures import lake_errors
from aqueduck.lake.session.files import WrittenFile, write_files
from aqueduck.lake.session.sql import ident
from aqueduck.model.layout import IDENTITY, PartitionKey, SortKey, TableLayout, goes_into_path, path_part

__all__ = ["SHARE_BYTES_MIN", "order_by", "partition_sql", "write_laid_out"]

SHARE_BYTES_MIN = 1 << 20
"""A partition with fewer bytes in one task, before compression, gets no file of its own."""
_SAMPLE_ROWS = 1000
_ROWS = "aqueduck_laid_out"


def partition_sql(key: PartitionKey) -> str:
    """The value of a partition key; the same expression as DuckLake's."""
    column = ident(key.column)
    if key.transform == IDENTITY:
        return column
    if key.buckets:
        return f"(murmur3_32({column}) & 2147483647) % {key.buckets}"
    return f"{key.transform}({column})"


def order_by(keys: Sequence[SortKey]) -> str:
    """The terms of an ORDER BY clause."""
    return ", ".join(
        f"{ident(key.column or '')} {'desc' if key.descending else 'asc'}"
        f" nulls {'first' if key.nulls_first else 'last'}"
        for key in keys
    )


def write_laid_out(
    con: duckdb.DuckDBPyConnection,
    query: str,
    directory: str,
    name: str,
    layout: TableLayout,
    *,
    columns: Sequence[str],
    table: str | None = None,
) -> list[WrittenFile]:
    """
    Write the rows of a query with these columns, of which `name` is the files' name without suffix; no rows, no file.

    `con` must have one thread, so that files keep the order of the rows.
    """
    known = {column.lower() for column in columns}
    wanted = [key.column for key in layout.partition] + [key.column or "" for key in layout.sort]
    if not layout.by_tasks or any(column.lower() not in known for column in wanted):
        layout = TableLayout()  # the driver sees that the files do not fit
    if not layout.partition:
        ordered = f"select * from ({query}) order by {order_by(layout.sort)}" if layout.sort else query
        return write_files(con, ordered, directory, f"{name}.parquet", columns=len(columns), table=table)
    with lake_errors("writing a data file", table=table):
        groups = _sorted_groups(con, query, layout, known)
        rows_min = SHARE_BYTES_MIN / _row_bytes(con)
    names, files, rest = layout.path_names, [], []
    for number, (values, first, count) in enumerate(groups):
        if count < rows_min or not goes_into_path(names, values):
            rest.append((first, first + count))
            continue
        place = "/".join([directory.rstrip("/"), *map(path_part, names, values)])
        files += write_files(
            con, f"{_cells(columns)} where rowid between {first} and {first + count - 1}", place,
            f"{name}{layout.mark}-{number}.parquet", columns=len(columns), table=table,
        )  # fmt: skip
    if rest:
        files += write_files(
            con, _within(columns, rest), directory, f"{name}-rest.parquet",
            columns=len(columns), table=table,
        )  # fmt: skip
    con.execute(f"drop table {_ROWS}")
    return files


def _sorted_groups(
    con: duckdb.DuckDBPyConnection, query: str, layout: TableLayout, columns: Collection[str]
) -> list[tuple[tuple[str | None, ...], int, int]]:
    """Store the rows by partition; returns the values, as text, the first row and the number of rows of each."""
    if any(key.buckets for key in layout.partition):
        load_extension(con, "ducklake")  # has the hash function
    con.execute("set preserve_insertion_order = true")
    prefix = "k"
    while any(column.startswith(prefix) for column in columns):
        prefix += "_"
    keys = [f"{prefix}{n}" for n in range(len(layout.partition))]
    values = ", ".join(f"{partition_sql(key)} as {k}" for key, k in zip(layout.partition, keys, strict=True))
    terms = ", ".join([*keys, *([order_by(layout.sort)] if layout.sort else [])])
    con.execute(f"create or replace temp table {_ROWS} as select *, {values} from ({query}) order by {terms}")
    con.execute("set preserve_insertion_order = false")  # a limit of a row group's bytes needs that
    listed = ", ".join(keys)
    texts = ", ".join(f"cast({k} as varchar)" for k in keys)
    found = con.execute(
        f"select {texts}, min(rowid) as first, count(*) from {_ROWS} group by {listed} order by first"
    ).fetchall()
    return [(tuple(row[:-2]), int(row[-2]), int(row[-1])) for row in found]


def _row_bytes(con: duckdb.DuckDBPyConnection) -> float:
    """The average size of a row as text, from a sample; at least one byte."""
    row = con.execute(
        f"select avg(strlen(cast(r as varchar))) from (from {_ROWS} limit {_SAMPLE_ROWS}) r"
    ).fetchone()
    return max(1.0, float(row[0] or 1)) if row else 1.0


def _cells(columns: Sequence[str]) -> str:
    return f"select {', '.join(map(ident, columns))} from {_ROWS}"


def _within(columns: Sequence[str], ranges: Sequence[tuple[int, int]]) -> str:
    """The rows of these ranges."""
    listed = ", ".join(f"({first}, {end})" for first, end in ranges)
    return f"{_cells(columns)} r semi join (values {listed}) v (first, beyond) on r.rowid >= v.first and r.rowid < v.beyond"
