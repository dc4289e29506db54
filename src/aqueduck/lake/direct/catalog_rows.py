"""
DuckLake's catalog tables, read and written as the DuckLake 1.0 specification says.

Everything here runs in the transaction of the session on its catalog, which reads one state of it (repeatable read).
`Catalog` hides that a catalog in PostgreSQL takes all statements in one round trip, and one in SQLite takes them one
by one.  A commit of someone else in between makes ours fail, because both insert the same snapshot id.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from aqueduck.lake.session.catalog import LakeSession
from aqueduck.lake.session.sql import ident, literal
from aqueduck.model.schema import TableName

__all__ = ["Catalog", "ColumnStats", "DataFile", "Described", "Newest", "TableFacts", "lines"]

VERSION = "1.0"
SCHEMA = "public"
"""The schema of DuckLake's tables in a catalog in PostgreSQL: sessions attach it without naming another one."""
_STORED = {
    "postgres": {
        "boolean": "boolean", "int16": "smallint", "int32": "integer", "int64": "bigint", "float32": "real",
        "float64": "double precision", "blob": "bytea", "varchar": "bytea", "json": "bytea", "time": "time",
        "uuid": "uuid", "date": "varchar", "timestamp": "varchar", "timestamptz": "varchar", "": "numeric",
    },
    "sqlite": {
        "boolean": "bigint", "int16": "bigint", "int32": "bigint", "int64": "bigint", "blob": "blob", "": "varchar",
    },
}  # fmt: skip
"""How DuckLake stores the types of columns in tables of inlined rows; "" stands for all others."""
_SELECTS_MAX = 400
"""SQLite combines at most 500 selects in one statement."""


@dataclass(frozen=True, slots=True)
class Newest:
    """The newest lake snapshot."""

    snapshot: int
    schema_version: int
    next_catalog_id: int
    next_file_id: int


@dataclass(frozen=True, slots=True)
class InlineLimits:
    """The limits for inlined rows that were stored with `set_option`, by scope and the id of its schema or table."""

    stored: Mapping[tuple[str, int], int]

    def of(self, table: Described, default: int) -> int:
        """The limit of a table: its own, that of its schema, that of the lake, or that of the session."""
        scopes = (("table", table.table_id), ("schema", table.schema_id), ("", 0))
        return next((self.stored[scope] for scope in scopes if scope in self.stored), default)


@dataclass(frozen=True, slots=True)
class Described:
    """A table of the lake as of one schema version."""

    table_id: int
    schema_id: int
    version: int
    """The schema version of its columns, which names its table of inlined rows."""
    columns: tuple[tuple[int, str, str], ...]
    """Id, name and type of each column, in order."""
    plain: bool
    """Whether it has no constraints and no nested columns."""
    steady: frozenset[int]
    """Columns that the table has had since it was made, under one name and type."""


@dataclass(frozen=True, slots=True)
class DataFile:
    """A current data file, with the range of one of its columns."""

    number: int
    path: str
    absolute: bool
    rows: int
    plain: bool
    """Whether it and its delete file are Parquet and not encrypted."""
    deletes: tuple[str, bool] | None
    """The path of its delete file, and whether it is absolute."""
    lowest: str | None
    highest: str | None


@dataclass(slots=True)
class ColumnStats:
    """The statistics of a column of a table."""

    contains_null: bool | None
    """None if unknown."""
    lowest: str | None
    highest: str | None


@dataclass(slots=True)
class TableFacts:
    """What changes with each commit."""

    rows: int = 0
    next_row: int = 0
    counted: bool = False
    """Whether the table has statistics: it has or had rows."""
    columns: dict[int, ColumnStats] = field(default_factory=dict)
    inlined: list[tuple[str, int]] = field(default_factory=list)
    """Its tables of inlined rows, with their schema versions."""
    files: int = 0


class Catalog:
    """The catalog of a session, inside a transaction of it."""

    def __init__(self, session: LakeSession) -> None:
        self._session = session
        self._postgres = session.kind == "postgres"
        self._writes: list[str] = []

    def _name(self, table: str) -> str:
        return f"{SCHEMA}.{ident(table)}" if self._postgres else ident(table)

    # -- reading

    def _read(self, statement: str) -> list[tuple[object, ...]]:
        function = "postgres_query" if self._postgres else "sqlite_query"
        return self._session.execute(
            f"from {function}({literal(self._session.metadata)}, {literal(statement)})",
            doing="reading the catalog",
        )

    def inline_limits(self) -> InlineLimits | None:
        """The stored limits for inlined rows; None if the catalog is of a version that this module does not know."""
        rows = self._read(
            "select key, value, cast(scope as varchar(10)) as scope, cast(scope_id as varchar(20)) as scope_id"
            f" from {self._name('ducklake_metadata')} where key in ('version', 'data_inlining_row_limit')"
        )
        limits = {}
        for key, value, scope, number in rows:
            if key == "data_inlining_row_limit":
                limits[_text(scope) or "", int(str(number or 0))] = int(str(value))
            elif value != VERSION:
                return None
        return InlineLimits(limits)

    def newest(self) -> Newest:
        snapshots = self._name("ducklake_snapshot")
        [row] = self._read(
            f"select snapshot_id, schema_version, next_catalog_id, next_file_id from {snapshots}"
            f" where snapshot_id = (select max(snapshot_id) from {snapshots})"
        )
        return Newest(*(int(str(value)) for value in row))

    def describe(self, targets: Collection[TableName]) -> dict[TableName, Described]:
        """The tables with these names, by `folded` name."""
        wanted = {target.folded for target in targets}
        names = ", ".join(sorted({literal(t.name) for t in wanted}))
        tables, schemas = self._name("ducklake_table"), self._name("ducklake_schema")
        found = self._read(
            f"select t.table_id, s.schema_id, s.schema_name, t.table_name from {tables} t join {schemas} s using (schema_id)"
            f" where t.end_snapshot is null and s.end_snapshot is null and lower(t.table_name) in ({names})"
        )
        named = {int(str(i)): TableName(str(schema), str(name)).folded for i, _, schema, name in found}
        schemas_of = {int(str(i)): int(str(schema)) for i, schema, _, _ in found}
        named = {i: name for i, name in named.items() if name in wanted}
        if not named:
            return {}
        among = f"table_id in ({', '.join(map(str, named))})"
        versions = {
            int(str(i)): int(str(version))
            for i, version in self._read(
                f"select table_id, max(schema_version) from {self._name('ducklake_schema_versions')} where {among} group by table_id"
            )
        }
        odd = {
            int(str(i))
            for (i,) in self._read(
                f"select distinct table_id from {self._name('ducklake_column')} where end_snapshot is null and {among}"
                " and (parent_column is not null or not cast(nulls_allowed as boolean))"
            )
        }
        columns: dict[int, list[tuple[int, str, str]]] = {}
        for i, column, name, kind in self._read(
            f"select table_id, column_id, column_name, column_type from {self._name('ducklake_column')}"
            f" where end_snapshot is null and {among} order by table_id, column_order"
        ):
            columns.setdefault(int(str(i)), []).append((int(str(column)), str(name), str(kind)))
        steady: dict[int, set[int]] = {}
        for i, column in self._read(
            f"select c.table_id, c.column_id from {self._name('ducklake_column')} c join"
            f" (select table_id, min(begin_snapshot) as made from {self._name('ducklake_table')} where {among} group by table_id) t"
            " using (table_id) group by c.table_id, c.column_id, t.made having count(distinct c.column_name) = 1"
            " and count(distinct c.column_type) = 1 and min(c.begin_snapshot) = t.made"
        ):
            steady.setdefault(int(str(i)), set()).add(int(str(column)))
        return {
            name: Described(
                i,
                schemas_of[i],
                versions[i],
                tuple(columns.get(i, ())),
                i not in odd,
                frozenset(steady.get(i, ())),
            )
            for i, name in named.items()
            if i in versions
        }

    def facts(self, tables: Collection[int]) -> dict[int, TableFacts]:
        """The facts of these tables, by id."""
        found = {number: TableFacts() for number in tables}
        among = f"table_id in ({', '.join(map(str, found))})"
        for number, rows, next_row in self._read(
            f"select table_id, record_count, next_row_id from {self._name('ducklake_table_stats')} where {among}"
        ):
            facts = found[int(str(number))]
            facts.rows, facts.next_row, facts.counted = int(str(rows)), int(str(next_row)), True
        for number, column, null, low, high in self._read(
            f"select table_id, column_id, cast(contains_null as varchar(5)), min_value, max_value"
            f" from {self._name('ducklake_table_column_stats')} where {among}"
        ):
            has_null = None if null is None else str(null) in ("true", "1")
            found[int(str(number))].columns[int(str(column))] = ColumnStats(has_null, _text(low), _text(high))
        for number, name, version in self._read(
            f"select table_id, table_name, schema_version from {self._name('ducklake_inlined_data_tables')} where {among}"
        ):
            found[int(str(number))].inlined.append((str(name), int(str(version))))
        for number, files in self._read(
            f"select table_id, count(*) from {self._name('ducklake_data_file')} where end_snapshot is null and {among} group by table_id"
        ):
            found[int(str(number))].files = int(str(files))
        return found

    def inlined_rows(self, wanted: Mapping[str, str]) -> dict[str, list[int]]:
        """The ids of current inlined rows that fulfil a condition, by the table of inlined rows."""
        selects = [
            f"select {number} as n, row_id from {self._name(table)} where end_snapshot is null and {condition}"
            for number, (table, condition) in enumerate(wanted.items())
        ]
        names = list(wanted)
        found: dict[str, list[int]] = {}
        for number, row in self._united(selects):
            found.setdefault(names[int(str(number))], []).append(int(str(row)))
        return found

    def files(self, columns: Mapping[int, int]) -> dict[int, list[DataFile]]:
        """The current files of tables, each with the range of one column, by table."""
        which = " or ".join(
            f"(f.table_id = {table} and s.column_id = {column})" for table, column in columns.items()
        )
        found: dict[int, list[DataFile]] = {}
        flag = "cast(cast({} as integer) as varchar(1))"
        for table, number, path, relative, rows, plain, deletes, relatively, low, high in self._read(
            f"select f.table_id, f.data_file_id, f.path as a, {flag.format('f.path_is_relative')} as b, f.record_count,"
            " case when f.file_format = 'parquet' and f.encryption_key is null and d.encryption_key is null"
            " and coalesce(d.format, 'parquet') = 'parquet' then 1 else 0 end as c,"
            f" d.path as d, {flag.format('d.path_is_relative')} as e, s.min_value, s.max_value from {self._name('ducklake_data_file')} f"
            f" left join {self._name('ducklake_file_column_stats')} s on s.data_file_id = f.data_file_id and ({which})"
            f" left join {self._name('ducklake_delete_file')} d on d.data_file_id = f.data_file_id and d.end_snapshot is null"
            f" where f.end_snapshot is null and f.table_id in ({', '.join(map(str, columns))})"
        ):
            file = DataFile(
                int(str(number)),
                str(path),
                str(relative) == "0",
                int(str(rows)),
                str(plain) == "1",
                None if deletes is None else (str(deletes), str(relatively) == "0"),
                _text(low),
                _text(high),
            )
            found.setdefault(int(str(table)), []).append(file)
        return found

    def deleted_from_files(
        self, rows: Mapping[int, Sequence[tuple[int, int]]]
    ) -> dict[int, set[tuple[int, int]]]:
        """Which of these rows of files are deleted already, by table."""
        known = self._deleting_tables()
        conditions = {
            _deletes(table): " or ".join(f"(file_id = {file} and row_id = {place})" for file, place in places)
            for table, places in rows.items()
            if _deletes(table) in known
        }
        selects = [
            f"select {name.rpartition('_')[2]} as n, file_id, row_id from {self._name(name)} where {condition}"
            for name, condition in conditions.items()
        ]
        found: dict[int, set[tuple[int, int]]] = {}
        for table, file, place in self._united(selects):
            found.setdefault(int(str(table)), set()).add((int(str(file)), int(str(place))))
        return found

    def _deleting_tables(self) -> set[str]:
        """The tables in which DuckLake stores deletes from files; it makes one with the first of them."""
        places = (
            f"pg_catalog.pg_tables where schemaname = '{SCHEMA}' and tablename"
            if self._postgres
            else "sqlite_master where name"
        )
        column = "cast(tablename as text)" if self._postgres else "name"
        rows = self._read(f"select {column} from {places} like 'ducklake!_inlined!_delete!_%' escape '!'")
        return {str(name) for (name,) in rows}

    def _united(self, selects: Sequence[str]) -> Iterator[tuple[object, ...]]:
        step = max(len(selects), 1) if self._postgres else _SELECTS_MAX
        for at in range(0, len(selects), step):
            yield from self._read(" union all ".join(selects[at : at + step]))

    def inlined_value(self, table: str, column: str, condition: str) -> list[str | None]:
        """The values of a column in current inlined rows."""
        rows = self._read(
            f"select {ident(column)} from {self._name(table)} where end_snapshot is null and {condition}"
        )
        return [_text(value) for (value,) in rows]

    # -- writing

    def _target(self, table: str) -> str:
        return self._name(table) if self._postgres else f"{ident(self._session.metadata)}.{ident(table)}"

    def make_inlined(self, table: Described) -> str:
        """Make the table for inlined rows of a table, as DuckLake does before the first of them."""
        name = f"ducklake_inlined_data_{table.table_id}_{table.version}"
        kinds = _STORED["postgres" if self._postgres else "sqlite"]
        columns = ["row_id bigint", "begin_snapshot bigint", "end_snapshot bigint"]
        columns += [
            f"{ident(column)} {kinds.get(kind, kinds.get('', kind))}" for _, column, kind in table.columns
        ]
        self._writes.append(f"create table {self._target(name)} ({', '.join(columns)})")
        self._writes.append(
            f"insert into {self._target('ducklake_inlined_data_tables')} (table_id, table_name, schema_version)"
            f" values ({table.table_id}, {literal(name)}, {table.version})"
        )
        return name

    def insert(self, table: str, rows: Sequence[str]) -> None:
        """Insert rows, given as lists of literals."""
        if rows:
            self._writes.append(f"insert into {self._target(table)} values {lines(rows)}")

    def end_rows(self, table: str, rows: Iterable[int], snapshot: int) -> None:
        """Mark inlined rows as deleted by a lake snapshot, whose own rows may have the same ids."""
        numbers = ", ".join(map(str, rows))
        self._writes.append(
            f"update {self._target(table)} set end_snapshot = {snapshot}"
            f" where row_id in ({numbers}) and end_snapshot is null and begin_snapshot <> {snapshot}"
        )

    def delete_from_files(self, rows: Mapping[int, Sequence[tuple[int, int]]], snapshot: int) -> None:
        """Mark rows of files as deleted by a lake snapshot."""
        known = self._deleting_tables() if rows else set()
        for table, places in rows.items():
            name = _deletes(table)
            if name not in known:
                self._writes.append(
                    f"create table {self._target(name)} (file_id bigint, row_id bigint, begin_snapshot bigint)"
                )
            self.insert(name, [f"{file}, {place}, {snapshot}" for file, place in places])

    def count(self, counts: Mapping[int, tuple[int, int]]) -> None:
        """Set the number of rows and the next row id of tables."""
        values = lines([f"{n}, {rows}, {row}" for n, (rows, row) in counts.items()])
        self._writes.append(
            f"update {self._target('ducklake_table_stats')} set record_count = v.total, next_row_id = v.following"
            f" from (values {values}) as v (id, total, following) where table_id = v.id"
        )

    def widen(self, changed: Mapping[tuple[int, int], ColumnStats]) -> None:
        """Set the statistics of columns."""
        if not changed:
            return
        values = lines(
            [
                f"{t}, {c}, {_bool(s)}, {literal(s.lowest)}, {literal(s.highest)}"
                for (t, c), s in changed.items()
            ]
        )
        null = "v.null_seen" if self._postgres else "v.null_seen::int"
        self._writes.append(
            f"update {self._target('ducklake_table_column_stats')} set contains_null = {null}, min_value = v.low,"
            f" max_value = v.high from (values {values}) as v (id, number, null_seen, low, high)"
            " where table_id = v.id and column_id = v.number"
        )

    def forget_statistics(self, columns: Collection[tuple[int, int]]) -> None:
        """Remove the statistics of columns, by the ids of table and column."""
        if columns:
            which = " or ".join(f"(table_id = {table} and column_id = {column})" for table, column in columns)
            self._writes.append(f"delete from {self._target('ducklake_table_column_stats')} where {which}")

    def first_statistics(self, tables: Mapping[int, tuple[int, Mapping[int, ColumnStats]]]) -> None:
        """Statistics of tables that had no row before: the number of rows, and those of columns with values."""
        # By position, as DuckLake writes them; the order differs between versions of the catalog.
        for number, (rows, columns) in tables.items():
            self._writes.append(
                f"insert into {self._target('ducklake_table_stats')} (table_id, record_count, next_row_id, file_size_bytes)"
                f" values ({number}, {rows}, {rows}, 0)"
            )
            values = [
                f"{number}, {c}, {self._flag(s)}, {literal(s.lowest)}, {literal(s.highest)}"
                for c, s in columns.items()
            ]
            if values:
                self._writes.append(
                    f"insert into {self._target('ducklake_table_column_stats')}"
                    f" (table_id, column_id, contains_null, min_value, max_value) values {lines(values)}"
                )

    def _flag(self, s: ColumnStats) -> str:
        return _bool(s) if self._postgres else {"true": "1", "false": "0"}.get(_bool(s), "null")

    def snapshot(self, newest: Newest, new_files: int, changes: str, message: str, extra: str) -> None:
        """The lake snapshot, and what it changed."""
        number = newest.snapshot + 1
        now = "now()" if self._postgres else "now()::varchar"
        self._writes.append(
            f"insert into {self._target('ducklake_snapshot')}"
            " (snapshot_id, snapshot_time, schema_version, next_catalog_id, next_file_id)"
            f" values ({number}, {now}, {newest.schema_version}, {newest.next_catalog_id}, {newest.next_file_id + new_files})"
        )
        self._writes.append(
            f"insert into {self._target('ducklake_snapshot_changes')}"
            " (snapshot_id, changes_made, author, commit_message, commit_extra_info)"
            f" values ({number}, {literal(changes)}, 'aqueduck', {literal(message)}, {literal(extra)})"
        )

    def flush(self) -> None:
        """Send what was written; the session's transaction commits it."""
        doing = "writing the catalog"
        if self._postgres:
            statement = literal(";\n".join(self._writes))
            self._session.execute(
                f"call postgres_execute({literal(self._session.metadata)}, {statement})", doing=doing
            )
        else:
            for write in self._writes:
                self._session.execute(write, doing=doing)
        self._writes.clear()


def _deletes(table: int) -> str:
    return f"ducklake_inlined_delete_{table}"


def lines(rows: Iterable[str]) -> str:
    """Rows of a `values` list."""
    return ", ".join(f"({row})" for row in rows)


def _bool(s: ColumnStats) -> str:
    return "null" if s.contains_null is None else "true" if s.contains_null else "false"


def _text(value: object) -> str | None:
    return None if value is None else str(value)
