"""
Which columns the segments of a group have.

A segment names its columns as the stream does; what they are numbered in the catalog tells a renamed column from one that
was dropped and another that was added (`column_numbers`).  Each version of a table's columns is asked for once, in the order of the stream.
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
    """The versions of the columns of a group's tables, beside what the lake has of them."""

    def __init__(self, dsn: str, book: TableBook) -> None:
        self._dsn = dsn
        self._book = book
        self._known: dict[tuple[int, int, int, str], TableSchema] = {}
        self._last: dict[tuple[int, int], TableSchema] = {}
        """Of each table since its copy, the last version that was clear."""

    def clear(self) -> None:
        """A capture that starts counts versions anew, from where the lake is."""
        self._known.clear()
        self._last.clear()

    def forget(self, oid: int) -> None:
        """The lake's table got other columns without a segment that has them: what comes next is told from those."""
        for memory in (self._known, self._last):
            for key in [key for key in memory if key[0] == oid]:
                del memory[key]  # type: ignore[arg-type]

    def of(self, segment: SegmentRef) -> TableSchema:
        """The columns of a segment, with their numbers in the catalog; asked once for each version since the table's copy."""
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
        """Parked segments of a table with the numbers that follow from the columns of its copy, which is older than they are."""
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
                raise  # the server is away: the batch comes again
            log.debug("table not described", table=schema.qualified)  # it is gone: names have to do
        found = schema.numbered(before, now, dropped)
        if schema.projection is None or not is_clear(schema):
            return found
        # The capture has asked before us, and what it left out of the segments follows from the answer.
        same = [c.number for c in found.columns] == [c.number for c in schema.columns]
        unclear = tuple(replace(c, number=UNCLEAR) for c in schema.columns)
        return found if same else replace(schema, columns=unclear)


def _is_known(version: TableSchema) -> bool:
    return all(c.number > 0 for c in version.columns)
