"""
The net effect of a cycle's changes: what one task of a fan-out writes to its destinations.

`load` puts the changes for some destinations into the pool's engine, and `fold` reduces them to the net effect per
key, for all of these destinations at once. `destination` writes it to each of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass

import pyarrow as pa

from aqueduck.lake.session.failures import lake_errors
from aqueduck.lake.session.pool import LakePool
from aqueduck.lake.source.source_lake import ReadPlan
from aqueduck.lake.values.kept_types import one_key, received, unkept, unkept_error

__all__ = ["Net", "drop", "fold", "load", "refuse_unkept"]

_numbers = itertools.count(1)


@dataclass(frozen=True, slots=True)
class Net:
    """The net effect of a batch, for all destinations that one task serves: a relation of the pool's engine."""

    name: str
    counts: dict[int, dict[str, int]]
    """
    By destination: `rows` to write, `keys` to delete, keys that the destination had before (`known`) and those of them
    that are gone (`lost`), changes overridden by later ones (`conflicts`), deleted keys with NULLs (`nulls`).
    """

    def of(self, index: int) -> dict[str, int]:
        return self.counts.get(index, {})


def load(pool: LakePool, chunks: Iterable[bytes], plan: ReadPlan) -> str | None:
    """Load the chunks for the destinations into one relation; None if there are none."""
    name = f"changes_{next(_numbers)}"
    con = pool.con.cursor()
    made = False
    cells = ", ".join(f"{received(c.type, f'c{i}')} as c{i}" for i, c in enumerate(plan.source.columns))
    arrived = f"select d, s, r, op, bad, {cells} from arrived"
    with lake_errors("taking in changes"):
        for chunk in chunks:
            con.register("arrived", pa.ipc.open_stream(pa.BufferReader(chunk)).read_all())
            con.execute(f"insert into {name} {arrived}" if made else f"create table {name} as {arrived}")
            con.unregister("arrived")
            made = True
    return name if made else None


def fold(pool: LakePool, changes: str | None, plan: ReadPlan) -> Net:
    """The net effect per destination and key; replaces the relation `changes`."""
    if changes is None:
        return Net("", {})
    con = pool.con.cursor()
    cells = ", ".join(("bad", *(f"c{i}" for i in range(len(plan.source.columns)))))
    with lake_errors("folding changes"):
        [[removes]] = con.execute(f"select bool_or(not op) from {changes}").fetchall()
        if not removes and not plan.strict:
            rows = con.execute(f"select d, count(*) from {changes} group by d").fetchall()
            con.execute(f"alter table {changes} add column gone boolean default false")
            return Net(changes, {d: {"rows": n} for d, n in rows})
        keys = ", ".join(one_key(plan.source.columns[k].type, f"c{k}") for k in plan.keys)
        name = f"net_{next(_numbers)}"
        # A destination without removals needs no fold, because all of its rows are new.
        gone = "true" if plan.strict else f"bool_or(not op) over (partition by d, {keys})"
        losing = f"select distinct d from {changes} where {'true' if plan.strict else 'not op'}"
        con.execute(
            f"create table {name} as with losing as ({losing}),"
            f" ranked as (select *, row_number() over (partition by d, {keys} order by s desc, op desc, r desc) as n,"
            f" {gone} as gone, max(s) over (partition by d, {keys}) as last,"
            # If the first change of a key in the range is a removal, the destination has the key.
            f" min(s) filter (not op) over (partition by d, {keys}) = min(s) over (partition by d, {keys}) as was"
            f" from {changes} where d in (from losing)),"
            " overridden as (select d, count(*) as overridden from ranked where s < last group by d)"
            f" select d, op, gone, coalesce(was, false) as was, coalesce(overridden, 0) as overridden, {cells} from ranked"
            " left join overridden using (d) where n = 1 union all"
            f" select d, op, false, false, 0, {cells} from {changes} where d not in (from losing) order by d"
        )
        con.execute(f"drop table {changes}")
        some_null = " or ".join(f"c{k} is null" for k in plan.keys)
        counted = con.execute(
            "select d, count(*) filter (op), count(*) filter (gone), count(*) filter (was and not op),"
            f" count(*) filter (was), max(overridden), count(*) filter (gone and ({some_null})) from {name} group by d"
        ).fetchall()
    names = ("rows", "keys", "lost", "known", "conflicts", "nulls")
    return Net(name, {d: dict(zip(names, counts, strict=True)) for d, *counts in counted})


def refuse_unkept(pool: LakePool, net: Net, index: int, plan: ReadPlan) -> None:
    """Raise if a row for the destination has a value that its lake would not keep."""
    if net.name and unkept(plan.source.columns):
        query = f"select min(bad) from {net.name} where d = {index} and op"
        [[bad]] = pool.con.cursor().execute(query).fetchall()
        if bad is not None:
            raise unkept_error(plan.source.columns[bad], plan.table.qualified)


def drop(pool: LakePool, name: str) -> None:
    """Drop a relation of the pool's engine."""
    if name:
        pool.con.cursor().execute(f"drop table if exists {name}")
