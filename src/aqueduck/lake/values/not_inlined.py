"""
Turn inlining off for tables whose rows DuckLake does not read back exactly from its catalog.

The limit is an option of the table, so it applies to every writer of the lake.
"""

from __future__ import annotations

from collections.abc import Mapping

from aqueduck.lake.session.pool import PooledLake
from aqueduck.lake.session.sql import ident, literal
from aqueduck.lake.values.kept_types import is_inlined
from aqueduck.model.schema import TableName

__all__ = ["CATALOG_COLUMNS", "keep_out_of_catalog"]

CATALOG_COLUMNS = frozenset({"row_id", "begin_snapshot", "end_snapshot", "rowid"})
"""Names of DuckLake's own columns in its tables of inlined rows; `rowid` in a SQLite catalog."""


def keep_out_of_catalog(lake: PooledLake, table: TableName, columns: Mapping[str, str]) -> None:
    """Turn inlining off for a table if its columns (name: type) require it, before a transaction creates or alters it."""
    if all(is_inlined(kind) and name.lower() not in CATALOG_COLUMNS for name, kind in columns.items()):
        return
    done = lake.execute(
        f"select 1 from {ident(lake.alias)}.options() where option_name = 'data_inlining_row_limit'"
        " and value = '0' and lower(scope_entry) = lower(?)",
        (table.qualified,),
    )
    if not done:
        lake.execute(
            f"call {ident(lake.alias)}.set_option('data_inlining_row_limit', 0,"
            f" schema => {literal(table.schema)}, table_name => {literal(table.name)})",
            doing="turning inlining off for a table",
        )
