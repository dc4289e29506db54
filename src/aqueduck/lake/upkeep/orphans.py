"""
Remove orphans: files that a failed batch left behind and that no catalog row refers to.

At a start nothing else runs, so `remove_orphans` removes every unknown file with the group's prefix in the directories
of its tables.  While a service runs, `remove_old_orphans` removes files older than any batch, including DuckLake's own.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from datetime import datetime

from aqueduck.lake.session.catalog import METADATA, LakeSession
from aqueduck.lake.session.directories import read_directories, stored_directory
from aqueduck.lake.session.files import file_prefix
from aqueduck.lake.session.storage import join, list_files, list_times, remove_file
from aqueduck.lake.upkeep.table_upkeep import Lake
from aqueduck.model.schema import TableName

__all__ = ["remove_old_orphans", "remove_orphans"]


def remove_orphans(
    session: LakeSession,
    group: str,
    targets: Iterable[TableName],
    *,
    keep: str | None = None,
    names: Container[str] = (),
) -> list[str]:
    """
    Remove a group's orphans before anything new is written; returns the removed files.

    Files of the run `keep` and files in `names` stay: they belong to copies that are running or will resume and that
    the catalog does not know yet.
    """
    rows, _ = session.query(
        f"select path from {METADATA}.ducklake_data_file where contains(path, 'aqueduck-')"
        f" union all select path from {METADATA}.ducklake_files_scheduled_for_deletion where contains(path, 'aqueduck-')"
    )
    known = {path.rsplit("/", 1)[-1] for (path,) in rows}
    removed = []
    directories = read_directories(session)
    for target in targets:
        directory = directories.place(target)
        if directory is None:
            continue
        for file in list_files(directory, f"aqueduck-{group}-"):
            name = file.rsplit("/", 1)[-1]
            kept = name in names or (keep is not None and name.startswith(f"aqueduck-{group}-{keep}-"))
            if name not in known and not kept:
                remove_file(file)
                removed.append(file)
    return removed


def remove_old_orphans(
    lake: Lake,
    tables: Iterable[TableName],
    *,
    older_than: datetime,
    groups: Iterable[str] = (),
    keep: Callable[[str], bool] = lambda name: False,
) -> int:
    """
    Remove files in the tables' directories that no catalog row refers to; returns how many.

    Files are listed before the catalog is queried, so that a file committed in between is not removed.  Only names
    in the form of DuckLake or one of the `groups` are considered; `keep` says which of them will still be committed.
    """
    prefixes = ("ducklake-", *map(file_prefix, groups))
    found: dict[str, str] = {}
    for table in tables:
        directory = stored_directory(lake, table)
        for place, written in () if directory is None else list_times(directory):
            name = place.rsplit("/", 1)[-1]
            if name.startswith(prefixes) and written < older_than and not keep(name):
                found[name] = join(directory or "", place)
    if not found:
        return 0
    known = lake.execute(
        " union all ".join(
            f"select path from {lake.metadata}.{table}"
            for table in (
                "ducklake_data_file",
                "ducklake_delete_file",
                "ducklake_files_scheduled_for_deletion",
            )
        ),
        doing="reading the lake's files",
    )
    for (path,) in known:
        found.pop(path.rsplit("/", 1)[-1], None)
    for path in found.values():
        remove_file(path)
    return len(found)
