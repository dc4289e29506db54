"""
Tables of events: their columns, and the common part of the sinks that write tables, in PostgreSQL
(`sinks.postgres_table`) and in DuckLake (`sinks.lake_table`).

Parts of the format `table` have the columns of `lake.fold.change_rows.EVENT_SCHEMA`; `member` names the
column to use.
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
    """One column: its type in new tables, and the types that an existing table may have instead."""

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
    # Not jsonb, and not the lake's JSON: both refuse escapes such as "\ud800", which columns of type json may
    # contain.
    EventColumn("key", "key", "json", "VARCHAR", ("jsonb", "text", "JSON")),
    EventColumn("event", "value", "json", "VARCHAR", ("jsonb", "text", "JSON")),
)


def check_columns(table: str, found: Mapping[str, str], required: Iterable[str] = ()) -> None:
    """
    Refuse an existing table that cannot store events: `found` has its types by column.

    The table may have other columns, unless they are among the `required`, which need a value.
    """
    ours = {column.name for column in EVENT_COLUMNS}
    problems = [f"{name} needs a value" for name in required if name not in ours]
    for column in EVENT_COLUMNS:
        allowed = (column.postgres, column.lake, *column.also)
        if column.name not in found:
            problems.append(f"{column.name} is missing")
        elif found[column.name] not in allowed:
            problems.append(f"{column.name} is {found[column.name]}")
    if problems:
        raise SinkTableError(
            f"the table cannot store events: {', '.join(problems)}",
            hint="name a new table, which is then created, or add the columns of docs/events.md",
            table=table,
        )


class TableSink:
    """
    A sink that stores its own bookmark: `write` takes a batch, `save` commits it together with the bookmark
    at its end.

    It has nothing to restore and nothing to do between batches: everything is committed in one transaction.
    """

    part_format: PartFormat = "table"
    _parts: Sequence[EventPart] = ()
    """The batch that `save` writes."""
    _known: Bookmark | None = None
    """The bookmark that was last loaded or saved."""

    def place(self) -> dict[str, Any]:
        return {}

    def write(self, parts: Sequence[EventPart], position: int) -> None:
        """Keep the batch; `save` writes it."""
        self._parts = parts

    def tick(self, position: int, *, final: bool = False) -> bool:
        return False

    def settle(self, position: int) -> None: ...

    def _refuse_second_service(self, found: Bookmark | None) -> None:
        """Detect a second service on the same slot, which would deliver twice: it finds a changed bookmark."""
        if found != self._known:
            raise BookmarkError(
                "another service has moved the bookmark", hint="run only one service per slot"
            )
