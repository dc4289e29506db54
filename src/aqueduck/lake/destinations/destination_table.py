"""
A destination's table: identify it, create it, and alter it to follow the source's columns.

Users drop and replace tables.  DuckLake's uuid distinguishes the table with our rows from another one of the same name.
A missing or replaced table is re-seeded.  A table with other columns is refused: it is never written or dropped.
"""

from __future__ import annotations

from typing import Literal

from aqueduck.lake.session.pool import PooledLake
from aqueduck.lake.session.sql import ident, literal
from aqueduck.lake.target.places import read_places, refuse_other_buckets
from aqueduck.lake.target.set_layouts import layout_changes, sort_changes, without_sort_key
from aqueduck.model.errors import (
    LakeError,
    LakeTableMissingError,
    PartitionedTargetError,
    SchemaChangeError,
    TargetReplacedError,
)
from aqueduck.model.layout import AS_IT_IS, WantedLayout
from aqueduck.model.routing import Evolve, SourceTable, evolution
from aqueduck.model.schema import TableName

__all__ = [
    "bucketed",
    "evolve_table",
    "find_table",
    "gets_bucket",
    "lay_out_table",
    "make_table",
    "may_seed",
    "missing",
    "refuse_others",
    "replaced",
]


def find_table(lake: PooledLake, target: TableName) -> str | None:
    """The uuid of the table in the open transaction; None if there is none."""
    m = lake.metadata
    # Begin DuckLake's part of the transaction first, so that the commit fails if the table is replaced from now on.
    lake.execute(f"from {ident(lake.alias)}.current_snapshot()", doing="looking for a destination's table")
    rows = lake.execute(
        f"select t.table_uuid::varchar from {m}.ducklake_table t join {m}.ducklake_schema s using (schema_id)"
        " where lower(s.schema_name) = lower(?) and lower(t.table_name) = lower(?)"
        " and t.end_snapshot is null and s.end_snapshot is null",
        (target.schema, target.name),
        doing="looking for a destination's table",
    )
    return str(rows[0][0]) if rows else None


def missing(target: TableName) -> LakeError:
    return LakeTableMissingError(
        f"the destination's table {target.qualified} was dropped or renamed",
        hint="nothing to do: the table is created again and seeded",
        table=target.qualified,
    )


def replaced(target: TableName, *, view: bool = False) -> LakeError:
    what = "a view has the name of" if view else "another table replaced"
    return TargetReplacedError(
        f"{what} the destination's table {target.qualified}",
        hint="rename or drop it; the destination's table is then created again and seeded",
        table=target.qualified,
    )


def make_table(
    lake: PooledLake,
    target: TableName,
    source: SourceTable,
    before: SourceTable | None = None,
    uuid: str | None = None,
) -> bool:
    """
    Create the table if it is missing, or recreate it if it is ours and has other columns; returns whether it did.

    `before` has the columns for which our table was created, and `uuid` identifies that table.
    """
    name = lake.table(target)
    to_do = may_seed(lake, target, source, before, uuid)
    if to_do == "keep":
        return False
    if to_do == "replace":
        lake.execute(f"drop table if exists {name}", doing="recreating a destination's table")
    columns = ", ".join(f"{ident(c.name)} {c.type}" for c in source.columns)
    lake.execute(f"create schema if not exists {ident(lake.alias)}.{ident(target.schema)}")
    lake.execute(f"create table {name} ({columns})", doing="creating a destination's table")
    return True


def gets_bucket(lake: PooledLake, target: TableName, wanted: WantedLayout) -> bool:
    """Whether the table would be partitioned by a bucket from now on: DuckLake 1.5.5 then hides its rows from deletes."""
    if not any(key.buckets for key in wanted.partition or ()):
        return False
    place = read_places(lake, [target]).get(target.folded)
    return place is not None and not place.view and wanted.differs(place.layout)[0]


def bucketed(target: TableName) -> LakeError:
    return PartitionedTargetError(
        f"the destination's table {target.qualified} is to be partitioned by a bucket",
        hint="nothing to do: the table is seeded anew",
        table=target.qualified,
    )


def lay_out_table(lake: PooledLake, target: TableName, wanted: WantedLayout) -> None:
    """Inside a transaction: alter a committed table whose layout is not the wanted one."""
    place = None if wanted == AS_IT_IS else read_places(lake, [target]).get(target.folded)
    if place is None or place.view:
        return
    for change in layout_changes(wanted, place.layout):
        lake.execute(f"alter table {lake.table(target)} {change}", doing="setting the layout")
    if wanted.file_bytes is not None:
        lake.execute(
            f"call {ident(lake.alias)}.set_option('target_file_size', {literal(f'{wanted.file_bytes}B')},"
            f" schema => {literal(target.schema)}, table_name => {literal(target.name)})",
            doing="setting options",
        )


def may_seed(
    lake: PooledLake,
    target: TableName,
    source: SourceTable,
    before: SourceTable | None = None,
    uuid: str | None = None,
) -> Literal["keep", "make", "replace"]:
    """What a seed does with an existing table of the target's name; raises if it is not ours and has other columns."""
    place = read_places(lake, [target]).get(target.folded)
    if place is None:
        return "make"
    if place.view:
        raise replaced(target, view=True)
    ours = before is not None and uuid in (None, place.uuid)
    if ours and before is not None and evolution(before.columns, source.columns) != []:
        return "replace"
    differing = _differing(lake, target, source)
    if differing and before is not None and not ours:
        raise replaced(target)
    if differing:
        raise SchemaChangeError(
            f"the destination's table has other columns: {', '.join(differing)}",
            hint="rename or drop it; it is then created again",
            table=target.qualified,
        )
    return "keep"


def _differing(lake: PooledLake, target: TableName, source: SourceTable) -> list[str]:
    stored = lake.execute(f"select column_name, column_type from (describe {lake.table(target)})")
    columns = {(c.name.lower(), c.type) for c in source.columns}
    return sorted({name for name, _ in {(str(n).lower(), k) for n, k in stored} ^ columns})


def refuse_others(lake: PooledLake, target: TableName, uuid: str | None) -> None:
    """Raise if our table is missing or was replaced by another one."""
    found = find_table(lake, target)
    if found is None:
        raise missing(target)
    if uuid not in (None, found):
        raise replaced(target)


def evolve_table(lake: PooledLake, target: TableName, step: Evolve) -> None:
    """Apply one step of the source's column changes."""
    if step.kind == "drop":
        _drop_sort_key(lake, target, step.name)
    if step.kind == "type":
        refuse_other_buckets(lake, target, step.name, _stored_type(lake, target, step.name), step.to)
    lake.execute(_evolve(lake.table(target), step), doing="following a change of columns")


def _drop_sort_key(lake: PooledLake, target: TableName, column: str) -> None:
    """DuckLake drops no column by which a table is sorted."""
    place = read_places(lake, [target]).get(target.folded)
    if place is not None and without_sort_key(place.layout, column) != place.layout:
        for change in sort_changes(without_sort_key(place.layout, column)):
            lake.execute(f"alter table {lake.table(target)} {change}", doing="setting the layout")


def _stored_type(lake: PooledLake, target: TableName, column: str) -> str:
    """The type that a column has now."""
    [[kind]] = lake.execute(
        f"select column_type from (describe {lake.table(target)}) where lower(column_name) = lower(?)",
        (column,),
    )
    return str(kind)


def _evolve(table: str, step: Evolve) -> str:
    match step.kind:
        case "add":
            default = "" if step.default is None else f" default {literal(step.default)}"
            return f"alter table {table} add column {ident(step.name)} {step.to}{default}"
        case "drop":
            return f"alter table {table} drop column {ident(step.name)}"
        case "rename":
            return f"alter table {table} rename column {ident(step.name)} to {ident(step.to)}"
        case _:
            return f"alter table {table} alter column {ident(step.name)} set data type {step.to}"
