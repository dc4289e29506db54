"""
Both sides of a range of lake snapshots: inserted rows and deleted rows, each with its lake snapshot.

DuckLake 1.5.5 dates a row that was deleted from a merged file by its *insertion* (`tests/lake/conformance/test_ducklake.py`).
The set of rows that it returns for a range is right, so a range of one lake snapshot does not depend on the date.
`dated` divides a range into such ranges if the table has a merged file.
"""

from __future__ import annotations

from aqueduck.lake.ledger.lineage import relayout_note
from aqueduck.lake.session.pool import PooledLake
from aqueduck.lake.session.sql import literal
from aqueduck.model.errors import MergedChangesError
from aqueduck.model.routing import SnapshotRange
from aqueduck.model.schema import TableName

__all__ = ["dated", "has_merged_files", "refuse_merged_updates", "refuse_relaid_rows", "side", "sides"]

ONCE = (
    " qualify coalesce(filename not like '%.parquet', true)"
    " or row_number() over (partition by filename, file_row_number) = 1"
)
"""If one transaction deletes some rows of a file and then the rest, DuckLake reports the rows twice as deleted."""


def dated(lake: PooledLake, table_id: int, span: SnapshotRange) -> list[SnapshotRange]:
    """
    Divide the range into ranges in which every change can be dated, in order.

    A merge may happen at any time, so call this in the transaction that reads.
    """
    if not span.removes:
        return [span]
    return list(span.one_by_one()) if has_merged_files(lake, table_id) else [span]


def has_merged_files(lake: PooledLake, table_id: int) -> bool:
    """Whether any file of the table has rows of several lake snapshots."""
    merged = (
        f"from {lake.metadata}.ducklake_data_file where table_id = {table_id} and partial_max is not null"
    )
    [[any_merged]] = lake.execute(f"select exists ({merged})", doing="looking for merged files")
    return bool(any_merged)


def refuse_merged_updates(lake: PooledLake, table: TableName, table_id: int, span: SnapshotRange) -> None:
    """
    Raise if updates of a dated range cannot be distinguished from insertions.

    Both sides of an update have the same row id, until the file with the new row is merged and the row gets another id.
    """
    if not span.removes or span.first != span.last:
        return  # nothing was removed, or no file of the table was merged
    s = span.first
    merged = (
        f"from {lake.metadata}.ducklake_data_file where table_id = {table_id}"
        f" and partial_max is not null and begin_snapshot <= {s} and partial_max >= {s}"
    )
    added, removed = (side(lake, table, kind, span, "") for kind in ("insertions", "deletions"))
    [[unclear]] = lake.execute(
        f"select exists ({merged}) and exists ({added}) and exists ({removed})",
        doing="looking for merged updates",
    )
    if unclear:
        raise MergedChangesError(
            f"the files with the changes of lake snapshot {s} were merged before they were read, so updates look like insertions",
            hint="set routing.key_columns, or merge the source's files less often than the slowest reader reads",
            table=table.qualified,
        )


def refuse_relaid_rows(lake: PooledLake, table: TableName, table_id: int, span: SnapshotRange) -> None:
    """Raise if `aqueduck maintain --relayout` wrote rows of this range: they look like new ones and have new row ids."""
    [[relaid]] = lake.execute(
        f"select count(*) from {lake.metadata}.ducklake_snapshot_changes"
        " where snapshot_id between ? and ? and commit_extra_info = ?",
        (span.first, span.last, relayout_note(table_id)),
        doing="looking for rewritten rows",
    )
    if relaid:
        raise MergedChangesError(
            f"files of lake snapshots {span.first} to {span.last} were rewritten by their layout, and old rows look new",
            hint="set routing.key_columns, so that rewritten rows can be recognized",
            table=table.qualified,
        )


def side(lake: PooledLake, table: TableName, kind: str, span: SnapshotRange, cells: str) -> str:
    """A query for the insertions or deletions of a dated range: lake snapshot, row id and cells."""
    name = ", ".join(map(literal, (lake.alias, table.schema, table.name)))
    snapshot = str(span.first) if span.first == span.last else "snapshot_id"
    return (
        f"select {snapshot}::bigint as aqueduck_s, rowid as aqueduck_r{cells}"
        f" from ducklake_table_{kind}({name}, {span.first}, {span.last})"
    )


def _were_there(lake: PooledLake, table_id: int, span: SnapshotRange) -> str:
    """
    A condition on deletions from merged files: the row existed before.

    If one transaction wrote and deleted a row and its file was merged later, DuckLake reports the row as deleted in
    every later lake snapshot too.
    """
    before = span.first - 1
    alive = f"begin_snapshot <= {before} and (end_snapshot is null or end_snapshot > {before})"
    names = lake.execute(
        f"select (select schema_name from {lake.metadata}.ducklake_schema s where s.schema_id = t.schema_id and {alive}),"
        f" table_name from {lake.metadata}.ducklake_table t where table_id = {table_id} and {alive}",
        doing="reading the source's catalog",
    )
    if not names:
        return f" where snapshot_id = {span.first}"
    earlier = f"{lake.table(TableName(*names[0]))} at (version => {before})"
    return (
        f" where snapshot_id = {span.first}"
        f" or (filename, file_row_number) in (select (filename, file_row_number) from {earlier})"
    )


def sides(
    lake: PooledLake, table: TableName, table_id: int, span: SnapshotRange, added: str, removed: str
) -> str:
    """
    A `with` clause that names both sides of a dated range, `added` and `removed`, with these cells.

    A row that one transaction wrote to a file and deleted again is on both sides and is left out.  Such rows are
    compared by their place in the file.  Inlined rows have no such place, but are never on both sides for this reason.
    """
    place = ", filename as aqueduck_f, file_row_number as aqueduck_n"
    kept = (
        "select x.* exclude (aqueduck_f, aqueduck_n) from {} x where not exists (select 1 from {} z"
        " where z.aqueduck_s = x.aqueduck_s and z.aqueduck_f = x.aqueduck_f and z.aqueduck_n = x.aqueduck_n"
        " and z.aqueduck_f like '%.parquet')"
    )
    insertions = side(lake, table, "insertions", span, place + added)
    known = span.first == span.last and has_merged_files(lake, table_id)
    there = _were_there(lake, table_id, span) if known else ""
    deletions = side(lake, table, "deletions", span, place + removed) + there + ONCE
    return (
        f"with aqueduck_a as materialized ({insertions}), aqueduck_d as materialized ({deletions}),"
        f" added as ({kept.format('aqueduck_a', 'aqueduck_d')}),"
        f" removed as ({kept.format('aqueduck_d', 'aqueduck_a')})"
    )
