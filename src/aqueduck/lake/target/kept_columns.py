"""
Column changes of targets that keep old rows or have several sources: no column is dropped or narrowed.

A column that the source drops stays for the rows that have values in it.  If its name is used again, or if its new
type cannot hold the old values, it is *set aside* under another name.  If several sources share the target, a rename
adds a column and moves this source's values to it.  The steps come from `evolve.plan_changes`, as for every target.
"""

from __future__ import annotations

from collections.abc import Sequence

from aqueduck.lake.session.catalog import LakeSession
from aqueduck.lake.session.sql import ident, lake_table
from aqueduck.lake.target.evolve import (
    ColumnChange,
    alter,
    holds,
    literal_value,
    rename_column,
    stored_columns,
)
from aqueduck.lake.target.mode_rows import own_rows
from aqueduck.model.columns.typemap import lake_type
from aqueduck.model.errors import ResyncNeededError, SchemaChangeError
from aqueduck.model.modes import TableMode
from aqueduck.model.schema import Column, TableName, TableSchema

__all__ = ["fit_columns", "keep_columns"]


def keep_columns(
    session: LakeSession, target: TableName, steps: Sequence[ColumnChange], mode: TableMode
) -> None:
    """Apply the source's column changes, inside the transaction that applies the next run."""
    for step in steps:
        if step.kind == "add":
            _add(session, target, step.column, mode)
        elif step.kind == "rename":
            _rename(session, target, step, mode)
        elif step.kind == "widen":
            raise ResyncNeededError(
                f"the type of {step.column.name} was widened right after the column was added",
                table=target.qualified,
            )
    session.memory.targets.pop(target, None)


def fit_columns(session: LakeSession, target: TableName, schema: TableSchema, mode: TableMode) -> None:
    """Inside a transaction: add or set aside columns so that a copy with these columns fits; no row changes."""
    stored = stored_columns(session, target)
    for column in schema.columns:
        kind, found = lake_type(column), stored.get(column.name.lower())
        if found is None:
            alter(session, target, f"add column {ident(column.name)} {kind}")
        elif holds(kind, found) and kind != found:
            alter(session, target, f"alter column {ident(column.name)} set data type {kind}")
        elif not holds(found, kind):
            _set_aside(session, target, column, mode)
            alter(session, target, f"add column {ident(column.name)} {kind}")
    session.memory.targets.pop(target, None)


def _add(session: LakeSession, target: TableName, column: Column, mode: TableMode) -> None:
    """Add a column; existing rows of this source get its default, rows of other sources do not."""
    name, kind = ident(column.name), lake_type(column)
    found = stored_columns(session, target).get(column.name.lower())
    value = "null" if column.missing is None else literal_value(session, column, column.missing)
    if mode.source_column is None:
        if found is not None:  # the source dropped a column of this name earlier
            _set_aside(session, target, column, mode)
        default = "" if column.missing is None else f" default {value}"
        alter(session, target, f"add column {name} {kind}{default}")
        return
    if found is not None and not holds(found, kind):
        raise _conflict(target, column, found)
    if found is None:
        alter(session, target, f"add column {name} {kind}")
    _set(session, target, f"{name} = {value}", f"t.{name} is distinct from {value}", mode)


def _rename(session: LakeSession, target: TableName, step: ColumnChange, mode: TableMode) -> None:
    found = stored_columns(session, target).get(step.column.name.lower())
    if mode.source_column is None:
        if found is not None and step.before.lower() != step.column.name.lower():
            _set_aside(session, target, step.column, mode)
        rename_column(session, target, step.before, step.column.name)
        return
    kind = lake_type(step.column)
    before, after = ident(step.before), ident(step.column.name)
    if found is not None and not holds(found, kind):
        raise _conflict(target, step.column, found)
    if found is None:
        alter(session, target, f"add column {after} {kind}")
    _set(session, target, f"{after} = t.{before}, {before} = null", f"t.{before} is not null", mode)


def _set(session: LakeSession, target: TableName, values: str, where: str, mode: TableMode) -> None:
    session.execute(
        f"update {lake_table(target)} as t set {values} where {own_rows(mode)} and {where}",
        doing="changing the columns",
        table=target.qualified,
    )


def _set_aside(session: LakeSession, target: TableName, column: Column, mode: TableMode) -> None:
    """Rename a column to free its name; its values stay."""
    stored = stored_columns(session, target)
    if mode.source_column is not None:
        raise _conflict(target, column, stored[column.name.lower()])
    number = 1
    while f"{column.name}_{number}".lower() in stored:
        number += 1
    rename_column(session, target, column.name, f"{column.name}_{number}")


def _conflict(target: TableName, column: Column, found: str) -> SchemaChangeError:
    return SchemaChangeError(
        f"the column {column.name} is {lake_type(column)} here but {found} in the target, which other sources fill too",
        hint="use the same type in all sources, or give this table its own target",
        table=target.qualified,
    )
