"""
Apply a cycle to destinations: each in one transaction of its own lake, together with its cursor.

`apply_changes` and `seed` write the net effect that `net_changes` computed into one destination.  The
cursor is a row of `aqueduck.fanout_state` in the destination's lake.  It is moved only if it has exactly the value that the
caller expects, so a second writer or a repeated cycle changes nothing.

The code does not guess whether the destination has a row: it deletes every key for which the source lost a row,
then inserts the rows that the last change of each key left.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import duckdb

from aqueduck import faults
from aqueduck.lake.destinations.cycle import Applied, Destination
from aqueduck.lake.destinations.destination_table import (
    bucketed,
    evolve_table,
    find_table,
    gets_bucket,
    lay_out_table,
    make_table,
    may_seed,
    missing,
    replaced,
)
from aqueduck.lake.destinations.net_changes import Net
from aqueduck.lake.session.catalog import OWN_SCHEMA
from aqueduck.lake.session.failures import lake_errors
from aqueduck.lake.session.pool import PooledLake
from aqueduck.lake.session.sql import equal, ident, idents, literal
from aqueduck.lake.source.source_lake import ReadPlan
from aqueduck.lake.target.places import hidden_rows_error, hides_rows
from aqueduck.lake.upkeep.statistics import settle_statistics
from aqueduck.lake.values.not_inlined import keep_out_of_catalog
from aqueduck.model.routing import SourceColumn, SourceTable, evolution
from aqueduck.model.schema import TableName

__all__ = [
    "STATE",
    "State",
    "Terms",
    "apply_changes",
    "check_target",
    "make_tables",
    "read_state",
    "seed",
]

STATE = TableName(OWN_SCHEMA, "fanout_state")
_STATE_COLUMNS = """
    destination_id varchar, instance_id varchar, source_table varchar, last_snapshot_id bigint,
    rows_replicated bigint, last_error varchar, last_change_at timestamp with time zone,
    updated_at timestamp with time zone, routing_value varchar, source_columns varchar
"""
NOT_SEEDED = -1
"""The cursor of a destination whose seed has begun; concurrent seeds conflict on its row."""
STATE_UPDATES_MAX = 2000
"""The number of cursor updates after which their dead rows are flushed from the catalog."""


@dataclass(frozen=True, slots=True)
class Terms:
    """A destination's target table, routing column and key columns (by column id), for which its cursor is valid."""

    target: str
    field: int
    keys: tuple[int, ...]

    @classmethod
    def of(cls, destination: Destination, plan: ReadPlan) -> Terms:
        columns = plan.source.columns
        keys = tuple(sorted(columns[key].id for key in plan.keys))
        return cls(str(destination.target.folded), columns[plan.field].id, keys)

    @classmethod
    def from_json(cls, text: str) -> Terms | None:
        """The terms in a stored state; None if an earlier version wrote it without them."""
        values = json.loads(text)
        return cls(values["target"], values["field"], tuple(values["keys"])) if "target" in values else None


@dataclass(frozen=True, slots=True)
class State:
    """The state that a destination's lake has of the destination."""

    cursor: int
    source: SourceTable
    value: str
    """The routing value of its rows."""
    rows: int = 0
    """Rows replicated in total."""
    changed_at: float | None = None
    """When a row last changed, in seconds since the Unix epoch."""
    terms: Terms | None = None
    """None if an earlier version wrote the state without them."""
    stamp: int | None = None
    """When the source created the cursor's lake snapshot; None if an earlier version wrote the state."""
    table: str | None = None
    """DuckLake's uuid of the table with the rows; None if an earlier version wrote the state."""

    def fits(self, destination: Destination, plan: ReadPlan) -> bool:
        """Whether the cursor is valid for this source table, routing value and terms."""
        return (
            self.source.uuid == plan.source.uuid
            and self.value == destination.value
            and self.terms in (None, Terms.of(destination, plan))
        )

    def is_about(self, destination: Destination) -> bool:
        """Whether the state describes the destination's current table."""
        return self.terms is None or self.terms.target == str(destination.target.folded)


class CursorMovedError(Exception):
    """The destination's cursor does not have the expected value."""


class SeedNeededError(CursorMovedError):
    """A seed is needed: the source's columns changed too much, or another table replaced the destination's (with a reason)."""


class MiscountError(SeedNeededError):
    """The destination would have another number of rows than the source."""


def read_state(lake: PooledLake, destination_id: str) -> State | None:
    """The destination's state; None if it was never seeded."""
    try:
        rows = lake.con.execute(
            "select last_snapshot_id, source_columns, routing_value, rows_replicated, epoch(last_change_at)"
            f" from {lake.table(STATE)} where destination_id = ?",
            [destination_id],
        ).fetchall()
    except duckdb.CatalogException:
        return None
    except duckdb.Error:
        with lake_errors("reading the cursor"):
            raise
    if not rows:
        return None
    cursor, source, value, count, changed = rows[0]
    if cursor == NOT_SEEDED:
        return None
    stored = json.loads(source)
    return State(
        int(cursor), SourceTable.from_json(source), value, int(count), changed, Terms.from_json(source),
        stored.get("stamp"), stored.get("table"),
    )  # fmt: skip


def apply_changes(
    lake: PooledLake,
    destination: Destination,
    index: int,
    net: Net,
    plan: ReadPlan,
    instance: str,
    expected: int | None = None,
) -> Applied:
    """
    Bring one destination to the end of the plan; the result has no cursor if the destination must be seeded instead.

    `expected` is the number of rows that it must have afterwards, if the plan counts rows.
    """
    began = time.monotonic()
    counts = net.of(index)
    rows = counts.get("rows", 0)
    settle_statistics(lake, [destination.target], lake.settled)
    try:
        with lake.transaction():
            table = find_table(lake, destination.target)
            if table is None:
                raise SeedNeededError(missing(destination.target))
            checked = plan.source, Terms.of(destination, plan), table
            if lake.memory.get(destination.id) != checked:
                _check_and_evolve(lake, destination, plan, table)
                if gets_bucket(lake, destination.target, destination.layout):
                    raise SeedNeededError(bucketed(destination.target))
                lay_out_table(lake, destination.target, destination.layout)
            if counts.get("keys"):
                _refuse_hidden_rows(lake, destination)
            matched = _delete(lake, destination, index, counts, net, plan) if counts.get("keys") else 0
            deleted = min(matched, counts.get("lost", 0))
            if rows:
                _insert(lake, destination, index, net, plan)
            # A cycle that only counts rows writes nothing.
            if plan.end != plan.start and not _move_cursor(
                lake, destination, plan, instance, table, changed=rows + deleted
            ):
                raise CursorMovedError
            if plan.counted and _count(lake, destination, plan) != expected:
                raise MiscountError
            faults.point("fanout.before_commit")
    except SeedNeededError as why:
        reason = str(why.args[0]) if why.args else None
        return Applied(destination.id, None, miscounted=isinstance(why, MiscountError), reason=reason)
    except CursorMovedError:
        lake.memory.pop(destination.id, None)
        state = read_state(lake, destination.id)
        fits = state is not None and state.fits(destination, plan)
        if state is None or not fits:
            return Applied(destination.id, None)
        return Applied(destination.id, state.cursor, stamp=state.stamp)
    faults.point("fanout.after_commit")
    settle_statistics(lake, [destination.target], lake.settled)
    lake.memory[destination.id] = checked
    _tidy(lake)
    return Applied(
        destination.id,
        plan.end,
        stamp=plan.stamp,
        rows={
            "written" if not plan.keys else "upserted": rows,
            "deleted": deleted,
            "matched": matched - deleted,
            "conflicts": counts.get("conflicts", 0),
            "orphans": max(counts.get("known", 0) - matched, 0),
        },
        seconds=time.monotonic() - began,
    )


def seed(
    lake: PooledLake, destination: Destination, index: int, net: Net, plan: ReadPlan, instance: str
) -> Applied:
    """Replace a destination's rows by those of the source at the plan's end."""
    began = time.monotonic()
    rows = net.of(index).get("rows", 0)
    # Tables are created first: DuckLake loses inlined rows of a table that the same transaction creates.
    state = make_tables(lake, destination, plan, instance)
    keep_out_of_catalog(lake, destination.target, plan.source.types)
    with lake.transaction():
        routed = _routed(destination, plan, state)
        _refuse_hidden_rows(lake, destination)
        lake.execute(
            f"delete from {lake.table(destination.target)} where "
            + " or ".join(
                equal(column.type, ident(column.name), f"try_cast(? as {column.type})")
                for column, _ in routed
            ),
            [value for _, value in routed],
            doing="emptying a destination",
        )
        lay_out_table(lake, destination.target, destination.layout)  # a bucket would hide the rows to delete
        if rows:
            _insert(lake, destination, index, net, plan)
        table = find_table(lake, destination.target)
        _write_state(lake, destination, plan, instance, table, cursor=plan.end, rows=rows)
        faults.point("fanout.before_seed")
    faults.point("fanout.after_seed")
    settle_statistics(lake, [destination.target], lake.settled)
    lake.memory[destination.id] = plan.source, Terms.of(destination, plan), table
    return Applied(
        destination.id, plan.end, seeded=True, stamp=plan.stamp, rows={"written": rows},
        seconds=time.monotonic() - began,
    )  # fmt: skip


def _routed(destination: Destination, plan: ReadPlan, state: State | None) -> list[tuple[SourceColumn, str]]:
    """The columns and values that select the destination's rows: the current ones, and those of its stored state."""
    field = plan.source.columns[plan.field]
    routed = [(field, destination.value)]
    if state is not None and state.is_about(destination):
        before = field.id if state.terms is None else state.terms.field
        routed += [(column, state.value) for column in plan.source.columns if column.id == before]
    return routed


def make_tables(lake: PooledLake, destination: Destination, plan: ReadPlan, instance: str) -> State | None:
    """Create the destination's tables and its row of the state if they are missing; returns the previous state."""
    lake.memory.pop(destination.id, None)
    lake.settled.discard(destination.target)
    with lake.transaction():
        state = read_state(lake, destination.id)
        if state is None:
            lake.execute(f"create schema if not exists {ident(lake.alias)}.{ident(OWN_SCHEMA)}")
            lake.execute(f"create table if not exists {lake.table(STATE)} ({_STATE_COLUMNS})")
        made = make_table(lake, destination.target, plan.source, *_made_for(destination, state))
        if made and state is not None:
            lake.execute(f"delete from {lake.table(STATE)} where destination_id = ?", (destination.id,))
        rows = lake.execute(
            f"select count(*) from {lake.table(STATE)} where destination_id = ?", (destination.id,)
        )
        if rows == [(0,)]:
            _write_state(lake, destination, plan, instance, None, cursor=NOT_SEEDED, rows=0)
    return state


def check_target(lake: PooledLake, destination: Destination, plan: ReadPlan, state: State | None) -> None:
    """Raise if `make_tables` would refuse an existing table or view with the target's name."""
    may_seed(lake, destination.target, plan.source, *_made_for(destination, state))


def _made_for(destination: Destination, state: State | None) -> tuple[SourceTable | None, str | None]:
    """The columns for which the destination's table was created, and its uuid; None before it exists."""
    if state is None or not state.is_about(destination):
        return None, None
    return state.source, state.table


def _write_state(
    lake: PooledLake,
    destination: Destination,
    plan: ReadPlan,
    instance: str,
    table: str | None,
    *,
    cursor: int,
    rows: int,
) -> None:
    """Replace the destination's row; concurrent writers conflict, because both delete the old row."""
    lake.execute(f"delete from {lake.table(STATE)} where destination_id = ?", (destination.id,))
    lake.execute(
        f"insert into {lake.table(STATE)} values (?, ?, ?, {cursor}, {rows}, null, now(), now(), ?, ?)",
        (
            destination.id,
            instance,
            plan.table.qualified,
            destination.value,
            _described(destination, plan, table),
        ),
        doing="writing the cursor",
    )


def _described(destination: Destination, plan: ReadPlan, table: str | None) -> str:
    """The source's columns, the terms, the cursor's stamp and the table's uuid, in the form that the state stores."""
    stored = asdict(plan.source) | asdict(Terms.of(destination, plan)) | {"stamp": plan.stamp, "table": table}
    return json.dumps(stored, separators=(",", ":"))


def _check_and_evolve(lake: PooledLake, destination: Destination, plan: ReadPlan, table: str) -> None:
    """Check that the state is as expected and the table is ours, then alter the table to the source's columns."""
    state = read_state(lake, destination.id)
    if state is None or state.cursor != destination.cursor or not state.fits(destination, plan):
        raise CursorMovedError
    if state.table not in (None, table):
        raise SeedNeededError(replaced(destination.target))
    keep_out_of_catalog(lake, destination.target, plan.source.types)
    if state.source.columns == plan.source.columns and state.terms is not None:
        return
    steps = evolution(state.source.columns, plan.source.columns)
    if steps is None:
        raise SeedNeededError
    for step in steps:
        evolve_table(lake, destination.target, step)


def _refuse_hidden_rows(lake: PooledLake, destination: Destination) -> None:
    if hides_rows(lake, destination.target):
        raise hidden_rows_error(destination.target)


def _delete(
    lake: PooledLake, destination: Destination, index: int, counts: dict[str, int], net: Net, plan: ReadPlan
) -> int:
    columns = plan.source.columns
    same = " and ".join(
        f"t.{ident(columns[k].name)} is not distinct from k.c{k}"
        if counts.get("nulls")
        else equal(columns[k].type, f"t.{ident(columns[k].name)}", f"k.c{k}")
        for k in plan.keys
    )
    keys = ", ".join(f"c{k}" for k in plan.keys)
    [[count]] = lake.execute(
        f"delete from {lake.table(destination.target)} as t"
        # The lake cannot have a key with a value that it does not keep, but it may have a key that compares equal to it.
        f" using (select {keys} from memory.main.{net.name} where d = {index} and gone and bad is null) as k where {same}",
        doing="deleting rows of a destination",
    )
    return int(count)


def _insert(lake: PooledLake, destination: Destination, index: int, net: Net, plan: ReadPlan) -> None:
    names: Sequence[str] = [column.name for column in plan.source.columns]
    cells = ", ".join(f"c{i}" for i in range(len(names)))
    lake.execute(
        f"insert into {lake.table(destination.target)} ({idents(names)})"
        f" select {cells} from memory.main.{net.name} where d = {index} and op",
        doing="writing rows of a destination",
    )


def _move_cursor(
    lake: PooledLake, destination: Destination, plan: ReadPlan, instance: str, table: str, *, changed: int
) -> bool:
    last_change = ", last_change_at = now()" if changed else ""
    try:
        rows = lake.execute(
            f"update {lake.table(STATE)} set last_snapshot_id = {plan.end}, instance_id = {literal(instance)},"
            f" rows_replicated = rows_replicated + {changed}, last_error = null, updated_at = now(){last_change},"
            f" source_columns = {literal(_described(destination, plan, table))}"
            f" where destination_id = {literal(destination.id)} and last_snapshot_id = {destination.cursor}",
            doing="writing the cursor",
        )
    finally:
        lake.memory["updates"] = lake.memory.get("updates", 0) + 1
    return bool(rows[0][0])


def _count(lake: PooledLake, destination: Destination, plan: ReadPlan) -> int:
    field = plan.source.columns[plan.field]
    [[count]] = lake.execute(
        f"select count(*) from {lake.table(destination.target)}"
        f" where {ident(field.name)} = cast(? as {field.type})",
        (destination.value,),
        doing="counting rows of a destination",
    )
    return int(count)


def _tidy(lake: PooledLake) -> None:
    """Flush old versions of the cursor from the catalog, once in many updates."""
    if lake.memory.get("updates", 0) < STATE_UPDATES_MAX:
        return
    lake.memory["updates"] = 0
    lake.execute(
        f"call ducklake_flush_inlined_data({literal(lake.alias)}, schema_name => {literal(STATE.schema)},"
        f" table_name => {literal(STATE.name)})",
        doing="flushing inlined rows",
    )
