"""
Which columns the segments of a group have.

A segment has the column names of the stream.  Column numbers from the catalog distinguish a renamed column from a column that was
dropped while another was added (`column_numbers`).  The catalog is asked once for each version of a table's columns, in
stream order.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import structlog

from aqueduck.model.changes import SegmentRef
from aqueduck.model.columns.column_numbers import UNCLEAR
from aqueduck.model.columns.projection import is_clear
from aqueduck.model.errors import AqueduckError, Retry
from aqueduck.model.schema import TableSchema
from aqueduck.postgres.catalog.tables import describe_oid, dropped_columns
from aqueduck.postgres.session.connection import connect
from aqueduck.sync.tables.table_book import TableBook

__all__ = ["ColumnVersions"]

log = structlog.get_logger()


class ColumnVersions:
    """The versions of the columns of a group's tables that are newer than the lake's."""

    def __init__(self, dsn: str, book: TableBook) -> None:
        self._dsn = dsn
        self._book = book
        self._known: dict[tuple[int, int, int, str], TableSchema] = {}
        self._last: dict[tuple[int, int], TableSchema] = {}
        """By table: the last unambiguous version since its copy."""

    def clear(self) -> None:
        """A capture that starts numbers versions anew, from the lake's position."""
        self._known.clear()
        self._last.clear()

    def forget(self, oid: int) -> None:
        """The lake's table got other columns without a segment that has them; later versions are compared with these."""
        for memory in (self._known, self._last):
            for key in [key for key in memory if key[0] == oid]:
                del memory[key]  # type: ignore[arg-type]

    def of(self, segment: SegmentRef) -> TableSchema:
        """The columns of a segment with their numbers in the catalog; asked once for each version since the table's copy."""
        state = self._book.states.get(segment.table_oid)
        if state is None or state.schema is None:
            return TableSchema.from_json(segment.schema_json).in_lake
        copy = (state.oid, state.copy_position)
        key = (*copy, segment.version, segment.schema_json)
        if key not in self._known:
            before = self._last.get(copy, state.schema.streamed)
            found = self._asked(TableSchema.from_json(segment.schema_json), before)
            self._known[key] = found.in_lake
            if _is_known(found):
                self._last[copy] = found
        return self._known[key]

    def after(self, copied: TableSchema, segments: Iterable[SegmentRef]) -> list[SegmentRef]:
        """Parked segments of a table with the column numbers that follow from the columns of its older copy."""
        before = copied.streamed
        known: dict[tuple[int, str], TableSchema] = {}
        numbered = []
        for segment in segments:
            key = (segment.version, segment.schema_json)
            if key not in known:
                known[key] = self._asked(TableSchema.from_json(segment.schema_json), before)
                before = known[key] if _is_known(known[key]) else before
            numbered.append(replace(segment, schema_json=known[key].to_json()))
        return numbered

    def _asked(self, schema: TableSchema, before: TableSchema) -> TableSchema:
        now, dropped = None, set[int]()
        try:
            with connect(self._dsn) as conn:
                now = describe_oid(conn, schema.oid, need_key=False, projection=schema.projection)
                dropped = dropped_columns(conn, schema.oid)  # after it: rather too many than too few
        except AqueduckError as exc:
            if exc.retry is Retry.AUTO:
                raise  # the server is unreachable: the batch is repeated
            log.debug(
                "table not described", table=schema.qualified
            )  # the table was dropped: names must suffice
        found = schema.numbered(before, now, dropped)
        if schema.projection is None or not is_clear(schema):
            return found
        # The capture has asked earlier, and left columns out of the segments according to the answer.
        same = [c.number for c in found.columns] == [c.number for c in schema.columns]
        unclear = tuple(replace(c, number=UNCLEAR) for c in schema.columns)
        return found if same else replace(schema, columns=unclear)


def _is_known(version: TableSchema) -> bool:
    return all(c.number > 0 for c in version.columns)
