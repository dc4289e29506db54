"""
Files that a dead batch left behind: written by a task, known to no catalog row.

Only files with this group's prefix, in the directories of its tables, are ever looked at.
"""

from __future__ import annotations

from collections.abc import Container, Iterable

from aqueduck.errors import SchemaChangeError
from aqueduck.lake.apply import table_directory
from aqueduck.lake.catalog import METADATA, LakeSession
from aqueduck.lake.storage import list_files, remove_file
from aqueduck.schema import TableName

__all__ = ["remove_orphans"]


def remove_orphans(
    session: LakeSession,
    group: str,
    targets: Iterable[TableName],
    *,
    keep: str | None = None,
    names: Container[str] = (),
) -> list[str]:
    """
    Remove them before anything new is written; returns what was removed.

    Files of the run `keep` stay, and those in `names`: copies that are under way or will go on, of
    which the catalog knows nothing yet.
    """
    rows, _ = session.query(
        f"select path from {METADATA}.ducklake_data_file where contains(path, 'aqueduck-')"
        f" union all select path from {METADATA}.ducklake_files_scheduled_for_deletion where contains(path, 'aqueduck-')"
    )
    known = {path.rsplit("/", 1)[-1] for (path,) in rows}
    removed = []
    for target in targets:
        try:
            directory = table_directory(session, target)
        except SchemaChangeError:
            continue  # the target is gone: its table waits for a new copy
        for file in list_files(directory, f"aqueduck-{group}-"):
            name = file.rsplit("/", 1)[-1]
            kept = name in names or (keep is not None and name.startswith(f"aqueduck-{group}-{keep}-"))
            if name not in known and not kept:
                remove_file(file)
                removed.append(file)
    return removed
