"""
The net effect of a write by key: the last row of each key, with the cells that it left out filled in.

It is not the fold of `lake.fold`: that one reads segments of captured changes, this one the rows of a query.
`folded_rows` creates a temporary table from an upsert's parts if they cannot be applied directly: because of
repeated keys, deletes, truncates, or cells that were not sent because they did not change.  The driver runs it inside
the transaction of the write (`table_write`).
"""

from __future__ import annotations

import uuid

from aqueduck.lake.session.pool import PooledLake
from aqueduck.lake.session.sql import ident, idents, literal
from aqueduck.lake.writes.write_target import CONTROL, WriteOrder, WriteTarget
from aqueduck.model.errors import DuplicateKeyError, ResyncNeededError

__all__ = ["folded_rows"]

_LEFT_OUT = f"{CONTROL}unchanged"
_DELETED, _STALE = f"{CONTROL}deleted", f"{CONTROL}stale"
"""Whether the write deletes the key, and whether a row precedes that delete and so has values of another row."""


def folded_rows(lake: PooledLake, order: WriteOrder, target: WriteTarget, rows: str) -> str | None:
    """The last row of each key as a temporary table; None if the parts already have one row per key."""
    left_out = _left_out(lake, order, target, rows)
    if order.op is None and not left_out and not _has_twice(lake, order, rows):
        return None
    if not order.order:
        raise DuplicateKeyError(
            f"two rows of one write have the same key ({', '.join(order.keys)})",
            hint="set the option order to the columns that decide which row is the last, or drop duplicates first",
            table=order.table.qualified,
        )
    place = f"row({', '.join(f'{CONTROL}{i}' for i in range(len(order.order)))})"
    relevant = _after_truncate(lake, order, rows, place)
    name = f"aqueduck_write_{uuid.uuid4().hex[:8]}"
    if left_out:
        relevant = _with_deletes(order, relevant, place)
    lake.execute(
        f"create temp table {name} as select * from {relevant}"
        f" qualify row_number() over (partition by {idents(order.keys)} order by {place} desc) = 1",
        doing="folding rows by key",
    )
    for column in left_out:
        _fill(lake, order, name, column, relevant, place)
    if left_out:
        _refuse_unknown(lake, order, name)
    return name


def _has_twice(lake: PooledLake, order: WriteOrder, rows: str) -> bool:
    [[twice]] = lake.execute(
        f"select exists (select 1 from {rows} group by {idents(order.keys)} having count(*) > 1)",
        doing="looking at keys",
    )
    return bool(twice)


def _left_out(lake: PooledLake, order: WriteOrder, target: WriteTarget, rows: str) -> list[str]:
    """The table's columns that at least one row left out."""
    if order.unchanged is None:
        return []
    named = lake.execute(f"select distinct lower(unnest({_LEFT_OUT})) from {rows}")
    return [column for column in target.stored if (column.lower(),) in named]


def _after_truncate(lake: PooledLake, order: WriteOrder, rows: str, place: str) -> str:
    """The rows after the last truncate; if there is one, empty the table."""
    if order.op is None:
        return rows
    truncates = f"{rows} where {CONTROL}op = 'truncate'"
    [[count]] = lake.execute(f"select count(*) from {truncates}")
    if not count:
        return rows
    lake.execute(f"delete from {lake.table(order.table)}", doing="emptying the table")
    return f"(select * from {rows} where {place} > (select max({place}) from {truncates}))"


def _with_deletes(order: WriteOrder, rows: str, place: str) -> str:
    if order.op is None:
        return f"(select *, false as {_DELETED}, false as {_STALE} from {rows})"
    last = f"max(case when {CONTROL}op = 'delete' then {place} end) over (partition by {idents(order.keys)})"
    return f"(select *, {last} is not null as {_DELETED}, coalesce({place} <= {last}, false) as {_STALE} from {rows})"


def _fill(lake: PooledLake, order: WriteOrder, name: str, column: str, rows: str, place: str) -> None:
    """Fill cells that were left out, from the last row of the write that has a value, or else from the table."""
    cell, keys, lacks = ident(column), idents(order.keys), _lacks(column)
    sent = (
        f"select {keys}, arg_max_null({cell}, {place}) as {cell} from {rows}"
        f" where not {lacks} and not {_STALE} group by {keys}"
    )
    same = " and ".join(f"{name}.{ident(key)} is not distinct from k.{ident(key)}" for key in order.keys)
    without = f"list_filter({_LEFT_OUT}, lambda x: lower(x) <> {literal(column.lower())})"
    for source, condition in ((f"({sent})", "true"), (lake.table(order.table), f"not {name}.{_DELETED}")):
        lake.execute(
            f"update {name} set {cell} = k.{cell}, {_LEFT_OUT} = {without} from {source} as k"
            f" where {same} and {_lacks(column, name)} and {condition}",
            doing="filling in unchanged values",
        )


def _lacks(column: str, table: str | None = None) -> str:
    names = _LEFT_OUT if table is None else f"{table}.{_LEFT_OUT}"
    return f"coalesce(list_contains(list_transform({names}, lambda x: lower(x)), {literal(column.lower())}), false)"


def _refuse_unknown(lake: PooledLake, order: WriteOrder, name: str) -> None:
    alive = f" and {CONTROL}op is distinct from 'delete'" if order.op else ""
    [[count]] = lake.execute(f"select count(*) from {name} where len({_LEFT_OUT}) > 0{alive}")
    if count:
        raise ResyncNeededError(
            "an update left out an unchanged value that neither the table nor the write has",
            hint="alter table … replica identity full in the source, and write its rows again",
            table=order.table.qualified,
        )
