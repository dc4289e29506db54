"""
Write a batch of small changes into the catalog in one transaction for all of its tables.

`commit_directly` returns false and writes nothing unless the whole batch consists of a few rows for tables such as we
create; the caller then commits through DuckLake.  It writes exactly what DuckLake would write, and tests compare the two
for each catalog.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from aqueduck import faults
from aqueduck.lake.direct.catalog_rows import Catalog, ColumnStats, Described, Newest, TableFacts
from aqueduck.lake.direct.cells import Cells, Slot, ducklake_type, stored_exactly
from aqueduck.lake.direct.extremes import Merge, merged
from aqueduck.lake.direct.files import ROWS_MAX, Sought, rows_in_files, worth_reading
from aqueduck.lake.fold.small import is_small, small_effect
from aqueduck.lake.ledger.progress import Position, progress_cells, progress_table
from aqueduck.lake.session.catalog import LakeSession
from aqueduck.lake.session.directories import read_directories
from aqueduck.lake.session.sql import ident
from aqueduck.lake.target.evolve import same_columns
from aqueduck.lake.target.inlined import reserved_names
from aqueduck.lake.target.places import know_places, notice_changes
from aqueduck.model.columns.projection import is_clear
from aqueduck.model.errors import CatalogUnreachableError, LakeBusyError, LakeError
from aqueduck.model.layout import PLAIN
from aqueduck.model.modes import UPSERT
from aqueduck.model.schema import Column, TableName, TableSchema

if TYPE_CHECKING:  # `commit` calls this module
    from aqueduck.lake.commit.commit import BatchPlan, TablePlan

__all__ = ["commit_directly"]

CHANGES_MAX = 20_000
BYTES_MAX = 16 << 20
"""The most changes and bytes of a batch that are written directly: for more, the engine is as fast."""
KINDS = ("postgres", "sqlite")
"""Kinds of catalogs that are written directly; a DuckDB file can be opened only once."""


class _NotDirect(Exception):  # noqa: N818 - no error: the ordinary way follows
    """A part of the batch needs the engine."""


@dataclass(slots=True)
class _Table:
    """A table of the batch on its way into the catalog."""

    target: TableName
    columns: tuple[Column, ...]
    key: tuple[int, ...]
    cells: list[Slot]
    keys: list[Slot]
    rows: int
    described: Described | None = None
    facts: TableFacts = field(default_factory=TableFacts)
    key_cells: list[tuple[str, ...]] = field(default_factory=list)
    gone: dict[str, list[int]] = field(default_factory=dict)
    """Inlined rows to delete, by the table that has them."""
    gone_from_files: list[tuple[int, int]] = field(default_factory=list)
    updates: bool = False
    """Whether each row takes the place of the one that it deletes, with its id."""

    inlined: str = ""
    """The catalog's table for its inlined rows of now."""


def commit_directly(
    session: LakeSession, plan: BatchPlan, before: int, message: str, extra: Mapping[str, Any]
) -> bool:
    """Commit the batch in the catalog; false if it needs the engine.  It continues from the position `before`."""
    if session.kind not in KINDS or session.config.inline_rows == 0 or plan.parked or plan.changed:
        return False
    if not all(_is_direct(session, table) for table in _busy(plan)) or not _is_small(plan):
        return False
    try:
        with session.alone(), session.one_thread():
            tables = _folded(session, plan)
            with session.transaction():
                _write(session, plan, tables, before, message, extra)
                faults.point("lake.before_commit")
    except _NotDirect:
        return False
    inlined = session.memory.inlined_rows
    for table in tables[:-1]:
        inlined[table.target] = inlined.get(table.target, 0) + table.rows
    faults.point("lake.after_commit")
    return True


def _busy(plan: BatchPlan) -> list[TablePlan]:
    return [table for table in plan.tables if table.runs]


def _is_small(plan: BatchPlan) -> bool:
    segments = [s for table in plan.tables for run in table.runs for s in run.segments]
    return sum(s.rows for s in segments) <= CHANGES_MAX and sum(s.bytes for s in segments) <= BYTES_MAX


def _is_direct(session: LakeSession, table: TablePlan) -> bool:
    """Whether the batch has a few plain changes of a table whose columns are those of its target."""
    if table.mode != UPSERT or len(table.runs) != 1 or table.schema is None:
        return False
    [run] = table.runs
    limit = session.limits.get(table.target, session.config.inline_rows)
    return (
        not (run.data or run.deletes or run.patches or run.ends)
        and all(s.kind == "rows" for s in run.segments)
        and is_small(run.segments, run.schema)
        and sum(s.rows for s in run.segments) <= limit
        and is_clear(run.schema)
        and same_columns(table.schema, run.schema)
        and not reserved_names(session, run.schema)
        and all(stored_exactly(run.schema.columns[k]) for k in run.schema.key_indexes)
    )


def _folded(session: LakeSession, plan: BatchPlan) -> list[_Table]:
    """The net effect of the batch on each table, typed, with the position as the last one."""
    cells = Cells(session)
    tables = []
    for table in _busy(plan):
        [run] = table.runs
        effect = small_effect(run.segments, run.schema, table.skip_before)
        if effect.rows.num_rows or effect.keys.num_rows:
            tables.append(_typed(cells, table.target, run.schema, effect.rows, effect.keys))
    tables.append(_position(cells, plan.position))
    try:
        cells.cast()
    except CatalogUnreachableError:
        raise
    except LakeError:  # the ordinary way finds the table that the value belongs to
        raise _NotDirect from None
    if any("NULL" in slot.literals for table in tables for slot in table.keys):
        raise _NotDirect
    return tables


def _typed(cells: Cells, target: TableName, schema: TableSchema, rows: pa.Table, keys: pa.Table) -> _Table:
    key = schema.key_indexes
    return _Table(
        target,
        schema.columns,
        key,
        [cells.add(c, rows.column(f"n{i}")) for i, c in enumerate(schema.columns)],
        [cells.add(schema.columns[k], keys.column(f"k{i}")) for i, k in enumerate(key)],
        rows.num_rows,
        key_cells=list(zip(*(column.to_pylist() for column in keys.columns), strict=True)),
    )


def _position(cells: Cells, position: Position) -> _Table:
    columns, row = progress_cells(position)
    schema = TableSchema(0, "", "", columns, (columns[0].name,), "d")
    rows = pa.table([pa.array([cell], pa.string()) for cell in row], [f"n{i}" for i in range(len(row))])
    keys = pa.table([pa.array([position.group], pa.string())], ["k0"])
    table = _typed(cells, progress_table(position.group), schema, rows, keys)
    table.updates = True
    return table


# -- inside the transaction


def _write(
    session: LakeSession,
    plan: BatchPlan,
    tables: Sequence[_Table],
    before: int,
    message: str,
    extra: Mapping[str, Any],
) -> None:
    notice_changes(session)
    catalog = Catalog(session)
    _know(session, catalog, plan, tables)
    newest = catalog.newest()
    facts = catalog.facts([_described(table).table_id for table in tables])
    for table in tables:
        table.facts = facts[_described(table).table_id]
        _check_inlined(catalog, table)
    _check_position(catalog, tables[-1], before)
    _find_gone(session, catalog, tables)
    _insert(session, catalog, newest, tables, message, extra)
    catalog.flush()


def _check_inlined(catalog: Catalog, table: _Table) -> None:
    """Find the table for its inlined rows, or make it, as DuckLake does before the first of them."""
    described = _described(table)
    names = {version: name for name, version in table.facts.inlined}
    if table.rows:
        table.inlined = names.get(described.version) or catalog.make_inlined(described)
    if table.key_cells and names.keys() - {described.version} and not _steady(table):
        raise _NotDirect  # older rows may have the key under another name or type


def _described(table: _Table) -> Described:
    assert table.described is not None
    return table.described


def _know(session: LakeSession, catalog: Catalog, plan: BatchPlan, tables: Sequence[_Table]) -> None:
    """Look at the tables, unless nothing has changed since, and make sure that they are ours and as we make them."""
    memory = session.memory
    know_places(session, [table.target for table in plan.tables])
    for one in plan.tables:
        place = memory.places[one.target.folded]
        if place is None or place.view or place.layout != PLAIN or one.target_uuid not in (None, place.uuid):
            raise _NotDirect  # the ordinary way has the error for it
    limits = catalog.inline_limits()
    if limits is None:
        raise _NotDirect
    new = [table.target for table in tables if table.target.folded not in memory.described]
    if new:
        memory.described.update(catalog.describe(new))
    for table in tables:
        table.described = memory.described.get(table.target.folded)
        if table.described is None or not table.described.plain or not _fits(table):
            raise _NotDirect
        limit = limits.of(table.described, session.limits.get(table.target, session.config.inline_rows))
        if max(table.rows, len(table.key_cells)) > limit:
            raise _NotDirect  # DuckLake writes a file


def _fits(table: _Table) -> bool:
    wanted = [(c.name.lower(), ducklake_type(c)) for c in table.columns]
    return sorted(wanted) == sorted((name.lower(), kind) for _, name, kind in _described(table).columns)


def _check_position(catalog: Catalog, progress: _Table, before: int) -> None:
    if len(progress.facts.inlined) != 1:
        raise _NotDirect
    found = catalog.inlined_value(progress.inlined, "position", "true")
    if not found:
        raise _NotDirect  # it was flushed to a file
    if found != [str(before)]:
        raise LakeBusyError("the group's position in the lake moved while this batch was prepared")


def _find_gone(session: LakeSession, catalog: Catalog, tables: Sequence[_Table]) -> None:
    """Find the rows that the batch deletes: among inlined rows, and if they are not there, in files."""
    keyed = [table for table in tables if table.key_cells]
    conditions = {
        name: condition for t in keyed for condition in [_condition(t)] for name, _ in t.facts.inlined
    }
    found = catalog.inlined_rows(conditions)
    for table in keyed:
        table.gone = {name: found[name] for name, _ in table.facts.inlined if name in found}
    missing = [t for t in keyed if t.facts.files and sum(map(len, t.gone.values())) < len(t.key_cells)]
    if missing:
        _find_in_files(session, catalog, missing)


def _find_in_files(session: LakeSession, catalog: Catalog, tables: Sequence[_Table]) -> None:
    if session.encrypted or not all(map(_steady, tables)):
        raise _NotDirect
    ids = {_described(t).table_id: _key_ids(t)[0] for t in tables}
    files, directories = catalog.files(ids), read_directories(session)
    sought = {}
    for table in tables:
        directory = directories.of(table.target)
        assert directory is not None
        names = {number: name for number, name, _ in _described(table).columns}
        columns = tuple((names[n], table.columns[k]) for n, k in zip(_key_ids(table), table.key, strict=True))
        keys = Sought(directory, columns, table.key_cells)
        worth = worth_reading(keys, files.get(_described(table).table_id, []))
        if not all(f.plain for f in worth) or sum(f.rows for f in worth) > ROWS_MAX:
            raise _NotDirect
        if worth:
            sought[_described(table).table_id] = (keys, worth)
    found = rows_in_files(session, catalog, sought)
    for table in tables:
        table.gone_from_files = found.get(_described(table).table_id, [])


def _key_ids(table: _Table) -> list[int]:
    """DuckLake's ids of the columns of the key."""
    ids = {name.lower(): number for number, name, _ in _described(table).columns}
    return [ids[table.columns[k].name.lower()] for k in table.key]


def _steady(table: _Table) -> bool:
    """Whether older rows have the key under the same names and types."""
    return _described(table).steady.issuperset(_key_ids(table))


def _condition(table: _Table) -> str:
    stored = {name.lower(): name for _, name, _ in _described(table).columns}
    names = [ident(stored[table.columns[k].name.lower()]) for k in table.key]
    if len(names) == 1:
        return f"{names[0]} in ({', '.join(table.keys[0].literals)})"
    keys = zip(*(slot.literals for slot in table.keys), strict=True)
    same = (" and ".join(f"{n} = {v}" for n, v in zip(names, key, strict=True)) for key in keys)
    return f"({' or '.join(f'({one})' for one in same)})"


def _insert(
    session: LakeSession,
    catalog: Catalog,
    newest: Newest,
    tables: Sequence[_Table],
    message: str,
    extra: Mapping[str, Any],
) -> None:
    snapshot = newest.snapshot + 1
    ordered = sorted(tables, key=lambda table: _described(table).table_id)
    written = [table for table in ordered if table.rows]
    for table in written:
        catalog.insert(table.inlined, _rows(table, snapshot))
    for table in ordered:
        for name, rows in table.gone.items():
            catalog.end_rows(name, rows, snapshot)
    catalog.delete_from_files(
        {_described(t).table_id: t.gone_from_files for t in ordered if t.gone_from_files}, snapshot
    )
    counted = [table for table in written if table.facts.counted]
    catalog.count(
        {
            _described(t).table_id: (t.facts.rows + t.rows, t.facts.next_row + (0 if t.updates else t.rows))
            for t in counted
        }
    )
    _widen(session, catalog, counted)
    catalog.first_statistics(
        {_described(t).table_id: (t.rows, _first(t)) for t in written if not t.facts.counted}
    )
    changes = [f"inlined_insert:{_described(t).table_id}" for t in written]
    changes += [f"inlined_delete:{_described(t).table_id}" for t in ordered if t.gone or t.gone_from_files]
    catalog.snapshot(newest, len(written), ",".join(changes), message, json.dumps(extra))


def _slots(table: _Table) -> dict[int, tuple[Column, Slot]]:
    """Column and cells by DuckLake's column id."""
    by_name = {c.name.lower(): (c, slot) for c, slot in zip(table.columns, table.cells, strict=True)}
    return {number: by_name[name.lower()] for number, name, _ in _described(table).columns}


def _rows(table: _Table, snapshot: int) -> list[str]:
    literals = zip(*(slot.literals for _, slot in _slots(table).values()), strict=True)
    first = table.facts.next_row
    ids = table.gone[table.inlined] if table.updates else range(first, first + table.rows)
    return [f"{n}, {snapshot}, NULL, {', '.join(row)}" for n, row in zip(ids, literals, strict=True)]


def _first(table: _Table) -> dict[int, ColumnStats]:
    """Statistics of a table's first rows; columns without a value get none (ADR 66)."""
    slots = _slots(table)
    return {
        number: ColumnStats(slot.has_null, slot.lowest, slot.highest)
        for number, (_, slot) in slots.items()
        if slot.lowest is not None
    }


def _widen(session: LakeSession, catalog: Catalog, tables: Sequence[_Table]) -> None:
    merges = {}
    for table in tables:
        known = table.facts.columns
        for number, (column, slot) in _slots(table).items():
            if number in known:
                merges[_described(table).table_id, number] = Merge(column, known[number], slot)
    changed = merged(session, merges)
    catalog.forget_statistics([key for key, statistics in changed.items() if statistics is None])
    catalog.widen({key: statistics for key, statistics in changed.items() if statistics is not None})
