"""
Give targets the layout that the configuration wants; what it does not mention stays as people set it in the lake.

A new target gets its layout in the transaction that creates it.  An existing one is altered at a start, and when the
group starts again because its options changed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

import structlog

from aqueduck.lake.session.catalog import LakeSession
from aqueduck.lake.session.sql import LAKE, ident, lake_table, literal
from aqueduck.lake.target.places import know_places, notice_changes
from aqueduck.model.columns.typemap import lake_type
from aqueduck.model.errors import ConfigError, LakeError, PartitionedTargetError
from aqueduck.model.layout import AS_IT_IS, IDENTITY, PLAIN, PartitionKey, SortKey, TableLayout, WantedLayout
from aqueduck.model.modes import TableMode
from aqueduck.model.schema import TableName, TableSchema

__all__ = [
    "check_wanted",
    "fit_layouts",
    "lay_out",
    "layout_changes",
    "planned_layout",
    "set_file_sizes",
    "sort_changes",
    "without_sort_key",
]

log = structlog.get_logger()


def check_wanted(wanted: WantedLayout, schema: TableSchema, mode: TableMode) -> None:
    """Raise if the target will not have a column that the layout names; `schema` has the lake's columns."""
    known = {name.lower() for name in _kinds(schema, mode)}
    for column in wanted.columns:
        if column.lower() not in known:
            raise ConfigError(
                f"{schema.qualified} has no column {column} in the lake",
                hint="correct the name in partition_by or sort_by, which name columns of the lake table",
                table=schema.qualified,
            )


def planned_layout(
    session: LakeSession, target: TableName, schema: TableSchema, mode: TableMode
) -> TableLayout:
    """The layout that a missing target will get."""
    return _of_columns(session.wanted.get(target, AS_IT_IS).over(PLAIN), _kinds(schema, mode))


def lay_out(
    session: LakeSession, target: TableName, schema: TableSchema, mode: TableMode, before: TableLayout = PLAIN
) -> None:
    """Inside the transaction that creates the target: set its layout, by default that of the table `before`."""
    layout = _of_columns(session.wanted.get(target, AS_IT_IS).over(before), _kinds(schema, mode))
    _alter(session, target, layout, layout != PLAIN and bool(layout.partition), bool(layout.sort))
    session.laid_out[target] = layout


def fit_layouts(
    session: LakeSession,
    targets: Mapping[TableName, str | None],
    transact: Callable[[Callable[[], None]], None],
) -> dict[TableName, LakeError]:
    """
    Alter those of our targets whose layout is not the wanted one; returns the errors.

    `targets` has the uuid of each; `transact` runs a function in a lake transaction.
    """
    own = {t: w for t, w in session.wanted.items() if t in targets}
    notice_changes(session)
    know_places(session, list(own))
    places = {target: session.memory.places.get(target.folded) for target in own}
    failed: dict[TableName, LakeError] = {}
    for target, wanted in own.items():
        place = places[target]
        if place is None or place.view or place.uuid != targets[target]:
            continue
        partition, sort = wanted.differs(place.layout)
        if not (partition or sort):
            continue
        layout = wanted.over(place.layout)
        try:
            if partition:
                _refuse_late_bucket(session, target, layout)
            transact(functools.partial(_alter, session, target, layout, partition, sort))
        except LakeError as exc:
            failed[target] = exc
            continue
        log.info("layout set", table=target.qualified, partition=list(map(str, layout.partition)))
    notice_changes(session)
    set_file_sizes(session, own)
    return failed


def _refuse_late_bucket(session: LakeSession, target: TableName, layout: TableLayout) -> None:
    """Raise if the layout has a bucket and the target has files, whose rows DuckLake would no longer find by value."""
    if not any(key.buckets for key in layout.partition):
        return
    files = session.execute(
        f"from ducklake_list_files({literal(LAKE)}, {literal(target.name)}, schema => {literal(target.schema)}) limit 1",
        doing="listing the table's files",
        table=target.qualified,
    )
    if files:
        raise PartitionedTargetError(
            f"the lake table {target.qualified} has rows, which DuckLake does not find by their values after"
            " it is partitioned by a bucket",
            hint="choose other keys in partition_by; or drop the lake table and re-copy it:"
            " aqueduck tables resync -c FILE TABLE",
            table=target.qualified,
        )


def set_file_sizes(session: LakeSession, targets: Iterable[TableName]) -> None:
    """Set the wanted file sizes of existing targets, outside a transaction: DuckLake takes no option of a new table."""
    wanted = {t: w.file_bytes for t in targets if (w := session.wanted.get(t)) and w.file_bytes is not None}
    if not wanted:
        return
    know_places(session, list(wanted))
    options = session.execute(
        "select lower(scope_entry), value from ducklake_options('lake')"
        " where option_name = 'target_file_size' and scope = 'TABLE'",
        doing="reading options",
    )
    known = {str(entry): str(value) for entry, value in options}
    for target, size in wanted.items():
        place = session.memory.places.get(target.folded)
        if place is None or place.view or known.get(target.folded.qualified) == str(size):
            continue
        session.execute(
            f"call lake.set_option('target_file_size', {literal(f'{size}B')},"
            f" schema => {literal(target.schema)}, table_name => {literal(target.name)})",
            doing="setting options",
            table=target.qualified,
        )


def _kinds(schema: TableSchema, mode: TableMode) -> dict[str, str]:
    return {c.name: lake_type(c) for c in schema.columns} | dict(mode.columns)


def _of_columns(layout: TableLayout, kinds: dict[str, str]) -> TableLayout:
    """The layout for a table with these columns, without keys of other columns."""
    known = {name.lower(): (name, kind) for name, kind in kinds.items()}
    partition = [
        replace(key, column=known[key.column.lower()][0], kind=known[key.column.lower()][1])
        for key in layout.partition
        if key.column.lower() in known
    ]
    sort = [key for key in layout.sort if key.column is None or key.column.lower() in known]
    found = TableLayout(tuple(partition), tuple(sort))
    return replace(found, in_paths=found.can_be_in_paths(list(kinds)))


def layout_changes(wanted: WantedLayout, current: TableLayout) -> list[str]:
    """What to alter of a table with the layout `current`."""
    return _changes(wanted.over(current), *wanted.differs(current))


def without_sort_key(layout: TableLayout, column: str) -> TableLayout:
    """The layout of a table that loses a column: a table is not sorted by what it does not have."""
    return replace(
        layout, sort=tuple(key for key in layout.sort if (key.column or "").lower() != column.lower())
    )


def sort_changes(layout: TableLayout) -> list[str]:
    """What to alter of a table to sort it like this."""
    return _changes(layout, False, True)


def _alter(session: LakeSession, target: TableName, layout: TableLayout, partition: bool, sort: bool) -> None:
    for change in _changes(layout, partition, sort):
        session.execute(
            f"alter table {lake_table(target)} {change}", doing="setting the layout", table=target.qualified
        )


def _changes(layout: TableLayout, partition: bool, sort: bool) -> list[str]:
    changes = []
    if partition:
        keys = ", ".join(map(_partition, layout.partition))
        changes.append(f"set partitioned by ({keys})" if keys else "reset partitioned by")
    if sort:
        keys = ", ".join(map(_sort, layout.sort))
        changes.append(f"set sorted by ({keys})" if keys else "reset sorted by")
    return changes


def _partition(key: PartitionKey) -> str:
    column = ident(key.column)
    if key.transform == IDENTITY:
        return column
    return f"bucket({key.buckets}, {column})" if key.buckets else f"{key.transform}({column})"


def _sort(key: SortKey) -> str:
    expression = key.expression if key.column is None else ident(key.column)
    return (
        f"{expression} {'desc' if key.descending else 'asc'} nulls {'first' if key.nulls_first else 'last'}"
    )
