"""
The columns of a table of events, for the sinks that are tables: PostgreSQL (`postgres.events_table`) and DuckLake
(`lake.events_lake`).

Parts of the format `table` have the columns of `lake.change_rows.EVENT_SCHEMA`; `member` says which one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from aqueduck.errors import SinkTableError

__all__ = ["EVENT_COLUMNS", "EventColumn", "check_columns"]


@dataclass(frozen=True, slots=True)
class EventColumn:
    """One column: its type where it is made, and the types that an existing table may have instead."""

    name: str
    member: str
    postgres: str
    lake: str
    also: tuple[str, ...] = ()


EVENT_COLUMNS = (
    EventColumn("commit_lsn", "commit_lsn", "pg_lsn", "BIGINT"),
    EventColumn("seq", "seq", "bigint", "BIGINT"),
    EventColumn("commit_time", "commit_time", "timestamp with time zone", "TIMESTAMP WITH TIME ZONE"),
    EventColumn("xid", "xid", "bigint", "BIGINT"),
    EventColumn("op", "op", "text", "VARCHAR"),
    EventColumn("schema_name", "schema", "text", "VARCHAR"),
    EventColumn("table_name", "table", "text", "VARCHAR"),
    # Not jsonb, and not the lake's JSON: both refuse escapes such as "\ud800", which columns of type json may hold.
    EventColumn("key", "key", "json", "VARCHAR", ("jsonb", "text", "JSON")),
    EventColumn("event", "value", "json", "VARCHAR", ("jsonb", "text", "JSON")),
)


def check_columns(table: str, found: Mapping[str, str], required: Iterable[str] = ()) -> None:
    """
    Refuse a table that exists and cannot take events: `found` has its types by column.

    Columns of its own are fine unless they are among the `required`, which have to be given a value.
    """
    ours = {column.name for column in EVENT_COLUMNS}
    problems = [f"{name} has to be given a value" for name in required if name not in ours]
    for column in EVENT_COLUMNS:
        allowed = (column.postgres, column.lake, *column.also)
        if column.name not in found:
            problems.append(f"{column.name} is missing")
        elif found[column.name] not in allowed:
            problems.append(f"{column.name} is {found[column.name]}")
    if problems:
        raise SinkTableError(
            f"the table cannot take events: {', '.join(problems)}",
            hint="name another table, which is then made, or give it the columns of docs/events.md",
            table=table,
        )
