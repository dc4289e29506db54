"""
Removing Aqueduck's own records from a lake: the schema `aqueduck`.

Tables with people's data are in other schemas, and stay.
"""

from __future__ import annotations

from collections.abc import Collection

from aqueduck.lake.ledger.parking import parking_files
from aqueduck.lake.ledger.progress import progress_table
from aqueduck.lake.ledger.table_states import forget_group
from aqueduck.lake.session.catalog import OWN_SCHEMA, LakeSession
from aqueduck.lake.session.sql import LAKE, qualified
from aqueduck.lake.session.storage import remove_file

__all__ = ["drop_records", "forget_groups", "others_in_lake", "own_tables"]

_SHARED = ("parked", "partitions", "tables", "targets")
"""Tables of all groups; each group also has its own."""


def own_tables(session: LakeSession, groups: Collection[str]) -> list[str]:
    """The tables of the schema that a lake has for these groups."""
    known = {*_SHARED, *(progress_table(group).name for group in groups)}
    return sorted(known & set(_tables(session)))


def others_in_lake(session: LakeSession, groups: Collection[str]) -> list[str]:
    """The tables of the schema that belong to groups, flows or programs other than these groups."""
    return sorted(set(_tables(session)) - set(own_tables(session, groups)))


def forget_groups(session: LakeSession, groups: Collection[str]) -> None:
    """Delete the records of these groups, and the changes that were parked for them."""
    for group in groups:
        forget_group(session, group)
        for file in parking_files(session, group):
            remove_file(file)


def drop_records(session: LakeSession) -> None:
    """Drop what is left of the schema, after the groups were forgotten."""
    with session.transaction():
        for name in own_tables(session, ()):
            session.execute(f"drop table {qualified(LAKE, OWN_SCHEMA, name)}", doing="dropping own tables")
        session.execute(f"drop schema {qualified(LAKE, OWN_SCHEMA)}", doing="dropping own tables")


def _tables(session: LakeSession) -> list[str]:
    rows = session.execute(
        "select table_name from duckdb_tables() where database_name = ? and schema_name = ?",
        [LAKE, OWN_SCHEMA],
        doing="looking at own tables",
    )
    return [name for (name,) in rows]
