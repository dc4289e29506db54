"""
Insert rows into a table with a layout: DuckLake divides them by partition and sorts them.

A partition's share of the rows is a file of its own if it has more rows than may be inlined.  Smaller shares are inlined
together, so that they gather in the catalog over many batches instead of becoming many small files; but only
`SMALL_SHARES_ROWS_MAX` rows at once, because every delete reads what is inlined.
"""

from __future__ import annotations

import contextlib
import itertools
from dataclasses import replace

from aqueduck.lake.session.catalog import LakeSession
from aqueduck.lake.session.partition_files import partition_sql
from aqueduck.lake.session.sql import ident, lake_table
from aqueduck.lake.session.storage import discard_file
from aqueduck.lake.target.inserts import insert_and_sync
from aqueduck.model.errors import LakeError, PartitionValueError
from aqueduck.model.layout import COMPONENT_BYTES_MAX, IDENTITY, TableLayout, path_part
from aqueduck.model.schema import TableName

__all__ = ["discard_inserted", "insert_by_layout"]

SMALL_SHARES_ROWS_MAX = 25_000


def insert_by_layout(
    session: LakeSession, target: TableName, rows: str, count: int, layout: TableLayout
) -> None:
    """Insert `count` rows into a table with this layout."""
    layout = _of_rows(session, rows, layout)
    _refuse_long_values(session, target, rows, layout)
    limit = session.inline_rows
    keys = ", ".join(map(partition_sql, layout.partition))
    small, largest = (count, count) if count <= limit else _small_shares(session, rows, keys, limit)
    if 0 < small < count:
        share = f"count(*) over (partition by {keys})"
        _inline(session, target, f"(from {rows} qualify {share} <= {largest})", small)
        insert_and_sync(session, target, f"(from {rows} qualify {share} > {largest})")
    elif small:
        _inline(session, target, rows, small)
    else:
        insert_and_sync(session, target, rows)


def _inline(session: LakeSession, target: TableName, rows: str, count: int) -> None:
    """Insert rows into the catalog, also if they are more than the limit."""
    limit = session.inline_rows
    try:
        session.inline(max(limit, count))
        session.execute(
            f"insert into {lake_table(target)} by name from {rows}",
            doing="inserting rows",
            table=target.qualified,
        )
    finally:
        with contextlib.suppress(LakeError):  # a failed transaction accepts no more statements
            session.inline(limit)
    session.memory.inlined_rows[target] = session.memory.inlined_rows.get(target, 0) + count


def discard_inserted(session: LakeSession) -> None:
    """After a commit, outside a transaction: remove files whose rows it inserted."""
    for path in session.inserted:
        discard_file(path)
    session.inserted.clear()


def _of_rows(session: LakeSession, rows: str, layout: TableLayout) -> TableLayout:
    """The layout without keys that the rows lack: these are NULL, for example after the source dropped a column."""
    known = {
        str(name).lower() for (name,) in session.execute(f"select column_name from (describe from {rows})")
    }
    return replace(layout, partition=tuple(key for key in layout.partition if key.column.lower() in known))


def _small_shares(session: LakeSession, rows: str, keys: str, limit: int) -> tuple[int, int]:
    """How many rows are inlined: those of the shares of at most so many rows, which is the second number."""
    if not keys or not limit:
        return 0, 0
    sizes = session.execute(
        f"select c, count(*) from (select count(*) as c from {rows} group by {keys}) group by c order by c",
        doing="dividing rows by partition",
    )
    totals = itertools.accumulate(size * times for size, times in sizes)
    fitting = [
        (total, size)
        for total, (size, _) in zip(totals, sizes, strict=True)
        if size <= limit and total <= SMALL_SHARES_ROWS_MAX
    ]
    return fitting[-1] if fitting else (0, 0)


def _refuse_long_values(session: LakeSession, target: TableName, rows: str, layout: TableLayout) -> None:
    """Raise if a value is too long for the name of its directory: what is inlined could never be flushed to a file."""
    for key in layout.partition:
        if key.transform != IDENTITY or key.kind != "varchar":
            continue
        column = ident(key.column)
        [[size]] = session.execute(f"select max(octet_length(encode(url_encode({column})))) from {rows}")
        if (
            not layout.names_directories
            or len(path_part(key.column, "")) + (size or 0) <= COMPONENT_BYTES_MAX
        ):
            continue
        raise PartitionValueError(
            f"a value of the partition column {key.column} is too long for the name of a directory",
            hint=f"alter table {lake_table(target)} reset partitioned by, or set partitioned by other columns",
            table=target.qualified,
        )
