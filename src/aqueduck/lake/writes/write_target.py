"""
The target table of a write: created if it is missing, and compared with the rows to write.

All rows that `format("ducklake")` reads from a table can be written to it: text to types that Spark does not have, and
numbers to wider types.  Everything else is refused before a task starts.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import duckdb
import pyarrow as pa

from aqueduck.config.lake_place import LakePlace
from aqueduck.lake.session.directories import stored_directory
from aqueduck.lake.session.engine import is_remote, new_connection
from aqueduck.lake.session.pool import LakePool, PooledLake
from aqueduck.lake.session.sql import ident, literal
from aqueduck.lake.values.kept_types import is_adopted, kept, refuse_types
from aqueduck.lake.values.not_inlined import keep_out_of_catalog
from aqueduck.lake.values.spark_cells import OWN_MESSAGE, from_spark, is_nested, spark_type
from aqueduck.model.errors import ConfigError, SchemaChangeError
from aqueduck.model.schema import TableName

__all__ = ["CONTROL", "WriteMode", "WriteOrder", "WriteTarget", "open_target"]

CONTROL = "_aqueduck_"
"""The prefix of columns that are in a part but not in the table."""

WriteMode = Literal["append", "overwrite", "upsert"]

_WIDER = ("TINYINT", "SMALLINT", "INTEGER", "BIGINT")
_DECIMAL = re.compile(r"DECIMAL\((\d+),\s*(\d+)\)")


@dataclass(frozen=True, slots=True)
class WriteOrder:
    """The table to write to, the mode and the options of the write."""

    table: TableName
    mode: WriteMode
    keys: tuple[str, ...] = ()
    order: tuple[str, ...] = ()
    """Columns that order the rows of a key: the last row wins. They are stored only if the table has them."""
    op: str | None = None
    """The column that marks deletes and truncates; stored only if the table has it."""
    unchanged: str | None = None
    """The column that names the columns whose stored values stay; stored only if the table has it."""

    @property
    def steering(self) -> tuple[tuple[str, tuple[str, ...]], ...]:
        """The options that name control columns, with those columns."""
        op, unchanged = ((name,) if name else () for name in (self.op, self.unchanged))
        return ("op", op), ("unchanged", unchanged), ("order", self.order)


@dataclass(frozen=True, slots=True)
class WriteTarget:
    """The table, as passed to tasks."""

    table: TableName
    directory: str
    stored: tuple[str, ...]
    """The table's columns."""
    cells: tuple[str, ...]
    """SQL expressions over the arriving rows for the columns of a part."""
    inserted: bool
    """Whether rows are always inserted, because DuckLake cannot add files with these types, or to an encrypted lake."""
    encrypted: bool = False
    """Whether the lake is encrypted, so that parts are too, each with a key that the driver gets from its task."""


def open_target(pool: LakePool, place: LakePlace, order: WriteOrder, arrow: pa.Schema) -> WriteTarget:
    """Create the table if it is missing; raise if the rows do not fit it."""
    _check_names(order, arrow.names)
    columns = _types(arrow)
    with pool.use(place) as lake:
        if not _exists(lake, order.table):
            _make(lake, order, columns)
        stored = [
            (str(name), str(kind), null == "NO")
            for name, kind, null in lake.execute(
                f'select column_name, column_type, "null" from (describe {lake.table(order.table)})',
                doing="describing the table",
            )
        ]
        types = {name: kind for name, kind, _ in stored}
        refuse_types(types, order.table.qualified)
        keep_out_of_catalog(lake, order.table, types)
        return WriteTarget(
            order.table,
            _directory(lake, order.table),
            tuple(name for name, _, _ in stored),
            tuple(_cells(order, columns, stored)),
            lake.encrypted or not all(map(is_adopted, types.values())),
            lake.encrypted,
        )


def _types(arrow: pa.Schema) -> dict[str, str]:
    """The columns with their types in DuckDB."""
    con = new_connection(threads=1)
    try:
        con.register("empty", arrow.empty_table())
        rows = con.execute("select column_name, column_type from (describe from empty)").fetchall()
    except duckdb.Error:
        raise SchemaChangeError(
            "a column has a type that a lake cannot hold", hint="cast it to string or binary"
        ) from None
    finally:
        con.close()
    variants = {field.name for field in arrow if _is_variant(field.type)}
    return {str(name): "VARIANT" if name in variants else str(kind) for name, kind in rows}


def _is_variant(kind: pa.DataType) -> bool:
    """Whether Spark marked the struct as a VARIANT."""
    return pa.types.is_struct(kind) and any((field.metadata or {}).get(b"variant") for field in kind)


def _check_names(order: WriteOrder, columns: Sequence[str]) -> None:
    lower = [name.lower() for name in columns]
    if len(set(lower)) < len(lower):
        raise SchemaChangeError(
            "two columns differ only in case, which a lake does not support", table=order.table.qualified
        )
    for option, names in (*order.steering, ("keys", order.keys)):
        for name in names:
            if name not in columns:
                raise ConfigError(f"ducklake: the option {option} names a column {name} that is not written")
    if (order.op or order.unchanged) and not order.order:
        raise ConfigError("ducklake: the options op and unchanged require the option order")
    if order.order and not order.keys:
        raise ConfigError("ducklake: the option order requires the option keys")


def _exists(lake: PooledLake, table: TableName) -> bool:
    return bool(
        lake.execute(
            "select 1 from duckdb_tables() where database_name = ? and lower(schema_name) = lower(?)"
            " and lower(table_name) = lower(?)",
            (lake.alias, table.schema, table.name),
        )
    )


def _make(lake: PooledLake, order: WriteOrder, columns: dict[str, str]) -> None:
    steering = {name for _, names in order.steering for name in names} - set(order.keys)
    wanted = ", ".join(f"{ident(n)} {k}" for n, k in columns.items() if n not in steering)
    with lake.transaction():
        lake.execute(f"create schema if not exists {ident(lake.alias)}.{ident(order.table.schema)}")
        lake.execute(
            f"create table if not exists {lake.table(order.table)} ({wanted})", doing="making the table"
        )


def _cells(order: WriteOrder, columns: dict[str, str], stored: Sequence[tuple[str, str, bool]]) -> list[str]:
    given = {name.lower(): (name, kind) for name, kind in columns.items()}
    names = {name.lower() for name, _, _ in stored}
    steering = {name.lower() for _, names in order.steering for name in names}
    missing = [name for name, _, _ in stored if name.lower() not in given]
    extra = [name for name in columns if name.lower() not in names and name.lower() not in steering]
    if missing or extra:
        what = f"the column {missing[0]} is missing" if missing else f"the table has no column {extra[0]}"
        raise SchemaChangeError(
            f"the rows do not fit the table: {what}",
            hint="select exactly the table's columns, or alter the table first",
            table=order.table.qualified,
        )
    cells = []
    for name, kind, required in stored:
        source, source_kind = given[name.lower()]
        if not _fits(source_kind, kind):
            raise SchemaChangeError(
                f"the column {name} is {kind} in the table, which cannot take {source_kind}",
                hint=f"cast the column to {spark_type(kind).lower()} first",
                table=order.table.qualified,
            )
        cell = from_spark(kind, source_kind, ident(source))
        if rule := kept(kind, cell):
            problem = literal(
                f"{OWN_MESSAGE}the column {name} has a value that DuckLake does not keep exactly as {kind}"
            )
            cell = f"case when {ident(source)} is null or ({rule}) then {cell} else error({problem}) end"
        if required:
            problem = literal(f"{name} is null")
            cell = f"case when {ident(source)} is null then error({problem}) else {cell} end"
        cells.append(f"{cell} as {ident(name)}")
    cells += [f"{ident(name)} as {CONTROL}{i}" for i, name in enumerate(order.order)]
    if order.op is not None:
        cells.append(f"lower({ident(order.op)}) as {CONTROL}op")
    if order.unchanged is not None:
        cells.append(f"cast({ident(order.unchanged)} as varchar[]) as {CONTROL}unchanged")
    return cells


def _fits(source: str, target: str) -> bool:
    if source == target or (not is_nested(target) and spark_type(target) == source):
        return True
    if source in _WIDER and target in _WIDER:
        return _WIDER.index(source) <= _WIDER.index(target)
    if (source, target) in (("FLOAT", "DOUBLE"), ("TIMESTAMP", "TIMESTAMP_NS")):
        return True
    one, other = _DECIMAL.fullmatch(source), _DECIMAL.fullmatch(target)
    if one is None or other is None:
        return False
    digits, scale = int(one[1]), int(one[2])
    return int(other[2]) >= scale and int(other[1]) - int(other[2]) >= digits - scale


def _directory(lake: PooledLake, table: TableName) -> str:
    """The directory of the table's files."""
    place = stored_directory(lake, table)
    assert place is not None, "it was made"
    return place if is_remote(place) else os.path.abspath(place)  # noqa: PTH100 - the text, not the file
