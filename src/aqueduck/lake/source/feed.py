"""
A lake table for users' queries: its rows at a lake snapshot, or its changes, as Arrow batches.

This implements the Spark formats `ducklake` and `ducklake_changes` (`spark.formats.lake_source`).  Columns have types
that Spark can hold (`spark_cells`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import duckdb
import pyarrow as pa

from aqueduck.config.lake_place import LakePlace
from aqueduck.lake.session.failures import lake_errors
from aqueduck.lake.session.pool import LakePool, PooledLake
from aqueduck.lake.session.sql import ident, literal
from aqueduck.lake.source.change_sides import dated, side, sides
from aqueduck.lake.source.source_lake import RangeRead, SourceLake
from aqueduck.lake.values.spark_cells import mark_variants, marked, spark_type, to_spark
from aqueduck.model.errors import (
    ConfigError,
    LakeWriteError,
    ReservedColumnError,
    SchemaChangeError,
    SourceDivergedError,
)
from aqueduck.model.routing import PLACES, SnapshotRange, SourceColumn, SourceTable
from aqueduck.model.schema import TableName

__all__ = ["Feed", "FeedPart", "read_part"]

BATCH_ROWS = 8192
SCAN_BYTES = 8 << 20
"""Files with fewer bytes in total are read by one task."""
META_COLUMNS = ("_change_type", "_lake_snapshot_id", "_rowid")


@dataclass(frozen=True, slots=True)
class FeedPart:
    """The part that one task reads: a range of lake snapshots, or the table at one lake snapshot."""

    table: TableName
    cells: tuple[tuple[str, str], ...]
    """Name and expression of each column."""
    span: SnapshotRange
    table_id: int
    scan: bool = False
    condition: str = "true"
    files: str = "true"
    """The condition that selects the files of a scan."""
    variants: frozenset[str] = frozenset()


class Feed:
    """Reads the catalog and plans the parts."""

    def __init__(self, lake: PooledLake, table: TableName) -> None:
        self._lake = lake
        self._table = table
        self.source = SourceLake(lake, table)

    def schema(self, at: int, *, changes: bool) -> pa.Schema:
        """The columns with their Spark types, for `changes` including those that describe the change."""
        with lake_errors("describing the table"):
            schema = self._lake.con.execute(self._no_rows(at, changes=changes)).to_arrow_table().schema
        return mark_variants(schema, _variants(self.source.table_at(at)[2].columns))

    def check_condition(self, condition: str, at: int, *, changes: bool) -> None:
        """Raise if the text is not a condition on these columns."""
        try:
            self._lake.con.execute(f"select 1 from ({self._no_rows(at, changes=changes)}) where {condition}")
        except duckdb.Error as exc:
            reason = str(exc).splitlines()[0]
            raise ConfigError(
                f"the option where cannot be used: {reason}", table=self._table.qualified
            ) from None

    def _no_rows(self, at: int, *, changes: bool) -> str:
        _, _, source = self.source.table_at(at)
        if changes:
            source.refuse_reserved_names()
        cells = ", ".join(f"cast(null as {spark_type(c.type)}) as {ident(c.name)}" for c in source.columns)
        meta = ", null::varchar as _change_type, null::bigint as _lake_snapshot_id, null::bigint as _rowid"
        return f"select {cells}{meta if changes else ''} limit 0"

    def first(self) -> int:
        """The lake snapshot before the table was created."""
        return max(self.source.table_at(self.source.latest())[1] - 1, 0)

    def uuid(self, at: int) -> str:
        """Which table has the name at a lake snapshot."""
        return self.source.table_at(at)[2].uuid

    def at_time(self, time: str) -> int:
        """The newest lake snapshot at a point in time."""
        rows = self._lake.execute(
            f"select max(snapshot_id) from {self._lake.metadata}.ducklake_snapshot"
            " where snapshot_time::timestamptz <= ?::timestamptz",
            (time,),
            doing="looking for a lake snapshot by its time",
        )
        return int(rows[0][0]) if rows[0][0] is not None else 0

    def scan(self, at: int, names: Sequence[str], parts: int) -> list[FeedPart]:
        """The whole table at a lake snapshot, with its files divided into at most `parts` parts."""
        table_id, _, source = self.source.table_at(at)
        by_name = {column.name: column for column in source.columns}
        cells = tuple(_shown(by_name[n]) for n in names)
        variants = _variants(by_name[n] for n in names)
        whole = FeedPart(self._table, cells, SnapshotRange(at, at), table_id, scan=True, variants=variants)
        if any(column.name.lower() == "filename" for column in source.columns):
            return [whole]  # a column named filename hides DuckLake's own
        groups = self._file_groups(at, parts)
        if len(groups) < 2:
            return [whole]
        known = ", ".join(literal(file) for group in groups for file in group)
        conditions = [f"filename in ({', '.join(map(literal, group))})" for group in groups]
        # Rows that are in none of these files are inlined in the catalog.
        return [replace(whole, files=files) for files in (*conditions, f"filename not in ({known})")]

    def _file_groups(self, at: int, parts: int) -> list[list[str]]:
        """Group the files into parts of about equal size; a few small files become one part."""
        rows = self._lake.execute(
            f"select data_file, data_file_size_bytes from ducklake_list_files({literal(self._lake.alias)},"
            f" {literal(self._table.name)}, schema => {literal(self._table.schema)}, snapshot_version => {at})",
            doing="listing the table's files",
        )
        total = sum(size for _, size in rows)
        wanted = max(1, min(len(rows), parts, -(-total // SCAN_BYTES)))
        groups: list[list[str]] = [[] for _ in range(wanted)]
        filled = [0] * wanted
        for file, size in sorted(rows, key=lambda row: -row[1]):
            least = filled.index(min(filled))
            groups[least].append(file)
            filled[least] += size
        return [group for group in groups if group]

    def changes(self, start: int, end: int, names: Sequence[str], parts: int) -> list[FeedPart]:
        """The changes after `start` up to and including `end`, divided by ranges and into about `parts` parts."""
        table_id, made, now = self.source.table_at(end)
        wanted = self._columns(now, names)
        self._refuse_another_table(start, made)
        reads, _ = self.source.reads(table_id, made, SourceTable(now.uuid, wanted), start, end)
        if any(read.span.removes and not read.placed for read in reads):
            raise ReservedColumnError(
                f"the table has a column named {' or '.join(PLACES)}, which hides the values that identify changes",
                hint="rename the column; a table with only inserts can be read without that",
                table=self._table.qualified,
            )
        return [piece for read in reads for piece in _pieces(read, wanted, parts)]

    def _refuse_another_table(self, start: int, made: int) -> None:
        """Raise if another table had the name at the start: its deleted rows are not changes of this one."""
        if start < made - 1 and self.source.exists_at(start):
            raise SourceDivergedError(
                f"the table was dropped and created again, last in lake snapshot {made}",
                hint=f"start at lake snapshot {made}, with an empty target",
                table=self._table.qualified,
            )

    def _columns(self, now: SourceTable, names: Sequence[str]) -> tuple[SourceColumn, ...]:
        by_name = {column.name: column for column in now.columns}
        missing = [name for name in names if name not in by_name and name not in META_COLUMNS]
        if missing:
            raise SchemaChangeError(
                f"the table no longer has the column {missing[0]}",
                hint="restart the query to read the table with its current columns",
                table=self._table.qualified,
            )
        return tuple(by_name[name] for name in names if name not in META_COLUMNS)

    def rows_by_snapshot(self, start: int, end: int) -> list[tuple[int, int]]:
        """The number of changes of each lake snapshot in the range."""
        found: dict[int, int] = {}
        for part in self.changes(start, end, [], 1):
            for span in dated(self._lake, part.table_id, part.span):
                for kind in ("insertions", "deletions") if span.removes else ("insertions",):
                    rows = side(self._lake, part.table, kind, span, "")
                    for snapshot, count in self._lake.execute(
                        f"select aqueduck_s, count(*) from ({rows}) group by 1"
                    ):
                        found[snapshot] = found.get(snapshot, 0) + count
        return sorted(found.items())


def read_part(pool: LakePool, place: LakePlace, part: FeedPart) -> Iterator[pa.RecordBatch]:
    """
    The rows of a part.

    A session that was attached before inlined rows were flushed may look for them in the old place.  A read that fails
    before its first row is therefore retried once with a new session.
    """
    first = None
    try:
        rows = _read_part(pool, place, part)
        first = next(rows, None)
    except LakeWriteError:
        rows = _read_part(pool, place, part)
    if first is not None:
        yield first
    yield from rows


def _read_part(pool: LakePool, place: LakePlace, part: FeedPart) -> Iterator[pa.RecordBatch]:
    with pool.use(place, read_only=True) as lake, lake_errors("reading the lake"):
        names = ", ".join(ident(name) for name, _ in part.cells)
        if part.scan:
            source = f"select {_cells(part)} from {lake.table(part.table)} at (version => {part.span.last}) where {part.files}"
            yield from _batches(lake, part, f"select {names} from ({source}) where {part.condition}")
            return
        # Internal names that a user's table cannot have, so that conditions refer to its own columns.
        meta = 'change_type_ as "_change_type", aqueduck_s as "_lake_snapshot_id", aqueduck_r as "_rowid"'
        columns = f"{names}, " if names else ""
        with lake.transaction():  # no merge can happen between the check for merged files and the reads
            for span in dated(lake, part.table_id, part.span):
                yield from _batches(
                    lake,
                    part,
                    f"select * from (select {columns}{meta} from ({_typed(lake, part, span)})) where {part.condition}"
                    ' order by "_lake_snapshot_id", "_rowid", "_change_type" desc',
                )


def _batches(lake: PooledLake, part: FeedPart, query: str) -> Iterator[pa.RecordBatch]:
    reader = lake.con.execute(query).to_arrow_reader(BATCH_ROWS)
    schema = mark_variants(reader.schema, part.variants)
    for batch in reader:
        yield marked(batch, schema) if part.variants else batch


def _shown(column: SourceColumn, cell: str | None = None) -> tuple[str, str]:
    cell = ident(column.name) if cell is None else cell
    return column.name, to_spark(column.name, column.type, cell)


def _variants(columns: Iterable[SourceColumn]) -> frozenset[str]:
    return frozenset(column.name for column in columns if column.type == "VARIANT")


def _pieces(read: RangeRead, columns: Sequence[SourceColumn], parts: int) -> Iterator[FeedPart]:
    cells = tuple(_shown(column, cell) for column, cell in zip(columns, read.cells, strict=True))
    for span in _split(read.span, parts):
        yield FeedPart(read.table, cells, span, read.table_id, variants=_variants(columns))


def _split(span: SnapshotRange, parts: int) -> Iterator[SnapshotRange]:
    length = span.last - span.first + 1
    step = -(-length // max(1, min(parts, length)))
    for first in range(span.first, span.last + 1, step):
        yield span.within(first, min(first + step - 1, span.last))


def _cells(part: FeedPart) -> str:
    return ", ".join(f"{cell} as {ident(name)}" for name, cell in part.cells)


def _typed(lake: PooledLake, part: FeedPart, span: SnapshotRange) -> str:
    """Both sides of each change with its kind; an update is a row that was removed and added with the same row id."""
    cells = f", {_cells(part)}" if part.cells else ""
    if not span.removes:
        return (
            f"select 'insert' as change_type_, * from ({side(lake, part.table, 'insertions', span, cells)})"
        )
    kind = (
        "select case when exists (select 1 from {} o where o.aqueduck_s = x.aqueduck_s and o.aqueduck_r = x.aqueduck_r)"
        " then '{}' else '{}' end as change_type_, x.* from {} x"
    )
    return (
        f"{sides(lake, part.table, part.table_id, span, cells, cells)}"
        f" {kind.format('removed', 'update_postimage', 'insert', 'added')} union all"
        f" {kind.format('added', 'update_preimage', 'delete', 'removed')}"
    )
