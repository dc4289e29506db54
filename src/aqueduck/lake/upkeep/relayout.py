"""
Rewrite files from before a change of the layout: their rows are deleted and inserted again, in one lake snapshot.

One step takes some files, so that commits wait only a moment; the caller excludes other writers of the table.  DuckLake's
own rewrites and merges keep the partition of each file.  The rows stay the same, but the change feed shows a deletion
and an insertion of each, and their row ids are new.
"""

from __future__ import annotations

from aqueduck.lake.ledger.lineage import relayout_note
from aqueduck.lake.session.catalog import LakeSession
from aqueduck.lake.session.directories import table_directory
from aqueduck.lake.session.sql import LAKE, ident, lake_table, literal, string_list
from aqueduck.lake.session.storage import join
from aqueduck.lake.target.inlined import RESERVED
from aqueduck.lake.target.layout_rows import insert_by_layout
from aqueduck.lake.target.places import know_places, known_layout, notice_changes
from aqueduck.lake.upkeep.table_upkeep import table_id
from aqueduck.model.schema import TableName

__all__ = ["relayout_step"]

STEP_BYTES = 32 << 20
"""The most that one step reads, except for a single larger file: commits wait for a step."""
_ROWS = "aqueduck_relaid"


def relayout_step(session: LakeSession, target: TableName, after: int) -> tuple[int, int]:
    """
    Rewrite the next files of a target, those with an id beyond `after`, by its present layout.

    Returns the number of files, which is 0 at the end, and the last id.
    """
    number = table_id(session, target)
    if number is None:
        return 0, after
    files = _outdated(session, number, after)
    if not files:
        return 0, after
    directory = table_directory(session, target)
    paths = [join(directory, path) if relative else path for _, path, relative in files]
    these = f"filename in ({string_list(paths)[1:-1]})"
    with session.transaction():
        notice_changes(session)
        know_places(session, [target])
        session.execute(
            f"create or replace temp table {_ROWS} as select * from {lake_table(target)} where {these}",
            doing="reading files",
            table=target.qualified,
        )
        [[count]] = session.execute(f"select count(*) from {_ROWS}")
        session.execute(
            f"delete from {lake_table(target)} where {these}", doing="rewriting files", table=target.qualified
        )
        if count:
            _insert(session, target, count)
        session.execute(
            f"call {ident(LAKE)}.set_commit_message('aqueduck', {literal(f'relayout of {target.qualified}')},"
            f" extra_info => {literal(relayout_note(number))})"
        )
    session.execute(f"drop table if exists {_ROWS}")
    return len(files), files[-1][0]


def _insert(session: LakeSession, target: TableName, count: int) -> None:
    names = {str(name).lower() for (name,) in session.execute(f"select column_name from (describe {_ROWS})")}
    limit = session.limits.get(target, session.config.inline_rows)
    session.inline(0 if names & (RESERVED | {"rowid"}) else limit)
    insert_by_layout(session, target, _ROWS, count, known_layout(session, target))


def _outdated(session: LakeSession, table: int, after: int) -> list[tuple[int, str, bool]]:
    """Id and path of files with other partition keys than the table has now, or from before its sort keys were set."""
    m = session.metadata
    current = (
        f"(select max(i.partition_id) from {m}.ducklake_partition_info i join {m}.ducklake_partition_column c"
        f" on c.partition_id = i.partition_id where i.table_id = {table} and i.end_snapshot is null)"
    )
    sorted_since = (
        f"(select max(i.begin_snapshot) from {m}.ducklake_sort_info i join {m}.ducklake_sort_expression e"
        f" on e.sort_id = i.sort_id where i.table_id = {table} and i.end_snapshot is null)"
    )
    rows = session.execute(
        f"select f.data_file_id, f.path, f.path_is_relative, f.file_size_bytes from {m}.ducklake_data_file f"
        f" where f.table_id = {table} and f.end_snapshot is null and f.data_file_id > {after}"
        f" and (f.partition_id is distinct from {current} or f.begin_snapshot < {sorted_since})"
        " order by f.data_file_id",
        doing="reading the lake's files",
    )
    files: list[tuple[int, str, bool]] = []
    total = 0
    for number, path, relative, size in rows:
        total += size
        if files and total > STEP_BYTES:
            break
        files.append((int(number), str(path), bool(relative)))
    return files
