"""
A destination's table: which one it is, how it is made, and how it follows the source's columns.

People drop and replace tables.  DuckLake's uuid tells the table that has our rows from another one of its name: what is missing
or replaced is seeded again, and a table with other columns is refused, never written and never dropped.
"""

from __future__ import annotations

from typing import Literal

from aqueduck.lake.session.pool import PooledLake
from aqueduck.lake.session.sql import ident, literal
from aqueduck.lake.target.places import read_places
from aqueduck.model.errors import LakeError, LakeTableMissingError, SchemaChangeError, TargetReplacedError
from aqueduck.model.routing import Evolve, SourceTable, evolution
from aqueduck.model.schema import TableName

__all__ = ["evolve_table", "find_table", "make_table", "may_seed", "missing", "refuse_others", "replaced"]


def find_table(lake: PooledLake, target: TableName) -> str | None:
    """The uuid of the table that the open transaction sees; None if there is none."""
    m = lake.metadata
    # DuckLake's own part of the transaction begins first: a table that is replaced from now on makes the commit fail.
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
        f"the destination has no table {target.qualified} any more: it was dropped or renamed",
        hint="nothing to do: the table is made anew and seeded",
        table=target.qualified,
    )


def replaced(target: TableName, *, view: bool = False) -> LakeError:
    what = "a view has the name of" if view else "another table took the place of"
    return TargetReplacedError(
        f"{what} the destination's table {target.qualified}",
        hint="rename or drop it, and the table is made anew and seeded",
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
    Make the table with the source's columns if it is missing, or if it is ours and has others; whether it was made.

    `before` is what our table was made for, `uuid` which table that is.
    """
    name = lake.table(target)
    to_do = may_seed(lake, target, source, before, uuid)
    if to_do == "keep":
        return False
    if to_do == "replace":
        lake.execute(f"drop table if exists {name}", doing="making a destination's table anew")
    columns = ", ".join(f"{ident(c.name)} {c.type}" for c in source.columns)
    lake.execute(f"create schema if not exists {ident(lake.alias)}.{ident(target.schema)}")
    lake.execute(f"create table {name} ({columns})", doing="making a destination's table")
    return True


def may_seed(
    lake: PooledLake,
    target: TableName,
    source: SourceTable,
    before: SourceTable | None = None,
    uuid: str | None = None,
) -> Literal["keep", "make", "replace"]:
    """What a seed does with what has the table's name; raises if it is another one with other columns."""
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
            hint="rename or drop it, and it is made anew",
            table=target.qualified,
        )
    return "keep"


def _differing(lake: PooledLake, target: TableName, source: SourceTable) -> list[str]:
    stored = lake.execute(f"select column_name, column_type from (describe {lake.table(target)})")
    columns = {(c.name.lower(), c.type) for c in source.columns}
    return sorted({name for name, _ in {(str(n).lower(), k) for n, k in stored} ^ columns})


def refuse_others(lake: PooledLake, target: TableName, uuid: str | None) -> None:
    """Raise if our table is not there any more, or another one is."""
    found = find_table(lake, target)
    if found is None:
        raise missing(target)
    if uuid not in (None, found):
        raise replaced(target)


def evolve_table(lake: PooledLake, target: TableName, step: Evolve) -> None:
    """Make one step towards the source's columns."""
    lake.execute(_evolve(lake.table(target), step), doing="following a change of columns")


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
