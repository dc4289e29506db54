"""
Tables of events: their columns, and what the sinks share that are tables, in PostgreSQL (`sinks.postgres_table`) and in
DuckLake (`sinks.lake_table`).

Parts of the format `table` have the columns of `lake.fold.change_rows.EVENT_SCHEMA`; `member` says which one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from aqueduck.model.bookmarks import Bookmark
from aqueduck.model.errors import BookmarkError, SinkTableError
from aqueduck.model.event_parts import EventPart, PartFormat

__all__ = ["EVENT_COLUMNS", "EventColumn", "TableSink", "check_columns"]


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


class TableSink:
    """
    A sink that keeps its own bookmark: `write` takes a batch, `save` makes it visible together with the bookmark that ends it.

    It has no place to return to and nothing to do between batches: all that it has is behind one commit.
    """

    part_format: PartFormat = "table"
    _parts: Sequence[EventPart] = ()
    """The batch that `save` writes."""
    _known: Bookmark | None = None
    """The bookmark that was loaded or saved last."""

    def place(self) -> dict[str, Any]:
        return {}

    def write(self, parts: Sequence[EventPart], position: int) -> None:
        """Remember the batch; `save` writes it."""
        self._parts = parts

    def tick(self, position: int, *, final: bool = False) -> bool:
        return False

    def settle(self, position: int) -> None: ...

    def _check_nobody_else(self, found: Bookmark | None) -> None:
        """Two services of one slot would both deliver: the second one to get here finds another bookmark."""
        if found != self._known:
            raise BookmarkError(
                "another service has moved the bookmark", hint="let one service at a time read a slot"
            )
