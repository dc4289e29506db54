"""
The directories in which DuckLake keeps the files of tables, existing and planned.

Files are written before the catalog knows them.  If a table is created together with its first rows, its files
exist before the table does, in the directory that DuckLake will assign to it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from aqueduck.lake.session.catalog import METADATA, LakeSession
from aqueduck.lake.session.storage import join
from aqueduck.lake.upkeep.table_upkeep import Lake, table_id
from aqueduck.model.errors import SchemaChangeError
from aqueduck.model.modes import UPSERT, TableMode
from aqueduck.model.schema import TableName

__all__ = ["Directories", "read_directories", "stored_directory", "table_directory"]

_PLAIN_NAME = re.compile(r"[A-Za-z0-9_-]+")
_TABLES = (
    "select s.schema_name, t.table_name, s.path, s.path_is_relative, t.path, t.path_is_relative"
    f" from {METADATA}.ducklake_table t join {METADATA}.ducklake_schema s using (schema_id)"
    " where t.end_snapshot is null and s.end_snapshot is null"
)


@dataclass(frozen=True, slots=True)
class Directories:
    """The directories of a lake's tables at one point in time."""

    data_path: str
    tables: dict[TableName, str]
    """Directories of tables, by `folded` name."""
    schemas: dict[str, str]
    """Directories of schemas, by name in lower case."""

    def of(self, target: TableName) -> str | None:
        """The directory of an existing table; None if it does not exist."""
        return self.tables.get(target.folded)

    def planned(self, target: TableName, mode: TableMode = UPSERT) -> str | None:
        """
        The directory that a missing table will get; None if the table must be created before its first rows.

        The latter applies if several sources share the table, because their columns have to match, and if its name is
        one for which DuckLake chooses a random directory.
        """
        plain = _PLAIN_NAME.fullmatch(target.schema) and _PLAIN_NAME.fullmatch(target.name)
        if not plain or mode.source_column is not None:
            return None
        above = self.schemas.get(target.schema.lower(), join(self.data_path, target.schema))
        return join(above, target.name)

    def place(self, target: TableName, mode: TableMode = UPSERT) -> str | None:
        """The current or planned directory of a table; None if the table must be created first."""
        return self.of(target) or self.planned(target, mode)


def read_directories(session: LakeSession) -> Directories:
    tables = session.execute(_TABLES)
    schemas = session.execute(
        f"select schema_name, path, path_is_relative from {METADATA}.ducklake_schema where end_snapshot is null"
    )
    return Directories(
        session.config.data_path,
        {TableName(row[0], row[1]).folded: _table_directory(session, row) for row in tables},
        {name.lower(): _schema_directory(session, path, relative) for name, path, relative in schemas},
    )


def table_directory(session: LakeSession, target: TableName) -> str:
    """The directory of a table; raises if the table does not exist."""
    rows = session.execute(
        f"{_TABLES} and lower(s.schema_name) = lower(?) and lower(t.table_name) = lower(?)",
        [target.schema, target.name],
    )
    if not rows:
        raise SchemaChangeError("the target table does not exist in the lake", table=target.qualified)
    return _table_directory(session, rows[0])


def _table_directory(session: LakeSession, row: Sequence[Any]) -> str:
    _, _, schema_path, schema_relative, path, relative = row
    above = _schema_directory(session, schema_path, schema_relative)
    return str(join(above, path) if relative else path).rstrip("/")


def _schema_directory(session: LakeSession, path: str, relative: bool) -> str:
    return str(join(session.config.data_path, path) if relative else path).rstrip("/")


def stored_directory(lake: Lake, table: TableName) -> str | None:
    """The directory of a table below the data path that the catalog has; None if the table does not exist."""
    number = table_id(lake, table)
    if number is None:
        return None
    [[base]] = lake.execute(f"select value from {lake.metadata}.ducklake_metadata where key = 'data_path'")
    [[schema_path, schema_relative, path, relative]] = lake.execute(
        f"select s.path, s.path_is_relative, t.path, t.path_is_relative from {lake.metadata}.ducklake_table t"
        f" join {lake.metadata}.ducklake_schema s using (schema_id)"
        f" where t.table_id = {number} and t.end_snapshot is null and s.end_snapshot is null"
    )
    above = join(base, schema_path) if schema_relative else schema_path
    return str(join(above, path) if relative else path).rstrip("/")
