"""The bookmark in a DuckLake: a table of ours, one row a slot, replaced in one lake transaction."""

from __future__ import annotations

from aqueduck.bookmarks import Bookmark
from aqueduck.config import LakeConfig
from aqueduck.lake.catalog import OWN_SCHEMA, LakeSession, open_lake
from aqueduck.lake.sql import lake_table
from aqueduck.schema import TableName

__all__ = ["LakeBookmarks"]

TABLE = lake_table(TableName(OWN_SCHEMA, "bookmarks"))


class LakeBookmarks:
    """A row of `aqueduck.bookmarks`."""

    def __init__(self, config: LakeConfig, slot: str) -> None:
        self._slot = slot
        self._lake: LakeSession = open_lake(config)
        self._lake.execute(
            f"create table if not exists {TABLE} (slot_name varchar, bookmark varchar, updated_at timestamptz)",
            doing="making the table of bookmarks",
        )

    def load(self) -> Bookmark | None:
        rows = self._lake.execute(
            f"select bookmark from {TABLE} where slot_name = ?", (self._slot,), doing="reading the bookmark"
        )
        return Bookmark.from_json(rows[0][0]) if rows else None

    def save(self, bookmark: Bookmark) -> None:
        doing = "writing the bookmark"
        with self._lake.transaction():
            self._lake.execute(f"delete from {TABLE} where slot_name = ?", (self._slot,), doing=doing)
            self._lake.execute(
                f"insert into {TABLE} values (?, ?, now())", (self._slot, bookmark.to_json()), doing=doing
            )

    def close(self) -> None:
        self._lake.close()
