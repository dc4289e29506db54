"""
Alter a target's columns after the source's columns changed: plan the steps and execute them.

`plan_changes` is pure: it compares the columns that a target was made for with those of the next run
and returns a list of steps.  It identifies a column by its number in the source's catalog if the number is known,
because the number survives a rename; the stream itself has only names.  Steps run inside the transaction that
applies the run, except for wider types: see `widen`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from aqueduck.lake.session.catalog import LakeSession
from aqueduck.lake.session.sql import ident, lake_table, literal
from aqueduck.lake.target.places import known_layout, refuse_other_buckets
from aqueduck.lake.target.set_layouts import sort_changes, without_sort_key
from aqueduck.model.columns.column_numbers import UNCLEAR
from aqueduck.model.columns.typemap import cast_sql, keeps_values, lake_type
from aqueduck.model.errors import PartitionedTargetError, ResyncNeededError, SchemaChangeError
from aqueduck.model.schema import Column, TableName, TableSchema

__all__ = [
    "ColumnChange",
    "alter",
    "evolve",
    "holds",
    "literal_value",
    "plan_changes",
    "rename_column",
    "same_columns",
    "stored_columns",
    "widen",
    "wider_columns",
]

_WIDER = {
    "SMALLINT": {"INTEGER", "BIGINT"},
    "INTEGER": {"BIGINT"},
    "FLOAT": {"DOUBLE"},
}


@dataclass(frozen=True, slots=True)
class ColumnChange:
    """One change of one column."""

    kind: Literal["add", "drop", "rename", "widen"]
    column: Column
    before: str = ""
    """The old name of a renamed column; for a wider type, the target's name for the column when the batch begins."""


def same_columns(one: TableSchema, other: TableSchema) -> bool:
    """
    Whether a target with the columns of `one` can take rows of the later version `other` without a change.

    The order of columns does not matter; their numbers must be equal if both are known.
    """
    if len(one.columns) != len(other.columns):
        return False
    theirs = {c.name: c for c in other.columns}
    return all(c.name in theirs and _same(c, theirs[c.name]) for c in one.columns)


def _same(one: Column, other: Column) -> bool:
    same_type = lake_type(one) == lake_type(other) and keeps_values(one, other)
    return same_type and _maybe_same_number(one, other)


def _maybe_same_number(one: Column, other: Column) -> bool:
    return not one.number or not other.number or one.number == other.number


def plan_changes(old: TableSchema, new: TableSchema) -> list[ColumnChange]:
    """
    Steps from the columns of `old` to those of `new`; raises if the table must be re-copied.

    Drops come first, then renames, then additions, because each step may free a name for the next.
    """
    if not new.columns:
        raise SchemaChangeError(
            "the source table no longer has any columns",
            hint=f"add columns, then: aqueduck tables resync -c FILE {TableName(new.schema, new.name)}",
            table=new.qualified,
        )
    if any(c.number == UNCLEAR for c in new.columns):
        raise ResyncNeededError(
            "columns were replaced by others, and it is no longer known to which of them these changes belong",
            table=new.qualified,
        )
    kept, renamed = _matched(old, new)
    gone = [c for c in old.columns if c.name not in kept and c.name not in renamed]
    came_from = {**{name: name for name in kept}, **{after: name for name, after in renamed.items()}}
    before = {c.name: c for c in old.columns}
    after = {c.name: c for c in new.columns}
    steps = [ColumnChange("drop", c) for c in gone]
    steps += _renames({name: after[new_name] for name, new_name in renamed.items()})
    for column in new.columns:
        if column.name not in came_from:
            steps.append(ColumnChange("add", _addable(new, column)))
        else:
            was = before[came_from[column.name]]
            if lake_type(was) != lake_type(column):
                _refuse_narrowing(new, was, column)
                steps.append(ColumnChange("widen", column, was.name))
            elif not keeps_values(was, column):
                raise ResyncNeededError(
                    f"the type of {column.name} changed, which may have changed its values",
                    table=new.qualified,
                )
    return steps


def _matched(old: TableSchema, new: TableSchema) -> tuple[set[str], dict[str, str]]:
    """Columns of `old` that keep their name, and renamed ones with their new name."""
    after = {c.name: c for c in new.columns}
    kept = {c.name for c in old.columns if c.name in after and _maybe_same_number(c, after[c.name])}
    lost = [c for c in old.columns if c.name not in kept]
    found = [c for c in new.columns if c.name not in kept]
    renamed: dict[str, str] = {}
    for column in lost:
        same = [c for c in found if column.number and c.number == column.number]
        if same:
            renamed[column.name] = same[0].name
    for column in lost:
        # The catalog no longer has this name.  A column at the same place with the same type is a rename,
        # because a new column would come last.
        place = old.columns.index(column)
        other = new.columns[place] if len(new.columns) == len(old.columns) else None
        if column.name in renamed or other is None or other not in found or other.name in renamed.values():
            continue
        if not other.number and lake_type(other) == lake_type(column):
            renamed[column.name] = other.name
    return kept, renamed


def _renames(wanted: dict[str, Column]) -> list[ColumnChange]:
    """Renames in an order in which each new name is free; swapped names go through a temporary name."""
    steps: list[ColumnChange] = []
    left = dict(wanted)
    while left:
        free = [name for name, column in left.items() if column.name not in left]
        if not free:
            name, column = left.popitem()
            aside = f"{column.name}_aqueduck"
            steps.append(ColumnChange("rename", replace(column, name=aside), name))
            left[aside] = column
            continue
        steps += [ColumnChange("rename", left.pop(name), name) for name in free]
    return steps


def _addable(table: TableSchema, column: Column) -> Column:
    if column.computed:
        raise ResyncNeededError(
            f"existing rows have values in the new column {column.name} that the stream does not send",
            table=table.qualified,
        )
    return column


def holds(stored: str, kind: str) -> bool:
    """Whether a column of type `stored` can hold every value of type `kind` unchanged."""
    return stored == kind or stored in _WIDER.get(kind, ()) or _wider_decimal(kind, stored)


def _refuse_narrowing(table: TableSchema, was: Column, now: Column) -> None:
    one, other = lake_type(was), lake_type(now)
    if holds(other, one):
        return
    raise ResyncNeededError(
        f"the type of {now.name} changed from {one} to {other}, which is not a wider one",
        table=table.qualified,
    )


def _wider_decimal(one: str, other: str) -> bool:
    sizes = [_decimal(t) for t in (one, other)]
    if None in sizes:
        return False
    (p, s), (q, t) = sizes  # type: ignore[misc]
    return bool(t == s and q >= p)


def _decimal(kind: str) -> tuple[int, int] | None:
    if not kind.startswith("DECIMAL("):
        return None
    precision, scale = kind.removeprefix("DECIMAL(").removesuffix(")").split(",")
    return int(precision), int(scale)


def wider_columns(old: TableSchema, versions: Sequence[TableSchema]) -> tuple[TableSchema, list[TableSchema]]:
    """
    Give `old` and all versions the widest type that each column has in any of them.

    A value of the narrower type also fits the wider one, so the versions need not keep the narrower type.
    """
    names = [{c.name: c.name for c in old.columns}]  # for `old` and each version: its names to those of `old`
    wider: dict[str, Column] = {}
    current = old
    for version in versions:
        steps = [] if same_columns(current, version) else plan_changes(current, version)
        renames = [(s.before, s.column.name) for s in steps if s.kind == "rename"]
        for step in steps:
            if step.kind == "widen" and step.before in names[-1]:
                wider[names[-1][step.before]] = step.column
        gone = {s.column.name for s in steps if s.kind == "drop"}
        names.append({_last_name(renames, now): was for now, was in names[-1].items() if now not in gone})
        current = version
    all_of_them = [
        _with_types(schema, {now: wider[was] for now, was in known.items() if was in wider})
        for schema, known in zip([old, *versions], names, strict=True)
    ]
    return all_of_them[0], all_of_them[1:]


def _with_types(schema: TableSchema, wider: Mapping[str, Column]) -> TableSchema:
    columns = tuple(_with_type(c, wider[c.name]) if c.name in wider else c for c in schema.columns)
    return replace(schema, columns=columns)


def _with_type(column: Column, other: Column) -> Column:
    """A column with the type of another, including the base type of a domain."""
    return replace(
        other,
        name=column.name,
        not_null=column.not_null,
        number=column.number,
        missing=column.missing,
        computed=column.computed,
    )


def _last_name(renames: Sequence[tuple[str, str]], name: str) -> str:
    """The name after all renames, applied in order; swapped names are renamed several times."""
    for before, after in renames:
        name = after if name == before else name
    return name


def stored_columns(session: LakeSession, target: TableName) -> dict[str, str]:
    """Types of the target's columns, by name in lower case."""
    rows = session.execute(f"select column_name, column_type from (describe {lake_table(target)})")
    return {str(name).lower(): str(kind) for name, kind in rows}


def widen(session: LakeSession, target: TableName, old: TableSchema, wider: TableSchema) -> None:
    """
    Widen the types of columns, in a separate transaction that the caller has opened.

    No value changes, so the lake shows the same state before and after.  In one transaction with inserts,
    DuckLake 1.5.5 loses the column's statistics and then prunes rows by the statistics of later inserts.
    """
    stored = stored_columns(session, target)
    for before, after in zip(old.columns, wider.columns, strict=True):
        kind = lake_type(after)
        # Another source of the same target may have widened the column already.
        known = stored[before.name.lower()]
        if lake_type(before) != kind and not holds(known, kind):
            refuse_other_buckets(session, target, before.name, known, kind)
            alter(session, target, f"alter column {ident(before.name)} set data type {kind}")
    session.memory.targets.pop(target, None)


def evolve(session: LakeSession, target: TableName, steps: Sequence[ColumnChange]) -> None:
    """
    Execute all steps but widening, inside the transaction that applies the run; `widen` ran before.

    A column is not dropped in the transaction that added it: DuckLake 1.5.5 gives its id to the next new column,
    which then shows the dropped column's values.
    """
    for step in steps:
        if step.kind == "widen":
            raise ResyncNeededError(
                f"the type of {step.column.name} was widened right after the column was added",
                table=target.qualified,
            )
        name = ident(step.column.name)
        if step.kind == "add":
            missing = step.column.missing
            default = "" if missing is None else f" default {literal_value(session, step.column, missing)}"
            alter(session, target, f"add column {name} {lake_type(step.column)}{default}")
            session.added.add((target, step.column.name.lower()))
        elif step.kind == "drop":
            if (target, step.column.name.lower()) in session.added:
                raise ResyncNeededError(
                    f"the column {step.column.name} was added and dropped again between two commits to the lake",
                    table=target.qualified,
                )
            _refuse_partition_column(session, target, step.column.name)
            _drop_sort_key(session, target, step.column.name)
            alter(session, target, f"drop column {name}")
        elif step.kind == "rename":
            rename_column(session, target, step.before, step.column.name)
            before = (target, step.before.lower())
            if before in session.added:
                session.added.remove(before)
                session.added.add((target, step.column.name.lower()))
    session.memory.targets.pop(target, None)


def literal_value(session: LakeSession, column: Column, text: str) -> str:
    """The default for existing rows as a literal, because DuckLake accepts no expression there."""
    [[value]] = session.execute(
        f"select {cast_sql(column, 'x')}::varchar from (select ? as x)", [text], doing="reading a default"
    )
    return literal(None if value is None else str(value))


def _refuse_partition_column(session: LakeSession, target: TableName, column: str) -> None:
    if any(key.column.lower() == column.lower() for key in known_layout(session, target).partition):
        raise PartitionedTargetError(
            f"the source no longer has the column {column}, by which the lake table is partitioned",
            hint=f"alter table {lake_table(target)} reset partitioned by",
            table=target.qualified,
        )


def _drop_sort_key(session: LakeSession, target: TableName, column: str) -> None:
    """DuckLake drops no column by which a table is sorted."""
    layout = known_layout(session, target)
    rest = without_sort_key(layout, column)
    if rest != layout:
        for change in sort_changes(rest):
            alter(session, target, change)
        session.laid_out[target] = rest


def rename_column(session: LakeSession, target: TableName, before: str, after: str) -> None:
    """Rename a column, inside a transaction."""
    alter(session, target, f"rename column {ident(before)} to {ident(after)}")
    session.renamed.setdefault(target, []).append((before, after))


def alter(session: LakeSession, target: TableName, change: str) -> None:
    """Execute one `alter table` on the target."""
    session.execute(
        f"alter table {lake_table(target)} {change}", doing="changing the columns", table=target.qualified
    )
