"""The bookmark in a DuckLake: one row per slot in a table of ours, replaced in one lake transaction."""

from __future__ import annotations

from aqueduck.config.sync import LakeConfig
from aqueduck.lake.session.catalog import OWN_SCHEMA, LakeSession, open_lake
from aqueduck.lake.session.sql import LAKE, lake_table
from aqueduck.model.bookmarks import Bookmark
from aqueduck.model.schema import TableName

__all__ = ["BOOKMARKS", "LakeBookmarks", "read_lake_bookmark"]

BOOKMARKS = TableName(OWN_SCHEMA, "bookmarks")
TABLE = lake_table(BOOKMARKS)


def read_lake_bookmark(config: LakeConfig, slot: str) -> Bookmark | None:
    """Read the bookmark from an existing lake, read-only."""
    with open_lake(config, read_only=True) as lake:
        there = "select 1 from duckdb_tables() where database_name = ? and schema_name = ? and table_name = ?"
        if not lake.execute(
            there, (LAKE, BOOKMARKS.schema, BOOKMARKS.name), doing="looking for the bookmark"
        ):
            return None
        return _read(lake, slot)


def _read(lake: LakeSession, slot: str) -> Bookmark | None:
    query = f"select bookmark from {TABLE} where slot_name = ?"
    rows = lake.execute(query, (slot,), doing="reading the bookmark")
    return Bookmark.from_json(rows[0][0]) if rows else None


class LakeBookmarks:
    """Stores the bookmark as a row of `aqueduck.bookmarks`."""

    def __init__(self, config: LakeConfig, slot: str) -> None:
        self._slot = slot
        self._lake: LakeSession = open_lake(config)
        self._lake.execute(
            f"create table if not exists {TABLE} (slot_name varchar, bookmark varchar, updated_at timestamptz)",
            doing="making the table of bookmarks",
        )

    def load(self) -> Bookmark | None:
        return _read(self._lake, self._slot)

    def save(self, bookmark: Bookmark) -> None:
        with self._lake.transaction():
            self._put(bookmark)

    def _put(self, bookmark: Bookmark) -> None:
        doing = "writing the bookmark"
        self._lake.execute(f"delete from {TABLE} where slot_name = ?", (self._slot,), doing=doing)
        self._lake.execute(
            f"insert into {TABLE} values (?, ?, now())", (self._slot, bookmark.to_json()), doing=doing
        )

    def close(self) -> None:
        self._lake.close()
