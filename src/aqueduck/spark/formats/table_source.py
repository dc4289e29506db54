"""
`spark.read.format("postgres_table")`: read a table with many tasks under one snapshot of the server.

Partitions are ranges of pages.  A separate process holds the snapshot (`postgres.copy.snapshot_holder`), because no
object of Spark lives from the plan of a read to its last task.  Rows are read and cast like those of a copy, so that the
result equals a copy of the table in the lake.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSource, DataSourceReader, Filter, InputPartition
from pyspark.sql.types import StructType

from aqueduck.config.secret_text import SecretText
from aqueduck.model.errors import AqueduckError, ConfigError, CopyDisturbedError
from aqueduck.model.schema import TableName, TableSchema
from aqueduck.spark.formats.source_options import Options

if TYPE_CHECKING:
    import psycopg
    import pyarrow as pa

    from aqueduck.postgres.copy.snapshot_holder import HeldSnapshot
    from aqueduck.postgres.copy.table_copy import Chunk

__all__ = ["FORMAT", "TABLE_OPTIONS", "PostgresTableSource", "table_struct"]

FORMAT = "postgres_table"
TABLE_OPTIONS = ("dsn", "dsn_env", "dsn_file", "table", "columns", "partition_bytes", "snapshot_seconds")
PARTITION_BYTES = 64 << 20
SNAPSHOT_SECONDS = 600
BATCH_ROWS = 16_384


@dataclass(frozen=True)
class TableOptions:
    """The options of a read."""

    dsn: SecretText
    table: TableName
    columns: tuple[str, ...]
    partition_bytes: int
    snapshot_seconds: int

    @classmethod
    def read(cls, given: Mapping[str, str]) -> TableOptions:
        options = Options(FORMAT, given, TABLE_OPTIONS)
        seconds = options.number("snapshot_seconds")
        return cls(
            options.secret("dsn"),
            options.table("table", default_schema="public"),
            options.names("columns"),
            options.size("partition_bytes") or PARTITION_BYTES,
            SNAPSHOT_SECONDS if seconds is None else seconds,
        )

    def describe(self, conn: psycopg.Connection[Any], names: Sequence[str]) -> TableSchema:
        """The table with only these columns, or with all if none are named."""
        from aqueduck.postgres.catalog.tables import describe_table

        table = describe_table(conn, str(self.table), need_key=False)
        by_name = {column.name: column for column in table.columns}
        missing = [name for name in names if name not in by_name]
        if missing:
            raise ConfigError(
                f"{FORMAT}: the table {table.qualified} has no column {missing[0]}",
                hint=f"its columns are: {', '.join(by_name)}",
            )
        return replace(table, columns=tuple(by_name[name] for name in names)) if names else table


class PostgresTableSource(DataSource):
    """A table of PostgreSQL at one point in time."""

    @classmethod
    def name(cls) -> str:
        return FORMAT

    def schema(self) -> StructType:
        from aqueduck.postgres.session.connection import connect

        options = TableOptions.read(self.options)
        with connect(options.dsn) as conn:
            return table_struct(options.describe(conn, options.columns))

    def reader(self, schema: StructType) -> DataSourceReader:
        return TableReader(TableOptions.read(self.options), schema)


def table_struct(table: TableSchema) -> StructType:
    """The Spark schema of a table."""
    from aqueduck.lake.fold.fold_tasks import task_engine
    from aqueduck.lake.session.sql import ident
    from aqueduck.lake.values.spark_cells import spark_type
    from aqueduck.model.columns.typemap import lake_type
    from aqueduck.spark.formats.spark_types import struct_of

    cells = ", ".join(f"cast(null as {spark_type(lake_type(c))}) as {ident(c.name)}" for c in table.columns)
    with task_engine("", len(table.columns)) as con:
        con.execute("set arrow_lossless_conversion = false")
        return struct_of(con.execute(f"select {cells} limit 0").to_arrow_table().schema)


@dataclass
class ChunkPartition(InputPartition):
    """Ranges of pages that one task reads."""

    number: int
    table: TableSchema
    chunks: tuple[Chunk, ...]
    marks: dict[int, int]
    """The names of the table's columns, by number, at planning time."""
    snapshot: HeldSnapshot


class TableReader(DataSourceReader):
    """The server applies the filters that it can evaluate; Spark applies all filters again."""

    def __init__(self, options: TableOptions, schema: StructType) -> None:
        self._options = options
        self._schema = schema
        self._filters: tuple[Filter, ...] = ()

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:
        self._filters = tuple(filters)
        return filters

    def partitions(self) -> Sequence[InputPartition]:
        from aqueduck.postgres.copy.snapshot_holder import hold_snapshot
        from aqueduck.postgres.copy.table_copy import plan_chunks, read_column_marks
        from aqueduck.postgres.session.connection import connect

        o = self._options
        with connect(o.dsn, autocommit=False) as conn:
            conn.execute("set transaction isolation level repeatable read read only")
            table = o.describe(conn, self._schema.fieldNames())
            found = read_column_marks(conn, [table.oid])[table.oid]
            marks = {c.number: found[c.number] for c in table.columns}
            _refuse_unreadable(conn, table)
            groups = _groups(plan_chunks(conn, table, chunk_bytes=o.partition_bytes), o.partition_bytes)
        # Planned before the snapshot: the last chunk has no upper limit, so it includes pages added later.
        snapshot = hold_snapshot(o.dsn, len(groups), o.snapshot_seconds)
        return [ChunkPartition(n, table, tuple(group), marks, snapshot) for n, group in enumerate(groups)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """In a task: read the chunks."""
        from aqueduck.postgres.copy.snapshot_holder import check_snapshot, report
        from aqueduck.postgres.session.connection import connect

        assert isinstance(partition, ChunkPartition)
        p = partition
        with connect(self._options.dsn, application_name="aqueduck read") as conn:
            check_snapshot(conn, p.snapshot)
            report(conn, p.snapshot, f"begin {p.number}")
            yield from self._typed(p)
            _refuse_rewritten(conn, p)
            report(conn, p.snapshot, f"end {p.number}")

    def _typed(self, p: ChunkPartition) -> Iterator[pa.RecordBatch]:
        import pyarrow as pa

        from aqueduck.lake.fold.fold_tasks import task_engine
        from aqueduck.lake.session.failures import lake_errors
        from aqueduck.lake.session.sql import ident
        from aqueduck.lake.values.spark_cells import spark_type
        from aqueduck.model.columns.typemap import cast_sql, lake_type
        from aqueduck.spark.formats.spark_types import duckdb_types

        failed: list[AqueduckError] = []
        arriving = self._arriving(p, failed)
        first = next(arriving, None)
        if first is None:
            return
        cells = []
        for i, (column, (_, kind)) in enumerate(
            zip(p.table.columns, duckdb_types(self._schema), strict=True)
        ):
            text = pa.types.is_string(first.schema.field(i).type)
            value = (
                f"cast({cast_sql(column, f'n{i}') if text else f'n{i}'} as {spark_type(lake_type(column))})"
            )
            cells.append(f"cast({value} as {kind}) as {ident(column.name)}")
        batches = itertools.chain([first], arriving)
        try:
            with (
                task_engine("", len(p.table.columns)) as con,
                lake_errors("reading a table", table=p.table.qualified),
            ):
                con.execute("set arrow_lossless_conversion = false")
                con.register("chunks", pa.RecordBatchReader.from_batches(first.schema, batches))
                yield from con.execute(f"select {', '.join(cells)} from chunks").to_arrow_reader(BATCH_ROWS)
        except AqueduckError as exc:
            raise failed[0] if failed else exc from None  # DuckDB passes on only a text

    def _arriving(self, p: ChunkPartition, failed: list[AqueduckError]) -> Iterator[pa.RecordBatch]:
        try:
            yield from self._chunks(p)
        except AqueduckError as exc:
            failed.append(exc)
            raise

    def _chunks(self, p: ChunkPartition) -> Iterator[pa.RecordBatch]:
        from aqueduck.postgres.copy.table_copy import ChunkReader
        from aqueduck.spark.formats.pushed_filters import postgres_condition

        condition = postgres_condition(self._filters, {c.name: c for c in p.table.columns})
        with ChunkReader(self._options.dsn, p.snapshot.name) as reader:
            for chunk in p.chunks:
                yield from reader.rows(p.table, chunk, condition)


def _groups(chunks: Iterable[Chunk], size: int) -> list[list[Chunk]]:
    """Group chunks into tasks, in order; small partitions of a table share one."""
    groups: list[list[Chunk]] = []
    filled = 0
    for chunk in chunks:
        if not groups or filled + chunk.bytes > size:
            groups.append([])
            filled = 0
        groups[-1].append(chunk)
        filled += chunk.bytes
    return groups


def _refuse_unreadable(conn: psycopg.Connection[tuple[object, ...]], table: TableSchema) -> None:
    """Raise before any task runs if the role may not read the table, with the statement that grants the right."""
    from aqueduck.model.errors import PrivilegeError
    from aqueduck.postgres.catalog.row_security import refuse_row_security
    from aqueduck.postgres.session.quoting import identifier, table_identifier

    row = conn.execute(
        "select has_any_column_privilege(%s::oid, 'select'), current_user::text", (table.oid,)
    ).fetchone()
    if row is not None and not row[0]:
        grant = f"grant select on {table_identifier(table)} to {identifier(str(row[1]))}"
        raise PrivilegeError("the role may not read the table", hint=grant, table=table.qualified)
    refuse_row_security(conn, table)


def _refuse_rewritten(conn: psycopg.Connection[Any], p: ChunkPartition) -> None:
    """
    Raise if the table changed while it was read.

    A truncated or rewritten table looks empty to an older snapshot, and columns are read by their current names.
    """
    from aqueduck.postgres.copy.table_copy import read_column_marks

    def changed(what: str) -> CopyDisturbedError:
        return CopyDisturbedError(
            f"the table {what} while it was read", hint="repeat the read", table=p.table.qualified
        )

    for relation, filenode, schema, name in {(c.relation, c.filenode, c.schema, c.table) for c in p.chunks}:
        row = conn.execute(
            "select c.relfilenode::int8, n.nspname::text, c.relname::text"
            " from pg_class c join pg_namespace n on n.oid = c.relnamespace where c.oid = %s",
            (relation,),
        ).fetchone()
        if row is None or row[0] != filenode:
            raise changed("was truncated or rewritten")
        if row[1:] != (schema, name):
            raise changed("was renamed")
    now = read_column_marks(conn, [p.table.oid]).get(p.table.oid, {})
    if any(now.get(number) != mark for number, mark in p.marks.items()):
        raise changed("was altered")
