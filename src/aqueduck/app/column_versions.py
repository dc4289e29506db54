"""
Which columns the segments of a group have.

A segment names its columns as the stream does; what they are numbered in the catalog tells a renamed column from one that
was dropped and another that was added (`column_numbers`).  Each version of a table's columns is asked for once, in the order of the stream.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import structlog

from aqueduck.changes import SegmentRef
from aqueduck.column_numbers import UNCLEAR
from aqueduck.errors import AqueduckError
from aqueduck.lake.table_states import TableState
from aqueduck.postgres.connection import connect
from aqueduck.postgres.tables import describe_oid, dropped_columns
from aqueduck.projection import is_clear
from aqueduck.schema import TableSchema

__all__ = ["ColumnVersions"]

log = structlog.get_logger()


class ColumnVersions:
    """The versions of the columns of a group's tables, `states` being what the lake has of them."""

    def __init__(self, dsn: str, states: Mapping[int, TableState]) -> None:
        self._dsn = dsn
        self._states = states
        self._known: dict[tuple[int, int, str], TableSchema] = {}
        self._last: dict[int, tuple[int, TableSchema]] = {}
        """Of each table, the last version that was clear, and the copy that it came after."""

    def clear(self) -> None:
        """A capture that starts counts versions anew, from where the lake is."""
        self._known.clear()
        self._last.clear()

    def of(self, segment: SegmentRef) -> TableSchema:
        """The columns of a segment, with their numbers in the catalog; asked once for each version."""
        key = (segment.table_oid, segment.version, segment.schema_json)
        if key not in self._known:
            self._known[key] = self._numbered(TableSchema.from_json(segment.schema_json)).in_lake
        return self._known[key]

    def _numbered(self, schema: TableSchema) -> TableSchema:
        state = self._states.get(schema.oid)
        if state is None or state.schema is None:
            return schema
        copied, before = self._last.get(schema.oid, (-1, state.schema.streamed))
        if copied != state.copy_position:
            before = state.schema.streamed
        found = self._asked(schema, before)
        if all(c.number > 0 for c in found.columns):
            self._last[schema.oid] = (state.copy_position, found)
        return found

    def _asked(self, schema: TableSchema, before: TableSchema) -> TableSchema:
        now, dropped = None, set[int]()
        try:
            with connect(self._dsn) as conn:
                now = describe_oid(conn, schema.oid, need_key=False, projection=schema.projection)
                dropped = dropped_columns(conn, schema.oid)  # after it: rather too many than too few
        except AqueduckError:  # it is gone, or cannot be asked: names have to do
            log.debug("table not described", table=schema.qualified)
        found = schema.numbered(before, now, dropped)
        if schema.projection is None or not is_clear(schema):
            return found
        # The capture has asked before us, and what it left out of the segments follows from the answer.
        same = [c.number for c in found.columns] == [c.number for c in schema.columns]
        unclear = tuple(replace(c, number=UNCLEAR) for c in schema.columns)
        return found if same else replace(schema, columns=unclear)
