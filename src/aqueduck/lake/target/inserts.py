"""
Insert rows and let DuckLake write the file, which it encrypts if the lake is encrypted.

DuckDB leaves the file to the operating system's cache.  It is synced to disk before the transaction commits: after the
commit, the slot is confirmed and the server forgets the changes.
"""

from __future__ import annotations

from pathlib import Path

from aqueduck.lake.session.catalog import LakeSession
from aqueduck.lake.session.directories import read_directories
from aqueduck.lake.session.engine import is_remote
from aqueduck.lake.session.sql import lake_table
from aqueduck.lake.session.storage import sync_file
from aqueduck.model.schema import TableName

__all__ = ["insert_and_sync"]


def insert_and_sync(session: LakeSession, target: TableName, rows: str) -> None:
    """Insert the rows of a relation by column name; DuckLake inlines them if they are few."""
    directory = read_directories(session).place(target)
    before = _files(directory)
    [[count]] = session.execute(
        f"insert into {lake_table(target)} by name from {rows}",
        doing="inserting rows",
        table=target.qualified,
    )
    if count <= session.inline_rows:
        session.memory.inlined_rows[target] = session.memory.inlined_rows.get(target, 0) + count
    for file in _files(directory) - before:
        sync_file(file)


def _files(directory: str | None) -> set[str]:
    if directory is None or is_remote(directory):
        return set()
    return {str(path) for path in Path(directory).rglob("*.parquet")}
