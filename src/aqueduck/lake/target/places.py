"""
Check that a target is still the table that we made, and read its layout: users drop, rename, replace and partition tables.

A table is identified by DuckLake's uuid, which survives a rename and an ALTER but not a drop and create.
`notice_changes` detects by a single number whether any table changed; while none did, the catalog is not
queried further.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace

from aqueduck.lake.ledger.table_states import TableState
from aqueduck.lake.session.catalog import LakeSession
from aqueduck.lake.session.sql import lake_table
from aqueduck.lake.target.layouts import read_layouts
from aqueduck.lake.upkeep.table_upkeep import Lake
from aqueduck.model.errors import LakeTableMissingError, PartitionedTargetError, TargetReplacedError
from aqueduck.model.layout import PLAIN, TableLayout
from aqueduck.model.schema import TableName

__all__ = [
    "OTHER",
    "Place",
    "check_place",
    "file_bytes",
    "hidden_rows_error",
    "hides_rows",
    "is_ours",
    "know_places",
    "known_layout",
    "notice_changes",
    "read_places",
    "refuse_hidden_rows",
    "refuse_other_buckets",
    "task_layout",
    "with_places",
]

OTHER = "none"
"""A uuid that no table has, so that any table found counts as another one."""


@dataclass(frozen=True, slots=True)
class Place:
    """A table or a view of the lake."""

    uuid: str
    layout: TableLayout = PLAIN
    view: bool = False


def read_places(lake: Lake, targets: Collection[TableName]) -> dict[TableName, Place]:
    """The committed tables and views with these names, by `folded` name."""
    wanted = {target.folded for target in targets}
    if not wanted:
        return {}
    m = lake.metadata
    rows = lake.execute(
        f"select s.schema_name, t.table_name, t.table_uuid::varchar, t.table_id, p.table_id is not null, false"
        f" from {m}.ducklake_table t join {m}.ducklake_schema s using (schema_id)"
        f" left join ({_with_layout(m)}) p on p.table_id = t.table_id"
        " where t.end_snapshot is null and s.end_snapshot is null and list_contains(?, lower(t.table_name))"
        " union all select s.schema_name, v.view_name, v.view_uuid::varchar, null, false, true"
        f" from {m}.ducklake_view v join {m}.ducklake_schema s using (schema_id)"
        " where v.end_snapshot is null and s.end_snapshot is null and list_contains(?, lower(v.view_name))",
        [[t.name for t in wanted], [t.name for t in wanted]],
        doing="looking at the targets",
    )
    found = {TableName(schema, name).folded: rest for schema, name, *rest in rows}
    found = {target: rest for target, rest in found.items() if target in wanted}
    layouts = read_layouts(lake, [number for _, number, laid_out, _ in found.values() if laid_out])
    return {
        target: Place(uuid, layouts.get(number, PLAIN), view)
        for target, (uuid, number, _, view) in found.items()
    }


def _with_layout(metadata: str) -> str:
    return (
        f"select table_id from {metadata}.ducklake_partition_info where end_snapshot is null"
        f" union select table_id from {metadata}.ducklake_sort_info where end_snapshot is null"
    )


def notice_changes(session: LakeSession) -> None:
    """
    Clear the session's knowledge of tables if the columns, the layout or the name of any table changed.

    In a transaction, call this after the first statement: any later change makes the commit fail.
    """
    [[version]] = session.execute(
        f"select schema_version from {session.metadata}.ducklake_snapshot order by snapshot_id desc limit 1",
        doing="looking for changes of tables",
    )
    if version != session.memory.schema_version:
        session.memory.schema_version = version
        session.memory.targets.clear()
        session.memory.places.clear()
        session.memory.settled.clear()
        session.memory.described.clear()


def file_bytes(lake: Lake, targets: Collection[TableName]) -> dict[TableName, int]:
    """The size of the files of these tables that have any."""
    wanted = {target.folded: target for target in targets}
    m = lake.metadata
    rows = lake.execute(
        f"select s.schema_name, t.table_name, c.file_size_bytes from {m}.ducklake_table_stats c"
        f" join {m}.ducklake_table t using (table_id) join {m}.ducklake_schema s using (schema_id)"
        " where c.file_size_bytes > 0 and t.end_snapshot is null and s.end_snapshot is null",
        doing="looking at the targets",
    )
    found = {TableName(schema, name).folded: size for schema, name, size in rows}
    return {target: found[name] for name, target in wanted.items() if name in found}


def _place(session: LakeSession, target: TableName) -> Place | None:
    known = session.memory.places
    if target.folded not in known:
        know_places(session, [target])
    return known[target.folded]


def know_places(session: LakeSession, targets: Collection[TableName]) -> None:
    """Read all of them with one query."""
    known = session.memory.places
    new = [target for target in targets if target.folded not in known]
    found = read_places(session, new)
    known.update((target.folded, found.get(target.folded)) for target in new)
    # A process may have died between a commit and its repair.
    session.memory.misfiled.update(t for t, place in found.items() if place.layout.repeats_column)


def known_layout(session: LakeSession, target: TableName) -> TableLayout:
    """The layout of a target, as this session knows it."""
    layout = session.laid_out.get(target)
    if layout is None:
        place = _place(session, target)
        layout = PLAIN if place is None else place.layout
    for before, after in session.renamed.get(target, ()):
        layout = layout.renamed(before, after)
    return layout


def task_layout(session: LakeSession, target: TableName) -> TableLayout:
    """The layout for which tasks write files; in an encrypted lake, DuckLake writes all of them."""
    return PLAIN if session.encrypted else known_layout(session, target)


def check_place(
    session: LakeSession,
    target: TableName,
    uuid: str | None,
    source: TableName | None = None,
    *,
    may_be_missing: bool = False,
) -> bool:
    """
    Raise unless the target is the table with this `uuid` and can be written; returns whether it exists.

    Not for a target that the open transaction created, because the catalog does not have it yet.
    """
    place = _place(session, target)
    if place is None and may_be_missing:
        return False
    again = f"aqueduck tables resync -c FILE {source or 'TABLE'}"
    name = target.qualified
    if place is None:
        raise LakeTableMissingError(
            f"the lake table {name} was dropped or renamed",
            hint=f"rename it back, or re-copy the table: {again}",
            table=name,
        )
    if place.view:
        raise TargetReplacedError(
            f"a view has the name of the lake table {name}",
            hint=f"drop or rename the view, then: {again}",
            table=name,
        )
    if uuid is not None and place.uuid != uuid:
        raise TargetReplacedError(
            f"the lake table {name} was replaced by another table, which Aqueduck does not write to",
            hint=f"rename or drop the other table, then: {again}",
            table=name,
        )
    if place.layout.unknown:
        raise PartitionedTargetError(
            f"the lake table {name} is partitioned by {', '.join(map(str, place.layout.unknown))},"
            " which cannot be written",
            hint=f"alter table {lake_table(target)} reset partitioned by",
            table=name,
        )
    return True


def refuse_hidden_rows(session: LakeSession, target: TableName, source: TableName | None = None) -> None:
    """Raise if the target `hides_rows`: deletes would not find them."""
    if any(key.buckets for key in known_layout(session, target).partition) and hides_rows(session, target):
        again = f"aqueduck tables resync -c FILE {source or 'TABLE'}"
        raise hidden_rows_error(target, f"; or, if its mode is upsert, re-copy it: {again}")


def hides_rows(lake: Lake, target: TableName) -> bool:
    """
    Whether a table is partitioned by a bucket and has files from before.

    DuckLake 1.5.5 skips such files in every query for a value of the column.
    """
    m = lake.metadata
    [[files]] = lake.execute(
        f"select count(*) from {m}.ducklake_partition_info i join {m}.ducklake_partition_column c"
        " on c.partition_id = i.partition_id and c.table_id = i.table_id"
        f" join {m}.ducklake_table t on t.table_id = i.table_id join {m}.ducklake_schema s using (schema_id)"
        f" join {m}.ducklake_data_file f on f.table_id = i.table_id"
        " where c.transform like 'bucket%' and f.partition_id is distinct from i.partition_id"
        " and lower(s.schema_name) = lower(?) and lower(t.table_name) = lower(?) and i.end_snapshot is null"
        " and t.end_snapshot is null and s.end_snapshot is null and f.end_snapshot is null",
        (target.schema, target.name),
        doing="looking at the targets",
    )
    return bool(files)


def hidden_rows_error(target: TableName, otherwise: str = "") -> PartitionedTargetError:
    return PartitionedTargetError(
        f"the lake table {target.qualified} was partitioned by a bucket when it had rows, and DuckLake does not find them"
        " by the value of the column",
        hint=f"alter table {lake_table(target)} reset partitioned by{otherwise}",
        table=target.qualified,
    )


def refuse_other_buckets(lake: Lake, target: TableName, column: str, before: str, after: str) -> None:
    """Raise if the target is partitioned by a bucket of the column, and the wider type has other hashes."""
    place = read_places(lake, [target]).get(target.folded)
    keys = place.layout.partition if place else ()
    if not any(key.buckets and key.column.lower() == column.lower() for key in keys):
        return
    [[differ]] = lake.execute(
        f"select murmur3_32('1'::{before}) is distinct from murmur3_32('1'::{after})",
        doing="comparing the hashes of two types",
    )
    if differ:
        raise PartitionedTargetError(
            f"the column {column} becomes {after}, but the lake table {target.qualified} is partitioned by a bucket of it,"
            " and its values would have other hashes",
            hint=f"alter table {lake_table(target)} reset partitioned by",
            table=target.qualified,
        )


def is_ours(session: LakeSession, target: TableName, uuid: str | None) -> bool:
    """False if a view or another table is known to have the target's name."""
    notice_changes(session)
    place = _place(session, target)
    return place is None or (not place.view and uuid in (None, place.uuid))


def with_places(session: LakeSession, states: Iterable[TableState]) -> list[TableState]:
    """Complete the states that lack their target's uuid, after a commit; returns only those."""
    unknown = [state for state in states if state.target_uuid is None]
    if not unknown:
        return []
    notice_changes(session)
    know_places(session, [state.target for state in unknown])
    found = [(state, session.memory.places[state.target.folded]) for state in unknown]
    return [replace(s, target_uuid=p.uuid) for s, p in found if p is not None and not p.view]
