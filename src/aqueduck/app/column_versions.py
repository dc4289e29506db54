"""
Which columns the segments of a group have.

A segment names its columns as the stream does; what they are numbered in the catalog tells a renamed column from one that
was dropped and another that was added.  Each version of a table's columns is asked for once.
"""

from __future__ import annotations

from collections.abc import Mapping

import structlog

from aqueduck.changes import SegmentRef
from aqueduck.errors import AqueduckError
from aqueduck.lake.table_states import TableState
from aqueduck.postgres.connection import connect
from aqueduck.postgres.tables import describe_oid
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

    def clear(self) -> None:
        """A capture that starts counts versions anew."""
        self._known.clear()

    def of(self, segment: SegmentRef) -> TableSchema:
        """The columns of a segment, with their numbers in the catalog; asked once for each version."""
        key = (segment.table_oid, segment.version, segment.schema_json)
        if key not in self._known:
            schema = TableSchema.from_json(segment.schema_json)
            if schema.projection is None or not is_clear(schema):  # else the capture has asked
                schema = self._numbered(schema)
            self._known[key] = schema.in_lake
        return self._known[key]

    def _numbered(self, schema: TableSchema) -> TableSchema:
        state = self._states.get(schema.oid)
        now = None
        try:
            with connect(self._dsn) as conn:
                now = describe_oid(conn, schema.oid, need_key=False, projection=schema.projection)
        except AqueduckError:  # it is gone, or cannot be asked: names have to do
            log.debug("table not described", table=schema.qualified)
        known = None if state is None or state.schema is None else state.schema.streamed
        return schema.numbered(now, known)
